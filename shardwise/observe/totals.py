"""Collect what a report needs from a run's steps, in memory that does not grow with their number.

Sums, extremes, the first and the last step are exact. Medians and shares are computed over a sample of steps:
all of them up to `MAX_SAMPLE`, and beyond that every second, every fourth and so on, so that the sample is
spread evenly over the run. The median of thousands of evenly spaced steps differs from that of the run by a
fraction of its noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from shardwise.observe.records import Record

WARM_UP = 2
"""Number of first steps that are left out of speeds and shares."""
MAX_SAMPLE = 4096
"""Maximum number of steps whose whole records are kept."""

T = TypeVar("T")


class Sample(Generic[T]):
    """Evenly spaced members of a stream: all of them, or between half of `most` and `most`."""

    def __init__(self, most: int = MAX_SAMPLE) -> None:
        self.members: list[T] = []
        self.seen = 0
        self._most, self._every = most, 1

    def add(self, member: T) -> None:
        """Add the next member of the stream."""
        if self.seen % self._every == 0:
            self.members.append(member)
            if len(self.members) > self._most:
                self.members = self.members[::2]
                self._every *= 2
        self.seen += 1


class SteadySteps:
    """Steps after the warm-up: all but the first two, or those if there are no others."""

    def __init__(self) -> None:
        self._warm_up: list[Record] = []
        self._steady: Sample[Record] = Sample()

    def add(self, step: Record) -> None:
        """Add the record of the next step."""
        if len(self._warm_up) < WARM_UP:
            self._warm_up.append(step)
        else:
            self._steady.add(step)

    @property
    def sample(self) -> list[Record]:
        """Evenly spaced steps after the warm-up."""
        return self._steady.members or self._warm_up

    @property
    def sample_with_warm_up(self) -> list[Record]:
        """Evenly spaced steps, and those of the warm-up."""
        return [*self._warm_up, *self._steady.members]

    @property
    def count(self) -> int:
        """Number of steps after the warm-up."""
        return self._steady.seen or len(self._warm_up)


class RunTotals:
    """Collects what is to be known of all steps.

    `planned_since` is the step after which the run had its present layout.
    """

    def __init__(self, planned_since: int) -> None:
        self._since = planned_since
        self.count, self.tokens, self._seconds = 0, 0, [0.0]
        self.first: Record = {}
        self.last: Record = {}
        self.lowest: Record = {"loss": None, "step": None}
        self.peak_memory: float | None = None
        self.steady = SteadySteps()
        self.like_planned = SteadySteps() if planned_since else self.steady
        self.held_out: list[Record] = []
        self.skipped: list[int] = []
        self._collectives: dict[str, dict[str, int]] = {}
        self._repeated: dict[str, dict[str, int]] = {}
        self._times = 0
        self.staleness: Counter[int] = Counter()
        """For all gradients of a server's workers, how many had which staleness."""
        self.dropped = 0
        """Number of these gradients that came after another one of the same portion."""
        self.updates: Counter[str] = Counter()
        """Number of updates without a lock, of rows that they wrote, and of conflicts among both."""
        self.again = 0
        """Number of steps that were repeated because a tensor in float8 had outgrown its scale."""
        self.float8_lost: dict[str, float] = {}
        """For each layer, the largest fraction of numbers below the range of float8."""
        self.last_float8: dict[str, tuple[float, float]] = {}
        self.last_with_experts: Record = {}
        self.worst_with_experts: Record = {}

    def gather(self, steps: Iterable[Record]) -> Iterator[Record]:
        """Yield the steps unchanged, and record each of them."""
        for step in steps:
            self._take(step)
            yield step

    @property
    def seconds(self) -> float:
        """Sum of the seconds of all steps."""
        return math.fsum(self._seconds)

    def _take(self, step: Record) -> None:
        self.first, self.last = self.first or step, step
        self.count += 1
        self.tokens += step.get("tokens", 0)
        self._seconds.append(step["seconds"])
        if len(self._seconds) > MAX_SAMPLE:
            self._seconds = [math.fsum(self._seconds)]
        loss, memory = step["loss"], step.get("memory_bytes")
        if math.isfinite(loss) and (self.lowest["loss"] is None or loss < self.lowest["loss"]):
            self.lowest = step
        if memory is not None and (self.peak_memory is None or memory > self.peak_memory):
            self.peak_memory = memory
        self.steady.add(step)
        if self._since and step["step"] > self._since:
            self.like_planned.add(step)
        self._take_rare(step)
        self._take_collectives(step.get("collectives", {}))

    def _take_rare(self, step: Record) -> None:
        """Record what only some steps have."""
        if "held_out_loss" in step:
            self.held_out.append({"step": step["step"], "loss": step["held_out_loss"]})
        if step.get("skipped"):
            self.skipped.append(step["step"])
        self.staleness.update(step.get("staleness", ()))
        self.dropped += step.get("dropped", 0)
        self.updates.update(step.get("updates", {}))
        self.again += step.get("again", 0)
        for layer, (lost, _) in step.get("float8", {}).items():
            self.float8_lost[layer] = max(lost, self.float8_lost.get(layer, 0.0))
        self.last_float8 = step.get("float8", self.last_float8)
        if step.get("expert_load") and "expert_imbalance" in step:
            self.last_with_experts, worst = step, self.worst_with_experts
            if not worst or step["expert_imbalance"] > worst["expert_imbalance"]:
                self.worst_with_experts = step

    @property
    def collectives(self) -> dict[str, dict[str, int]]:
        """Calls and bytes of all steps, by kind and axis."""
        self._take_collectives({})
        return self._collectives

    def _take_collectives(self, collectives: dict[str, dict[str, int]]) -> None:
        """Record the collectives of a step.

        Most steps have the same as the step before, so repetitions are counted and multiplied when another
        one comes.
        """
        if collectives == self._repeated:
            self._times += 1
            return
        for key, counts in self._repeated.items():
            total = self._collectives.setdefault(key, {"count": 0, "bytes": 0})
            total["count"] += self._times * counts["count"]
            total["bytes"] += self._times * counts["bytes"]
        self._repeated, self._times = collectives, 1

    @property
    def curve(self) -> list[list[float]]:
        """Step and loss of evenly spaced steps, including the first and the last."""
        points = [[step["step"], step["loss"]] for step in self.steady.sample_with_warm_up]
        if points[-1][0] != self.last["step"]:
            points.append([self.last["step"], self.last["loss"]])
        return points
