"""One step of an optimizer of `[optimizer]` (shardwise/optimizers) on this rank.

Three scalars come with the gradients: the learning rate, a number that all gradients are divided by, and
whether to skip the update. So clipping (divide by norm / limit), float16 loss scaling (divide by the scale)
and skipping a step with a non-finite gradient cost no extra pass over the gradients and no wait for the
device: the host learns what happened when it reads the step's metrics.

There are four kinds of update:

- states in bfloat16 are updated in float32 and rounded at random (optim/rounding.py);
- an optimizer with a fused kernel gets the tensors of many parameters at once;
- any other optimizer updates some million numbers at a time with torch's operators;
- rows of sparse gradients, and weights that processes share, are updated by optim/rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from shardwise.optim.pieces import Piece
from shardwise.optim.rows import update_rows
from shardwise.optim.sharded import ShardedOptimizer
from shardwise.optimizers import Optimizer

CHUNK = 1 << 24
"""Number of elements that torch's operators update at a time, which limits their temporary memory."""


@torch.no_grad()
def update(
    optimizer: ShardedOptimizer, lr: float, divide_by: Tensor, skip: Tensor, shared: bool = False
) -> None:
    """Make one step with gradients divided by `divide_by`; change nothing if `skip` is 1.

    Both are scalars, `skip` in float32. With `shared`, other processes update the same weights concurrently.
    """
    updated = update_rows(optimizer, lr, divide_by, skip, shared)
    device = next(
        (parameter.device for group in optimizer.param_groups for parameter in group["params"]), skip.device
    )
    # Offloaded parameters are updated on the host, which must wait for these two numbers; torch does not.
    divide_by, skip = divide_by.to(device), skip.to(device)
    momenta = optimizer.with_summed_momenta()
    for group in optimizer.param_groups:
        pieces, decay = optimizer.pieces(group["params"]), group["weight_decay"]
        scalars = _Scalars(lr * group["lr_factor"], divide_by, skip)
        summed = [piece for piece in pieces if piece.parameter in momenta]
        others = [piece for piece in pieces if piece.parameter not in momenta]
        _update_by_operators(partial(optimizer.settings.update_from_momentum, decay=decay), summed, scalars)
        _update_from_gradients(optimizer, others, decay, scalars)
    for parameter, gradient in updated.items():
        parameter.grad = gradient


@dataclass(frozen=True)
class _Scalars:
    """The three scalars of an update."""

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
    if divide_by.dtype == torch.float64:  # a kernel reads it as float32, which is too coarse for a proof
        torch._foreach_div_(gradients, torch.where(skip > 0, 1.0, divide_by))
        divide_by = torch.ones_like(skip)
    states = [(*piece.slots, *piece.scalars) for piece in pieces]
    slots = [list(of_pieces) for of_pieces in zip(*states, strict=True)]
    steps = [piece.step for piece in pieces]
    settings.update_fused(
        weights, gradients, slots, steps, lr=scalars.lr, decay=decay, divide_by=divide_by, skip=skip
    )


Rule = Callable[..., tuple[Tensor, Sequence[Tensor]]]
"""Takes (weight, gradient, slots, lr=, step=) and returns the new weight and slots."""


def _update_by_operators(rule: Rule, pieces: list[Piece], scalars: _Scalars) -> None:
    """Update pieces in place by a rule that returns new tensors; the caller has counted the step."""
    for piece in pieces:
        step, numbers = piece.step.clamp(min=1).double(), piece.scalars
        new_numbers: Sequence[Tensor] = numbers
        for weight, gradient, *slots in piece.chunks(CHUNK):
            states = [*slots, *numbers]
            new_weight, new = rule(weight, gradient / scalars.divide_by, states, lr=scalars.lr, step=step)
            _keep((weight, *slots), (new_weight, *new[: len(slots)]), scalars.skip)
            new_numbers = new[len(slots) :]  # the same for every chunk
        _keep(numbers, new_numbers, scalars.skip)


def _keep(tensors: Sequence[Tensor], new: Sequence[Tensor], skip: Tensor) -> None:
    for tensor, values in zip(tensors, new, strict=True):
        torch.where(skip > 0, tensor, values, out=tensor)
