"""What a rank holds of a parameter when it is updated."""

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
    step: Tensor
    """The number of steps done, a float32 scalar."""

    def chunks(self, size: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield (weight, gradient, slots…) of so many numbers at a time; all at once where they do not lie
        one after the other."""
        tensors = (self.weight, self.gradient, *self.slots)
        if self.weight.numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
            yield tensors
            return
        yield from zip(*(torch.split(tensor.view(-1), size) for tensor in tensors), strict=True)
