"""How the blocks of each candidate are cut into pipeline stages, and which of them the first, a middle and the last rank have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.config import IN_A_V
from shardwise.cost.space import Array, Bools, Ints, Space, Work, distinct
from shardwise.cost.stack import Stack
from shardwise.plan.engine import has_schedule
from shardwise.plan.schedule import rank_of_stage


@dataclass(frozen=True)
class Cut:
    """Blocks of the pipeline ranks of every candidate."""

    folded: Bools
    """The model goes down the ranks and comes back, a V: the first rank has embedding and head."""
    stages: Ints
    """Of each rank."""
    first: Array
    """Blocks of the first rank."""
    middle: Array
    """Of the fullest rank between the ends."""
    last: Array
    """Of the rank that has the head: the first one of a V."""
    last_stage: Array
    """Of the first rank's blocks, those of the model's last stage: none but in a V."""
    gathered_in_vain: Ints
    """Blocks of the first rank that are gathered once more than they are used: see `_in_vain`."""


def cut(work: Work, space: Space, stack: Stack) -> Cut:
    """As a job's stages will be cut, by cost or by hand; evenly where a program does that, or has more stages than blocks."""
    folded, looped = ((space.pipeline > 1) & has_schedule(space, names) for names in (IN_A_V, ("interleaved",)))
    stages = np.where(folded, 2, np.where(looped, space.stages_per_rank, 1))
    kinds, index = distinct([space.pipeline, stages, folded])
    own = [_stages_of_ranks(work, stack, ranks, per_rank, bool(down)) for ranks, per_rank, down in kinds]
    numbers = np.asarray([_of_ranks(ranks, bool(kind[2])) for kind, ranks in zip(kinds, own, strict=True)]).reshape(-1, 4)[index]
    firsts: list[Any] = [ranks[0] for ranks in own]
    in_vain = np.where(looped, _in_vain(space, stages, firsts, index), 0)
    first, middle, last, last_stage = numbers.T  # (candidates, 4) -> four columns
    return Cut(folded, stages, first, middle, last, last_stage, in_vain)


def _stages_of_ranks(work: Work, stack: Stack, ranks: int, per_rank: int, folded: bool) -> list[list[float]]:
    """For each rank the blocks of its stages, in the model's order."""
    stages = ranks * per_rank
    even = not stack.balanced or stages > work.model.layers
    counts: Any = [work.model.layers / stages] * stages if even else work.blocks(stages)
    rank_of = rank_of_stage("zbv", ranks) if folded else tuple(stage % ranks for stage in range(stages))
    return [[count for count, owner in zip(counts, rank_of, strict=True) if owner == rank] for rank in range(ranks)]


def _of_ranks(ranks: list[list[float]], folded: bool) -> tuple[float, float, float, float]:
    between = ranks[1:] if folded else ranks[1:-1]
    last = ranks[0] if folded else ranks[-1]
    return sum(ranks[0]), max(map(sum, between), default=0.0), sum(last), ranks[0][-1] if folded else 0.0


def _in_vain(space: Space, stages: Ints, firsts: list[list[float]], index: Ints) -> Ints:
    """Stages of the first rank whose last block torch gathers at the end of a step, for nobody.

    In backward FSDP2 gathers ahead, in the reverse order of all forwards of the step; so the first unit of one forward asks for
    the last unit of the forward before. Where a stage had no forward without its backward in between, as the later stages of an
    interleaved schedule between two rounds of micro-batches, the step's last backward asks for what nobody will use. That is so
    for stage k of a rank if k times the forwards of two rounds are more than the forwards that run ahead of backward.
    """
    rounds = np.maximum(1, space.accumulation // space.pipeline)
    two_rounds, longest = -(-2 * space.accumulation // rounds), -(-space.accumulation // rounds)
    ahead = 2 * space.pipeline - 3 + (stages - 1) * longest
    first = np.where(rounds > 1, ahead // two_rounds + 1, stages)
    # from_here[cut, k]: stages k and later of that cut that have several blocks; a stage of one block has it gathered still
    from_here = np.zeros((len(firsts), max(map(len, firsts), default=0) + 1), dtype=np.int64)
    for row, blocks in enumerate(firsts):
        from_here[row, : len(blocks)] = np.cumsum([count > 1 for count in blocks[::-1]])[::-1]
    return from_here[index, np.minimum(first, stages)]
