"""The gradients of a server's steps, which workers bring (asynchronous/).

The servers of a run are a team like any other: they share weights and optimizer states as ZeRO-3 does, make
the update together, evaluate, save and recover. But where a rank of a synchronous team would compute
gradients, a server takes those of the next update from its store and adds them up, in the order of the data,
whoever brought them and when.

The first server decides which gradients make the next update and tells the others. It also tells them once a
second that there is no update yet: a server that waits for workers is not one that hangs.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from shardwise.asynchronous.gradient_store import GradientStore
from shardwise.asynchronous.listener import Listener
from shardwise.asynchronous.portions import Contribution, Portions, State
from shardwise.asynchronous.scheduler import Scheduler, Update
from shardwise.config import Config
from shardwise.drivers.server_settings import portions, server_settings
from shardwise.errors import UserError
from shardwise.mesh import Worker, open_team_store
from shardwise.mesh.sockets import address_towards
from shardwise.optim import local
from shardwise.parallel.placement import local_slices
from shardwise.resilience.channel import Credentials
from shardwise.train.build import Training
from shardwise.train.sources import Drawn

AGE_SHARE = 0.1
"""Weight of the last update in the mean staleness by which weights are moved on."""
TURN_SECONDS = 1.0
"""How long the first server waits for an update before it tells the others that there is none yet."""


class Contributions:
    """The gradients that workers bring, as a source of steps."""

    def __init__(
        self,
        training: Training,
        stop_asked: Callable[[], bool],
        waiting: Callable[[], None],
        public: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stop_asked` and `waiting` are called while the server waits for workers. If not `public`, it does
        not listen for workers."""
        self.training, self._stop_asked, self._waiting = training, stop_asked, waiting
        config, worker = training.config, training.mesh.worker
        self._settings = server_settings(config)
        self.parameters = dict(training.parallel.named_parameters(once=True))
        dtype = next(iter(self.parameters.values())).dtype
        slices = {name: local_slices(parameter) for name, parameter in self.parameters.items()}
        self.store = GradientStore(slices, dtype, self._settings.codec)
        self.rows = config.train.global_batch // portions(config)
        work = Portions(
            portions=portions(config),
            updates=config.train.steps,
            most_stale=self._settings.staleness_bound,
            again=self._settings.backups,
            start=self._start(),
        )
        self.scheduler = Scheduler(work, clock) if training.mesh.is_main else None
        self._update: Update | None = None
        self.weights = self._flat()
        self._age = 0.0
        """Mean staleness of the gradients of the last updates."""
        self._publish()
        self._listener = None
        if public:
            address = address_towards(worker.address, worker.port)
            self._listener = Listener(
                address, credentials(worker), self.store, self.scheduler, digest(config), self.rows
            )
            open_team_store(worker).set(f"listener {worker.rank}", f"{address} {self._listener.port}")

    def draw(self) -> Drawn | None:
        """Wait for the next update; return None if the run is to stop first."""
        training = self.training
        with training.comm.clock.span("data"):
            update = self._next_update()
        if update is None:
            return None
        self._update = update
        weights = [1.0 / (1 + age) if self._settings.damping else 1.0 for age in update.staleness]
        rate, items = sum(weights) / len(weights), update.items or 1.0
        with training.comm.clock.span("forward_backward"):
            self._add_up(update, [weight / rate / items for weight in weights])
        tokens = torch.tensor(float(update.tokens), device=training.mesh.device)
        loss = torch.tensor(update.loss / items if training.mesh.is_main else 0.0, dtype=torch.float64)
        checksum = update.checksum if training.mesh.is_main else 0
        return Drawn(
            loss, tokens, checksum, staleness=update.staleness, dropped=len(update.dropped), rate=rate
        )

    def ahead(self) -> None:
        """Do nothing: workers compute the next gradients."""

    def again(self) -> None:
        """Fail: no step of a server is made again."""
        raise AssertionError("gradients that workers brought are not theirs to bring again")

    def hear(self, step: int, seconds: tuple[tuple[float, float], ...]) -> None:
        """Hand out the weights of the step that is done, and note what of the data is in them."""
        self._publish()
        state = State()
        if self.scheduler is not None and self._update is not None:
            self.scheduler.made(self._update)
            state = self.scheduler.state()
        _, after, missing = self.training.peers.broadcast(astuple(state), 0)
        self.training.sequences = after * self.rows
        self.training.missing = tuple(
            range(portion * self.rows, (portion + 1) * self.rows) for portion in missing
        )

    def close(self) -> None:
        """Close all connections to workers."""
        if self.scheduler is not None:
            self.scheduler.close()
        if self._listener is not None:
            self._listener.close()

    def _start(self) -> State:
        """Return where the data goes on. Portions are counted from the beginning of the data, so what was
        under way must be whole portions."""
        training, size = self.training, self.rows
        if training.sequences % size or any(
            rows.start % size or len(rows) != size for rows in training.missing
        ):
            before = min({len(rows) for rows in training.missing} or {math.gcd(training.sequences, size)})
            raise UserError(
                f"the checkpoint's data ends after {training.sequences} sequences with portions of {before} "
                f"under way, which portions of {size} do not continue; add "
                f"server.portions={training.config.train.global_batch // before}"
            )
        return State(
            training.step, training.sequences // size, tuple(rows.start // size for rows in training.missing)
        )

    def _next_update(self) -> Update | None:
        while True:
            update = self.scheduler.due(TURN_SECONDS) if self.scheduler is not None else None
            told, stop = self.training.peers.broadcast((_told(update), self._stop_asked()), 0)
            if told is not None:
                return update or _heard(told)
            if stop:
                return None
            self._waiting()

    @torch.no_grad()
    def _add_up(self, update: Update, factors: list[float]) -> None:
        """Put the sum of the gradients, each times its factor, on the parameters."""
        taken = self.store.take(update.keys, update.brought, update.dropped)
        start = 0
        for parameter in self.parameters.values():
            own = local(parameter)
            part = slice(start, start := start + own.numel())
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradient = local(parameter.grad).view(-1)
            torch.mul(taken[0][part], factors[0], out=gradient)
            for other, factor in zip(taken[1:], factors[1:], strict=True):
                gradient.add_(other[part], alpha=factor)
        self.store.give_back(taken)

    def _publish(self) -> None:
        """Hand out the weights; where gradients come late, the weights as they are expected to be by then."""
        before, self.weights = self.weights, self._flat()
        if self._update is None or not self._settings.predicts:
            self.store.publish(self.training.step, self.weights)
            return
        ages = self._update.staleness
        self._age += AGE_SHARE * (sum(ages) / len(ages) - self._age)
        momentum = self.training.config.optimizer.momentum_per_step
        assert momentum is not None, "a job that predicts without momentum is refused"
        ahead = steps_ahead(self._age, momentum)
        self.store.publish(self.training.step, torch.lerp(before, self.weights, 1 + ahead))

    @torch.no_grad()
    def _flat(self) -> Tensor:
        return torch.cat(
            [local(parameter).detach().reshape(-1).cpu() for parameter in self.parameters.values()]
        )


def steps_ahead(age: float, momentum: float) -> float:
    """Return how far weights move by momentum alone in `age` steps, in units of the last step."""
    return momentum * (1 - float(momentum**age)) / (1 - momentum)


def digest(config: Config) -> str:
    """Return a checksum of the job that a worker and its servers must have in common."""
    tables = {"model", "data", "train", "optimizer"}
    return hashlib.sha256(config.model_dump_json(include=tables).encode()).hexdigest()


def credentials(worker: Worker) -> Credentials:
    """Return the credentials of the run's servers and workers. Their hosts derive them from the run's secret,
    so they are not in torch's store, which anyone can read who reaches it."""
    assert worker.server_key, "the host gives every worker the key"
    return Credentials("server", worker.server_key)


def _told(update: Update | None) -> dict[str, Any] | None:
    if update is None:
        return None
    return {**vars(update), "contributions": [vars(one) for one in update.contributions]}


def _heard(told: dict[str, Any]) -> Update:
    lists = {name: tuple(told[name]) for name in ("staleness",)}
    keys = {
        name: tuple((worker, portion) for worker, portion in told[name]) for name in ("brought", "dropped")
    }
    contributions = tuple(Contribution(**one) for one in told["contributions"])
    return Update(**{**told, **lists, **keys, "contributions": contributions})
