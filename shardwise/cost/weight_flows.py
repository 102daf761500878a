"""What the data axes move: weights gathered and gradients summed, unit by unit.

A unit is what FSDP2 gathers at once (parallel/data.py): a block, its experts, its router, the embedding, and a root with all that
remains of a stage. The root stays gathered from forward to backward, so it is gathered once where others are gathered twice. With
P numbers in the units, R of them in the root, c and r bytes of a weight and a gradient on the wire, m micro-batches:

| zero | weights gathered   | gradients summed                                       |
| ---- | ------------------ | ------------------------------------------------------ |
| 0    |                    | r P once, all-reduce                                   |
| 1    | c P once           | r P once, reduce-scatter                               |
| 2    | c P once           | r P m, reduce-scatter                                  |
| 3    | c (2 P - R) m      | r P m, reduce-scatter                                  |

and in a run with replicas what was scattered is summed over them, once. Where backward goes in halves, everything is done once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from shardwise.config import Model
from shardwise.cost.first_rank import FirstRank
from shardwise.cost.flow import Flow, calls, units
from shardwise.cost.space import Bools, Ints
from shardwise.cost.stack import SHARDWISE
from shardwise.cost.stages import gathered_in_vain
from shardwise.plan.engine import has_schedule
from shardwise.plan.grid import COPIES, EXPERT_SHARDS, SHARDS, devices
from shardwise.plan.parameters import parameter_shapes

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel sums at once."""
Units = tuple[Any, Any]
"""How many units, and the numbers in all of them."""
NOTHING: Units = (0.0, 0.0)


def weight_flows(rank: FirstRank) -> Iterator[Flow]:
    """Of blocks, ends and experts, whatever engine holds them."""
    space, model, sizes = rank.space, rank.work.model, rank.sizes
    sharded = ~(rank.engine.single | rank.plain)
    apart = (space.pipeline > 1) | (not model.tied)  # the embedding is a unit by itself
    positions, head = (1 if model.positions == "learned" else 0), rank.head.astype(np.int64)
    own_head = sizes.embedding if model.tied else sizes.head
    blocks = rank.cut.first, rank.cut.first * rank.block
    embedding = apart * 1.0, np.where(apart, sizes.embedding, 0.0)
    root = (
        np.where(space.pipeline == 1, 1.0, positions + head),
        sizes.positions + head * (sizes.norm + np.where(apart, own_head, sizes.embedding)),
    )
    yield from _sharded(rank, SHARDS, rank.shards, sharded, rank.gathered, blocks, embedding, root)
    if model.experts:
        yield from _experts(rank, sharded)
        yield from _routers(rank, sharded)
    buckets, whole = _buckets(model, rank.stored)
    yield units("all_reduce", COPIES, "once", rank.plain, (buckets, whole), rank.stack.reduce_bytes / SHARDWISE.reduce_bytes)


def gathered_ahead(rank: FirstRank) -> Iterator[Flow]:
    """What FSDP2 gathers for nobody at the end of a step. It alone depends on the number of micro-batches in no simple way."""
    space = rank.space
    where = np.flatnonzero((rank.shards > 1) & (space.pipeline > 1) & has_schedule(space, ("interleaved",)))
    blocks = np.zeros(len(space))
    blocks[where] = gathered_in_vain(rank.work, space.take(where), rank.stack)
    yield calls("all_gather", SHARDS, "once", blocks, rank.block * rank.gathered if len(where) else 0.0)


def _experts(rank: FirstRank, sharded: Bools) -> Iterator[Flow]:
    """FSDP2 cuts experts by their number, so that every shard has whole ones, padded until they divide."""
    model = rank.work.model
    own = model.experts // rank.space.expert
    if rank.stack.whole_experts:
        own = -(-own // rank.expert_shards) * rank.expert_shards
    size = rank.cut.first * own * 3 * model.expert_width * model.hidden
    yield from _sharded(rank, EXPERT_SHARDS, rank.expert_shards, sharded, rank.gathered, (rank.cut.first, size))


def _routers(rank: FirstRank, sharded: Bools) -> Iterator[Flow]:
    """Gathered in the dtype of sums, so that no score is rounded."""
    if rank.stack.wide_routers:
        routers = rank.cut.first, rank.cut.first * rank.sizes.router
        yield from _sharded(rank, SHARDS, rank.shards, sharded, rank.wide, routers)


def _sharded(
    rank: FirstRank,
    axis: str,
    shards: Ints,
    here: Bools,
    width: float,
    blocks: Units,
    embedding: Units = NOTHING,
    root: Units = NOTHING,
) -> Iterator[Flow]:
    """Units that are sharded over this axis, where they are `here`, and gathered in so many bytes a weight."""
    space, stack, several = rank.space, rank.stack, here & (shards > 1)
    ends = embedding[0] + root[0], embedding[1] + root[1]
    twice = embedding[0] + ends[0], embedding[1] + ends[1]
    everything = blocks[0] + ends[0], blocks[1] + ends[1]
    three = (rank.engine.zero == 3) & ~rank.engine.splits_backward
    at_end = rank.engine.splits_backward | ((rank.engine.zero == 1) & (not stack.reduce_each))
    each_gather, each_sum = space.accumulation * (several & three), space.accumulation * (several & ~at_end)
    yield units("all_gather", axis, "forward", each_gather, blocks, width)
    yield units("all_gather", axis, "backward", each_gather, blocks, width)
    yield units("all_gather", axis, "ends", each_gather, twice, width)
    yield units("reduce_scatter", axis, "backward", each_sum, blocks, rank.reduced)
    yield units("reduce_scatter", axis, "ends", each_sum, ends, rank.reduced)
    weights = max(stack.gathers_after, 1) * everything[0], everything[1]  # gathered one by one, where a program does that
    yield units("all_gather", axis, "step" if stack.gathers_after else "once", several & ~three, weights, width)
    yield units("reduce_scatter", axis, "once", several & at_end, everything, rank.reduced)
    among_copies = here & (rank.engine.zero == 0) & (space.replica * devices(axis, space) > 1)
    yield units("all_reduce", f"replica x {axis}", "once", among_copies, everything, rank.reduced)
    among_replicas = here & (rank.engine.zero > 0) & (space.replica > 1)
    yield units("all_reduce", "replica", "once", among_replicas, (everything[0], everything[1] // shards), rank.reduced)


@lru_cache(maxsize=64)
def _buckets(model: Model, stored: int) -> tuple[int, int]:
    """How many sums DistributedDataParallel makes of the gradients, from the last parameter to the first, and their bytes. A
    bucket is full when it reaches its size; the first is small, so that summing begins early."""
    buckets = filled = total = 0
    for shape in reversed(parameter_shapes(model).values()):
        size = stored * int(np.prod(shape, dtype=object))
        filled, total = filled + size, total + size
        if filled >= (BUCKET if buckets else FIRST_BUCKET):
            buckets, filled = buckets + 1, 0
    return buckets + (filled > 0), total
