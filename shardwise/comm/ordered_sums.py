"""Sums that take several collectives, made in the background of the backward pass, in the order of requests.

Devices must issue the collectives of a group in one order. Continuing a sum from a callback of its first
collective breaks that order, because callbacks run at any time, and gloo then waits forever. So on a CPU one
thread makes all of them, each from beginning to end. On a GPU a stream of their own keeps their order too.
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
Requests = queue.SimpleQueue[tuple[Sum, Future[Tensor]] | None]


class OrderedSums:
    """Makes one sum after the other in the background."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._requests: Requests = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._requests.put, None)

    def run(self, make: Sum) -> Future[Tensor]:
        """Make a sum after all earlier ones; waiting for the returned future raises what went wrong."""
        if self._stream is not None:
            future: Future[Tensor] = Future(devices=[self.device])
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                future.set_result(make())
            return future
        if self._thread is None:
            name = "compressed sums"
            self._thread = threading.Thread(target=_work, args=(self._requests,), name=name, daemon=True)
            self._thread.start()
        future = Future()
        self._requests.put((make, future))
        return future


def _work(requests: Requests) -> None:
    """Make sums until the `OrderedSums` object is gone."""
    while (request := requests.get()) is not None:
        make, future = request
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)  # type: ignore[arg-type]
        del request, make, future  # the last sum may refer to a whole model, which could not be freed
