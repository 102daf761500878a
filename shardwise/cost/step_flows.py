"""Flows that run once a step, after all micro-batches.

These are sums of the gradients of weights that every tensor device has whole, sums of squares for the global
norm, the numbers that all ranks share, and in float8 the maxima of scaled tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from shardwise.config.axes import RANK_AXES, TOKEN_AXES
from shardwise.config.layout import Layout
from shardwise.cost.first_rank import FirstRank
from shardwise.cost.flow import Flow, calls
from shardwise.cost.space import distinct
from shardwise.plans.grid import EXPERT_SHARDS, SHARDS, joined_name

_SHARING = ("data", "context", "tensor", "expert")
"""Degrees that decide how gradients are sharded."""


def step_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the flows that run once a step."""
    space, model, sizes = rank.space, rank.work.model, rank.sizes
    has_head = rank.cut.first_has_head
    whole = rank.cut.first * sizes.whole_block + sizes.whole_positions + has_head * sizes.whole_norm
    yield calls("all_reduce", "tensor", "step", space.tensor > 1, whole * rank.stored)
    sends_embedding = (space.pipeline > 1) & ~has_head & model.tied
    yield calls("send", "pipeline", "step", sends_embedding, sizes.embedding // rank.shards * rank.stored)
    yield from _norm(rank)
    for axis in RANK_AXES:
        yield calls("all_reduce", axis, "step", getattr(space, axis) > 1, 8 * (4 + 2 * space.world))
    if rank.work.scales:
        for axis in RANK_AXES:
            yield calls(
                "all_reduce", axis, "step", 2 * (getattr(space, axis) > 1), (12 + 4) / 2 * rank.work.scales
            )
    if model.experts:
        for axis in TOKEN_AXES:
            yield calls(
                "all_reduce", axis, "step", getattr(space, axis) > 1, 8 * rank.cut.first * model.experts
            )
        yield calls("all_reduce", "pipeline", "step", 2 * (space.pipeline > 1), (8 + 8 * model.experts) / 2)


def _norm(rank: FirstRank) -> Iterator[Flow]:
    """Yield the sums of the global norm: one number for each axis of each way to shard gradients.

    The ways are dense and split over tensor devices, dense and whole, and experts. The plain tensors that
    DistributedDataParallel sums are whole everywhere.
    """
    space, experts, number = rank.space, rank.work.model.experts > 0, max(4, rank.stored)
    columns = [rank.engine.zero > 0, *(getattr(space, axis) for axis in _SHARING)]
    first, index = distinct(columns)
    kinds = zip(*(column[first].tolist() for column in columns), strict=True)
    summed = [_axes_of_norm(experts, *kind) for kind in kinds]
    for name in sorted({name for axes in summed for name in axes}):
        times = np.array([axes.count(name) for axes in summed])[index]
        yield calls("all_reduce", name, "step", np.where(rank.plain, 0, times), number)
    yield calls("all_reduce", "pipeline", "step", space.pipeline > 1, number)


@lru_cache(maxsize=4096)
def _axes_of_norm(experts: bool, sharded: bool, *degrees: int) -> tuple[str, ...]:
    """Return the axes that a norm is summed over, by their names in the grid (plans/grid.py)."""
    given: dict[str, Any] = dict(zip(_SHARING, degrees, strict=True))
    layout = Layout(**given)
    dense, of_experts = (joined_name(layout, axis) if sharded else "solo" for axis in (SHARDS, EXPERT_SHARDS))
    tensor, expert = (joined_name(layout, axis) for axis in ("tensor", "expert"))
    ways = {(dense, tensor), (dense, "solo"), *([(of_experts, expert)] if experts else [])}
    return tuple(axis for way in ways for axis in way if axis != "solo")
