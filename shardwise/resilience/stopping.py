"""How a run is asked to stop, and the exit statuses that say it did.

Schedulers signal every process of a job, and often more than once: SIGTERM from Slurm and Kubernetes, SIGUSR1
as an early warning (`sbatch --signal=USR1@60`), SIGHUP from a terminal that closes, SIGINT from Ctrl-C;
torchrun and `timeout` pass on what their children got already. All of them ask for one thing: finish the
step, save, and leave with a status that says so. One process answers for a run, its host: the server that
workers are forked from holds these signals back (server.py), and workers tell their host of them
(host_link.py). A worker that someone else started answers for itself, and all ranks stop together.

What is started ends with whoever started it: the kernel signals a process when its parent dies
(PR_SET_PDEATHSIG, Linux), which reaches also one that is stopped, and would see no pipe end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.errors import RunFailed

INTERRUPTED = 130
"""Exit status after Ctrl-C: the state is saved, and the same command goes on from it."""
RESUME_ME = 75
"""Exit status after the other signals (a scheduler wants the machine back): saved; start the same command
again. EX_TEMPFAIL."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
SAME_REQUEST_SECONDS = 1.0
"""A Ctrl-C within so long after the first signal is the same request, come another way."""
_PR_SET_PDEATHSIG = 1


class Stopped(Exception):
    """The run was asked to stop, and has nothing to save, or nobody left who could."""

    def __init__(self, status: int, message: str = "stopped at once; what was saved is kept") -> None:
        super().__init__(message)
        self.status = status


def cut_short(cause: str, saved: int | None, stepped: bool, status: int) -> Exception:
    """How a run ends whose workers were lost while it was stopping. Where a checkpoint is whole, of step
    `saved`, the same command goes on from it, which is what the status says; nothing is lost, either, where
    no step was done.
    """
    if saved is None and stepped:
        return RunFailed(f"{cause}; no checkpoint is whole")
    return Stopped(status, f"warning: {cause}; the same command goes on from step {saved or 0}")


class CollectSignals:
    """Collects the signals that ask a run to stop, while it lasts. Ctrl-C once more, a while later, ends the
    process at once.

    After it they are ignored: the run is over, and a signal that comes late must change neither what is left
    to tidy up nor the exit status. Under `nohup` SIGHUP stays ignored throughout.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._since = 0.0

    def __enter__(self) -> CollectSignals:
        handle_stop_signals(self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        handle_stop_signals(signal.SIG_IGN)

    def stop_without_parent(self) -> None:
        """Take the death of the process that started this one, torchrun's agent say, for a request to
        stop."""
        parent = os.getppid()

        def note_if_gone(*_: object) -> None:
            if os.getppid() != parent:  # else only the thread that started this process is gone
                self.note(signal.SIGTERM)

        if sys.platform == "linux":
            signal.signal(signal.SIGRTMIN, note_if_gone)
            signal_on_death_of_parent(signal.SIGRTMIN)

    def note(self, number: int) -> None:
        """This signal came, here or to a worker."""
        if not self.received:
            self._since = time.monotonic()
        self.received.append(number)

    @property
    def status(self) -> int | None:
        """What the run is to end with; None: it was not asked to stop."""
        if not self.received:
            return None
        return INTERRUPTED if signal.SIGINT in self.received else RESUME_ME

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.note(number)
        if number == signal.SIGINT and time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt


def handle_stop_signals(handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    """From now on each of the signals has this handler, but for a SIGHUP that `nohup` has switched off."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def stopped_with_nothing_begun(for_this_command: bool) -> Iterator[None]:
    """Leave at once, with the status that says so, when a signal comes before the command itself answers for
    signals: it has started nothing and has nothing to save. `for_this_command`: whether the command is one
    that ends with these statuses.
    """

    def leave(number: int, _: FrameType | None) -> None:
        os.write(2, b"stopped at once; what was saved is kept\n")
        os._exit(INTERRUPTED if number == signal.SIGINT else RESUME_ME)

    may_set = (
        for_this_command and threading.current_thread() is threading.main_thread()
    )  # others may not set signals
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS} if may_set else {}
    if before:
        handle_stop_signals(leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)


def stop_signals_as_bytes() -> int:
    """Have the signals written to a pipe, a byte each, by the kernel's handler itself: a thread that reads
    there hears of them even while the main one is stuck. Those that were held back since this process was
    forked come now. The pipe's reading end.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    handle_stop_signals(lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return reads


def signal_on_death_of_parent(number: int = signal.SIGKILL) -> None:
    """From now on this process gets that signal when the thread that forked it ends; on Linux, and elsewhere
    none."""
    if sys.platform == "linux":
        # not at the top: commands answer for signals before they import anything that takes time
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
