"""A flow: collectives of one kind over one axis that run beside the same work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from shardwise.config.schedules import Numbers
from shardwise.cost.codec_work import CodecWork
from shardwise.cost.space import Array, Ints, take

When = Literal["forward", "backward", "ends", "once", "pipeline", "step"]
"""The work that a flow runs beside, and that can hide it:

- "forward", "backward": a pass through the blocks, in every micro-batch;
- "ends": the embedding, the head and the loss, in every micro-batch;
- "once": a pass of one micro-batch through the blocks, once a step: weights that are gathered once, gradients
  that are summed at the end;
- "pipeline": the computing of a stage, while messages go between stages;
- "step": nothing. The flow runs before, in or after the optimizer's update.
"""
EACH_MICRO_BATCH: tuple[When, ...] = ("forward", "backward", "ends")


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind, axis and time: their number and bytes in a step, for every candidate.

    Bytes are those of the full tensor, as in the ledger.
    """

    kind: str
    axis: str
    """Axis as in the ledger, but including axes of one device: "data x context" even if context is 1."""
    when: When
    count: Array
    bytes: Array
    copies: int = 1
    """Number of copies of each row for different devices, if a node gets only one and copies it there."""
    codec_work: CodecWork | None = None
    """Work of the codec, if the flow is compressed."""

    def __add__(self, other: Flow) -> Flow:
        works = [flow.codec_work for flow in (self, other) if flow.codec_work is not None]
        work = works[0] + works[1] if len(works) == 2 else works[0] if works else None
        return replace(self, count=self.count + other.count, bytes=self.bytes + other.bytes, codec_work=work)

    def of_candidates(self, index: Ints, accumulation: Ints) -> Flow:
        """Return the flow of candidates with these numbers of micro-batches.

        `self` is that of their layouts; index[i] is the layout of candidate i.
        """
        count, size = take(self.count, index), take(self.bytes, index)
        work = self.codec_work and self.codec_work.take(index)
        if self.when in EACH_MICRO_BATCH:
            count, size, work = count * accumulation, size * accumulation, work and work.times(accumulation)
        return replace(self, count=count, bytes=size, codec_work=work)


def calls(kind: str, axis: str, when: When, count: Numbers, bytes_of_one: Numbers) -> Flow:
    """Return a flow of `count` collectives of `bytes_of_one` each."""
    times = np.asarray(count, dtype=np.float64)
    return Flow(kind, axis, when, times, times * bytes_of_one)


def units(
    kind: str, axis: str, when: When, times: Numbers, of_units: tuple[Numbers, Numbers], width: float
) -> Flow:
    """Return a flow of units, each one collective, repeated `times`.

    `of_units` are the number of units and the number of their elements, which have `width` bytes each.
    """
    repeats = np.asarray(times, dtype=np.float64)
    return Flow(kind, axis, when, repeats * of_units[0], repeats * of_units[1] * width)
