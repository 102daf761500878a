"""The process that workers are forked from: it imports torch once, and a new worker is there in a moment.

Importing this module needs no torch, so the server can be started first and do its imports while the command
that started it still reads its job. The server has no threads of computation and touches no GPU, so forking
it is safe. It is a new Python process, not a fork of the caller, so a notebook that has already used CUDA can
start workers. For the same reason neither the server nor a worker runs the caller's script again, as
multiprocessing would have them do (`without_main`).

A scheduler that ends a job signals this process too, and multiprocessing's resource tracker. Both hold back,
from their first instruction, the signals that ask a run to stop (stopping.py), and so does whatever is
forked, until it lets them through.

It is also the one who hears that a worker has ended. Should someone have stopped it, nothing would be forked
and no death be noticed, so whoever waits for it in vain lets it go on.
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


def start_server(preload: Sequence[str]) -> None:
    """Start it, if it does not run yet. It ends with the thread that calls this (preload.py): the main
    one."""
    check_limits()
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["shardwise.resilience.preload", *preload]
    )
    ensure_server()


def ensure_server() -> None:
    """Start it again, should it have ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a new process has its parent's mask
    try:
        resource_tracker.ensure_running()  # lets two of them through again here, once the tracker is there
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def without_main() -> Iterator[None]:
    """Start processes that do not run the caller's script again.

    By default multiprocessing imports the script in each new process. Workers need only modules of ours. A
    script without an `if __name__ == "__main__"` guard would start workers without end, and one that uses
    CUDA at its top level would initialise it in a process that forks.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def start_process(process: BaseProcess, seconds: float, given_up: Callable[[], bool]) -> bool:
    """Let the server fork this process; whether it did within so many seconds, and did not die over it.
    Asking it blocks, so a thread does that."""
    ensure_server()  # not in that thread: a server that is started there would end with it
    failures: list[BaseException] = []

    def start() -> None:
        try:
            process.start()
        except BaseException as error:
            failures.append(error)

    asking = threading.Thread(target=start, name="fork", daemon=True)
    deadline, patience = time.monotonic() + seconds, time.monotonic() + seconds / 2
    with without_main():
        asking.start()
        while asking.is_alive() and time.monotonic() < deadline and not given_up():
            asking.join(0.05)
            if time.monotonic() > patience:
                wake_server()
    if failures and isinstance(failures[0], EOFError | ConnectionError):
        _see_it_end()
        return False
    if failures:
        raise failures[0]
    return not asking.is_alive()


def _see_it_end() -> None:
    """A server that died hangs up a moment before it can be known to be dead, and till then another would not
    be started."""
    pid, deadline = server_pid(), time.monotonic() + 1.0
    with contextlib.suppress(ChildProcessError):  # it is known
        while pid is not None and time.monotonic() < deadline:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return
            time.sleep(0.01)


def wake_server() -> None:
    """Let the server go on, should it have been stopped."""
    if (pid := server_pid()) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def server_pid() -> int | None:
    """Of the server, if one was started here."""
    pid: int | None = getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None)
    return pid
