"""The number of blocks on the first, the middle and the last pipeline rank of each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from shardwise.config.schedules import is_in_a_v, stages_per_rank
from shardwise.cost.software import Software
from shardwise.cost.space import Array, Bools, Ints, Space, Workload, distinct
from shardwise.plans.schedule import rank_of_stage, round_count


@dataclass(frozen=True)
class Cut:
    """Numbers of blocks on the pipeline ranks of every candidate."""

    is_in_a_v: Bools
    """Whether stages go from the first rank to the last and back (a V), so that the first has both ends."""
    first_has_head: Bools
    """Whether the first rank has the head: in a V, and without a pipeline."""
    stages: Ints
    """Number of stages of each rank."""
    first: Array
    """Number of blocks of the first rank."""
    middle: Array
    """Number of blocks of the fullest rank between the first and the last."""
    last: Array
    """Number of blocks of the rank with the head, which is the first one in a V."""
    last_stage: Array
    """Number of blocks in the model's last stage, if it is on the first rank (in a V); otherwise 0."""
    before_middle: Array
    """Number of blocks before the first stage of the fullest rank between the first and the last."""
    before_last: Array
    """Number of blocks before the first stage of the rank with the head; 0 in a V."""


def cut(work: Workload, space: Space, stack: Software) -> Cut:
    """Return the blocks of the pipeline ranks: cut by cost, by hand, or evenly for a program that does that.

    If there are more stages than blocks, the last stage has only the head, and the first only the embedding.
    """
    in_a_v, stages = is_in_a_v(space), stages_per_rank(space)
    kinds, index = _kinds_of_cuts(space, stages, in_a_v)
    sums = [_blocks_of_ranks(_stages_of_ranks(work, stack.balanced, *kind), in_a_v=kind[2]) for kind in kinds]
    columns = np.asarray(sums).reshape(-1, 6)[index].T  # (candidates, 6) -> six columns
    return Cut(in_a_v, in_a_v | (space.pipeline == 1), stages, *columns)


def first_rank_has(work: Workload, space: Space, stack: Software, cut: Cut, blocks: tuple[int, ...]) -> Ints:
    """Return how many of these blocks are on the first rank."""
    kinds, index = _kinds_of_cuts(space, cut.stages, cut.is_in_a_v)
    counts = [
        sum(block in stage for stage in _first_rank_stages(work, stack.balanced, *kind) for block in blocks)
        for kind in kinds
    ]
    return np.asarray(counts, dtype=np.int64)[index]


def _kinds_of_cuts(space: Space, stages: Ints, in_a_v: Bools) -> tuple[list[tuple[int, int, bool]], Ints]:
    """Return the distinct (ranks, stages of a rank, whether they are in a V), and for each candidate the
    index of its own."""
    first, index = distinct([space.pipeline, stages, in_a_v])
    columns = (column[first].tolist() for column in (space.pipeline, stages, in_a_v))
    return list(zip(*columns, strict=True)), index


@lru_cache(maxsize=4096)
def _stages_of_ranks(
    work: Workload, balanced: bool, ranks: int, per_rank: int, in_a_v: bool
) -> list[list[float]]:
    """Return, for each rank, the numbers of blocks of its stages in the model's order."""
    blocks: list[list[float]] = [[] for _ in range(ranks)]
    counts = _blocks_of_stages(work, balanced, ranks * per_rank)
    for count, rank in zip(counts, rank_of_stage(ranks, per_rank, in_a_v), strict=True):
        blocks[rank].append(count)
    return blocks


def _blocks_of_stages(work: Workload, balanced: bool, stages: int) -> Sequence[float]:
    """Return the number of blocks of each stage."""
    layers = work.model.layers
    empty = stages - layers
    if not balanced:
        return [layers / stages] * stages
    if empty <= 0:
        return work.blocks(stages)
    return [0] * (empty // 2) + [1] * layers + [0] * (empty - empty // 2)


@lru_cache(maxsize=4096)
def _first_rank_stages(
    work: Workload, balanced: bool, ranks: int, per_rank: int, in_a_v: bool
) -> list[range]:
    """Return the blocks of each stage of the first rank. Those of a program that cuts blocks are rounded."""
    edges = [0, *map(round, accumulate(_blocks_of_stages(work, balanced, ranks * per_rank)))]
    places = rank_of_stage(ranks, per_rank, in_a_v)
    return [range(*ends) for ends, rank in zip(pairwise(edges), places, strict=True) if rank == 0]


def _blocks_of_ranks(
    ranks: list[list[float]], in_a_v: bool
) -> tuple[float, float, float, float, float, float]:
    """Return the fields of a `Cut` from `first` on, for one cut."""
    totals = [sum(stages) for stages in ranks]
    last = 0 if in_a_v else len(ranks) - 1
    between = [rank for rank in range(len(ranks)) if rank not in (0, last)]
    middle = max(between, key=lambda rank: (totals[rank], rank), default=0)
    # The first stages of the ranks are the first stages of the model, in order.
    before = list(accumulate((stages[0] for stages in ranks), initial=0.0))
    return (
        totals[0],
        totals[middle] if middle else 0.0,
        totals[last],
        ranks[0][-1] if in_a_v else 0.0,
        before[middle],
        before[last],
    )


def gathered_without_use(
    work: Workload, space: Space, stack: Software, blocks: tuple[int, ...] | None = None
) -> Ints:
    """Return how many of these blocks (None: of all) are on the first rank, and are gathered there by FSDP2
    once more than they are used. The schedule of all candidates must be interleaved.

    In backward FSDP2 prefetches units in the reverse order of all forwards of the step. So the first unit of
    one forward prefetches the last unit of the forward before. Between two rounds of micro-batches, the later
    stages of an interleaved schedule run no forward whose backward is still to come. There the step's last
    backward prefetches units that nothing uses. This is so for stage k of a rank if k times the forwards of
    two rounds are more than the forwards that run ahead of backward. The last unit is the stage's last block.
    """
    stages = space.stages_per_rank
    rounds = round_count(space.accumulation, space.pipeline)
    two_rounds, longest = -(-2 * space.accumulation // rounds), -(-space.accumulation // rounds)
    ahead = 2 * space.pipeline - 3 + (stages - 1) * longest
    first = np.where(rounds > 1, ahead // two_rounds + 1, stages)
    distinct_cuts, index = distinct([space.pipeline, stages])
    # from_stage[cut, k] is the number of stages k and later of a cut that have several blocks, of which the
    # last is counted. In a stage of one block, that block is still gathered.
    from_stage = np.zeros((len(distinct_cuts), int(stages.max(initial=0)) + 1), dtype=np.int64)
    for row, candidate in enumerate(distinct_cuts):
        ranks, per_rank = int(space.pipeline[candidate]), int(stages[candidate])
        own = _first_rank_stages(work, stack.balanced, ranks, per_rank, False)
        counts = _stages_of_ranks(work, stack.balanced, ranks, per_rank, False)[0]
        counted = [
            count > 1 and (blocks is None or stage[-1] in blocks)
            for count, stage in zip(counts, own, strict=True)
        ]
        from_stage[row, : len(own)] = np.cumsum(counted[::-1])[::-1]
    return from_stage[index, np.minimum(first, stages)]
