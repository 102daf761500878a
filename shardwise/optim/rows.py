"""AdamW on the rows that a sparse gradient has, and AdamW on weights that others change meanwhile.

**Rows.** A batch looks up some rows of a table (`nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`), and
only these have a gradient. A dense one would be zeros elsewhere, and an update of the whole table would take
as long as the table is large. Here weights and moments of the other rows stay as they are: their moments do
not decay while nobody looks them up, as in torch's SparseAdam. That is not AdamW to the bit, but costs what
the batch costs. Gradients come coalesced: each row once, in order.

**Shared.** Where several processes update the same tensors without a lock, each number is changed by adding
to it, so that what another adds meanwhile stays. But a first moment may then be read that has another's
gradient in it with a second moment that has not. Where the second is near zero, because nobody had looked up
that row before, their quotient would be a step of any size: one such row, and the run is lost. No history of
gradients makes the quotient larger than

    |first| / sqrt(second) <= (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2))

(Cauchy-Schwarz over the two weighted sums), so the first moment is cut to that. Moments that belong together
are never cut. That takes several passes over a dense gradient where the fused kernel takes one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def update_rows(
    optimizer: torch.optim.AdamW, divide_by: Tensor, skip: Tensor, shared: bool = False
) -> dict[nn.Parameter, Tensor]:
    """One update of all parameters with sparse gradients, and of all others too where they are `shared`; no
    change where `skip` is 1. The gradients are taken off the parameters and returned."""
    taken = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and (parameter.grad.is_sparse or shared):
                if not skip:  # to know which rows there are, one has waited for the device already
                    _update(
                        group, parameter, parameter.grad, divide_by, _moments(optimizer, parameter), shared
                    )
                taken[parameter], parameter.grad = parameter.grad, None
    return taken


def _moments(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state.update({moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")})
    return state


def _update(
    group: dict[str, Any],
    weight: Tensor,
    gradient: Tensor,
    divide_by: Tensor,
    state: dict[str, Tensor],
    shared: bool,
) -> None:
    beta1, beta2 = group["betas"]
    rows = gradient.indices()[0] if gradient.is_sparse else None  # None: all of them
    numbers = (gradient.values() if gradient.is_sparse else gradient) / divide_by.to(weight.dtype)
    state["step"] += 1
    steps = float(state["step"])
    first = _move(state["exp_avg"], rows, numbers, 1 - beta1)
    second = _move(state["exp_avg_sq"], rows, numbers.square(), 1 - beta2)
    if shared:
        most = second.clamp_(min=0).sqrt().mul_(largest_quotient(beta1, beta2))
        first = first.clamp_(-most, most)
    size = second.div_(1 - beta2**steps).sqrt_().add_(group["eps"])
    change = first.div_(size).mul_(-group["lr"] / (1 - beta1**steps))
    if group["weight_decay"]:
        change.sub_(_read(weight, rows), alpha=group["lr"] * group["weight_decay"])
    _add(weight, rows, change)


def _move(moment: Tensor, rows: Tensor | None, target: Tensor, share: float) -> Tensor:
    """Move the rows of a moment by this share of the way to their target; returns what they are then, if
    nobody else writes."""
    before = _read(moment, rows)
    change = (target - before).mul_(share)
    _add(moment, rows, change)
    return before.add_(change)


def _read(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor.detach().clone() if rows is None else tensor.detach().index_select(0, rows)


def _add(tensor: Tensor, rows: Tensor | None, change: Tensor) -> None:
    tensor.add_(change) if rows is None else tensor.index_add_(0, rows, change)


def largest_quotient(beta1: float, beta2: float) -> float:
    """Of a first moment and the root of the second, whatever the gradients were."""
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 else math.inf
