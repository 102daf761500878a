"""The gradients of a step, which a source computes or receives (train/sources.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.optim import global_norm

if TYPE_CHECKING:
    from shardwise.train.build import Training


@dataclass(frozen=True)
class Updates:
    """Counts of the updates that workers made in a step, each with one gradient (drivers/lock_free.py)."""

    made: int
    conflicting: int
    """Number of updates with a conflicting row: another worker wrote it after this one had read it."""
    rows: int
    """Number of rows that all updates wrote; a dense gradient counts as one row."""
    conflicting_rows: int


@dataclass(frozen=True)
class ProgramSums:
    """What the loss function of a program returned on this rank. The gradients and all numbers here are
    divided by the rows of the global batch; the number of items is known to all ranks only after the
    backward."""

    names: tuple[str, ...]
    """Names of the losses."""
    numbers: Tensor
    """The number of items, and each loss."""


@dataclass(frozen=True)
class StepGradients:
    """Facts about the global batch whose gradients the parameters of this rank now have."""

    loss: Tensor
    """This rank's part of the batch's mean loss."""
    tokens: Tensor
    """Number of tokens of the whole batch."""
    checksum: int
    """Checksum of the sequences that this rank reports."""
    clip: float | None = None
    """Largest norm of the gradient in the update; None: no limit."""
    rows: tuple[int, ...] = ()
    """Number of rows of each data-parallel device, if these numbers differ from step to step."""
    staleness: tuple[int, ...] = ()
    """Staleness of each gradient in the sum, if workers of a parameter server computed them."""
    dropped: int = 0
    """Number of gradients dropped since the last step, because another of the same portion came first."""
    rate: float = 1.0
    """Factor of the learning rate in this step: less than 1 if stale gradients are damped."""
    updates: Updates | None = None
    """Updates that workers have already made; None: the step still has to make its update."""
    norm: Tensor | None = None
    """Mean norm of the gradients of these updates."""
    program: ProgramSums | None = None
    """Results of a program's loss function; None: the loss is that of the job's model."""


def gradient_norm(training: Training) -> Tensor:
    """Return the norm of the gradients in place, without the loss scale."""
    parameters = (parameter for _, parameter in training.parallel.named_parameters(once=True))
    return global_norm(parameters, training.comm) / training.scale.value


def divisor(training: Training, norm: Tensor, clip: float | None) -> Tensor:
    """Return the divisor of the gradients in the update: the loss scale, times norm / limit if the norm
    exceeds the limit `clip`."""
    excess = torch.ones_like(norm) if clip is None else (norm / clip).clamp(min=1.0)
    return excess * training.scale.value


def at_least_some(items: Tensor) -> Tensor:
    """Return the number of items, or one if there are none, to divide by."""
    return torch.where(items > 0, items, torch.ones_like(items))
