"""A parameter server and its workers on one device, under a clock that is only imagined.

The same desk, shelf and rules as in a run of many processes (asynchronous/), with workers that take turns in
one process. Each has a speed, and takes a random time around that for every portion, from a seed; some are
lost now and then and come back. So staleness and what it costs can be studied without waiting and without the
machine's own noise, and whatever order of events made a mistake happens again.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from shardwise.asynchronous import messages
from shardwise.train.build import Training
from shardwise.train.contribute import batch_of, brought, summed_loss
from shardwise.train.serve import Contributions
from shardwise.train.sources import Drawn


@dataclass(frozen=True)
class Pace:
    """How a worker of the imagination works."""

    seconds: float = 1.0
    """For a portion, on average."""
    spread: float = 0.1
    """Of that time, relative to it: how far it is off, by a normal distribution."""
    losses: float = 0.0
    """Of portions: those during which it is lost, and with it what it computes."""


class Replay(Contributions):
    """Gradients of workers that are imagined, as a source of steps. `clock` is what their time would be."""

    def __init__(self, training: Training, paces: list[Pace], seed: int) -> None:
        self.clock = 0.0
        super().__init__(
            training, stop_asked=lambda: False, waiting=lambda: None, public=False, clock=lambda: self.clock
        )
        assert self.desk is not None, "one process"
        self.one_desk = self.desk
        self._chance, self._order = random.Random(seed), count()
        self._paces = {f"{index}-": pace for index, pace in enumerate(paces)}
        self._idle, self._busy = list(self._paces), list[tuple[float, int, str, int, Tensor]]()

    def draw(self) -> Drawn | None:
        while not self.one_desk.is_due():
            self._hand_out()
            self._next_event()
        return super().draw()

    def _hand_out(self) -> None:
        """To everybody who waits and gets something."""
        waiting, self._idle = self._idle, []
        for worker in waiting:
            task = self.one_desk.ask(worker, seconds=0.0)
            if not isinstance(task, messages.Task):
                self._idle.append(worker)
                continue
            pace = self._paces[worker]
            seconds = pace.seconds * max(0.05, self._chance.gauss(1.0, pace.spread))
            _, weights = self.shelf.weights(task.version)
            heapq.heappush(
                self._busy, (self.clock + seconds, next(self._order), worker, task.portion, weights)
            )

    def _next_event(self) -> None:
        """The next worker is done, or lost."""
        assert self._busy, "nobody works, and nothing is due"
        self.clock, _, worker, portion, weights = heapq.heappop(self._busy)
        if self._chance.random() < self._paces[worker].losses:
            self.one_desk.lost(worker)
        else:
            self._compute(worker, portion, weights)
        self._idle.append(worker)

    @torch.no_grad()
    def _put(self, weights: Tensor) -> None:
        start = 0
        for parameter in self.parameters.values():
            parameter.view(-1).copy_(weights[start : start + parameter.numel()])
            start += parameter.numel()

    def _compute(self, worker: str, portion: int, weights: Tensor) -> None:
        """With the weights that it had read; the servers' are back in place afterwards."""
        training = self.training
        self._put(weights)
        batch = batch_of(training, portion, self.rows)
        loss = summed_loss(training, batch)
        gradient = self.shelf.room()
        torch.cat([_gradient(parameter).reshape(-1) for parameter in self.parameters.values()], out=gradient)
        self._put(self.weights)
        self.shelf.put((worker, portion), gradient)
        self.one_desk.bring(worker, brought(training, portion, loss, batch))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
