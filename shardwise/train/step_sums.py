"""Sums over ranks in every step: the norm of the gradients, and one vector of float64. The vector is summed
over all axes except tensor, along which the maximum is taken.

It contains the loss, the votes to stop or to save, the checksum of the sequences read (data/batches.py), and
the seconds that each rank worked on the step before: 32 bytes, and 16 more for each rank. A checksum has up
to 56 bits and is sent as two halves of 28 bits, so that their sums are exact in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.config.axes import LOSS_AXES
from shardwise.train.step_gradients import at_least_some, gradient_norm

if TYPE_CHECKING:
    from shardwise.train.build import Training
    from shardwise.train.step_gradients import StepGradients

HALF = 1 << 28
"""A checksum has up to 2 x 28 bits: 32 of each sequence, and 24 of their number."""
STOP, SAVE = 1.0, 0.5
"""Values of the votes. Any rank may vote to stop, but only the main rank votes to save, by its clock. So a
sum of 0.5 is a vote to save, and a sum of at least 1 has a vote to stop. A run that stops saves anyway."""


def vote_of_this_rank(
    training: Training, stop_asked: Callable[[], bool], save_due: Callable[[], bool]
) -> float:
    """Return this rank's vote; 0 in a step in which the votes of all ranks are not summed."""
    if not training.rank_driver.hears_votes(training.step + 1):
        return 0.0
    if stop_asked():
        return STOP
    return SAVE if training.mesh.is_main and save_due() else 0.0


def message_to_all(training: Training, checksum: int, vote: float, seconds: tuple[float, float]) -> Tensor:
    """Return the values that this rank exchanges, except its loss. `seconds` are its (compute, data) seconds
    of the step before."""
    mesh, rank, world = training.mesh, training.mesh.worker.rank, training.mesh.worker.world
    high, low = divmod(checksum, HALF)
    times = [(0.0, 0.0)] * (world if world > 1 else 0)
    if times:
        times[rank] = seconds
    values = [vote, high, low, *(number for pair in times for number in pair)]
    # From pinned memory, because otherwise the host would wait for the device.
    message = torch.tensor(values, dtype=torch.float64, pin_memory=mesh.device.type == "cuda")
    return message.to(mesh.device, non_blocking=True)


@dataclass(frozen=True)
class StepSums:
    """Sums over all ranks in a step, on the device."""

    vector: Tensor
    """The vector that ranks exchange, and the mean of each loss of a program."""
    norm: Tensor
    """Norm of the gradient of the mean loss."""
    items: Tensor
    """Number that the gradients have still to be divided by. It is 1 without a program, whose loss is summed
    over items; their number is known only now."""

    @property
    def loss(self) -> Tensor:
        """The mean loss of the global batch."""
        return self.vector[0]

    @property
    def votes(self) -> Tensor:
        """The sum of the votes, as a vector of one number."""
        return self.vector[1:2]

    @property
    def are_finite(self) -> Tensor:
        """Whether the loss and the norm are finite."""
        return torch.isfinite(self.norm) & torch.isfinite(self.loss)


def sum_over_ranks(training: Training, gradients: StepGradients, message: Tensor) -> StepSums:
    """Return the norm of the gradients, and the loss and the message of all ranks together."""
    program = gradients.program
    with training.comm.clock.span("forward_backward"):
        norm = gradient_norm(training) if gradients.norm is None else gradients.norm
        more = [] if program is None else [program.numbers]
        vector = _summed(training, torch.cat([gradients.loss.double().reshape(1), message, *more]))
        if program is None:
            return StepSums(vector, norm, torch.ones_like(norm))
        items = at_least_some(vector[-len(program.names) - 1])
        vector[:1] /= items
        vector[-len(program.names) :] /= items
        items = items.to(norm.dtype)  # in float64 it would make the divisor of float32 gradients float64
        return StepSums(vector, norm / items, items)


def _summed(training: Training, numbers: Tensor) -> Tensor:
    """Sum numbers in place over all ranks that had different tokens or different stages. Ranks along the
    tensor axis had the same, so the maximum is taken."""
    comm = training.comm
    for axis in LOSS_AXES:
        comm.all_reduce(numbers, axis)
    comm.sum_over_data(numbers)
    comm.all_reduce(numbers, "tensor", op=torch.distributed.ReduceOp.MAX)
    return numbers


@dataclass(frozen=True)
class Shared:
    """Numbers that all ranks have exchanged in a step."""

    loss: float
    votes: float
    checksum: int
    rank_seconds: tuple[tuple[float, float], ...]
    """(compute, data) seconds of each rank in the step before, without waits."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Shared:
        """Return the numbers of a summed vector."""
        loss, votes, high, low, *times = numbers
        pairs = tuple(zip(times[::2], times[1::2], strict=True))
        return cls(loss, votes, int(high) * HALF + int(low), pairs)

    @property
    def stop(self) -> bool:
        """Whether any rank was asked to stop."""
        return self.votes >= STOP

    @property
    def save(self) -> bool:
        """Whether the main rank's clock says that a save is due."""
        return self.votes == SAVE
