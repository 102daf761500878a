"""This rank's part of an optimizer: its state, and the pieces of parameters that an update changes.

An optimizer treats each number of a weight by itself, so a rank's pieces of DTensors are all that an update
needs; to find that out for itself DTensor would take half a second for the first step and some milliseconds
for each.

Decay applies to matrices only; embeddings, norms and biases are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Compressor, Momentum
from shardwise.optim.norm import local
from shardwise.optim.pieces import Piece
from shardwise.optim.rounding import Rounding, Slices
from shardwise.optimizers import Optimizer


class ShardedOptimizer(torch.optim.Optimizer):
    """Holds the optimizer's state of this rank's parameters. `update` makes the steps."""

    def __init__(
        self, groups: list[dict[str, Any]], settings: Optimizer, rounding: Rounding | None = None
    ) -> None:
        """`rounding` is given where states are bfloat16."""
        super().__init__(groups, {"weight_decay": 0.0})
        self.settings, self.rounding = settings, rounding
        self._compressors: list[Compressor] = []
        self._compressed: set[nn.Parameter] = set()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter; it is made, as zeros, where there is none yet."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({slot: torch.zeros_like(parameter.detach()) for slot in self.settings.slots})
        return state

    def follow(self, compressor: Compressor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let a compressor send momenta in place of gradients, if the optimizer sums those. To be called
        before the first step."""
        momentum = self.settings.summed_momentum
        if momentum is None:
            return
        self._compressors.append(compressor)
        self._compressed |= {parameters[name] for name in compressor.names}
        compressor.momentum = Momentum(
            momentum.decay, lambda name: local(self.state[parameters[name]][momentum.slot])
        )

    def momenta(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients are momenta from now on."""
        return self._compressed if any(compressor.active for compressor in self._compressors) else set()

    def pieces(self, group: dict[str, Any]) -> list[Piece]:
        """Return this rank's piece of each parameter of a group that has a gradient."""
        return [self._piece(parameter) for parameter in group["params"] if parameter.grad is not None]

    def _piece(self, parameter: nn.Parameter) -> Piece:
        state = self.state_of(parameter)
        slots = tuple(local(state[slot]) for slot in self.settings.slots)
        gradient = local(_split_as(parameter, parameter.grad))
        return Piece(parameter, local(parameter), gradient, slots, state["step"])


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    settings: Optimizer,
    seed: int = 0,
    embeddings: Collection[str] = (),
    held: Callable[[Tensor], Slices] | None = None,
) -> ShardedOptimizer:
    """Return the optimizer of these parameters, with decay or without, frozen ones left out.

    Parameters on different meshes are in different groups. `embeddings` are the names of tables of vectors,
    which are not decayed; `held` is the slice of a parameter that this rank has; None: all of it. `seed`
    decides how bfloat16 states are rounded.
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
        {"params": params, "weight_decay": settings.weight_decay if decayed else 0.0}
        for (decayed, _), params in ordered
    ]
    grouped = grouped or [{"params": []}]  # all weights of a pipeline stage may be frozen
    rounding = None
    if any(parameter.dtype == torch.bfloat16 for parameter in names):
        rounding = Rounding(names, {parameter: (held or _whole)(parameter) for parameter in names}, seed)
    return ShardedOptimizer(grouped, settings, rounding)


def _whole(tensor: Tensor) -> Slices:
    return tuple(slice(0, size) for size in tensor.shape)


def _split_as(parameter: Any, gradient: Any) -> Any:
    """Return the gradient split as its parameter is: torch 2.11 makes a sum of uneven pieces whole, on every
    rank, and its first numbers would be taken for the piece."""
    same = not isinstance(gradient, DTensor) or gradient.placements == parameter.placements
    return gradient if same else gradient.redistribute(placements=parameter.placements)
