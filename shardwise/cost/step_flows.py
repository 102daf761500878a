"""What moves once a step, when all micro-batches are through: the gradients of weights that are whole on every tensor device, the
sums of squares of a global norm, and the numbers that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from shardwise.config import borrowed
from shardwise.cost.first_rank import FirstRank
from shardwise.cost.flow import Flow, calls
from shardwise.cost.space import distinct

ABSENT, FREE, BORROWED, DIVIDED = range(4)
"""An axis as the experts see it: of one device, not borrowed, borrowed whole, and borrowed in part."""
_SHARING = ("data", "context", "tensor")


def step_flows(rank: FirstRank) -> Iterator[Flow]:
    """All of it."""
    space, model, sizes = rank.space, rank.work.model, rank.sizes
    whole = rank.cut.first * sizes.whole_block + sizes.whole_positions + rank.head * sizes.whole_norm
    yield calls("all_reduce", "tensor", "step", space.tensor > 1, whole * rank.stored)
    elsewhere = (space.pipeline > 1) & ~rank.head & model.tied
    yield calls("send", "pipeline", "step", elsewhere, sizes.embedding // rank.shards * rank.stored)
    yield from _norm(rank)
    for axis in ("context", "pipeline", "data", "replica", "tensor"):
        yield calls("all_reduce", axis, "step", getattr(space, axis) > 1, 8 * (4 + 2 * space.world))
    if model.experts:
        for axis in ("replica", "data", "context", "tensor"):
            yield calls("all_reduce", axis, "step", getattr(space, axis) > 1, 8 * rank.cut.first * model.experts)
        yield calls("all_reduce", "pipeline", "step", 2 * (space.pipeline > 1), (8 + 8 * model.experts) / 2)


def _norm(rank: FirstRank) -> Iterator[Flow]:
    """One number for each axis of each way in which gradients are sharded: dense and split over tensor devices, dense and whole,
    experts."""
    space, taken, number = rank.space, borrowed(rank.space), max(4, rank.stored)
    states = []
    for axis in _SHARING:
        size, part = getattr(space, axis), taken[axis]
        states.append(np.select([size == 1, part == 1, part == size], [ABSENT, FREE, BORROWED], DIVIDED))
    kinds, index = distinct([rank.zero > 0, rank.alone, rank.plain, *states])
    summed = [_axes_of_norm(rank.work.model.experts > 0, *kind) for kind in kinds]
    for name in sorted({name for axes in summed for name in axes}):
        yield calls("all_reduce", name, "step", np.array([axes.count(name) for axes in summed])[index], number)
    yield calls("all_reduce", "pipeline", "step", space.pipeline > 1, number)


@lru_cache(maxsize=1024)
def _axes_of_norm(experts: bool, sharded: int, alone: int, plain: int, *states: int) -> tuple[str, ...]:
    """The axes that the norm of one kind of candidate is summed over. The names are those of the grid (mesh/mesh.py), where
    experts that borrow part of an axis cut it in two."""
    if plain:
        return ()
    assert not (alone and sharded), "what nobody else has is not sharded"
    dims: dict[str, list[str]] = {"data": [], "context": [], "tensor": [], "expert": [], "expert_data": []}
    for axis, state in zip(_SHARING, states, strict=True):
        outer = {FREE: [axis], DIVIDED: [f"{axis}.outer"]}.get(state, [])
        inner = {BORROWED: [axis], DIVIDED: [f"{axis}.inner"]}.get(state, [])
        dims[axis] = [*outer, *inner]
        dims["expert_data"] += outer
        dims["expert"] += inner

    def named(*axes: str) -> tuple[str, ...]:
        name = " x ".join(dim for axis in axes for dim in dims[axis])
        return (name,) if name else ()

    nobody = () if alone else ("solo",)  # an axis of one device, where nothing is sent, but which tells ways of sharding apart
    shards = (sharded and named("data", "context")) or nobody
    expert_shards = (sharded and named("expert_data")) or nobody
    ways = {shards + named("tensor"), shards, *([expert_shards + named("expert")] if experts else [])}
    return tuple(axis for way in ways for axis in way if axis != "solo")
