"""Updates of the rows that a sparse gradient has, and of weights that several processes share.

**Rows.** A batch looks up some rows of a table (`nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`), and
only these have a gradient. A dense gradient would be zeros elsewhere, and an update of the whole table would
take time in proportion to the table. Here weights and states of the other rows do not change: their momenta
do not decay while no batch looks them up, as in torch's SparseAdam. The result differs from the dense update,
but the cost depends on the batch only. Gradients arrive coalesced: each row once, in order.

**Shared.** Where several processes update the same tensors without a lock, each adds its change, so that what
another process adds meanwhile is not lost. The optimizer has a rule for it (`update_shared`), because it may
read one state before another process's update and a second state after it. Several passes over a dense
gradient take the place of the one pass of a fused kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.optim.sharded import ShardedOptimizer


@torch.no_grad()
def update_rows(
    optimizer: ShardedOptimizer, lr: float, divide_by: Tensor, skip: Tensor, shared: bool = False
) -> dict[nn.Parameter, Tensor]:
    """Make one update of all parameters with sparse gradients, and of the others too if weights are `shared`;
    change nothing if `skip` is 1. The gradients are removed from the parameters and returned."""
    gradients = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and (parameter.grad.is_sparse or shared):
                if not skip:  # reading it costs no extra wait: the host has waited for the number of rows
                    rate, decay = lr * group["lr_factor"], group["weight_decay"]
                    _update(optimizer, parameter, rate, decay, divide_by, shared)
                gradients[parameter], parameter.grad = parameter.grad, None
    return gradients


def _update(
    optimizer: ShardedOptimizer,
    parameter: nn.Parameter,
    lr: float,
    decay: float,
    divide_by: Tensor,
    shared: bool,
) -> None:
    gradient, state, settings = parameter.grad, optimizer.state_of(parameter), optimizer.settings
    assert gradient is not None, "the caller has checked"
    rows = gradient.indices()[0] if gradient.is_sparse else None  # None: all rows
    values = (gradient.values() if gradient.is_sparse else gradient) / divide_by.to(parameter.dtype)
    state["step"] += 1
    tensors = [parameter.detach(), *(state[slot] for slot in settings.slots)]
    weight, *slots = (_read(tensor, rows) for tensor in tensors)
    numbers = [state[name] for name in settings.scalars]
    rule = settings.update_shared if shared else settings.update
    moved, new = rule(weight, values, [*slots, *numbers], lr=lr, decay=decay, step=state["step"].double())
    for tensor, before, after in zip(tensors, (weight, *slots), (moved, *new), strict=False):
        _add(tensor, rows, after - before)
    for number, after in zip(numbers, new[len(slots) :], strict=True):
        number.copy_(after)


def _read(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor.clone() if rows is None else tensor.index_select(0, rows)


def _add(tensor: Tensor, rows: Tensor | None, change: Tensor) -> None:
    tensor.add_(change) if rows is None else tensor.index_add_(0, rows, change)
