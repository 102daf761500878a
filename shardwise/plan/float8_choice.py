"""Which products of the transformer are made in float8, by the names of their modules.

All that multiply by a matrix in a block, and the head; not routers, whose scores are never rounded. Sizes
must be multiples of 16, which is what a GPU's float8 products take. Experts' gate and up are one grouped
product (models/float8_grouped.py), named by its two weights: leaving out one leaves out both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from shardwise.config import Model, Train
from shardwise.plan.engine import Engine

MULTIPLE = 16
"""Of every size of a GPU's float8 products."""

_KINDS = {
    "query": "query",
    "key": "keys",
    "value": "keys",
    "output": "output",
    "gate": "up",
    "up": "up",
    "down": "down",
}
"""By the last word of a module's name. Grouped products of experts have their own, "experts"."""

_NORMED = {"query": "before_attention", "up": "before_inner"}
"""Kinds of products whose input is a norm's output."""


@dataclass(frozen=True)
class Shares:
    """How much of a job is made in float8: of every kind of product, the share of blocks that make it so."""

    query: float = 0.0
    keys: float = 0.0
    """And values."""
    output: float = 0.0
    up: float = 0.0
    """And gate; in a model with experts, those of shared ones."""
    down: float = 0.0
    experts: float = 0.0
    """Grouped products."""
    before_attention: float = 0.0
    """Share of blocks in which all products of the first norm's output are in float8; and of the second
    one's."""
    before_inner: float = 0.0
    head: bool = False
    dynamic: bool = False
    """Scales come from the tensors themselves, which are read once more for it."""
    products: int = 0
    """Of the whole model."""


class Product(NamedTuple):
    """A product of the transformer."""

    name: str
    """Of its module; of experts, of the weight."""
    source: str
    """The first with the same input."""
    sizes: tuple[int, int]
    """Outputs and inputs."""
    joined: str
    """The first of those that are made together, with one scale for their weights and one for their
    gradients."""


def products(model: Model) -> Iterator[Product]:
    """All of them."""
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
    """A problem for each pattern of train.float8_leave_out that leaves nothing out."""
    names = [product.name for product in products(model)]
    first = ", ".join(name for name in names if name.startswith("blocks.0."))
    for pattern in train.float8_leave_out:
        if not any(fnmatchcase(name, pattern) for name in names):
            yield (
                f"train.float8_leave_out: {pattern!r} is the name of no product; there are {first}, … "
                f"and head"
            )


def in_float8(model: Model, train: Train) -> list[str]:
    """The modules whose products a job makes in float8, and of experts the weights."""
    return [product.name for product in _asked(model, train) if _fits(product.sizes)]


def unfit(model: Model, train: Train) -> list[str]:
    """Those that are left out because of their sizes."""
    return [product.name for product in _asked(model, train) if not _fits(product.sizes)]


def scale_count(model: Model, train: Train) -> int:
    """Scales of the whole model: of the weight and the gradient of every product, and of each input that
    several share."""
    if train.precision != "float8":
        return 0
    chosen = set(in_float8(model, train))
    made = [product for product in products(model) if product.name in chosen]
    return 2 * len({product.joined for product in made}) + len({product.source for product in made})


def shares(model: Model, train: Train) -> Shares | None:
    """What the cost model has to know of a job's products in float8; None: there are none."""
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
    of_kinds = {kind: sum(made) / len(made) for kind, made in kinds.items()}
    return Shares(**of_kinds, head=head, dynamic=train.float8_scaling == "dynamic", products=len(chosen))


def _kind(name: str) -> str:
    return "experts" if ".experts." in name else _KINDS.get(name.rsplit(".", 1)[-1], name)


def casts_once(accumulation: Any, engine: Engine) -> Any:
    """Whether blocks' weights are cast once a step, for all its micro-batches: where they are whole, and stay
    so. Of a Layout, or of a Space."""
    return (accumulation > 1) & (engine.sharded == 0)


def gathered_in_float8(model: Model, train: Train) -> tuple[str, ...]:
    """Weights that are gathered in 8 bits, by their names in a block: those of products that are made so in
    every block. A tied one is looked up too, and must not be rounded."""
    if train.precision != "float8":
        return ()
    chosen = set(in_float8(model, train))
    left_out = {_in_block(product.name) for product in products(model) if product.name not in chosen}
    return tuple(sorted({*map(_in_block, chosen)} - left_out - ({"head"} if model.tied else set())))


def _in_block(name: str) -> str:
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def _asked(model: Model, train: Train) -> list[Product]:
    """Those that the job does not leave out, with others that they are made together with."""
    left_out = {product.joined for product in products(model) if _left_out(product.name, train)}
    return [product for product in products(model) if product.joined not in left_out]


def _left_out(name: str, train: Train) -> bool:
    if name == "head" and not train.float8_head:
        return True
    return any(fnmatchcase(name, pattern) for pattern in train.float8_leave_out)


def _fits(sizes: tuple[int, int]) -> bool:
    return not any(size % MULTIPLE for size in sizes)


def idle_float8(model: Model, train: Train) -> list[str]:
    """Why a job with float8 makes no product in it, for the settings without effect in a run's header
    (config/no_effect.py); empty where it makes some."""
    if train.precision != "float8" or in_float8(model, train):
        return []
    left = unfit(model, train)
    if not left:
        return ["train.precision = 'float8': the job leaves out all products"]
    asked = " that the job does not leave out" if len(left) < len(list(products(model))) else ""
    return [
        f"train.precision = 'float8': the sizes of all products{asked} are no multiples of {MULTIPLE} "
        f"({left[0]}, …)"
    ]
