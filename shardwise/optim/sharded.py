"""This rank's part of an optimizer: its state, and the pieces of parameters that an update changes.

An optimizer treats each number of a weight independently, so an update needs only this rank's pieces of
DTensors. DTensor's dispatch would take half a second for this in the first step, and milliseconds in each.

Decay applies to matrices only, not to embeddings, norms and biases, unless a group of the job says otherwise
(optimizers/groups.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm import CompressedAxisSum, Momentum
from shardwise.optim.norm import local
from shardwise.optim.pieces import Piece
from shardwise.optim.rounding import Rounding, Slices
from shardwise.optimizers import Optimizer

Group = dict[str, object]
"""A parameter group of torch: "params", "weight_decay" and "lr_factor"."""


class ShardedOptimizer(torch.optim.Optimizer):
    """Holds the optimizer's state for this rank's parameters. The function `optim.update` makes the steps."""

    def __init__(self, groups: list[Group], settings: Optimizer, rounding: Rounding | None = None) -> None:
        """`rounding` must be given where states are bfloat16."""
        super().__init__(groups, {"weight_decay": 0.0, "lr_factor": 1.0})
        self.settings, self.rounding = settings, rounding
        self._compressors: list[CompressedAxisSum] = []
        self._compressed: set[nn.Parameter] = set()

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the state of a parameter, which is created as zeros at the first call."""
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state.update({slot: self._zeros(parameter, slot) for slot in self.settings.slots})
            for name in self.settings.scalars:
                state[name] = torch.zeros((), dtype=torch.float64, device=parameter.device)
        return state

    def _zeros(self, parameter: nn.Parameter, slot: str) -> Tensor:
        dtype = self.settings.slot_dtype(slot)
        return torch.zeros_like(parameter.detach(), dtype=None if dtype is None else getattr(torch, dtype))

    def register(self, compressor: CompressedAxisSum, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let a compressor sum momenta instead of gradients if the optimizer has a `summed_momentum`. Call
        this before the first step."""
        momentum = self.settings.summed_momentum
        if momentum is None:
            return
        self._compressors.append(compressor)
        self._compressed |= {parameters[name] for name in compressor.names}
        slot = momentum.slot
        compressor.momentum = Momentum(momentum.decay, lambda name: local(self.state[parameters[name]][slot]))

    def with_summed_momenta(self) -> set[nn.Parameter]:
        """Return the parameters whose `grad` holds a summed momentum in this step."""
        return self._compressed if any(compressor.active for compressor in self._compressors) else set()

    def pieces(self, parameters: Iterable[nn.Parameter]) -> list[Piece]:
        """Return this rank's piece of each of these parameters that has a gradient."""
        return [
            self._piece(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None
        ]

    def _piece(self, parameter: nn.Parameter, gradient: Tensor) -> Piece:
        state = self.state_of(parameter)
        slots = tuple(local(state[slot]) for slot in self.settings.slots)
        scalars = tuple(state[name] for name in self.settings.scalars)
        values = local(_split_as(parameter, gradient))
        return Piece(parameter, local(parameter), values, slots, scalars, state["step"])


def make_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    settings: Optimizer,
    seed: int = 0,
    embeddings: Collection[str] = (),
    slices_of: Callable[[Tensor], Slices] | None = None,
) -> ShardedOptimizer:
    """Return the optimizer of these parameters without the frozen ones.

    `embeddings` are the names of embedding weights, which do not decay. `slices_of` returns this rank's slice
    of a parameter; None: ranks hold whole parameters. `seed` is that of stochastic rounding.
    """
    names = {parameter: name for name, parameter in named}
    rounding = None
    if any(parameter.dtype == torch.bfloat16 for parameter in names):
        slices = {parameter: (slices_of or _whole)(parameter) for parameter in names}
        rounding = Rounding(names, slices, seed)
    return ShardedOptimizer(_groups(names, settings, embeddings), settings, rounding)


def _groups(
    names: Mapping[nn.Parameter, str], settings: Optimizer, embeddings: Collection[str]
) -> list[Group]:
    """Return the trained parameters as groups of one mesh, one decay and one factor on the learning rate
    each, as kernels require."""
    groups: dict[tuple[float, float, object], list[nn.Parameter]] = defaultdict(list)
    for parameter, name in names.items():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            decays = parameter.ndim >= 2 and name not in embeddings
            groups[*settings.group_of(name, decays), mesh].append(parameter)
    if not groups:  # all weights of a pipeline stage may be frozen
        return [{"params": []}]
    return [
        {"params": parameters, "weight_decay": decay, "lr_factor": factor}
        for (decay, factor, _), parameters in groups.items()
    ]


def _whole(tensor: Tensor) -> Slices:
    return tuple(slice(0, size) for size in tensor.shape)


def _split_as(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return the gradient with the placements of its parameter. torch 2.11 replicates a sum of uneven pieces
    on every rank, and the first numbers of it are not this rank's piece."""
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return gradient
    same = gradient.placements == parameter.placements
    return gradient if same else gradient.redistribute(placements=parameter.placements)
