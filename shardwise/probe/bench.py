"""Time one operation on all workers at the same moment.

Training keeps all workers busy at once, and workers of one machine slow each other down: CPU workers share
cores and memory, GPUs share a bus. An operation is therefore timed on all workers together, the same number
of times on each, and its time is that of the slowest worker. All workers get the same result, so they make
the same decisions afterwards.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)
"""Timeout of a collective. Collectives take seconds at most; this long means that a worker has ended."""
MAX_CALLS = 20_000
"""Maximum number of calls in one window."""


@dataclass(frozen=True)
class Bench:
    """The workers that measure together."""

    device: torch.device
    everyone: dist.ProcessGroup | None
    """Process group of all workers; None if there is only one worker."""
    window: float
    """Seconds of one window of calls."""
    windows: int
    """Number of windows whose median is taken."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of one call: the median over a few windows, each of many calls in a row.

        The first call, which selects its kernel, is not counted.
        """
        self._calls(run, 1)
        once = self._agreed(run, 1)
        once = self._agreed(run, self._fitting(self.window / 10, once))
        count = self._fitting(self.window, once)
        return median(self.longest([self._calls(run, count) for _ in range(self.windows)]))

    def longest(self, values: Sequence[float]) -> list[float]:
        """Return, for each number, its maximum over all workers."""
        if self.everyone is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.everyone)
        return [float(number) for number in numbers.tolist()]

    def synchronize(self) -> None:
        """Wait for the work that this worker has queued on its device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _agreed(self, run: Callable[[], object], count: int) -> float:
        return self.longest([self._calls(run, count)])[0]

    def _fitting(self, seconds: float, once: float) -> int:
        return max(1, min(MAX_CALLS, round(seconds / max(once, 1e-9))))

    def _calls(self, run: Callable[[], object], count: int) -> float:
        """Return the seconds of one call, averaged over `count` calls that all workers start together."""
        self.longest([0.0])
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        self.synchronize()
        return (time.perf_counter() - start) / count
