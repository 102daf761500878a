"""float16: each number in 16 bits of floating point, scaled to its block's largest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.codecs.blocks import Floats
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class Float16(Floats):
    """Rounds each scaled number to float16: 2 n bytes and the scales."""

    name = "float16"
    kind = "float16"
    host_nanoseconds = (6.9, 2.5)
    gpu_share = 0.90
    bits = 16

    @property
    def dtype(self) -> torch.dtype:
        """Torch's dtype of the codes."""
        return torch.float16
