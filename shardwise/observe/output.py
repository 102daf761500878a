"""Standard output and error that never make a run wait.

A terminal stopped with Ctrl-S, a pager that nobody scrolls or a full pipe takes no more text, and a write to
it waits for as long as that lasts: the main worker would stand in the middle of its step with all others
waiting for it, or the host would watch over no one. So text is handed to a thread that waits instead. It
keeps `MOST` characters; what comes beyond is left out, and how much that was is said once somebody reads
again. What cannot be written at all (a closed pipe, a full disk) is left out in silence.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

MOST = 1 << 20
"""Characters that wait for a reader."""
LAST_SECONDS = 2.0
"""How long the end of a run waits for what was said to be read."""


@contextmanager
def unblocked_output() -> Iterator[None]:
    """Let standard output and error never block while it lasts; then wait a moment until all is written."""
    before = sys.stdout, sys.stderr
    mine = UnblockedStream(sys.stdout), UnblockedStream(sys.stderr)
    sys.stdout, sys.stderr = mine
    try:
        yield
    finally:
        for stream in mine:
            stream.finish(LAST_SECONDS)
        sys.stdout, sys.stderr = before


class UnblockedStream(io.TextIOBase):
    """A stream whose writes return at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._waiting: list[str] = []
        self._characters, self._left_out = 0, 0
        self._busy = self._finished = False
        threading.Thread(target=self._write_out, name="output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Take the text, or count it as left out; never waits."""
        with self._changed:
            if self._characters + len(text) > MOST:
                self._left_out += len(text)
            else:
                self._waiting.append(text)
                self._characters += len(text)
            self._changed.notify_all()
        return len(text)

    def finish(self, seconds: float) -> None:
        """Wait until all is written, but no longer than this; then take no more."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (self._waiting or self._busy) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._finished = True
            self._changed.notify_all()

    def _write_out(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._waiting and not self._finished:
                    self._changed.wait()
                if not self._waiting:
                    return
                left_out = (
                    f"\n[{self._left_out} characters were not shown: nobody read them]\n"
                    if self._left_out
                    else ""
                )
                text = "".join(self._waiting) + left_out
                self._waiting, self._characters, self._left_out, self._busy = [], 0, 0, True
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody is there to be told
