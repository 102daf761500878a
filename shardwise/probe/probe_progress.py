"""Progress of a probe. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ProgressCallback = Callable[[str, float], None]
"""Function that receives what is measured now, and the fraction of the probe that is done."""


def no_progress(what: str, share: float) -> None:
    """Ignore the progress; the default for callers that show nothing."""


@dataclass
class ProbeProgress:
    """Counts what has been measured and calls the function that shows the progress."""

    total: int
    on_progress: ProgressCallback
    done: int = 0

    def next(self, what: str) -> None:
        """Report the next measurement. Call this before each one."""
        self.on_progress(what, min(1.0, self.done / max(1, self.total)))
        self.done += 1
