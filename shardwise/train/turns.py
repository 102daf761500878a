"""Two threads of which one runs at a time: a program, and the loop that trains with it.

A program is written as a loop of its own, and so is training (train/run.py). Each therefore runs in a thread:
the loop in the worker's main thread, the program in another one. The loop lets the program run until it wants
a step, then makes the step, and so on. They never run at the same time, so nothing needs a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Left(BaseException):
    """Raised inside a program to end it: its team is gone, or only its beginning was wanted."""


class Turns:
    """Runs a function in a thread, by turns with the caller."""

    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function
        self._function_may_run, self._caller_may_run = threading.Semaphore(0), threading.Semaphore(0)
        self._leaving = False
        self._error: BaseException | None = None
        self.ended = False
        """Whether the function has returned or raised."""
        self._thread = threading.Thread(target=self._run, name="program", daemon=True)

    def resume(self) -> None:
        """Let the function run until it waits or ends, and raise what it raised."""
        assert not self.ended, "the function has ended"
        if self._thread.ident is None:
            self._thread.start()
        self._function_may_run.release()
        self._caller_may_run.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Give the turn to the caller of `resume` and wait for the next one. Called by the function."""
        self._caller_may_run.release()
        self._function_may_run.acquire()
        if self._leaving:
            raise Left

    def leave(self) -> None:
        """End the function where it waits."""
        self._leaving = True
        if self._thread.ident is not None and not self.ended:
            self._function_may_run.release()
            self._caller_may_run.acquire()

    def _run(self) -> None:
        self._function_may_run.acquire()
        try:
            self._function()
        except Left:
            pass
        except BaseException as error:  # raised in the caller's thread
            self._error = error
        finally:
            self.ended = True
            self._caller_may_run.release()
