"""TernGrad (Wen et al. 2017): numbers are rounded at random to -1, 0 or 1 times the block's scale.

The scale is the block's largest magnitude, or 2.5 standard deviations if that is less. Otherwise one large
number would leave only noise of all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.codecs.blocks import Multiples
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class TernGrad(Multiples):
    """Rounds each number at random to one of three values: n / 4 bytes and the scales."""

    name = "terngrad"
    kind = "drawn"
    clip = 2.5
    host_nanoseconds = (22.6, 5.3)  # without feedback, as it has none
    gpu_share = 0.64
    bits = 2
    shrinks_errors = False  # errors are larger than the gradient; they average out over steps instead

    def scale(self, magnitudes: Tensor, sizes: Tensor) -> Tensor:
        """Return the largest magnitude, or `clip` standard deviations if that is less."""
        largest = super().scale(magnitudes, sizes)
        # Relative to the largest, because the square of a small number would be zero.
        relative = (magnitudes / torch.where(largest > 0, largest, 1.0)).float()
        deviation = (relative.square().sum(-1, keepdim=True) / sizes).sqrt()
        return largest * (self.clip * deviation).clamp(max=1.0)
