"""Signals that ask a run to stop, and the exit statuses of a stopped run.

Schedulers send signals to every process of a job, often more than once: SIGTERM from Slurm and Kubernetes,
SIGUSR1 as an early warning (`sbatch --signal=USR1@60`), SIGHUP from a terminal that closes, SIGINT from
Ctrl-C. torchrun and `timeout` forward signals that their children have already received. All of them ask for
the same: finish the step, save, and exit with a status that says so. One process of a run handles them, the
host: the fork server blocks these signals (fork_server.py), and workers report them to their host
(worker_link.py). A worker of another launcher handles them itself, and all ranks stop together.

A process ends with the process that started it: the kernel sends it a signal when its parent dies
(PR_SET_PDEATHSIG, Linux). That also reaches a stopped process, which would not notice a closed pipe.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType

from shardwise.errors import RunFailed, UserError

INTERRUPTED = 130
"""Exit status after Ctrl-C: the state is saved, and the same command continues from it."""
RESUME_ME = 75
"""Exit status after the other signals: the state is saved; start the same command again (EX_TEMPFAIL)."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop."""
SAME_REQUEST_SECONDS = 1.0
"""Seconds after the first signal within which a Ctrl-C counts as the same request."""
_PR_SET_PDEATHSIG = 1
interrupts: list[int] = []
"""Signals that interrupted this command before it collected signals (cli/signals.py).

Their handler raises an exception. Python drops an exception that is raised inside a hook, for example of
`os.fork`, so `CollectSignals` takes these signals too.
"""

AT_ONCE = "stopped at once; what was saved is kept"
"""Message of a command that ends before it could finish a step."""


class Stopped(Exception):
    """The run was asked to stop, and there is nothing to save, or no worker left that could save."""

    def __init__(self, status: int, message: str = AT_ONCE) -> None:
        super().__init__(message)
        self.status = status


def status_after(received: Collection[int]) -> int:
    """Return the exit status of a command that these signals stopped. Python turns a Ctrl-C that no handler
    of ours received into an exception; then there are none."""
    return RESUME_ME if received and signal.SIGINT not in received else INTERRUPTED


def error_with_status(status: int, message: str) -> UserError:
    """Return the error that ends the command with this exit status: the user's mistake, or a failed run."""
    return UserError(message) if status == UserError.status else RunFailed(message)


def cut_short(cause: str, saved: int | None, stepped: bool, status: int) -> Exception:
    """Return the exception that ends a run whose workers were lost while it was stopping.

    If there is a complete checkpoint, of step `saved`, the same command continues from it, and the status
    says so. The same holds if no step was done, because then nothing is lost.
    """
    if saved is None and stepped:
        return RunFailed(f"{cause}; no checkpoint is whole")
    return Stopped(status, f"warning: {cause}; the same command goes on from step {saved or 0}")


class CollectSignals:
    """Collects the signals that ask a run to stop, inside a `with` block.

    A second Ctrl-C, some time after the first, ends the process at once. After the block the signals are
    ignored: the run is over, and a late signal must change neither the cleaning up nor the exit status. Under
    `nohup`, SIGHUP is always ignored.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._since = 0.0

    def __enter__(self) -> CollectSignals:
        handle_stop_signals(self._handle)
        while interrupts:
            self.note(interrupts.pop(0))
        return self

    def __exit__(self, *_: object) -> None:
        handle_stop_signals(signal.SIG_IGN)

    def stop_without_parent(self) -> None:
        """Treat the death of the parent process, such as torchrun's agent, as a request to stop."""
        parent = os.getppid()

        def note_if_gone(*_: object) -> None:
            if os.getppid() != parent:  # otherwise only the thread that started this process has ended
                self.note(signal.SIGTERM)

        if sys.platform == "linux":
            signal.signal(signal.SIGRTMIN, note_if_gone)
            signal_on_death_of_parent(signal.SIGRTMIN)

    def note(self, number: int) -> None:
        """Record a signal that came to this process or to a worker."""
        if not self.received:
            self._since = time.monotonic()
        self.received.append(number)

    @property
    def status(self) -> int | None:
        """Exit status of the run; None if it was not asked to stop."""
        return status_after(self.received) if self.received else None

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.note(number)
        if number == signal.SIGINT and time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt


def handle_stop_signals(handler: signal.Handlers | Callable[[int, FrameType | None], None]) -> None:
    """Set the handler of all these signals, except of a SIGHUP that `nohup` ignores."""
    for number in STOP_SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


@contextmanager
def stopped_with_nothing_begun(for_this_command: bool) -> Iterator[None]:
    """Exit at once if a signal comes inside the `with` block, before the command itself handles signals.

    At that time the command has started nothing and has nothing to save. `for_this_command` says whether the
    command is one that ends with these statuses.
    """

    def leave(number: int, _: FrameType | None) -> None:
        os.write(2, f"{AT_ONCE}\n".encode())
        os._exit(status_after([number]))

    # Only the main thread may set signal handlers.
    may_set = for_this_command and threading.current_thread() is threading.main_thread()
    handlers_before = {number: signal.getsignal(number) for number in STOP_SIGNALS} if may_set else {}
    if may_set:
        handle_stop_signals(leave)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            if signal.getsignal(number) is leave:
                signal.signal(number, handler)


def stop_signals_as_bytes() -> int:
    """Let Python write each signal to a pipe as one byte. Return the reading end of the pipe.

    The signal handler in C writes them, so a thread that reads the pipe learns of them even if the main
    thread is stuck. Signals that arrived while they were blocked are delivered now.
    """
    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    signal.set_wakeup_fd(writing_end, warn_on_full_buffer=False)
    handle_stop_signals(lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return reading_end


def signal_on_death_of_parent(number: int = signal.SIGKILL) -> None:
    """Let this process receive a signal when the thread that forked it ends; on Linux only."""
    if sys.platform == "linux":
        # Imported here, because commands handle signals before they import anything slow.
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
