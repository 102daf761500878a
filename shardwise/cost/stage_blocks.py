"""The blocks of the first, a middle and the last pipeline rank of each candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from shardwise.config.schedules import is_in_a_v, stages_per_rank
from shardwise.cost.software import Software
from shardwise.cost.space import Array, Bools, Ints, Space, Workload, distinct
from shardwise.plan.schedule import placement, round_count


@dataclass(frozen=True)
class Cut:
    """Blocks of the pipeline ranks of every candidate."""

    folded: Bools
    """Whether stages go from the first rank to the last and back (a V), so that the first has both ends."""
    stages: Ints
    """Number of stages of each rank."""
    first: Array
    """Blocks of the first rank."""
    middle: Array
    """Blocks of the rank with most between the ends."""
    last: Array
    """Blocks of the rank with the head, which is the first one in a V."""
    last_stage: Array
    """Blocks of the model's last stage on the first rank; 0 except in a V."""
    before_middle: Array
    """Blocks that a micro-batch goes through before it first comes to the fullest rank between the ends."""
    before_last: Array
    """Blocks before the first stage of the rank with the head; 0 in a V."""


def cut(work: Workload, space: Space, stack: Software) -> Cut:
    """As a job's stages will be cut, by cost or by hand; evenly where a program does that. Where a program
    has more stages than blocks, the last has the head alone, and the first the embedding."""
    folded, stages = is_in_a_v(space), np.where(space.pipeline > 1, stages_per_rank(space), 1)
    first, index = distinct([space.pipeline, stages, folded])
    kinds = zip(space.pipeline[first].tolist(), stages[first].tolist(), folded[first].tolist(), strict=True)
    sums = [_blocks_of_ranks(_stages_of_ranks(work, stack.balanced, *kind), folded=kind[2]) for kind in kinds]
    return Cut(folded, stages, *np.asarray(sums).reshape(-1, 6)[index].T)  # (candidates, 6) -> six columns


@lru_cache(maxsize=4096)
def _stages_of_ranks(
    work: Workload, balanced: bool, ranks: int, per_rank: int, folded: bool
) -> list[list[float]]:
    """For each rank the blocks of its stages, in the model's order."""
    stages, layers = ranks * per_rank, work.model.layers
    alone = stages - layers
    counts: Sequence[float] = [0] * (alone // 2) + [1] * layers + [0] * (alone - alone // 2)
    if not balanced:
        counts = [layers / stages] * stages
    elif alone <= 0:
        counts = work.blocks(stages)
    blocks: list[list[float]] = [[] for _ in range(ranks)]
    for count, rank in zip(counts, placement(ranks, per_rank, folded), strict=True):
        blocks[rank].append(count)
    return blocks


def _blocks_of_ranks(
    ranks: list[list[float]], folded: bool
) -> tuple[float, float, float, float, float, float]:
    """Blocks of the first, the fullest middle and the last rank, and of the model's last stage if the first
    rank has it; and those before the middle and the last one's first stage."""
    own = [sum(stages) for stages in ranks]
    ends = (0, 0) if folded else (0, len(ranks) - 1)
    middle = max(
        (rank for rank in range(len(ranks)) if rank not in ends),
        key=lambda rank: (own[rank], rank),
        default=0,
    )
    before = list(
        accumulate((stages[0] for stages in ranks), initial=0.0)
    )  # the first stages are the ranks' own, in order
    of_last_stage = ranks[0][-1] if folded else 0.0
    return (
        own[0],
        own[middle] if middle else 0.0,
        own[ends[1]],
        of_last_stage,
        before[middle],
        before[ends[1]],
    )


def gathered_in_vain(work: Workload, space: Space, stack: Software) -> Ints:
    """Blocks of the first rank that are gathered once more than they are used; of candidates whose schedule
    is interleaved.

    In backward FSDP2 gathers ahead, in the reverse order of all forwards of the step; so the first unit of
    one forward asks for the last unit of the forward before. Where a stage had no forward without its
    backward in between, as the later stages of an interleaved schedule between two rounds of micro-batches,
    the step's last backward asks for what nobody will use. That is so for stage k of a rank if k times the
    forwards of two rounds are more than the forwards that run ahead of backward.
    """
    stages = space.stages_per_rank
    rounds = round_count(space.accumulation, space.pipeline)
    two_rounds, longest = -(-2 * space.accumulation // rounds), -(-space.accumulation // rounds)
    ahead = 2 * space.pipeline - 3 + (stages - 1) * longest
    first = np.where(rounds > 1, ahead // two_rounds + 1, stages)
    which, index = distinct([space.pipeline, stages])
    # from_here[cut, k]: stages k and later of that cut that have several blocks; a stage of one block has it
    # gathered still
    from_here = np.zeros((len(which), int(stages.max(initial=0)) + 1), dtype=np.int64)
    for row, candidate in enumerate(which):
        blocks = _stages_of_ranks(
            work, stack.balanced, int(space.pipeline[candidate]), int(stages[candidate]), False
        )[0]
        from_here[row, : len(blocks)] = np.cumsum([count > 1 for count in blocks[::-1]])[::-1]
    return from_here[index, np.minimum(first, stages)]
