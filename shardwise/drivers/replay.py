"""A parameter server and its workers on one device, under a simulated clock.

The scheduler, the gradient store and the rules are those of a run of many processes (asynchronous/), but the
workers take turns in one process. Each worker has a mean speed, and the time for a portion varies around it
at random, from a seed; some workers are lost now and then and come back. So staleness and its cost can be
studied without waiting and without the noise of the machine, and an order of events that led to an error can
be repeated.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from shardwise.asynchronous import messages
from shardwise.drivers.contributions import Contributions
from shardwise.drivers.contributor import batch_of, brought, summed_loss
from shardwise.train.build import Training
from shardwise.train.step_gradients import StepGradients


@dataclass(frozen=True)
class Pace:
    """How fast and how reliable a simulated worker is."""

    seconds: float = 1.0
    """Mean time for a portion."""
    spread: float = 0.1
    """Standard deviation of that time, relative to it."""
    losses: float = 0.0
    """Share of the portions during which the worker is lost, so that the portion has to be computed again."""


class Replay(Contributions):
    """Gradients of simulated workers, as a source of steps. `clock` is the simulated time."""

    def __init__(self, training: Training, paces: list[Pace], seed: int) -> None:
        self.clock = 0.0
        super().__init__(
            training, stop_asked=lambda: False, waiting=lambda: None, public=False, clock=lambda: self.clock
        )
        assert self.scheduler is not None, "one process"
        self.only_scheduler = self.scheduler
        self._chance, self._order = random.Random(seed), count()
        self._paces = {f"{index}-": pace for index, pace in enumerate(paces)}
        self._idle, self._busy = list(self._paces), list[tuple[float, int, str, int, Tensor]]()

    def compute_gradients(self) -> StepGradients | None:
        """Let time pass until the next update can be made."""
        while not self.only_scheduler.is_due():
            self._hand_out()
            self._next_event()
        return super().compute_gradients()

    def _hand_out(self) -> None:
        """Give a portion to each waiting worker."""
        waiting, self._idle = self._idle, []
        for worker in waiting:
            task = self.only_scheduler.ask(worker, seconds=0.0)
            if not isinstance(task, messages.Task):
                self._idle.append(worker)
                continue
            pace = self._paces[worker]
            seconds = pace.seconds * max(0.05, self._chance.gauss(1.0, pace.spread))
            _, weights = self.store.weights(task.version)
            heapq.heappush(
                self._busy, (self.clock + seconds, next(self._order), worker, task.portion, weights)
            )

    def _next_event(self) -> None:
        """Advance the clock until the next worker has computed its portion, or is lost."""
        assert self._busy, "nobody works, and nothing is due"
        self.clock, _, worker, portion, weights = heapq.heappop(self._busy)
        if self._chance.random() < self._paces[worker].losses:
            self.only_scheduler.lost(worker)
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
        """Compute a portion with the weights that the worker had read, and restore those of the servers."""
        training = self.training
        self._put(weights)
        batch = batch_of(training, portion, self.rows)
        loss = summed_loss(training, batch)
        gradient = self.store.new_buffer()
        torch.cat([_gradient(parameter).reshape(-1) for parameter in self.parameters.values()], out=gradient)
        self._put(self.weights)
        self.store.put((worker, portion), gradient)
        self.only_scheduler.bring(worker, brought(training, portion, loss, batch))


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
