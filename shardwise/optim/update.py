"""One step of an optimizer of `[optimizer]` (shardwise/optimizers) on this rank.

Three scalars come with the gradients: the learning rate, a number that all gradients are divided by, and
whether to skip the update. Clipping (divide by norm / limit), float16 loss scaling (divide by the scale) and
"a non-finite gradient never touches a weight" thus cost no pass over the gradients of their own, and no wait
for the device: the host learns what happened when it reads the step's metrics.

An update takes one of these ways:

- states in bfloat16 are updated in float32 and rounded by chance (optim/rounding.py);
- an optimizer with a fused kernel is given the tensors of many parameters at once;
- any other updates some million numbers at a time, by torch's operators;
- rows of sparse gradients, and weights that processes share, have a way of their own (optim/rows.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.pieces import Piece
from shardwise.optim.rows import update_rows
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.optimizers import Optimizer

CHUNK = 1 << 24
"""Numbers of a weight that torch's operators update at a time: what they write in between is not larger."""


@torch.no_grad()
def update(
    optimizer: ShardedOptimizer, lr: float, divide_by: Tensor, skip: Tensor, shared: bool = False
) -> None:
    """Make one step with gradients divided by `divide_by`; change nothing where `skip` is 1.

    Both are scalars, `skip` float32. `shared`: other processes update the same weights at the same time.
    """
    taken = update_rows(optimizer, lr, divide_by, skip, shared)
    device = next(
        (parameter.device for group in optimizer.param_groups for parameter in group["params"]), skip.device
    )
    # Offloaded parameters are updated on the host, which must wait for these two numbers; torch would not.
    scalars = _Scalars(lr, divide_by.to(device), skip.to(device))
    momenta = optimizer.momenta()
    for group in optimizer.param_groups:
        pieces = optimizer.pieces(group)
        decay = group["weight_decay"]
        summed = [piece for piece in pieces if piece.parameter in momenta]
        rest = [piece for piece in pieces if piece.parameter not in momenta]
        _update_by_operators(partial(optimizer.settings.update_from_momentum, decay=decay), summed, scalars)
        _update_from_gradients(optimizer, rest, decay, scalars)
    for parameter, gradient in taken.items():
        parameter.grad = gradient


@dataclass(frozen=True)
class _Scalars:
    """What an update is given beside the tensors."""

    lr: float
    divide_by: Tensor
    skip: Tensor


def _update_from_gradients(
    optimizer: ShardedOptimizer, pieces: list[Piece], decay: float, scalars: _Scalars
) -> None:
    settings = optimizer.settings
    if not pieces:
        return
    if optimizer.rounding is not None:
        optimizer.rounding.update(settings, pieces, decay, scalars.lr, scalars.divide_by, scalars.skip)
    elif settings.fused:
        _update_by_kernel(settings, pieces, decay, scalars)
    else:
        torch._foreach_add_([piece.step for piece in pieces], 1 - scalars.skip)
        _update_by_operators(partial(settings.update, decay=decay), pieces, scalars)


def _update_by_kernel(settings: Optimizer, pieces: list[Piece], decay: float, scalars: _Scalars) -> None:
    divide_by, skip = scalars.divide_by, scalars.skip
    weights, gradients = [piece.weight for piece in pieces], [piece.gradient for piece in pieces]
    if divide_by.dtype == torch.float64:  # a kernel would read it as float32, which a proof would notice
        torch._foreach_div_(gradients, torch.where(skip > 0, 1.0, divide_by))
        divide_by = torch.ones_like(skip)
    slots = [[piece.slots[index] for piece in pieces] for index in range(len(settings.slots))]
    steps = [piece.step for piece in pieces]
    settings.update_fused(
        weights, gradients, slots, steps, lr=scalars.lr, decay=decay, divide_by=divide_by, skip=skip
    )


def _update_by_operators(rule: Callable[..., Any], pieces: list[Piece], scalars: _Scalars) -> None:
    """Update pieces in place by a rule that returns new tensors; the steps are counted already."""
    for piece in pieces:
        step = piece.step.clamp(min=1).double()
        for weight, gradient, *slots in piece.chunks(CHUNK):
            found, states = rule(weight, gradient / scalars.divide_by, slots, lr=scalars.lr, step=step)
            for tensor, new in zip((weight, *slots), (found, *states), strict=True):
                torch.where(scalars.skip > 0, tensor, new, out=tensor)
