"""Lock a folder against other processes. The system releases the lock when the process ends."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from filelock import FileLock, Timeout

from shardwise.errors import UserError

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of a file system that has no locks."""


def take_lock(path: Path, in_use: str, wait: Callable[[], None] | None = None) -> ExitStack:
    """Hold the lock that a file stands for until the returned value is closed. The file is created and stays.

    Use it as `with take_lock(…):`. If another process holds the lock, raise a `UserError` with the text
    `in_use`; if `wait` is given, call it instead and then wait for the lock. On a file system without locks,
    continue without one, unless `wait` is given: a caller that would wait relies on the lock.
    """
    lock, held = FileLock(path, thread_local=False), ExitStack()
    try:
        held.enter_context(lock.acquire(timeout=0))
    except Timeout:
        if wait is None:
            raise UserError(in_use) from None
        wait()
        held.enter_context(lock.acquire())
    except OSError as error:
        if wait is not None or error.errno not in NO_LOCKS:
            raise
    return held
