"""Cut a model into pipeline stages of equal cost, which is not the same as equal numbers of blocks.

A pipeline runs at the speed of its slowest stage: all other stages wait for it, in every micro-batch. The
blocks are alike, but the last stage also has the final norm and the output head, a matrix of vocabulary x
hidden: for `llama3-8b` (128256 x 4096) it costs as much as two blocks. With 4 stages of 8 blocks the other
three ranks would be idle a fifth of the time. So costs are counted by the FLOP convention of
`plans/flops.py`, and the cut with the smallest cost of the largest stage is found exactly: for blocks of
unequal cost by dynamic programming in O(stages x blocks^2). Among equally good cuts, the most even one is
chosen, which has the smallest sum of squares.

The embedding has no FLOPs by that convention, but it moves memory. Its cost is the number of FLOPs that a
device could compute in that time.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from math import inf

from shardwise.config import Model
from shardwise.errors import ConfigError
from shardwise.plans.flops import flops_per_token

FLOPS_PER_BYTE = 200.0
"""FLOPs that a device computes in the time it moves a byte: 153 on A100, 295 on H100 in bfloat16, by their
data sheets."""
BYTES_OF_A_LOOKUP = 12.0
"""Bytes moved per value of an embedding in 2-byte numbers: read and written in forward; read, added and
written in backward, where the gradient of the output is read too."""
ROUNDING = 1e-9

_Cut = tuple[float, tuple[int, ...]]
"""The sum of squares of the first stages, and the number of blocks of each."""


def block_costs(model: Model, sequence_length: int) -> tuple[tuple[float, ...], float, float]:
    """Return the cost of each block, of the embedding and of the head, in FLOPs per token in both passes."""
    head = 6.0 * model.vocabulary * model.hidden
    block = (flops_per_token(model, sequence_length) - head) / model.layers
    tables = 2 if model.positions == "learned" else 1
    return (block,) * model.layers, tables * BYTES_OF_A_LOOKUP * FLOPS_PER_BYTE * model.hidden, head


def cut(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Return the number of blocks of each stage that makes the most expensive stage as cheap as possible."""
    if not 1 <= stages <= len(costs):
        raise ConfigError("the pipeline", [_too_many_stages(len(costs), stages)])
    if min(costs) == max(costs) > 0:
        return _cut_equal_blocks(costs[0], len(costs), stages, first, last)
    largest = _largest_stage(costs, stages, first, last)
    return _most_even(costs, stages, first, last, largest * (1 + ROUNDING))


def stage_blocks(
    model: Model, sequence_length: int, stages: int, by_hand: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the blocks of each stage: those given by hand, or a cut by cost."""
    if by_hand is None:
        blocks, embedding, head = block_costs(model, sequence_length)
        return cut(blocks, stages, embedding, head)
    problems = []
    if len(by_hand) != stages:
        problems.append(
            f"layout.stages = {list(by_hand)}: has {len(by_hand)} numbers, but the pipeline has {stages} "
            "stages"
        )
    if sum(by_hand) != model.layers:
        problems.append(
            f"layout.stages = {list(by_hand)}: sums to {sum(by_hand)}, but the model has {model.layers} "
            "blocks"
        )
    if any(blocks < 1 for blocks in by_hand):
        problems.append(f"layout.stages = {list(by_hand)}: every stage needs at least one block")
    if problems:
        if stages <= model.layers:
            problems[-1] += f"; cut by cost it would be {list(stage_blocks(model, sequence_length, stages))}"
        raise ConfigError("the pipeline", problems)
    return tuple(by_hand)


def stage_costs(
    blocks: Sequence[int], costs: Sequence[float], first: float, last: float
) -> tuple[float, ...]:
    """Return the cost of each stage of a cut, with the embedding in the first and the head in the last."""
    edges = [0, *accumulate(blocks)]
    sums = [sum(costs[start:stop]) for start, stop in pairwise(edges)]
    sums[0] += first
    sums[-1] += last
    return tuple(sums)


def _too_many_stages(blocks: int, stages: int) -> str:
    nearest = "1" if stages < 1 else str(blocks)
    return (
        f"{stages} pipeline stages for {blocks} blocks: every stage needs at least one block; use at most "
        f"{nearest} stages (layout.pipeline x layout.stages_per_rank)"
    )


def _cut_equal_blocks(cost: float, blocks: int, stages: int, first: float, last: float) -> tuple[int, ...]:
    """Return the best cut of blocks of equal cost: each block goes to the stage that is cheapest so far.

    This minimises both the largest stage and the sum of squares in O(blocks log stages), because the planner
    compares many cuts.
    """
    extra = [0.0] * stages
    extra[0] += first
    extra[-1] += last
    counts = [1] * stages
    cheapest = [(round(1 + more / cost, 9), -stage) for stage, more in enumerate(extra)]
    heapify(cheapest)
    for _ in range(blocks - stages):
        so_far, stage = cheapest[0]
        counts[-stage] += 1
        heapreplace(cheapest, (so_far + 1, stage))
    return tuple(counts)


def _largest_stage(costs: Sequence[float], stages: int, first: float, last: float) -> float:
    """Return the smallest possible cost of the most expensive stage."""
    total = [0.0, *accumulate(costs)]
    # best[end] is the cost of the most expensive stage if the stages up to here have the blocks before `end`.
    best = [inf if end == 0 else first + total[end] for end in range(len(total))]
    for stage in range(1, stages):
        extra = [last if stage == stages - 1 and end == len(costs) else 0.0 for end in range(len(total))]
        best = [
            min(
                (max(best[start], total[end] - total[start] + extra[end]) for start in range(end)),
                default=inf,
            )
            for end in range(len(total))
        ]
    return best[-1] + (last if stages == 1 else 0.0)


def _most_even(
    costs: Sequence[float], stages: int, first: float, last: float, limit: float
) -> tuple[int, ...]:
    """Return the cut with the smallest sum of squares among those with no stage above `limit`.

    Among equal cuts, the first stages get fewer blocks, because they keep the most activations.
    """
    total = [0.0, *accumulate(costs)]
    scale = limit or 1.0
    best: list[_Cut] = [(0.0, ()), *((inf, ()) for _ in costs)]
    for stage in range(stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        longer: list[_Cut] = [(inf, ())]
        for end in range(1, len(total)):
            choices = ((best[start], total[end] - total[start] + extra, end - start) for start in range(end))
            longer.append(
                min(
                    (
                        (round(so_far[0] + (cost / scale) ** 2, 9), (*so_far[1], blocks))
                        for so_far, cost, blocks in choices
                        if cost <= limit
                    ),
                    default=(inf, ()),
                )
            )
        best = longer
    return best[-1][1]
