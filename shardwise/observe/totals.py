"""What a report needs of a run's steps, gathered while they pass by, in memory that does not grow with their
number.

Sums, extremes, the first and the last are exact. Medians and shares are taken over steps kept for that: all
of them up to `MOST`, beyond that every second, every fourth and so on, so that what is kept is spread evenly
over the run. A median of thousands of evenly spaced steps is the run's to a fraction of its noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from shardwise.observe.records import Record

WARM_UP = 2
"""Steps at the start that are left out of speeds and shares."""
MOST = 4096
"""Steps of which whole records are kept."""

T = TypeVar("T")


class Sample(Generic[T]):
    """Evenly spaced members of a stream: all of them, or, where they are more than `most`, between half as
    many and so many."""

    def __init__(self, most: int = MOST) -> None:
        self.members: list[T] = []
        self.seen = 0
        self._most, self._every = most, 1

    def add(self, member: T) -> None:
        """The next of the stream."""
        if self.seen % self._every == 0:
            self.members.append(member)
            if len(self.members) > self._most:
                self.members = self.members[::2]
                self._every *= 2
        self.seen += 1


class SteadySteps:
    """Steps once they have warmed up: all but the first two, or those if there are no others."""

    def __init__(self) -> None:
        self._warm_up: list[Record] = []
        self._steady: Sample[Record] = Sample()

    def add(self, step: Record) -> None:
        """The next step."""
        if len(self._warm_up) < WARM_UP:
            self._warm_up.append(step)
        else:
            self._steady.add(step)

    @property
    def kept(self) -> list[Record]:
        """Evenly spaced ones of them."""
        return self._steady.members or self._warm_up

    @property
    def all_kept(self) -> list[Record]:
        """Evenly spaced ones of them, and those before."""
        return [*self._warm_up, *self._steady.members]

    @property
    def count(self) -> int:
        """How many there were."""
        return self._steady.seen or len(self._warm_up)


class RunTotals:
    """Gathers what is to be known of all steps. `planned_since`: the step after which the run had the layout
    it has now."""

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
        """Of all gradients that were computed by a server's workers."""
        self.dropped = 0
        """Of them, those that came after another of the same portion."""
        self.updates: Counter[str] = Counter()
        """Those without a lock, the rows that they wrote, and the conflicts among both."""
        self.again = 0
        """Steps that were made again, because a tensor in float8 had outgrown its scale."""
        self.float8_lost: dict[str, float] = {}
        """By layer, the largest share of numbers that fell below the range of float8."""
        self.last_float8: dict[str, tuple[float, float]] = {}
        self.last_with_experts: Record = {}
        self.worst_with_experts: Record = {}

    def gather(self, steps: Iterable[Record]) -> Iterator[Record]:
        """Pass the steps on, taking note of each."""
        for step in steps:
            self._take(step)
            yield step

    @property
    def seconds(self) -> float:
        """Of all steps together."""
        return math.fsum(self._seconds)

    def _take(self, step: Record) -> None:
        self.first, self.last = self.first or step, step
        self.count += 1
        self.tokens += step.get("tokens", 0)
        self._seconds.append(step["seconds"])
        if len(self._seconds) > MOST:
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
        """What only some steps have."""
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
        """Calls and bytes of all steps together, by kind and axis."""
        self._take_collectives({})
        return self._collectives

    def _take_collectives(self, collectives: dict[str, dict[str, int]]) -> None:
        """Most steps do as the one before: how often is counted, and multiplied when another comes."""
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
        """Step and loss of evenly spaced steps, the first and the last among them."""
        points = [[step["step"], step["loss"]] for step in self.steady.all_kept]
        return (
            points
            if points[-1][0] == self.last["step"]
            else [*points, [self.last["step"], self.last["loss"]]]
        )
