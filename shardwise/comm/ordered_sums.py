"""Sums that take several collectives, made behind the backward pass, one after the other in the order they
were asked for.

Devices must issue the collectives of a group in one order. Continuing a sum from a callback of its first
collective does not keep to that: callbacks come when they come, and gloo then waits forever. So on a CPU one
thread makes all of them, each from beginning to end; on a GPU they are queued on a stream of their own, which
keeps their order too.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.futures import Future

Sum = Callable[[], Tensor]
Waiting = queue.SimpleQueue[tuple[Sum, Future[Tensor]] | None]


class InOrder:
    """Runs one sum after the other, behind whoever asks for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._waiting: Waiting = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._waiting.put, None)

    def run(self, make: Sum) -> Future[Tensor]:
        """Make a sum after all that were asked for before; a failure is raised where its future is waited
        for."""
        if self._stream is not None:
            future: Future[Tensor] = Future(devices=[self.device])
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                future.set_result(make())
            return future
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(self._waiting,), name="compressed sums", daemon=True
            )
            self._thread.start()
        future = Future()
        self._waiting.put((make, future))
        return future


def _work(waiting: Waiting) -> None:
    """Until whoever asks is gone. Between two sums nothing is held of the last, through which a whole model
    may hang on it."""
    while (asked := waiting.get()) is not None:
        make, future = asked
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)  # type: ignore[arg-type]
        del asked, make, future
