"""The part of a parameter that a rank updates, with its gradient and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Piece:
    """This rank's numbers of a parameter, its gradient and the optimizer's state, as plain tensors."""

    parameter: nn.Parameter
    weight: Tensor
    gradient: Tensor
    slots: tuple[Tensor, ...]
    scalars: tuple[Tensor, ...]
    """The single numbers that the optimizer keeps for the parameter, the same on every rank."""
    step: Tensor
    """Number of steps done, a float32 scalar."""

    def chunks(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield (weight, gradient, slots…) in chunks of `size` numbers, or as a whole if a tensor is not
        contiguous."""
        tensors = (self.weight, self.gradient, *self.slots)
        if self.weight.numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
            yield tensors
            return
        yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)
