"""Random-k: a share of the numbers, drawn again in each step. The row is cut into k equal stretches, and one
number of each is sent.

All devices draw the same places, so no places are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardwise.codecs.base import Argument, RowCodec, runs_kernels
from shardwise.codecs.chance import chance
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardwise.codecs import kernels
else:
    torch, kernels = LazyModule("torch"), LazyModule("shardwise.codecs.kernels")


@dataclass(frozen=True)
class RandomK(RowCodec):
    """Sends k numbers from random places as float32: 4 k bytes."""

    name = "randomk"
    argument = Argument(0.0, 1.0, whole=False, example="randomk(0.01)")
    same_draws_everywhere = True
    host_nanoseconds = (2.3, 1.9)
    gpu_share = 0.60

    def wire_bytes(self, numbers: int) -> int:
        """Return four bytes for each number that is sent."""
        return 4 * self._sent(numbers)

    def _sent(self, numbers: int) -> int:
        return min(numbers, max(1, ceil(self.argument_value * numbers))) if numbers else 0

    def encode_rows(self, rows: Tensor, seed: int, subtract: bool) -> Tensor:
        """Draw places, and return the numbers there."""
        total = rows.sum(1)
        if runs_kernels(rows):
            sent = kernels.send_drawn(rows, self._sent(rows.shape[1]), seed, subtract)
        else:
            places = self._places(rows, seed)
            sent = rows[:, places].float()
            if subtract:
                rows[:, places] -= sent.to(rows.dtype)
        if subtract and not total.isfinite().all():
            rows.nan_to_num_(0.0, 0.0, 0.0)
        sent[:, 0] += total * 0  # NaN if the row overflowed anywhere, so that every device sees it
        return sent.view(torch.uint8)

    def decode_rows(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        """Write or add the numbers in the same places."""
        if not add:
            rows.zero_()
        if runs_kernels(rows):
            kernels.put_drawn(wire.view(torch.float32), rows, seed)
        else:
            rows[:, self._places(rows, seed)] += wire.view(torch.float32).to(rows.dtype)

    def _places(self, rows: Tensor, seed: int) -> Tensor:
        numbers = rows.shape[1]
        sent = self._sent(numbers)
        ends = torch.arange(sent + 1, device=rows.device) * numbers // sent
        drawn = chance(torch.arange(sent, device=rows.device, dtype=torch.int32), seed)
        return ends[:-1] + (drawn.double() * (ends[1:] - ends[:-1])).long()
