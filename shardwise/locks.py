"""The one way to keep other processes out of a folder: a lock of the system's, which it lets go of if we
die."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from shardwise.errors import UserError


def take_lock(path: Path, in_use: str, wait: Callable[[], None] | None = None) -> ExitStack:
    """Hold the lock of a folder, or of a file that is made for it, until the value returned is closed: `with
    take_lock(…):`.

    Where another process holds it, a `UserError` says `in_use`; with `wait` that is called instead, and the
    lock waited for. On a file system without locks nothing can be known: we go on, except where somebody
    would wait, who relies on it.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    held = ExitStack()
    held.callback(os.close, descriptor)
    try:
        _lock(descriptor, in_use, wait)
    except BaseException:
        held.close()
        raise
    return held


def _lock(descriptor: int, in_use: str, wait: Callable[[], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait is None:
            raise UserError(in_use) from None
        wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        if wait is not None:
            raise
