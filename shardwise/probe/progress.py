"""How far a probe is. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str, float], None]
"""Takes what is being measured, and the share of the probe that is behind."""


def silent(what: str, share: float) -> None:
    """Tell nobody."""


@dataclass
class ProbeProgress:
    """Counts what has been measured, and tells whoever shows it."""

    total: int
    tell: Tell
    done: int = 0

    def next(self, what: str) -> None:
        """Before each thing that is timed."""
        self.tell(what, min(1.0, self.done / max(1, self.total)))
        self.done += 1
