"""The source of gradients on a parameter server: workers compute them (asynchronous/).

The servers of a run are a team like any other: they shard weights and optimizer states as ZeRO-3 does, make
the update together, evaluate, save and recover. But a rank of a synchronous team computes gradients, and a
server takes those of the next update from its store and sums them, in the order of the data, whichever
workers sent them and when.

The first server decides which gradients make the next update and tells the others. While there is no update,
it tells them so once a second, so that a server that waits for workers is not taken for one that hangs.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
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
from shardwise.train.record import StepRecord
from shardwise.train.step_gradients import StepGradients

AGE_SHARE = 0.1
"""Weight of the last update in the moving mean of staleness, by which weights are extrapolated."""
TURN_SECONDS = 1.0
"""Seconds that the first server waits for an update before it tells the others that there is none yet."""


class Contributions:
    """The source of gradients on a server: the sums of those that workers send."""

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
            max_staleness=self._settings.staleness_bound,
            backups=self._settings.backups,
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

    def compute_gradients(self) -> StepGradients | None:
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
        return StepGradients(
            loss,
            tokens,
            checksum,
            clip=training.config.train.clip,
            staleness=update.staleness,
            dropped=len(update.dropped),
            rate=rate,
        )

    def prepare_next(self) -> None:
        """Do nothing: workers compute the next gradients."""

    def repeat_last(self) -> None:
        """Fail: only float8 repeats steps, and it is refused with a parameter server."""
        raise AssertionError("no step of a server is repeated")

    def step_done(self, done: StepRecord) -> Mapping[str, float]:
        """Publish the weights of the step that is done, and note which sequences are in them."""
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
        return {}

    def finish(self) -> None:
        """Do nothing after the last step."""

    def close(self) -> None:
        """Close all connections to workers."""
        if self.scheduler is not None:
            self.scheduler.close()
        if self._listener is not None:
            self._listener.close()

    def _start(self) -> State:
        """Return the state from which the run continues. Portions are counted from the beginning of the data,
        so the missing sequences of a checkpoint must be whole portions."""
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
            message, stop = self.training.peers.broadcast((_to_message(update), self._stop_asked()), 0)
            if message is not None:
                return update or _from_message(message)
            if stop:
                return None
            self._waiting()

    @torch.no_grad()
    def _add_up(self, update: Update, factors: list[float]) -> None:
        """Put the sum of the gradients, each times its factor, on the parameters."""
        taken = self.store.take(update.keys, update.brought, update.dropped)
        start = 0
        for parameter in self.parameters.values():
            part = slice(start, start := start + local(parameter).numel())
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradient = local(parameter.grad).view(-1)
            torch.mul(taken[0][part], factors[0], out=gradient)
            for other, factor in zip(taken[1:], factors[1:], strict=True):
                gradient.add_(other[part], alpha=factor)
        self.store.give_back(taken)

    def _publish(self) -> None:
        """Publish the weights for workers. If gradients are stale, extrapolate the weights to those that they
        will be applied to."""
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
    """Return a checksum of the tables that must be the same in the jobs of a worker and its servers."""
    tables = {"model", "data", "train", "optimizer"}
    return hashlib.sha256(config.model_dump_json(include=tables).encode()).hexdigest()


def credentials(worker: Worker) -> Credentials:
    """Return the credentials of the run's servers and workers. Their hosts derive them from the run's secret,
    so they are not in torch's store, which anyone can read who reaches it."""
    assert worker.server_key, "the host gives every worker the key"
    return Credentials("server", worker.server_key)


def _to_message(update: Update | None) -> dict[str, Any] | None:
    """Return an update as a value that can be sent as JSON."""
    return None if update is None else asdict(update)


def _from_message(message: dict[str, Any]) -> Update:
    """Return the update of a received message, in which tuples have become lists."""
    tuples: dict[str, Any] = {
        "contributions": tuple(Contribution(**fields) for fields in message["contributions"]),
        "staleness": tuple(message["staleness"]),
        "brought": tuple(map(tuple, message["brought"])),
        "dropped": tuple(map(tuple, message["dropped"])),
    }
    return Update(**{**message, **tuples})
