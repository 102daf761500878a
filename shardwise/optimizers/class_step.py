"""One step of a torch.optim class on pieces of weights, with the state that the run holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError

CHUNK = 1 << 24
"""Number of elements that are updated at a time, which limits the temporary memory of torch's operators."""
INSTEAD = "Use an element-wise class, such as torch.optim.AdamW, NAdam, RAdam, Adamax, RMSprop or Adagrad"


@dataclass
class Piece:
    """Some numbers of one weight, with their gradient and state."""

    weight: Tensor
    gradient: Tensor
    slots: Sequence[Tensor]
    scalars: Sequence[float]
    done: int
    """Number of steps that the weight has made."""

    def parts(self) -> Iterator[Piece]:
        """Yield the piece in parts of at most CHUNK elements, or as a whole if a tensor is not contiguous."""
        tensors = (self.weight, self.gradient, *self.slots)
        if self.weight.numel() <= CHUNK or not all(tensor.is_contiguous() for tensor in tensors):
            yield self
            return
        parts = (torch.split(tensor.view(-1), CHUNK) for tensor in tensors)
        for weight, gradient, *slots in zip(*parts, strict=True):
            yield Piece(weight, gradient, slots, self.scalars, self.done)


def chunks(pieces: Sequence[Piece]) -> Iterator[list[tuple[int, Piece]]]:
    """Yield lists of parts of about CHUNK elements together, each with the number of its piece."""
    chunk: list[tuple[int, Piece]] = []
    size = 0
    for index, piece in enumerate(pieces):
        for part in piece.parts():
            if chunk and size + part.weight.numel() > CHUNK:
                yield chunk
                chunk, size = [], 0
            chunk.append((index, part))
            size += part.weight.numel()
    if chunk:
        yield chunk


@dataclass(frozen=True)
class States:
    """What a class keeps for each parameter."""

    slots: dict[str, str | None] = field(default_factory=dict)
    """The tensors of the parameter's shape by name, each with its dtype; None: that of the parameter."""
    scalars: dict[str, type | torch.dtype] = field(default_factory=dict)
    """The single numbers by name: tensors without a dim, with their dtype, or Python numbers, with their
    type."""
    step: type | torch.dtype | None = None
    """How the class keeps the number of steps; None: it does not."""


@dataclass(frozen=True)
class ClassStep:
    """A class with its settings and states, which updates pieces of weights."""

    kind: type[torch.optim.Optimizer]
    settings: Mapping[str, Any]
    """The keywords that it is made with, without the learning rate."""
    states: States
    decays: bool
    """Whether the class has a weight decay."""

    def made(self, parameters: Any, lr: float = 1e-3) -> torch.optim.Optimizer:
        """Return an optimizer of the class."""
        return make(self.kind, parameters, self.settings, lr)

    def update(self, pieces: Sequence[Piece], lr: float, decay: float) -> list[list[float]]:
        """Update pieces in place by one step of an optimizer that is made for it, and return the new scalars
        of each."""
        parameters = [nn.Parameter(_some(piece.weight)) for piece in pieces]
        group = {"params": parameters, **({"weight_decay": decay} if self.decays else {})}
        optimizer = self.made([group])
        optimizer.param_groups[0]["lr"] = lr
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = _some(piece.gradient)
            if piece.done:
                optimizer.state[parameter] = self._state(piece)
        optimizer.step()
        return [
            self._take(piece, parameter, optimizer.state.get(parameter, {}))
            for parameter, piece in zip(parameters, pieces, strict=True)
        ]

    def _state(self, piece: Piece) -> dict[str, object]:
        """Return the state of a piece as the class keeps it."""
        states, device = self.states, self._device_of_numbers(piece)
        state: dict[str, object] = dict(zip(states.slots, map(_some, piece.slots), strict=True))
        for (name, form), value in zip(states.scalars.items(), piece.scalars, strict=True):
            state[name] = _number(value, form, device)
        if states.step is not None:
            state["step"] = _number(piece.done, states.step, device)
        return state

    def _device_of_numbers(self, piece: Piece) -> torch.device:
        """Return the device on which the class expects single numbers: the host, but for fused kernels."""
        on_device = self.settings.get("fused") or self.settings.get("capturable")
        return piece.weight.device if on_device else torch.device("cpu")

    def _take(self, piece: Piece, parameter: nn.Parameter, state: Mapping[str, Any]) -> list[float]:
        """Copy to the piece what the class has replaced and not changed in place; return the scalars."""
        found = {name for name, value in state.items() if value is not None} - {"step"}
        if found != {*self.states.slots, *self.states.scalars}:
            raise UserError(
                f"{self.kind.__name__} keeps {', '.join(sorted(found)) or 'nothing'} for a weight of shape "
                f"{tuple(parameter.shape)}, and kept {', '.join((*self.states.slots, *self.states.scalars))} "
                f"in its trial. {INSTEAD}"
            )
        if piece.weight.numel():
            new = [parameter.detach(), *(state[name] for name in self.states.slots)]
            for old, tensor in zip((piece.weight, *piece.slots), new, strict=True):
                if old.data_ptr() != tensor.data_ptr():
                    old.copy_(tensor.view_as(old))
        return [float(state[name]) for name in self.states.scalars]


def _some(tensor: Tensor) -> Tensor:
    """Return the tensor, and a zero in place of an empty one, whose single numbers have to advance too."""
    return tensor if tensor.numel() else tensor.new_zeros(1)


def _number(value: float, form: type | torch.dtype, device: torch.device) -> object:
    return torch.tensor(value, dtype=form, device=device) if isinstance(form, torch.dtype) else form(value)


def make(
    kind: type[torch.optim.Optimizer], parameters: Any, settings: Mapping[str, Any], lr: float = 1e-3
) -> torch.optim.Optimizer:
    """Return an optimizer of this class."""
    return kind(parameters, lr=lr, **settings)  # type: ignore[call-arg]
