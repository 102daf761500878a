"""Numbers gone wrong on purpose, at a chosen step, on a chosen rank, and what that did to the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from ranks.jobs import Tables, start
from torch import Tensor, nn

from shardwise.checkpoint.save import State, state_of
from shardwise.errors import RunFailed
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.train.build import Training
from shardwise.train.steps import StepRecord, steps


class Fault:
    """Multiplies a gradient by `value` while armed."""

    def __init__(self, value: float) -> None:
        self.value, self.armed = value, False

    def behind(self, module: nn.Module) -> None:
        """In the gradient that flows into this module, and so in all that backward reaches after it."""
        module.register_forward_hook(lambda module, inputs, output: output.register_hook(self._all) and None)

    def in_weight_of(self, module: nn.Module) -> None:
        """In one element of the gradient of this module's weight, and nowhere else."""
        # Registered anew in each forward, because a sharded model swaps its parameters.
        module.register_forward_pre_hook(
            lambda module, inputs: module.weight.register_hook(self._one) and None
        )

    def _all(self, gradient: Tensor) -> Tensor:
        return gradient * self.value if self.armed else gradient

    def _one(self, gradient: Tensor) -> Tensor:
        if self.armed:
            gradient = gradient.clone()
            gradient[-1, -1] = self.value
        return gradient


@dataclass(frozen=True)
class Taken:
    """One step, and whether it changed anything on this rank."""

    step: StepRecord
    changed: set[str]
    adam_steps: set[float]


def skip(worker: Worker, tables: Tables, at: int, on: int) -> list[Taken]:
    """Train with a gradient that overflows at one step on one rank."""
    training = start(worker, tables)
    fault = Fault(torch.inf)
    fault.behind(training.parallel.model.blocks[0])
    return list(_steps(training, fault, at if worker.rank == on else 0))


def _steps(training: Training, fault: Fault, at: int) -> Iterator[Taken]:
    generator = steps(training)
    for number in range(1, training.config.train.steps + 1):
        before = snapshot(training)
        fault.armed = number == at
        done = next(generator)
        after = snapshot(training)
        changed = {key.section for key in after if not torch.equal(before[key], after[key])}
        yield Taken(done, changed, {float(value) for key, value in after.items() if key.slot == "step"})


def snapshot(training: Training) -> State:
    """A copy of all weights and moments, as far as this rank holds them."""
    state = state_of(training.parallel.named_parameters(), training.optimizer)
    return {key: local(tensor).clone() for key, tensor in state.items()}


def fail(worker: Worker, tables: Tables, parameter: str, at: int, on: int) -> tuple[str, bool]:
    """Train with a NaN in one parameter's gradient; what the run said, and whether the failing step left all
    as it was."""
    training = start(worker, tables)
    fault = Fault(torch.nan)
    fault.in_weight_of(training.parallel.model.get_submodule(parameter.removesuffix(".weight")))
    generator, number = steps(training), 0
    try:
        while True:
            number += 1
            before = snapshot(training)
            fault.armed = number == at and worker.rank == on
            next(generator)
    except RunFailed as error:
        after = snapshot(training)
        return str(error), all(torch.equal(before[name], after[name]) for name in before)
