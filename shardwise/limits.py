"""Limits that the system sets for a process (`ulimit`), checked before workers start and named when reached.

A limit that is too low causes errors in many places: an import cannot map a library, a socket cannot be
opened, a thread does not start. Their tracebacks do not say what to do, so these errors become one line with
the limit and the command that raises it. Soft limits, which every process may raise itself, are raised
without a message.
"""

from __future__ import annotations

import errno
import os
import resource

from shardwise.errors import UserError

FILES, FILES_OF_A_WORKER = 64, 8
"""Open files of the process that starts the others: a base, and the number for each worker."""
USUAL_FILES = 4096
"""Number of open files that the limit is raised to."""
ADDRESS_SPACE = 1280 << 20
"""Bytes that a worker maps before it builds a model: the libraries of PyTorch and the stacks of threads."""
_STARTING = {"fork", "spawnv_passfds", "_execute_child", "_launch"}
"""Names of the Python functions that start a process."""


def check_limits(workers: int = 1) -> None:
    """Raise a UserError that names every limit that is too low for this number of workers.

    Soft limits are raised first.
    """
    checks = (
        (resource.RLIMIT_NOFILE, FILES + FILES_OF_A_WORKER * workers, _files_needed),
        (resource.RLIMIT_AS, ADDRESS_SPACE, _space_needed),
    )
    problems = [
        words(allowed, needed)
        for limit, needed, words in checks
        if (allowed := _raised(limit, needed)) is not None
    ]
    if problems:
        raise UserError("\n".join(f"workers cannot start: {problem}" for problem in problems))


def limit_reached(error: BaseException) -> str | None:
    """Return which limit of this process caused an error and how to raise it; None for other errors."""
    text = str(error)
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE or os.strerror(errno.EMFILE) in text:
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return (
            f"a process may have at most {allowed} open files here. Raise that, with: ulimit -n {USUAL_FILES}"
        )
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY and (
        isinstance(error, MemoryError) or number == errno.ENOMEM or _lacks_memory(text)
    ):
        return (
            f"a process may have at most {allowed >> 10} KiB of address space here, and needs more. "
            "Raise that, with: ulimit -v unlimited"
        )
    cannot_start = "can't start new thread" in text or _cannot_start_process(error)
    if cannot_start and allowed != resource.RLIM_INFINITY:
        return (
            "no more processes or threads can be started here. A process may have at most "
            f"{allowed >> 10} KiB of address space, and the number of processes may be limited too. "
            "Raise both, with: ulimit -v unlimited; ulimit -u 4096"
        )
    if cannot_start:
        return (
            "no more processes or threads can be started here. Raise the limit, with: ulimit -u 4096 "
            "(in a container or a scheduler's job: raise its limit of processes)"
        )
    return None


def _raised(limit: int, needed: int) -> int | None:
    """Raise a soft limit to `needed`. Return None if that is enough, else the number that is allowed."""
    soft, hard = resource.getrlimit(limit)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    if hard == resource.RLIM_INFINITY or hard >= needed:
        enough = max(needed, USUAL_FILES) if limit == resource.RLIMIT_NOFILE else hard
        resource.setrlimit(limit, (enough if hard == resource.RLIM_INFINITY else min(enough, hard), hard))
        return None
    return soft


def _files_needed(allowed: int, needed: int) -> str:
    enough = max(USUAL_FILES, needed)
    return (
        f"a process may have {allowed} open files here, and needs up to {needed}. "
        f"Raise that, with: ulimit -n {enough}"
    )


def _space_needed(allowed: int, needed: int) -> str:
    return (
        f"a process may have {allowed >> 10} KiB of address space here, and PyTorch alone needs "
        f"{needed >> 10} KiB. Raise that, with: ulimit -v unlimited"
    )


def _lacks_memory(text: str) -> bool:
    """Return whether a text of the library loader, the system or torch says that memory is missing."""
    messages = (
        "failed to map segment",
        os.strerror(errno.ENOMEM),
        "can't allocate memory",
        os.strerror(errno.EAGAIN),
    )
    return any(message in text for message in messages)


def _cannot_start_process(error: BaseException) -> bool:
    """Return whether an error comes from a Python function that starts a process."""
    if not isinstance(error, OSError) or error.errno != errno.EAGAIN:
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_name in _STARTING
