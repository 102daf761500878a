"""Ctrl-C and SIGTERM: how a run is asked to stop, and the exit statuses that say it did."""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 130
"""Exit status after Ctrl-C: the state is saved, and the same command goes on from it."""
RESUME_ME = 75
"""Exit status after SIGTERM (a scheduler wants the machine back): saved; start the same command again. EX_TEMPFAIL."""


class Stopped(Exception):
    """The run was asked to stop when there was nothing to save, or asked twice."""

    def __init__(self, status: int) -> None:
        super().__init__("stopped at once; what was saved is kept")
        self.status = status


class CollectSignals:
    """Collects Ctrl-C and SIGTERM while it lasts."""

    def __init__(self, received: list[int]) -> None:
        self._received = received

    def __enter__(self) -> None:
        def note(number: int, _: FrameType | None) -> None:
            self._received.append(number)

        self._before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
