"""Limits that the system sets for a process (`ulimit`), checked before workers start and named when reached.

A limit that is too low causes errors in many places: an import cannot map a library, a socket cannot be
opened, a thread does not start. Their tracebacks do not say what to do, so these errors become one line with
the limit and the command that raises it. Soft limits, which every process may raise itself, are raised
without a message.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import resource

from shardwise.errors import UserError

FILES, FILES_OF_A_WORKER = 64, 8
"""Open files of the process that starts the others: a base, and the number for each worker."""
USUAL_FILES = 4096
"""Number of open files that the limit is raised to."""
PROCESSES, PROCESSES_OF_A_WORKER = 8, 7
"""Processes and threads that a run has at least: those that start and connect workers, and those of each
worker."""
USUAL_PROCESSES = 4096
"""Number of processes and threads of a user that is enough for any run."""
ADDRESS_SPACE = 1280 << 20
"""Bytes that a worker maps before it builds a model: the libraries of PyTorch and the stacks of threads."""
_STARTING = {"fork", "spawnv_passfds", "_execute_child", "_launch"}
"""Names of the Python functions that start a process."""


def check_limits(workers: int = 1) -> None:
    """Raise a UserError that names every limit that is too low for this number of workers.

    Soft limits are raised first.
    """
    processes = _processes_of_user() + PROCESSES + PROCESSES_OF_A_WORKER * workers
    checks = (
        (resource.RLIMIT_NOFILE, FILES + FILES_OF_A_WORKER * workers, _files_needed),
        (resource.RLIMIT_AS, ADDRESS_SPACE, _space_needed),
        *([(resource.RLIMIT_NPROC, processes, _processes_needed)] if os.geteuid() else []),
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
        enough = max(USUAL_FILES, 2 * allowed)
        return f"a process may have at most {allowed} open files here. Raise that, with: ulimit -n {enough}"
    allowed = resource.getrlimit(resource.RLIMIT_AS)[0]
    if allowed != resource.RLIM_INFINITY and (
        isinstance(error, MemoryError) or number == errno.ENOMEM or _lacks_memory(text)
    ):
        return (
            f"a process may have at most {allowed >> 10} KiB of address space here, and needs more. "
            "Raise that, with: ulimit -v unlimited"
        )
    if _cannot_start_thread(error) or _cannot_start_process(error):
        causes = [*limits_set(), "a container or a scheduler's job may have a limit of its own"]
        return f"no more processes or threads can be started here. What limits them: {'; or '.join(causes)}"
    return None


def limits_set() -> list[str]:
    """Return the limits of memory and processes that are set for this process, and how to raise each.

    The number of processes does not limit root, and a high number is named only if nothing else is.
    """
    space, processes = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_NPROC))
    limits = []
    if space != resource.RLIM_INFINITY:
        limits.append(
            f"a process may have {space >> 10} KiB of address space (raise it: ulimit -v unlimited)"
        )
    if processes != resource.RLIM_INFINITY and os.geteuid() and (processes < USUAL_PROCESSES or not limits):
        enough = max(USUAL_PROCESSES, 2 * processes)
        limits.append(f"a user may have {processes} processes and threads (raise it: ulimit -u {enough})")
    return limits


def _processes_of_user() -> int:
    """Return how many processes and threads this user has, which the limit of new ones counts; 0 if the
    system does not say.
    """
    count = 0
    for folder in glob.iglob("/proc/[0-9]*/task"):
        with contextlib.suppress(OSError):  # the process has ended
            status = os.stat(folder)
            if status.st_uid == os.geteuid():
                count += status.st_nlink - 2  # a folder for each thread
    return count


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


def _processes_needed(allowed: int, needed: int) -> str:
    return (
        f"a user may have {allowed} processes and threads here, and needs at least {needed} with those that "
        f"run already. Raise that, with: ulimit -u {max(USUAL_PROCESSES, 2 * needed)}"
    )


def _lacks_memory(text: str) -> bool:
    """Return whether a text of the library loader, the system or torch says that memory is missing."""
    messages = ("failed to map segment", os.strerror(errno.ENOMEM), "can't allocate memory")
    return any(message in text for message in messages)


def _cannot_start_thread(error: BaseException) -> bool:
    """Return whether Python or a C++ library could not start a thread. C++ has only the system's text."""
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "can't start new thread" in text or os.strerror(errno.EAGAIN) in text
    )


def _cannot_start_process(error: BaseException) -> bool:
    """Return whether an error comes from a Python function that starts a process."""
    if not isinstance(error, OSError) or error.errno != errno.EAGAIN:
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_code.co_name in _STARTING
