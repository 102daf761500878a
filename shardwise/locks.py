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
    """Hold the lock of a file until the returned value is closed. The file is created, and is not removed.

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


def lock_run_folder(folder: Path, subfolder: str = "") -> ExitStack:
    """Create a run folder with a subfolder, and hold its lock until the returned value is closed."""
    in_use = f"run.folder = {str(folder)!r}: another run is writing there now; give another run.folder"
    try:
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        return take_lock(folder / ".lock", in_use)
    except OSError as error:
        raise UserError(
            f"run.folder = {str(folder)!r}: cannot be written ({error.strerror}). Give another, for example "
            f"run.folder=runs/mine"
        ) from None
