"""A flow: collectives of one kind over one axis that run beside the same work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from shardwise.cost.space import Array

When = Literal["forward", "backward", "ends", "once", "pipeline", "step"]
"""What a flow runs beside, which decides what of it hides:

- "forward", "backward": of the blocks, in every micro-batch;
- "ends": the embedding, the head and the loss, in every micro-batch;
- "once": the blocks of one micro-batch, for the whole step: weights that are gathered once, gradients that are summed at the end;
- "pipeline": between two stages;
- "step": nothing; before, in or after the optimizer's update.
"""
EACH_MICRO_BATCH: tuple[When, ...] = ("forward", "backward", "ends")


@dataclass(frozen=True)
class Flow:
    """How many a step, and the bytes of all of them, for every candidate; bytes are of the full tensor, as in the ledger."""

    kind: str
    axis: str
    """As the ledger names it, with parts of one device left in: "data x context" where only data has several."""
    when: When
    count: Array
    bytes: Array

    def __add__(self, other: Flow) -> Flow:
        return replace(self, count=self.count + other.count, bytes=self.bytes + other.bytes)


def calls(kind: str, axis: str, when: When, count: Any, bytes_of_one: Any) -> Flow:
    """So many collectives of so many bytes each."""
    times = np.asarray(count, dtype=np.float64)
    return Flow(kind, axis, when, times, times * bytes_of_one)


def units(kind: str, axis: str, when: When, times: Any, of_units: tuple[Any, Any], width: float) -> Flow:
    """So often, that many units of so many numbers together, of this width in bytes; a unit is one collective."""
    often = np.asarray(times, dtype=np.float64)
    return Flow(kind, axis, when, often * of_units[0], often * of_units[1] * width)
