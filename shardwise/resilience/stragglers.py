"""Who is slow, and why: each rank's own work, watched step by step.

In synchronous training everybody waits for the slowest, so all ranks' steps take the same time and the step
time tells nothing about who causes it. What tells is the time a rank spends on its own work: computing and
reading data, without its waits for others. Every rank's two numbers travel with the loss, in a sum that
happens anyway: this costs 16 bytes a rank and no message.

A rank is compared with the median of the others that do the same work: those of its pipeline stage. Where it
has no such peers, it is compared with its own past, and what all ranks have in common (a machine that became
slower as a whole) is divided out. A slow step is nothing: pages are swapped, a disk hiccups. A rank is named
when it exceeded the threshold in 10 of the last 12 steps, and is let off when it did in at most 2.
Independent noise that exceeds the threshold in one step of a hundred would name an innocent once in some
10^18 steps.

The cause is what takes the rank longer than the others: computing (a hot or throttled device, a neighbour on
the same cores) or reading data. If no rank works longer and steps take longer all the same, the time goes
between the ranks: network, and nobody is named.

Where waits cannot be told from computation (FSDP2 on GPUs), compute times come as zero. Then only slow
reading can be found.
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
ENOUGH = 10
"""Slow steps of a window after which a rank is named."""
FEW = 2
"""Slow steps of a window at which it is let off."""
WARM_UP = 3
"""Steps at the start that say nothing about how long a step takes: they compile, allocate and warm up."""
PAST = 64
"""Steps that make up the past."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow for a while, or (rank None) the time between ranks that has grown."""

    rank: int | None
    factor: float
    """How many times as long as it should."""
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
    """What a step changed in who is slow: stragglers named with it, and those that are let off."""

    named: tuple[Straggler, ...] = ()
    gone: tuple[Straggler, ...] = ()
    latest: int | None = None
    """Who was the latest in this step, slow or not; not said of the first steps."""
    behind: float = 0.0
    """How many seconds longer that rank worked than it should have: what the others waited for it."""


class Watch:
    """Remembers a window of steps and says when somebody begins or ceases to be slow."""

    def __init__(
        self,
        world: int,
        threshold: float,
        groups: Sequence[Sequence[int]] | None = None,
        window: int = WINDOW,
        enough: int = ENOUGH,
    ) -> None:
        assert threshold > 1, "everybody would be slow"
        self._threshold, self._enough = threshold, enough
        self._groups = [np.asarray(group) for group in (groups or [range(world)])]
        assert sorted(rank for group in self._groups for rank in group) == list(range(world)), (
            "every rank is in one group"
        )
        self._alone = np.asarray([group[0] for group in self._groups if len(group) == 1], dtype=np.int64)
        self._numbers: deque[int] = deque(maxlen=window)
        self._ratios: deque[Floats] = deque(maxlen=window)  # of ranks, and last of the step as a whole
        self._excesses: deque[Floats] = deque(maxlen=window)  # (ranks, compute and data)
        self._past_alone = _Past()
        self._past_step = _Past()
        self._named: dict[int, Straggler] = {}
        self._world, self._seen = world, 0

    def step(self, number: int, times: Sequence[tuple[float, float]], seconds: float) -> StragglerChange:
        """Step `number` took `seconds`, and each rank (compute, data) seconds of its own."""
        self._seen += 1
        if self._seen <= WARM_UP:
            return StragglerChange()
        work = np.array(times, dtype=np.float64)
        compute_is_known = bool(work[:, 0].any())
        if not compute_is_known:  # all but reading is taken to be the same for everybody
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
        """What each rank's work should have taken: (ranks, compute and data)."""
        expected = work.copy()
        for group in self._groups:
            if len(group) > 1:
                expected[group] = np.stack(
                    [_median_of_others(work[group, column]) for column in (0, 1)], axis=1
                )
        if len(self._alone):
            expected[self._alone] = self._expected_alone(work[self._alone])
        return expected

    def _expected_alone(self, work: Floats) -> Floats:
        """As long as usual, or longer by what the others need longer."""
        usual = self._past_alone.median()
        if usual is None:
            self._past_alone.add(work)
            return work
        ratios = work.sum(1) / np.maximum(usual.sum(1), 1e-9)
        growth = np.maximum(1.0, _median_of_others(ratios)) if len(work) > 1 else np.ones(1)
        expected: Floats = usual * growth[:, None]
        slow = (ratios > self._threshold)[:, None]
        self._past_alone.add(np.where(slow, usual, work))  # a slow time must not become the usual
        return expected

    def _between(self, slowest: float, seconds: float) -> float:
        """How many times as long as usual the step took, if most of the growth is not the slowest rank's own
        work; else 0."""
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
        slow_indices = [
            index for index in np.flatnonzero(counts >= self._enough).tolist() if index not in self._named
        ]
        named = [self._name(index, slow[:, index], ratios[:, index]) for index in slow_indices]
        gone = [straggler for index, straggler in self._named.items() if counts[index] <= FEW]
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
    """What was usual: the median of a stretch of steps."""

    def __init__(self) -> None:
        self._steps: deque[Floats] = deque(maxlen=PAST)

    def add(self, values: Floats) -> None:
        self._steps.append(values)

    def median(self) -> Floats | None:
        """Of each value; None before there are enough steps to tell."""
        if len(self._steps) < WINDOW:
            return None
        middle: Floats = np.median(np.stack(self._steps), axis=0)
        return middle


def _median_of_others(values: Floats) -> Floats:
    """For each value, the median of all but it."""
    order = np.argsort(values, kind="stable")
    ranked, others = values[order], len(values) - 1
    positions = np.arange(len(values))
    low, high = (others - 1) // 2, others // 2
    middle = (ranked[low + (low >= positions)] + ranked[high + (high >= positions)]) / 2
    result = np.empty_like(values)
    result[order] = middle
    return result
