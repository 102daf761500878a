"""bfloat16: each number rounded to bfloat16, which has the range of float32 and needs no scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.codecs.base import RowCodec
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class BFloat16(RowCodec):
    """Rounds each number to bfloat16: 2 n bytes."""

    name = "bfloat16"
    host_nanoseconds = (2.9, 0.7)
    gpu_share = 0.67

    def wire_bytes(self, numbers: int) -> int:
        """Return two bytes a number."""
        return 2 * numbers

    def encode_rows(self, rows: Tensor, seed: int, subtract: bool) -> Tensor:
        """Return the rows rounded to bfloat16."""
        rounded = rows.to(torch.bfloat16)
        if subtract:
            rows.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0)
        return rounded.view(torch.uint8)

    def decode_rows(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        """Decode rows of bfloat16 numbers."""
        rounded = wire.view(torch.bfloat16)
        rows.add_(rounded) if add else rows.copy_(rounded)
