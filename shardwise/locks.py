"""Lock a folder against other processes. The system releases the lock when the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from shardwise.errors import UserError


def take_lock(path: Path, in_use: str, wait: Callable[[], None] | None = None) -> ExitStack:
    """Hold the lock of a folder, or of a file that is created for it, until the returned value is closed.

    Use it as `with take_lock(…):`. If another process holds the lock, raise a `UserError` with the text
    `in_use`; if `wait` is given, call it instead and then wait for the lock. On a file system without locks,
    continue without one, unless `wait` is given: a caller that would wait relies on the lock.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT, 0o666)
    lock = ExitStack()
    lock.callback(os.close, descriptor)
    try:
        _lock(descriptor, in_use, wait)
    except BaseException:
        lock.close()
        raise
    return lock


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
