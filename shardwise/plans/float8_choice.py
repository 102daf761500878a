"""Which matrix products of the transformer are computed in float8, by the names of their modules.

These are all products in blocks and the head, except routers, whose scores are never rounded. Sizes must be
multiples of 16, as a GPU's float8 products need. The gate and up products of experts are one grouped product
(models/float8_grouped.py), named by its two weights: leaving out one leaves out both.

The sizes that decide are those of whole weights, because a layout must not change which numbers are rounded.
If a device's part of a weight, or its number of tokens, is no multiple of 16, a GPU multiplies the same 8-bit
numbers in float32, which takes about thirty times as long.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import reduce
from operator import and_
from typing import NamedTuple

from shardwise.config import Layout, Model, Train
from shardwise.config.schedules import Numbers
from shardwise.plans.engine import Engine
from shardwise.plans.sharding import transformer_sharding

MULTIPLE = 16
"""Number that must divide every size of a GPU's float8 products."""

_KINDS = {
    "query": "query",
    "key": "keys",
    "value": "keys",
    "output": "output",
    "gate": "up",
    "up": "up",
    "down": "down",
}
"""Kind of a product by the last word of its module's name. Grouped products of experts are "experts"."""

_NORMED = {"query": "before_attention", "up": "before_inner"}
"""Kinds of products whose input is a norm's output."""


@dataclass(frozen=True)
class Float8Shares:
    """For every kind of product, the share of blocks that compute it in float8."""

    query: float = 0.0
    keys: float = 0.0
    """Share of the key and value products."""
    output: float = 0.0
    up: float = 0.0
    """Share of the gate and up products; in a model with experts, of the shared ones."""
    down: float = 0.0
    experts: float = 0.0
    """Share of the grouped products of experts."""
    before_attention: float = 0.0
    """Share of blocks in which all products of the first norm's output are in float8."""
    before_inner: float = 0.0
    """Share of blocks in which all products of the second norm's output are in float8."""
    head: bool = False
    dynamic: bool = False
    """Whether scales come from the tensors themselves, which are then read once more."""
    products: int = 0
    """Number of float8 products in the whole model."""


class CastWeights(NamedTuple):
    """Weights that are gathered in 8 bits, in the same blocks."""

    names: tuple[str, ...]
    """Names of the weights' modules in a block, or of the weights of experts; also "head"."""
    blocks: tuple[int, ...] | None
    """Numbers of the blocks; None: all of them."""


class Product(NamedTuple):
    """A matrix product of the transformer."""

    name: str
    """Name of its module; for experts, name of the weight."""
    source: str
    """Name of the first product with the same input."""
    sizes: tuple[int, int]
    """Number of outputs, and number of inputs."""
    joined: str
    """Name of the first product of those that are computed together, with one scale for all their weights and
    one for all their gradients."""


def products(model: Model) -> Iterator[Product]:
    """Yield all products that could be in float8."""
    for name, source, sizes in _dense(model):
        yield Product(name, source, sizes, name)
    for layer in range(model.layers if model.experts else 0):
        inside = f"blocks.{layer}.feed_forward.experts."
        for name, first in (("gate", "gate"), ("up", "gate"), ("down", "down")):
            sizes = (
                (model.hidden, model.expert_width) if name == "down" else (model.expert_width, model.hidden)
            )
            yield Product(inside + name, inside + first, sizes, inside + first)


def _dense(model: Model) -> Iterator[tuple[str, str, tuple[int, int]]]:
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    width = model.shared_experts * model.expert_width if model.experts else model.ffn
    for layer in range(model.layers):
        attention = f"blocks.{layer}.attention."
        for name, outputs in (("query", queries), ("key", keys), ("value", keys)):
            yield attention + name, attention + "query", (outputs, model.hidden)
        yield attention + "output", attention + "output", (model.hidden, queries)
        inside = f"blocks.{layer}.feed_forward." + ("shared." if model.experts else "")
        if not width:
            continue
        first = "gate" if model.gated or model.experts else "up"
        for name in ("gate", "up") if first == "gate" else ("up",):
            yield inside + name, inside + first, (width, model.hidden)
        yield inside + "down", inside + "down", (model.hidden, width)
    yield "head", "head", (MULTIPLE, model.hidden)  # its rows are padded


def unknown_patterns(model: Model, train: Train) -> Iterator[str]:
    """Yield a problem for each pattern of train.float8_leave_out that matches no product."""
    names = [product.name for product in products(model)]
    first = ", ".join(name for name in names if name.startswith("blocks.0."))
    for pattern in train.float8_leave_out:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield (
                f"train.float8_leave_out: {pattern!r} is the name of no product; there are {first}, … and "
                "head"
            )


def in_float8(model: Model, train: Train) -> list[str]:
    """Return the names of the modules, or expert weights, whose products a job computes in float8; none if
    its precision is another."""
    return [product.name for product in _chosen(model, train) if fits(product.sizes)]


def unfit(model: Model, train: Train) -> list[str]:
    """Return the names of the products whose sizes float8 does not support."""
    return [product.name for product in _chosen(model, train) if not fits(product.sizes)]


def scale_count(model: Model, train: Train) -> int:
    """Return the number of scales: one for the weight and the gradient of each product, and for each
    input."""
    names = set(in_float8(model, train))
    narrow = [product for product in products(model) if product.name in names]
    return 2 * len({product.joined for product in narrow}) + len({product.source for product in narrow})


def shares(model: Model, train: Train) -> Float8Shares | None:
    """Return the share of each kind of product that is in float8; None without float8."""
    if train.precision != "float8":
        return None
    chosen = set(in_float8(model, train))
    kinds: dict[str, list[bool]] = {}
    of_input: dict[str, bool] = {}  # whether all products of an input are in float8, by the first of them
    for product in products(model):
        narrow = product.name in chosen
        kinds.setdefault(_kind(product.name), []).append(narrow)
        of_input[product.source] = of_input.get(product.source, True) and narrow
    for source, narrow in of_input.items():
        if _kind(source) in _NORMED:
            kinds.setdefault(_NORMED[_kind(source)], []).append(narrow)
    head = all(kinds.pop("head"))
    of_kinds = {kind: sum(in_blocks) / len(in_blocks) for kind, in_blocks in kinds.items()}
    return Float8Shares(
        **of_kinds, head=head, dynamic=train.float8_scaling == "dynamic", products=len(chosen)
    )


def _kind(name: str) -> str:
    return "experts" if ".experts." in name else _KINDS.get(name.rsplit(".", 1)[-1], name)


def casts_once(accumulation: Numbers, engine: Engine) -> Numbers:
    """Return whether the weights of blocks are cast to float8 once per step: if they are not sharded and a
    step has several micro-batches."""
    return (accumulation > 1) & (engine.sharded == 0)


def gathered_in_float8(model: Model, train: Train) -> tuple[CastWeights, ...]:
    """Return the weights that are gathered in 8 bits: those whose products are in float8.

    A tied head is excluded, because the embedding lookup must not be rounded.
    """
    blocks_of: dict[str, list[int]] = {}
    for name in in_float8(model, train):
        if name.startswith("blocks."):
            _, block, in_block = name.split(".", 2)
            blocks_of.setdefault(in_block, []).append(int(block))
    names_of: dict[tuple[int, ...] | None, list[str]] = {}
    for in_block, blocks in blocks_of.items():
        names_of.setdefault(tuple(blocks) if len(blocks) < model.layers else None, []).append(in_block)
    if "head" in in_float8(model, train) and not model.tied:
        names_of.setdefault(None, []).append("head")
    return tuple(CastWeights(tuple(names), blocks) for blocks, names in names_of.items())


def _chosen(model: Model, train: Train) -> list[Product]:
    """Return the products that a job in float8 does not leave out, directly or with another that is computed
    with them."""
    if train.precision != "float8":
        return []
    left_out = {product.joined for product in products(model) if _left_out(product.name, train)}
    return [product for product in products(model) if product.joined not in left_out]


def _left_out(name: str, train: Train) -> bool:
    if name == "head" and not train.float8_head:
        return True
    return any(fnmatchcase(name, pattern) for pattern in train.float8_leave_out)


def fits(sizes: Iterable[Numbers]) -> Numbers:
    """Return whether a GPU multiplies matrices of these sizes in float8.

    Otherwise it multiplies the same 8-bit numbers in float32 (models/float8_products.py).
    """
    return reduce(and_, (size % MULTIPLE == 0 for size in sizes))


def multiplied_in_float32(model: Model, names: Collection[str], layout: Layout, tokens: int) -> list[str]:
    """Return the names of those of these float8 products that a GPU multiplies in float32, because a
    device's part of the weight does not fit, or its number of tokens. Experts have kernels for any number of
    tokens, and tensor devices do not split them."""
    return [
        product.name
        for product in products(model)
        if product.name in names
        and _kind(product.name) != "experts"
        and not fits((*_part(product, model, layout.tensor), tokens))
    ]


def _part(product: Product, model: Model, tensor: int) -> tuple[int, int]:
    """Return the sizes of a product on the first of these tensor devices. The rows of a head are padded."""
    (outputs, inputs), role = product.sizes, transformer_sharding(model).role(product.name)
    assert role is not None, f"the table has no entry for {product.name}"
    if role.kind == "columns":  # with fewer heads than devices, each device uses one
        return -(-outputs // min(tensor, role.parts or tensor)), inputs
    return outputs, -(-inputs // tensor) if role.kind == "rows" else inputs


def idle_float8(model: Model, train: Train) -> list[str]:
    """Return why a job with float8 computes no product in it, for the header of a run; else an empty list."""
    if train.precision != "float8" or in_float8(model, train):
        return []
    names = unfit(model, train)
    if not names:
        return ["train.precision = 'float8': the job leaves out all products"]
    condition = " that the job does not leave out" if len(names) < len(list(products(model))) else ""
    return [
        f"train.precision = 'float8': the sizes of all products{condition} are no multiples of {MULTIPLE} "
        f"({names[0]}, …)"
    ]
