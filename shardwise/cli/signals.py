"""Signal handling for commands that start processes: these processes end with the command, whatever ends
it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.resilience.stopping import STOP_SIGNALS, handle_stop_signals, interrupts


@contextmanager
def stopped_as_interrupted() -> Iterator[list[int]]:
    """Let every stop signal end the command as Ctrl-C does, so that the processes it started end with it.

    The yielded list then contains the signal. Further signals are ignored until the process ends, so that
    they neither disturb the cleanup nor change the exit status.
    """
    interrupts.clear()

    def interrupt(number: int, _: object) -> None:
        interrupts.append(number)
        handle_stop_signals(signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield interrupts
        return

    def unraisable(dropped: sys.UnraisableHookArgs) -> None:
        # Python drops an interrupt that comes in a hook of os.fork or in a destructor. The signal is noted.
        if not (interrupts and isinstance(dropped.exc_value, KeyboardInterrupt)):
            hook(dropped)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    handle_stop_signals(interrupt)
    try:
        yield interrupts
    finally:
        sys.unraisablehook = hook
        # If the exception left an `exec` of a text (dataclasses call it), Python notes an unhandled
        # interrupt, and `python -m` ends by SIGINT whatever the exit status is. The next `exec` clears
        # that note.
        exec("")
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)
