"""Sums of gradients that go on behind the backward pass, on CPU workers.

FSDP2 uses a sum as soon as its collective has returned: it adds it to the gradients. On a GPU all of that is
queued on a stream, and backward goes on. On a CPU backward would stand still for every unit. So FSDP2 is
given -0.0 in place of the sum, which added to a number changes none of its bits, and the sum itself is added
to the gradients once it is there: the same additions in the same order.

Each sum that is under way holds a unit's whole gradients, and room for as many that come. No more than `most`
of them are: enough for a large unit, such as the head, to be sent while blocks are computed. Between
micro-batches one is, as in FSDP2: sharded gradients stay sharded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shardwise.comm.comm import Comm
from shardwise.comm.ordered_sums import InOrder

NEUTRAL = -0.0
"""Added to any number, it leaves every bit of it as it is; 0.0 would make 0.0 of -0.0."""


class SumsBehind:
    """Sums under way, in the order they were asked for."""

    def __init__(self, comm: Comm, most: int) -> None:
        self.comm, self.most = comm, most
        self.queue = InOrder(comm.device)
        """Makes those that take several collectives."""
        self._under_way: deque[tuple[Callable[[], Tensor], Callable[[Tensor], None]]] = deque()

    def follow(self, finish: Callable[[], Tensor], use: Callable[[Tensor], None]) -> None:
        """A sum has begun: `finish` waits for it, and `use` takes it, here or in a later call."""
        self._under_way.append((finish, use))
        self.complete(but=self.most)

    def complete(self, but: int = 0) -> None:
        """Wait for all of them, but for so many of the last; without these, gradients are complete then."""
        while len(self._under_way) > but:
            self._use_first()

    def _use_first(self) -> None:
        finish, use = self._under_way.popleft()
        with self.comm.waiting():
            total = finish()
        use(total)


@dataclass(frozen=True)
class UnitBehind:
    """Of one unit of FSDP2: where its sums go on, and what takes each of them."""

    all: SumsBehind
    use: Callable[[Tensor], None]
