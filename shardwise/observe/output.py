"""Standard output and error that never block a run.

A terminal stopped with Ctrl-S, a pager that nobody scrolls or a full pipe accepts no more text, and a write
to it blocks as long as that lasts: the main worker would stop in the middle of its step with all others
waiting for it, or the host would not watch its workers. Text is therefore passed to a thread that waits
instead. The thread keeps up to `MAX_CHARACTERS` characters. More text is left out, and a note says how much
once the output is read again. Text that cannot be written at all (a closed pipe, a full disk) is left out
without a note.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

MAX_CHARACTERS = 1 << 20
"""Maximum number of characters that wait to be written."""
LAST_SECONDS = 2.0
"""Seconds for which the end of a run waits for the rest to be written."""


@contextmanager
def unblocked_output() -> Iterator[None]:
    """Let standard output and error never block inside a `with` block; then wait a moment for the rest."""
    before = sys.stdout, sys.stderr
    streams = UnblockedStream(sys.stdout), UnblockedStream(sys.stderr)
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
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
        """Encoding of the underlying stream."""
        return self._stream.encoding

    def isatty(self) -> bool:
        """Return whether the underlying stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the file descriptor of the underlying stream."""
        return self._stream.fileno()

    def writable(self) -> bool:
        """Return True, because the stream is for writing."""
        return True

    def write(self, text: str) -> int:
        """Accept the text, or count it as left out, without waiting."""
        with self._changed:
            if self._characters + len(text) > MAX_CHARACTERS:
                self._left_out += len(text)
            else:
                self._waiting.append(text)
                self._characters += len(text)
            self._changed.notify_all()
        return len(text)

    def finish(self, seconds: float) -> None:
        """Wait until everything is written, but at most `seconds`; then accept no more."""
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
                note = f"\n[{self._left_out} characters were not shown: nobody read them]\n"
                text = "".join(self._waiting) + (note if self._left_out else "")
                self._waiting, self._characters, self._left_out, self._busy = [], 0, 0, True
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):
                pass  # there is no other place to report this
