"""How many numbers of a model's weights a device has: its part of each matrix, and of that part the rows that
ZeRO leaves it.

Counting parameters and dividing is nearly right, and never exactly. Tensor devices split matrices but keep
norms whole, and key heads where there are fewer of them than devices; rows that do not divide leave the first
device more than the others; ZeRO pads the rows of each weight until they divide. So each weight is counted by
itself, by the sharding table (plan/sharding.py) and the rules of parallel/data.py, for the first device,
which has most. tests/parallel/test_predictions.py holds them to what ranks have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from shardwise.config import Model
from shardwise.config.compression import is_compressed
from shardwise.config.parameters import Shape, parameter_shapes
from shardwise.plan import sharding
from shardwise.plan.dtypes import computes_wide
from shardwise.plan.sharding import transformer_sharding

Count = Any
"""A number of one device; an array of the cost model's candidates."""


@dataclass(frozen=True)
class Part:
    """Numbers of some weights on one device."""

    whole: Count = 0.0
    """Before ZeRO: this tensor device's part."""
    shard: Count = 0.0
    """What it keeps of that between uses, rows padded; all of it where nothing is sharded."""
    gathered: Count = 0.0
    """What it has when the shards are put together again, padding included."""
    wide: Count = 0.0
    """Those of `gathered` that are computed with in the wide dtype (plan/dtypes.py)."""
    compressed: Count = 0.0
    """Those of `gathered` whose gradients a job may compress, and of `shard`."""
    compressed_shard: Count = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(*(own + others for own, others in zip(self.counts, other.counts, strict=True)))

    def __mul__(self, times: Count) -> Part:
        return Part(*(times * own for own in self.counts))

    @property
    def counts(self) -> tuple[Count, ...]:
        """All of them, in the order of the fields."""
        return self.whole, self.shard, self.gathered, self.wide, self.compressed, self.compressed_shard


@dataclass(frozen=True)
class Parts:
    """One block without its experts, the experts of one block, what comes before the blocks, and what comes
    after."""

    block: Part
    experts: Part
    first: Part
    last: Part
    copy: Part
    """Of a tied embedding, which the last pipeline stage has too."""


@lru_cache(maxsize=65536)
def parts_of(model: Model, tensor: int, shards: int, expert: int = 1, expert_shards: int = 1) -> Parts:
    """The parts of the first device, with states sharded over so many devices; 1: not sharded."""
    found = dict.fromkeys(("block", "experts", "first", "last"), Part())
    for name, shape in parameter_shapes(model.model_copy(update={"layers": 1})).items():
        place = _place(name)
        if place == "experts":
            part, split = sliced((model.experts // expert, *shape[1:]), None, 1, expert_shards), True
        else:
            dim = split_dim(name, model, tensor)
            part, split = sliced(shape, dim, tensor, shards), tensor == 1 or dim is not None
            part = replace(part, wide=part.gathered if computes_wide(name) else 0.0)
        found[place] += _compressed(part) if split and is_compressed(shape) else part
    shape = (model.vocabulary, model.hidden)
    copy = sliced(shape, 0, tensor, shards) if model.tied else Part()
    return Parts(**found, copy=_compressed(copy) if is_compressed(shape) else copy)


def _compressed(part: Part) -> Part:
    return replace(part, compressed=part.gathered, compressed_shard=part.shard)


def with_peers(parts: Parts, dense: Count, experts: Count, zero: Count, replica: Count) -> Parts:
    """The same where so many devices of a replica hold the same weights: what one device has is not summed,
    nor compressed."""

    def held(part: Part, devices: Count) -> Part:
        return replace(part, compressed=part.compressed * ((devices > 1) | ((zero == 0) & (replica > 1))))

    rest = {name: held(getattr(parts, name), dense) for name in ("block", "first", "last", "copy")}
    return Parts(experts=held(parts.experts, experts), **rest)


def _place(name: str) -> str:
    if ".experts." in name:
        return "experts"
    return (
        "block"
        if name.startswith("blocks.")
        else "first"
        if name.startswith(("embedding.", "positions."))
        else "last"
    )


def sliced(shape: Shape, dim: int | None, tensor: int, shards: int) -> Part:
    """The first device's part of one weight that tensor devices split in this dim, and ZeRO by rows."""
    own = [-(-size // tensor) if place == dim else size for place, size in enumerate(shape)]
    rows, row = own[0], prod(own[1:])
    shard = -(-rows // shards) * row
    return Part(rows * row, shard, shard * shards)


@lru_cache(maxsize=4096)
def split_dim(name: str, model: Model, tensor: int) -> int | None:
    """The dim in which tensor devices split a weight of the transformer, or None: each has it whole."""
    module, _, parameter = name.rpartition(".")
    role = transformer_sharding(model).role(module)
    assert role is not None, f"the table has no entry for {module}"
    return sharding.split_dim(role, parameter, tensor)
