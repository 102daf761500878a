"""Timing one thing on all workers at the same moment.

Training keeps every worker busy at once, and workers of one machine are in each other's way: CPU workers
share cores and memory, GPUs a bus. So whatever is timed runs on all of them together, as often on each, and
the time is that of the last to finish. All workers get the same answer, and go on with the same decisions.
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
"""A collective takes seconds at most; one that takes this long waits for a worker that is gone."""
MOST_CALLS = 20_000


@dataclass(frozen=True)
class Bench:
    """The workers that measure together."""

    device: torch.device
    everyone: dist.ProcessGroup | None
    """None where there is one worker."""
    window: float
    windows: int

    def seconds(self, run: Callable[[], object]) -> float:
        """Of one call: the median of a few windows of calls in a row. The first call, which finds its kernel,
        is not counted."""
        self._calls(run, 1)
        once = self._agreed(run, 1)
        once = self._agreed(run, self._fitting(self.window / 10, once))
        count = self._fitting(self.window, once)
        return median(self.longest([self._calls(run, count) for _ in range(self.windows)]))

    def longest(self, values: Sequence[float]) -> list[float]:
        """Each of these numbers where it is largest among the workers."""
        if self.everyone is None:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.everyone)
        return [float(number) for number in numbers.tolist()]

    def synchronize(self) -> None:
        """Wait for what this worker has asked of its device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _agreed(self, run: Callable[[], object], count: int) -> float:
        return self.longest([self._calls(run, count)])[0]

    def _fitting(self, seconds: float, once: float) -> int:
        return max(1, min(MOST_CALLS, round(seconds / max(once, 1e-9))))

    def _calls(self, run: Callable[[], object], count: int) -> float:
        """Seconds of one of so many calls in a row, begun by all workers together."""
        self.longest([0.0])
        self.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            run()
        self.synchronize()
        return (time.perf_counter() - start) / count
