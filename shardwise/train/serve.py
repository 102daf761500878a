"""A server's steps: gradients come from workers, who pull the weights and push what they computed
(asynchronous/).

The servers of a run are a team like any other: they share weights and optimizer states as ZeRO-3 does, make
the update together, evaluate, save and recover. Only where a rank of a synchronous team would compute
gradients, a server takes those that are due from its shelf and adds them up, in the order of the data,
whoever brought them and when.

The first server decides what is due and tells the others, once a second also that nothing is: a server that
waits for workers is not one that hangs.
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

from shardwise.asynchronous.servers import Desk, Front, Shelf, Update
from shardwise.asynchronous.work import Contribution, State, Work
from shardwise.config import Config
from shardwise.errors import UserError
from shardwise.mesh import open_team_store
from shardwise.mesh.sockets import address_towards
from shardwise.optim import local
from shardwise.parallel.placement import held
from shardwise.resilience.channel import Credentials
from shardwise.train.build import Training
from shardwise.train.sources import Drawn

AGE_SHARE = 0.1
"""Of the last update in the mean staleness by which weights are moved on."""
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
        """Not `public`: nobody from outside is listened to."""
        self.training, self._stop_asked, self._waiting = training, stop_asked, waiting
        config, worker = training.config, training.mesh.worker
        self.parameters = dict(training.parallel.named_parameters(once=True))
        dtype = next(iter(self.parameters.values())).dtype
        slices = {name: held(parameter) for name, parameter in self.parameters.items()}
        self.shelf = Shelf(slices, dtype, config.server.codec)
        self.rows = config.train.global_batch // portions(config)
        work = Work(
            portions=portions(config),
            updates=config.train.steps,
            most_stale=config.server.staleness_bound,
            again=config.server.backups,
            start=self._start(),
        )
        self.desk = Desk(work, clock) if training.mesh.is_main else None
        self._update: Update | None = None
        self.weights = self._flat()
        self._age = 0.0
        """Of gradients, in the last updates: the mean staleness."""
        self._publish()
        self._front = None
        if public:
            address = address_towards(worker.address, worker.port)
            self._front = Front(
                address, credentials(worker.store_name), self.shelf, self.desk, digest(config), self.rows
            )
            open_team_store(worker).set(f"front {worker.rank}", f"{address} {self._front.port}")

    def draw(self) -> Drawn | None:
        training = self.training
        with training.comm.clock.span("data"):
            update = self._next_update()
        if update is None:
            return None
        self._update = update
        weights = [1.0 / (1 + age) if training.config.server.damping else 1.0 for age in update.staleness]
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
        pass

    def again(self) -> None:
        raise AssertionError("gradients that workers brought are not theirs to bring again")

    def hear(self, step: int, seconds: tuple[tuple[float, float], ...]) -> None:
        """The step is done: its weights are the newest."""
        self._publish()
        state = State()
        if self.desk is not None and self._update is not None:
            self.desk.made(self._update)
            state = self.desk.state()
        _, after, missing = self.training.peers.from_rank(astuple(state), 0)
        self.training.sequences = after * self.rows
        self.training.missing = tuple(
            range(portion * self.rows, (portion + 1) * self.rows) for portion in missing
        )

    def close(self) -> None:
        if self.desk is not None:
            self.desk.close()
        if self._front is not None:
            self._front.close()

    def _start(self) -> State:
        """Where the data goes on. Portions are cut from its very beginning, so what was under way must be
        whole ones."""
        training, size = self.training, self.rows
        if training.sequences % size or any(
            rows.start % size or len(rows) != size for rows in training.missing
        ):
            before = min({len(rows) for rows in training.missing} or {math.gcd(training.sequences, size)})
            raise UserError(
                f"the checkpoint's data ends after {training.sequences} sequences with portions of {before} "
                f"under way, which "
                f"portions of {size} do not continue; add "
                f"server.portions={training.config.train.global_batch // before}"
            )
        return State(
            training.step, training.sequences // size, tuple(rows.start // size for rows in training.missing)
        )

    def _next_update(self) -> Update | None:
        while True:
            update = self.desk.due(TURN_SECONDS) if self.desk is not None else None
            told = self.training.peers.from_rank([_told(update), self._stop_asked()], 0)
            if told[0] is not None:
                return update or _heard(told[0])
            if told[1]:
                return None
            self._waiting()

    @torch.no_grad()
    def _add_up(self, update: Update, factors: list[float]) -> None:
        """The sum of the gradients, each times its factor."""
        taken = self.shelf.take(update.keys, update.brought, update.dropped)
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
        self.shelf.give_back(taken)

    def _publish(self) -> None:
        """Hand out the weights, or, where gradients come late, where they will be by then."""
        before, self.weights = self.weights, self._flat()
        if self._update is None or not self.training.config.server.predicts:
            self.shelf.publish(self.training.step, self.weights)
            return
        ages = self._update.staleness
        self._age += AGE_SHARE * (sum(ages) / len(ages) - self._age)
        ahead = steps_ahead(self._age, momentum=self.training.config.train.betas[0])
        self.shelf.publish(self.training.step, torch.lerp(before, self.weights, 1 + ahead))

    @torch.no_grad()
    def _flat(self) -> Tensor:
        return torch.cat(
            [local(parameter).detach().reshape(-1).cpu() for parameter in self.parameters.values()]
        )


def steps_ahead(age: float, momentum: float) -> float:
    """How far weights move on by momentum alone in so many steps, in steps as long as the last."""
    return momentum * (1 - float(momentum**age)) / (1 - momentum)


def portions(config: Config) -> int:
    """Pieces of a global batch."""
    assert config.server.portions is not None, "filled in before workers start"
    return config.server.portions


def digest(config: Config) -> str:
    """What a worker must have been started with to work for these servers."""
    return hashlib.sha256(config.model_dump_json(include={"model", "data", "train"}).encode()).hexdigest()


def credentials(store_name: str) -> Credentials:
    """What makes a worker one of a run's: the name of its store, which nobody else knows."""
    return Credentials("server", store_name.encode())


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
