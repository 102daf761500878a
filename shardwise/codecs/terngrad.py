"""TernGrad (Wen et al. 2017): -1, 0 or 1 times the block's scale, by chance.

The scale is the block's largest magnitude, or 2.5 deviations if that is less: else one large number makes
noise of all others.
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

CLIP = 2.5
"""Deviations of its block beyond which a number is cut off."""


@dataclass(frozen=True)
class TernGrad(Multiples):
    """Rounds each number by chance to one of three values: n / 4 bytes and the scales."""

    name = "terngrad"
    sends = "-1, 0 or 1 times 2.5 deviations of its block, by chance"
    kind = "drawn"
    clip = CLIP
    host_nanoseconds = (22.6, 5.3)  # without feedback, as it has none

    @property
    def gpu_share(self) -> float:
        """Measured on an H200 with 268 M numbers."""
        return 0.64

    @property
    def bits(self) -> int:
        """Number of bits of a code: 2."""
        return 2

    @property
    def shrinks_errors(self) -> bool:
        """The error exceeds the gradient; it averages out over steps instead."""
        return False

    def scale(self, magnitudes: Tensor, sizes: Tensor) -> Tensor:
        """Return the largest magnitude, or CLIP deviations if that is less."""
        largest = super().scale(magnitudes, sizes)
        # Relative to the largest: the square of a small number would be zero.
        relative = (magnitudes / torch.where(largest > 0, largest, 1.0)).float()
        deviation = (relative.square().sum(-1, keepdim=True) / sizes).sqrt()
        return largest * (CLIP * deviation).clamp(max=1.0)
