"""AdamW in one fused kernel, with clipping, loss scale and the non-finite guard inside it.

torch's fused AdamW takes two device scalars: it divides every gradient by `grad_scale`, and leaves weights
and moments alone where `found_inf` is 1. So clipping (divide by norm / limit), float16 loss scaling (divide
by the scale) and "a non-finite gradient never touches a weight" cost no pass over the gradients of their own,
and no wait for the device: the host learns what happened when it reads the step's metrics.

States in bfloat16 are updated and rounded by optim/rounding.py, rows of sparse gradients, and weights that
processes share, by optim/rows.py.

Decay is decoupled (Loshchilov & Hutter, 2019) and applies to matrices only; embeddings, norms and biases are
left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise._torch import LocalAdamW
from shardwise.config import Train
from shardwise.optim.norm import local
from shardwise.optim.onebit import OneBitAdam
from shardwise.optim.rounding import RoundedAdamW, Slices
from shardwise.optim.rows import update_rows


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    train: Train,
    embeddings: Collection[str] = (),
    held: Callable[[Tensor], Slices] | None = None,
) -> torch.optim.AdamW:
    """AdamW over parameters by name, with decay or without, and frozen ones left out; parameters on different
    meshes go through the kernel apart. `embeddings` are the names of tables of vectors, which are not
    decayed; `held` is the slice of a parameter that this rank has; None: all of it.
    """
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    names: dict[nn.Parameter, str] = {}
    for name, parameter in named:
        names[parameter] = name
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups[parameter.ndim >= 2 and name not in embeddings, mesh].append(parameter)
    ordered = sorted(groups.items(), key=lambda item: not item[0][0])  # those with decay first
    grouped = [
        {"params": params, "weight_decay": train.weight_decay if decayed else 0.0}
        for (decayed, _), params in ordered
    ]
    grouped = grouped or [
        {"params": [], "weight_decay": 0.0}
    ]  # all weights of a pipeline stage may be frozen
    options: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": train.betas,
        "eps": train.epsilon,
        "fused": True,
    }
    if any(parameter.dtype == torch.bfloat16 for parameter in names):
        slices = {parameter: (held or _whole)(parameter) for parameter in names}
        return RoundedAdamW(grouped, names, slices, train.seed, **options)
    return (OneBitAdam if train.optimizer == "1bit-adam" else LocalAdamW)(grouped, **options)


def _whole(tensor: Tensor) -> Slices:
    return tuple(slice(0, size) for size in tensor.shape)


def update(
    optimizer: torch.optim.AdamW, lr: float, divide_by: Tensor, skip: Tensor, shared: bool = False
) -> None:
    """One step with gradients divided by `divide_by`; no change at all where `skip` is 1. Both are scalars,
    `skip` float32. `shared`: other processes update the same weights at the same time."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    done = update_rows(optimizer, divide_by, skip, shared)
    if (
        divide_by.dtype == torch.float64
    ):  # the kernel would read it as float32, which a proof in float64 would notice
        _divide_gradients(optimizer, torch.where(skip > 0, 1.0, divide_by))
        divide_by = torch.ones_like(skip)
    device = next(
        (parameter.device for group in optimizer.param_groups for parameter in group["params"]), skip.device
    )
    # Offloaded parameters are updated on the host, which must wait for these two numbers; torch would not.
    optimizer.grad_scale = divide_by.to(device)  # type: ignore[attr-defined]
    optimizer.found_inf = skip.to(device)  # type: ignore[attr-defined]
    optimizer.step()
    for parameter, gradient in done.items():
        parameter.grad = gradient


def _divide_gradients(optimizer: torch.optim.AdamW, divide_by: Tensor) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if gradients := [local(parameter.grad) for parameter in parameters if parameter.grad is not None]:
        torch._foreach_div_(gradients, divide_by)
