"""Signs (Karimireddy et al. 2019): one bit for each number, and the mean magnitude of each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.codecs.blocks import BlockCodec
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Sends the sign of each number: n / 8 bytes and the scales."""

    name = "sign"
    kind = "sign"
    host_nanoseconds = (10.0, 5.0)
    gpu_share = 0.84
    bits = 1
    largest_code = 1.0

    def scale(self, magnitudes: Tensor, sizes: Tensor) -> Tensor:
        """Return the mean magnitude of each block."""
        return magnitudes.sum(-1, keepdim=True) / sizes

    def to_codes(self, scaled: Tensor, draws: Tensor | None) -> Tensor:
        """Return 1 for numbers that are not negative, else 0."""
        return (scaled >= 0).to(torch.uint8)

    def to_numbers(self, codes: Tensor) -> Tensor:
        """Return 1 for code 1, and -1 for code 0."""
        return codes.float().mul_(2).sub_(1)
