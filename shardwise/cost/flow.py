"""A flow: collectives of one kind over one axis that run beside the same work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shardwise.cost.codec_work import CodecWork
from shardwise.cost.space import Array, Ints, take

When = Literal["forward", "backward", "ends", "once", "pipeline", "step"]
"""What a flow runs beside, which decides what of it hides:

- "forward", "backward": of the blocks, in every micro-batch;
- "ends": the embedding, the head and the loss, in every micro-batch;
- "once": the blocks of one micro-batch, for the whole step: weights that are gathered once, gradients that
  are summed at the end;
- "pipeline": between two stages;
- "step": nothing; before, in or after the optimizer's update.
"""
EACH_MICRO_BATCH: tuple[When, ...] = ("forward", "backward", "ends")


@dataclass(frozen=True)
class Flow:
    """How many a step, and the bytes of all of them, for every candidate; bytes are of the full tensor, as in
    the ledger."""

    kind: str
    axis: str
    """As the ledger names it, with parts of one device left in: "data x context" where only data has
    several."""
    when: When
    count: Array
    bytes: Array
    copies: int = 1
    """Of each row, that go to different devices, where a program sends one of them to a node and makes the
    others there."""
    codec_work: CodecWork | None = None
    """Of sums that are compressed: what is done around their collectives."""

    def __add__(self, other: Flow) -> Flow:
        works = [flow.codec_work for flow in (self, other) if flow.codec_work is not None]
        both = works[0] + works[1] if len(works) == 2 else works[0] if works else None
        return replace(self, count=self.count + other.count, bytes=self.bytes + other.bytes, codec_work=both)

    def of_candidates(self, index: Ints, accumulation: Ints) -> Flow:
        """A flow of layouts as that of candidates with so many micro-batches; index[i] is the layout of
        candidate i."""
        count, size, work = (
            take(self.count, index),
            take(self.bytes, index),
            self.codec_work and self.codec_work.take(index),
        )
        if self.when in EACH_MICRO_BATCH:
            count, size, work = count * accumulation, size * accumulation, work and work.times(accumulation)
        return replace(self, count=count, bytes=size, codec_work=work)


def calls(kind: str, axis: str, when: When, count: Any, bytes_of_one: Any) -> Flow:
    """So many collectives of so many bytes each."""
    times = np.asarray(count, dtype=np.float64)
    return Flow(kind, axis, when, times, times * bytes_of_one)


def units(kind: str, axis: str, when: When, times: Any, of_units: tuple[Any, Any], width: float) -> Flow:
    """So often, that many units of so many numbers together, of this width in bytes; a unit is one
    collective."""
    often = np.asarray(times, dtype=np.float64)
    return Flow(kind, axis, when, often * of_units[0], often * of_units[1] * width)
