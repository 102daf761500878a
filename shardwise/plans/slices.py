"""Numbers of elements of a model's weights on a device, after the split of tensor parallelism and of ZeRO.

The number of parameters divided by the number of devices is not exact. Tensor devices split matrices but keep
norms whole, and key heads too if there are fewer of them than devices; if rows do not divide, the first
device has more than the others; ZeRO pads the rows of each weight until they divide. So each weight is
counted separately, by the sharding table (plans/sharding.py) and the rules of parallel/data.py, for the first
device, which has most. tests/parallel/test_predictions.py compares this with what ranks hold.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Self

from shardwise.config import Layout, Model
from shardwise.config.compression import is_compressed
from shardwise.config.parameters import Shape, parameter_shapes
from shardwise.config.schedules import Numbers
from shardwise.plans import sharding
from shardwise.plans.dtypes import computes_wide
from shardwise.plans.grid import expert_shards
from shardwise.plans.sharding import transformer_sharding


@dataclass(frozen=True)
class Counts:
    """Numbers that are added and multiplied field by field; arrays for the cost model's candidates."""

    @property
    def counts(self) -> tuple[Numbers, ...]:
        """All fields, in their order."""
        return tuple(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Self) -> Self:
        return type(self)(*(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)))

    def __mul__(self, times: Numbers) -> Self:
        return type(self)(*(times * count for count in self.counts))


@dataclass(frozen=True)
class Part(Counts):
    """Numbers of elements of some weights on one device."""

    whole: Numbers = 0.0
    """Elements before ZeRO: this tensor device's part."""
    shard: Numbers = 0.0
    """Elements kept between uses, with padding; the same as `whole` without sharding."""
    gathered: Numbers = 0.0
    """Elements after a gather of the shards, with padding."""
    wide: Numbers = 0.0
    """Elements of `gathered` that are used in the wide dtype (plans/dtypes.py)."""
    compressed: Numbers = 0.0
    """Elements of `gathered` whose gradients may be compressed."""
    compressed_shard: Numbers = 0.0
    """Elements of `shard` whose gradients may be compressed."""


@dataclass(frozen=True)
class Parts:
    """A device's parts of the weights of a model."""

    block: Part
    """One block without its experts."""
    experts: Part
    """The experts of one block."""
    first: Part
    """The weights before the blocks."""
    last: Part
    """The weights after the blocks."""
    copy: Part
    """Second copy of a tied embedding, on the last pipeline stage."""


@lru_cache(maxsize=65536)
def parts_of(model: Model, tensor: int, shards: int, expert: int = 1, shards_of_experts: int = 1) -> Parts:
    """Return the parts of the first device, with states sharded over `shards` devices (1: not sharded)."""
    parts = dict.fromkeys(("block", "experts", "first", "last"), Part())
    for name, shape in parameter_shapes(model.model_copy(update={"layers": 1})).items():
        place = _place(name)
        if place == "experts":
            part, split = sliced((model.experts // expert, *shape[1:]), None, 1, shards_of_experts), True
        else:
            dim = split_dim(name, model, tensor)
            part, split = sliced(shape, dim, tensor, shards), tensor == 1 or dim is not None
            part = replace(part, wide=part.gathered if computes_wide(name) else 0.0)
        parts[place] += _compressed(part) if split and is_compressed(shape) else part
    shape = (model.vocabulary, model.hidden)
    copy = sliced(shape, 0, tensor, shards) if model.tied else Part()
    return Parts(**parts, copy=_compressed(copy) if is_compressed(shape) else copy)


def _compressed(part: Part) -> Part:
    return replace(part, compressed=part.gathered, compressed_shard=part.shard)


def with_peers(parts: Parts, dense: Numbers, experts: Numbers, zero: Numbers, replica: Numbers) -> Parts:
    """Return the parts with compression only of gradients that are summed, because several devices hold the
    weight.

    `dense` and `experts` are the numbers of devices of a replica that hold the same weights, and the same
    experts.
    """

    def summed(part: Part, devices: Numbers) -> Part:
        return replace(part, compressed=part.compressed * ((devices > 1) | ((zero == 0) & (replica > 1))))

    rest = {name: summed(getattr(parts, name), dense) for name in ("block", "first", "last", "copy")}
    return Parts(experts=summed(parts.experts, experts), **rest)


def _place(name: str) -> str:
    if ".experts." in name:
        return "experts"
    if name.startswith("blocks."):
        return "block"
    return "first" if name.startswith(("embedding.", "positions.")) else "last"


def sliced(shape: Shape, dim: int | None, tensor: int, shards: int) -> Part:
    """Return the first device's part of a weight that tensor devices split in this dim, and ZeRO by rows."""
    rows, *others = _split(shape, dim, tensor)
    shard = prod([-(-rows // shards), *others])
    return Part(prod([rows, *others]), shard, shard * shards)


def _split(shape: Shape, dim: int | None, tensor: int) -> list[int]:
    """Return the shape of the first device's part of a weight that tensor devices split in this dim."""
    return [-(-size // tensor) if index == dim else size for index, size in enumerate(shape)]


def parameter_slices(model: Model, layout: Layout, zero: int) -> dict[str, dict[str, list[int]]]:
    """Return three shapes for each weight of the transformer.

    They are those of the whole weight, of the part that the first device computes with, and of the part of
    its states that it keeps. `blocks.*` stands for every block.
    """
    shapes: dict[str, dict[str, list[int]]] = {}
    for name, shape in parameter_shapes(model.model_copy(update={"layers": 1})).items():
        if _place(name) == "experts":
            used, shards = [model.experts // layout.expert, *shape[1:]], int(expert_shards(layout))
        else:
            used = _split(shape, split_dim(name, model, layout.tensor), layout.tensor)
            shards = layout.shards
        kept = [-(-used[0] // shards), *used[1:]] if zero else used
        pattern = name.replace("blocks.0.", "blocks.*.", 1)
        shapes[pattern] = {"whole": list(shape), "used": used, "kept": kept}
    return shapes


@lru_cache(maxsize=4096)
def split_dim(name: str, model: Model, tensor: int) -> int | None:
    """Return the dim in which tensor devices split a weight of the transformer; None if they do not."""
    module, _, parameter = name.rpartition(".")
    role = transformer_sharding(model).role(module)
    assert role is not None, f"the table has no entry for {module}"
    return sharding.split_dim(role, parameter, tensor)
