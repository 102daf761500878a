"""The process that workers are forked from. It imports torch once, so that a new worker starts quickly.

Importing this module needs no torch, so the server can be started first and do its imports while the command
that started it still reads its job. The server has no computing threads and does not use a GPU, so forking it
is safe. It is a new Python process and not a fork of the caller, so a notebook that has already used CUDA can
start workers. For the same reason neither the server nor a worker runs the caller's script again, as
multiprocessing would do (`without_main`).

A scheduler that ends a job sends signals to this process too, and to multiprocessing's resource tracker. Both
block the signals that ask a run to stop (stopping.py) from their first instruction on. So do all processes
that are forked, until they unblock them.

The server also notices when a worker has ended. If somebody stopped the server, nothing would be forked and
no death would be noticed, so a process that waits for it too long sends it SIGCONT.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import ModuleType

from shardwise.limits import check_limits
from shardwise.resilience.stopping import STOP_SIGNALS

_also: list[str] = []
"""Modules that the server imports in addition to those that its starters name."""


def also_preload(module: str) -> None:
    """Let the server import one more module, after all others. Call this before the server is started."""
    _also.append(module)


def start_server(preload: Sequence[str]) -> None:
    """Start the server if it does not run yet. It ends with the thread that calls this, the main one
    (preload.py).
    """
    check_limits()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["shardwise.resilience.preload", *preload, *_also]
    )
    ensure_server()


def ensure_server() -> None:
    """Start the server again if it has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a new process inherits the mask
    try:
        resource_tracker.ensure_running()  # unblocks two of the signals in this process afterwards
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not run the caller's script again.

    By default multiprocessing imports the script in each new process. Workers need only modules of shardwise.
    A script without an `if __name__ == "__main__"` guard would start workers without end, and a script that
    uses CUDA at its top level would initialise it in a process that forks.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start_process(process: BaseProcess, seconds: float, given_up: Callable[[], bool]) -> bool:
    """Let the server fork this process. Return whether it did so in time and did not die.

    The request blocks, so a thread makes it.
    """
    ensure_server()  # a server that is started in the thread below would end with it
    failures: list[BaseException] = []

    def start() -> None:
        try:
            process.start()
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=start, name="fork", daemon=True)
    deadline, half_time = time.monotonic() + seconds, time.monotonic() + seconds / 2
    with without_main():
        asking.start()
        while asking.is_alive() and time.monotonic() < deadline and not given_up():
            asking.join(0.05)
            if time.monotonic() > half_time:
                wake_server()
    if failures and isinstance(failures[0], EOFError | ConnectionError):
        _wait_for_end()
        return False
    if failures:
        raise failures[0]
    return not asking.is_alive()


def _wait_for_end() -> None:
    """Wait until a server that died counts as dead.

    Its connection closes a moment earlier, and until then no other server would be started.
    """
    pid, deadline = server_pid(), time.monotonic() + 1.0
    with contextlib.suppress(ChildProcessError):  # its end has been collected already
        while pid is not None and time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.01)


def wake_server() -> None:
    """Let the server continue, in case it was stopped."""
    if (pid := server_pid()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def server_pid() -> int | None:
    """Return the process id of the server, if one was started here."""
    pid: int | None = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    return pid
