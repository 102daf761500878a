"""Sums of gradients that run in the background of the backward pass, on CPU workers.

FSDP2 uses a sum as soon as its collective has returned: it adds it to the gradients. On a GPU all of that is
queued on a stream, and backward goes on. On a CPU, backward would stand still for every unit. So FSDP2 gets
-0.0 in place of the sum, which added to a number changes none of its bits, and the sum itself is added to the
gradients when it has arrived: the same additions in the same order.

Each running sum holds a unit's whole gradients, and room for as many that arrive. At most `limit` sums run at
a time: enough for a large unit, such as the head, to be sent while blocks are computed. Between micro-batches
one sum may run, as in FSDP2: sharded gradients stay sharded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shardwise.comm.comm import Comm
from shardwise.comm.ordered_sums import OrderedSums

NEUTRAL = -0.0
"""A value that leaves every bit of a number unchanged when added to it; 0.0 would turn -0.0 into 0.0."""


class DeferredSums:
    """The running sums of this rank, oldest first."""

    def __init__(self, comm: Comm, limit: int) -> None:
        self.comm, self.limit = comm, limit
        self.queue = OrderedSums(comm.device)
        """Makes the sums that take several collectives."""
        self._running: deque[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = deque()

    def add(self, finish: Callable[[], Tensor], use: Callable[[Tensor], None]) -> None:
        """Add a sum that has started: `finish` waits for it, and `use` takes it, now or in a later call."""
        self._running.append((finish, use))
        self.complete(leave=self.limit)

    def complete(self, leave: int = 0) -> None:
        """Wait for all sums except the last `leave` ones; gradients are complete when none is left."""
        while len(self._running) > leave:
            finish, use = self._running.popleft()
            with self.comm.waiting():
                total = finish()
            use(total)


@dataclass(frozen=True)
class DeferredUnitSum:
    """How the sums of one FSDP2 unit are deferred."""

    sums: DeferredSums
    """Sums of all units."""
    use: Callable[[Tensor], None]
    """Function that adds a finished sum to the unit's gradients."""
