"""Find out who is slow, and why, from each rank's own work in every step.

In synchronous training all ranks wait for the slowest, so the steps of all ranks take the same time, and the
step time does not show who causes it. The time that a rank spends on its own work does: computing and reading
data, without waiting for others. Two numbers per rank are sent together with the loss, in a sum that happens
anyway. This costs 16 bytes per rank and no message.

A rank is compared with the median of the others that do the same work: those of its pipeline stage. If it has
no such peers, it is compared with its own past, and what all ranks have in common (a machine that became
slower as a whole) is divided out. A single slow step means nothing: memory is swapped, a disk is busy. A rank
is reported as slow when it exceeded the threshold in 10 of the last 12 steps, and no longer when it did so in
at most 2. Independent noise that exceeds the threshold in one step of a hundred would report a rank wrongly
once in about 10^18 steps.

The cause is what takes the rank longer than the others: computing (a hot or throttled device, another program
on the same cores) or reading data. If no rank works longer and steps still take longer, the time is lost
between the ranks: the cause is the network, and no rank is reported.

If waiting cannot be separated from computing (FSDP2 on GPUs), compute times are zero. Then only slow reading
can be found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Cause = Literal["compute", "data", "network"]
Floats = NDArray[np.float64]

WINDOW = 12
"""Number of last steps that are looked at."""
MIN_SLOW_STEPS = 10
"""Number of slow steps in a window from which on a rank is reported as slow."""
MAX_SLOW_STEPS = 2
"""Number of slow steps in a window down to which a rank is no longer slow."""
WARM_UP = 3
"""Number of first steps that are ignored, because they compile, allocate and warm up."""
PAST = 64
"""Number of steps that make up the past."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow for a while, or (rank None) time between ranks that has grown."""

    rank: int | None
    factor: float
    """How many times as long the work takes as it should."""
    cause: Cause
    since_step: int

    def __str__(self) -> str:
        if self.rank is None:
            longer = f"steps take {self.factor:.1f} times as long as before since step {self.since_step}"
            return f"{longer}, and no rank works longer: {self.cause}"
        slow = f"rank {self.rank} needs {self.factor:.1f} times the median time for its own work"
        return f"{slow} since step {self.since_step}: {self.cause}"


@dataclass(frozen=True)
class StragglerChange:
    """Ranks that are slow since this step, and ranks that are no longer slow."""

    named: tuple[Straggler, ...] = ()
    gone: tuple[Straggler, ...] = ()
    latest: int | None = None
    """Rank that was latest in this step, slow or not; None for the first steps."""
    behind: float = 0.0
    """Seconds by which that rank worked longer than it should have, and the others waited for it."""


class StragglerWatch:
    """Looks at the last steps and says when a rank begins or ceases to be slow."""

    def __init__(
        self,
        world: int,
        threshold: float,
        groups: Sequence[Sequence[int]] | None = None,
        window: int = WINDOW,
        min_slow_steps: int = MIN_SLOW_STEPS,
    ) -> None:
        assert threshold > 1, "otherwise all ranks would be slow"
        self._threshold, self._min_slow_steps = threshold, min_slow_steps
        self._groups = [np.asarray(group) for group in (groups or [range(world)])]
        assert sorted(rank for group in self._groups for rank in group) == list(range(world)), (
            "every rank is in one group"
        )
        self._alone = np.asarray([group[0] for group in self._groups if len(group) == 1], dtype=np.int64)
        self._numbers: deque[int] = deque(maxlen=window)
        self._ratios: deque[Floats] = deque(maxlen=window)
        """For each step, the ratios of all ranks, and last the ratio of the step as a whole."""
        self._excesses: deque[Floats] = deque(maxlen=window)
        """For each step, seconds beyond the expected ones: (ranks, compute and data)."""
        self._past_alone = _Past()
        self._past_step = _Past()
        self._named: dict[int, Straggler] = {}
        self._world, self._seen = world, 0

    def step(self, number: int, times: Sequence[tuple[float, float]], seconds: float) -> StragglerChange:
        """Record that step `number` took `seconds`, and each rank (compute, data) seconds for its own
        work.
        """
        self._seen += 1
        if self._seen <= WARM_UP:
            return StragglerChange()
        work = np.array(times, dtype=np.float64)
        compute_is_known = bool(work[:, 0].any())
        if not compute_is_known:  # everything but reading is assumed to be the same for all ranks
            work[:, 0] = max(0.0, seconds - work[:, 1].max())
        expected = self._expected(work)
        ratios = work.sum(1) / np.maximum(expected.sum(1), 1e-9)
        between = self._between(float(work.sum(1).max()), seconds) if compute_is_known else 0.0
        self._numbers.append(number)
        self._ratios.append(np.append(ratios, between))
        self._excesses.append(work - expected)
        late = (work - expected).sum(1)
        named, gone = self._changed()
        return StragglerChange(named, gone, int(late.argmax()), max(0.0, float(late.max())))

    def _expected(self, work: Floats) -> Floats:
        """Return how long each rank's work should have taken: (ranks, compute and data)."""
        expected = work.copy()
        for group in self._groups:
            if len(group) > 1:
                medians = [_median_of_others(work[group, column]) for column in (0, 1)]
                expected[group] = np.stack(medians, axis=1)
        if len(self._alone):
            expected[self._alone] = self._expected_alone(work[self._alone])
        return expected

    def _expected_alone(self, work: Floats) -> Floats:
        """Return, for ranks without peers, the usual time, extended by what other ranks need longer."""
        usual = self._past_alone.median()
        if usual is None:
            self._past_alone.add(work)
            return work
        ratios = work.sum(1) / np.maximum(usual.sum(1), 1e-9)
        growth = np.maximum(1.0, _median_of_others(ratios)) if len(work) > 1 else np.ones(1)
        expected: Floats = usual * growth[:, None]
        slow = (ratios > self._threshold)[:, None]
        self._past_alone.add(np.where(slow, usual, work))  # a slow time must not become the usual one
        return expected

    def _between(self, slowest: float, seconds: float) -> float:
        """Return how many times as long as usual the step took; 0 if the slowest rank's own work explains the
        growth.
        """
        usual = self._past_step.median()
        if usual is None or seconds <= self._threshold * usual[0]:
            self._past_step.add(np.array([seconds, slowest]))
        if usual is None:
            return 0.0
        grown, by_work = seconds - usual[0], slowest - usual[1]
        return float(seconds / usual[0]) if by_work < grown / 2 else 0.0

    def _changed(self) -> tuple[tuple[Straggler, ...], tuple[Straggler, ...]]:
        ratios = np.stack(self._ratios)
        slow = ratios > self._threshold
        counts = slow.sum(0)
        slow_often = np.flatnonzero(counts >= self._min_slow_steps).tolist()
        new = [index for index in slow_often if index not in self._named]
        named = [self._name(index, slow[:, index], ratios[:, index]) for index in new]
        gone = [straggler for index, straggler in self._named.items() if counts[index] <= MAX_SLOW_STEPS]
        for straggler in gone:
            del self._named[self._index(straggler)]
        self._named |= {self._index(straggler): straggler for straggler in named}
        return tuple(named), tuple(gone)

    def _index(self, straggler: Straggler) -> int:
        return self._world if straggler.rank is None else straggler.rank

    def _name(self, index: int, slow: NDArray[np.bool_], ratios: Floats) -> Straggler:
        since, factor = self._numbers[int(np.argmax(slow))], float(np.median(ratios[slow]))
        if index == self._world:
            return Straggler(None, factor, "network", since)
        compute, data = np.stack(self._excesses)[slow, index].sum(0)
        return Straggler(index, factor, "data" if data > compute else "compute", since)


class _Past:
    """The usual values: the median over the last steps."""

    def __init__(self) -> None:
        self._steps: deque[Floats] = deque(maxlen=PAST)

    def add(self, values: Floats) -> None:
        self._steps.append(values)

    def median(self) -> Floats | None:
        """Return the median of each value; None before there are enough steps."""
        if len(self._steps) < WINDOW:
            return None
        middle: Floats = np.median(np.stack(self._steps), axis=0)
        return middle


def _median_of_others(values: Floats) -> Floats:
    """Return, for each value, the median of all other values."""
    order = np.argsort(values, kind="stable")
    ranked, others = values[order], len(values) - 1
    positions = np.arange(len(values))
    low, high = (others - 1) // 2, others // 2
    middle = (ranked[low + (low >= positions)] + ranked[high + (high >= positions)]) / 2
    result = np.empty_like(values)
    result[order] = middle
    return result
