"""The name and shape of every parameter of a model, computed from its configuration.

Memory, FLOPs and the bytes of every collective follow from this table, so the planner needs neither torch nor
a model: the parameters of a model with 405 billion are counted in microseconds. The names are those of
`models.Transformer`, which checkpoints and sharding tables use too. Tests compare the two, and the totals
with the published counts.

A tied model has no `head.weight`: the embedding matrix serves twice and is counted once, as part of the
embedding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from shardwise.config.model import Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModuleParameters:
    """Numbers of parameters of a user's module, which are known once it is built."""

    total: int
    frozen: int = 0
    """Number of parameters with requires_grad=False, which are never trained."""

    @property
    def trained(self) -> int:
        """Number of parameters that are trained."""
        return self.total - self.frozen


def parameter_shapes(model: Model) -> dict[str, Shape]:
    """Return the shape of each parameter by its name, in the order of the module.

    Matrices are (outputs, inputs); those of experts are stacked: (experts, outputs, inputs).
    """
    blocks = (
        (f"blocks.{layer}.{name}", shape) for layer in range(model.layers) for name, shape in _block(model)
    )
    return {**dict(_before_blocks(model)), **dict(blocks), **dict(_after_blocks(model))}


def count(model: Model) -> int:
    """Return the number of parameters. The embedding of a tied model counts once."""
    outside = _numbers([*_before_blocks(model), *_after_blocks(model)])
    return outside + model.layers * _numbers(_block(model))


def active_count(model: Model) -> int:
    """Return the number of parameters that one token uses: all, without the experts that it does not
    visit."""
    if not model.experts:
        return count(model)
    experts = _numbers((name, shape) for name, shape in _experts(model) if ".experts." in name)
    unvisited = model.experts - model.experts_per_token
    return count(model) - model.layers * experts * unvisited // model.experts


def _numbers(parameters: Iterable[tuple[str, Shape]]) -> int:
    return sum(prod(shape) for _, shape in parameters)


def _before_blocks(model: Model) -> Iterator[tuple[str, Shape]]:
    yield "embedding.weight", (model.vocabulary, model.hidden)
    if model.positions == "learned":
        yield "positions.weight", (model.max_positions, model.hidden)


def _after_blocks(model: Model) -> Iterator[tuple[str, Shape]]:
    yield from _norm("norm", model)
    if not model.tied:
        yield "head.weight", (model.vocabulary, model.hidden)


def _block(model: Model) -> Iterator[tuple[str, Shape]]:
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    yield from _norm("attention_norm", model)
    yield from _linear("attention.query", query, model.hidden, bool(model.bias))
    yield from _linear("attention.key", key, model.hidden, bool(model.bias))
    yield from _linear("attention.value", key, model.hidden, bool(model.bias))
    yield from _linear("attention.output", model.hidden, query, model.bias is True)
    if model.qk_norm:
        yield "attention.query_norm.weight", (model.head_dim,)
        yield "attention.key_norm.weight", (model.head_dim,)
    yield from _norm("feed_forward_norm", model)
    yield from _experts(model) if model.experts else _feed_forward("feed_forward", model.ffn, model)
    if model.post_norms:
        yield from _norm("attention_post_norm", model)
        yield from _norm("feed_forward_post_norm", model)


def _feed_forward(name: str, width: int, model: Model) -> Iterator[tuple[str, Shape]]:
    if model.gated:
        yield from _linear(f"{name}.gate", width, model.hidden, model.bias is True)
    yield from _linear(f"{name}.up", width, model.hidden, model.bias is True)
    yield from _linear(f"{name}.down", model.hidden, width, model.bias is True)


def _experts(model: Model) -> Iterator[tuple[str, Shape]]:
    width = model.expert_width
    yield "feed_forward.router.weight", (model.experts, model.hidden)
    yield "feed_forward.experts.gate", (model.experts, width, model.hidden)
    yield "feed_forward.experts.up", (model.experts, width, model.hidden)
    yield "feed_forward.experts.down", (model.experts, model.hidden, width)
    if model.shared_experts:
        yield from _feed_forward("feed_forward.shared", model.shared_experts * width, model)


def _linear(name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, model: Model) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (model.hidden,)
    if model.norm == "layer":
        yield f"{name}.bias", (model.hidden,)
