"""Top-k: of each 1,024 numbers the share with the largest magnitudes.

The largest of each block are sent, not the largest of all numbers. Otherwise weights with large gradients
would get every change, and others none; but the size of a gradient says little about how far AdamW moves its
weight. Places within a block also fit into 16 bits, and a GPU finds them in one pass.

Values are sent as bfloat16, followed by their places as int16. The largest numbers of each device are in
different places, so a sum has more numbers that are not zero, and three times the share is sent of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from shardwise.codecs.base import SPARSE_BLOCK, Argument, RowCodec, runs_kernels
from shardwise.codecs.blocks import cached_parts
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardwise.codecs import kernels
else:
    torch, kernels = LazyModule("torch"), LazyModule("shardwise.codecs.kernels")

SHARE_OF_SUMS = 3


@dataclass(frozen=True)
class TopK(RowCodec):
    """Sends the k largest numbers and their places: 4 k bytes."""

    name = "topk"
    argument = Argument(0.0, 1.0, whole=False, example="topk(0.01)")
    host_nanoseconds = (13.2, 1.1)
    gpu_share = 0.25

    def for_sums(self) -> TopK:
        """Return the codec with three times the share."""
        return TopK(min(1.0, SHARE_OF_SUMS * self.argument_value))

    @property
    def per_block(self) -> int:
        """Numbers that are sent of each block."""
        return ceil(self.argument_value * SPARSE_BLOCK)

    def wire_bytes(self, numbers: int) -> int:
        """Return two bytes for each value that is sent, and two for its place."""
        return 4 * self.per_block * -(-numbers // SPARSE_BLOCK)

    def encode_rows(self, rows: Tensor, seed: int, subtract: bool) -> Tensor:
        """Return the largest numbers of each block, and their places."""
        if runs_kernels(rows):
            wire = kernels.send_largest(rows, self.per_block, self.wire_bytes(rows.shape[1]))
            if subtract:
                kernels.put_largest(wire, rows, -1.0)
                rows.nan_to_num_(0.0, 0.0, 0.0)
            return wire
        wire = torch.empty(len(rows), self.wire_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device)
        values, places = self._split(wire)
        padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % SPARSE_BLOCK))
        blocks = padded.view(len(rows), -1, SPARSE_BLOCK)
        for part in cached_parts(len(rows), blocks.shape[1], SPARSE_BLOCK):
            magnitudes = blocks[:, part].abs().nan_to_num_(torch.inf, torch.inf)
            chosen = magnitudes.topk(places.shape[2], sorted=False).indices.sort().values
            places[:, part] = chosen.to(torch.int16)
            values[:, part] = blocks[:, part].gather(2, chosen).to(torch.bfloat16)
        if subtract:
            _add_in_places(values, places, rows, -1)
            if not values.isfinite().all():
                rows.nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def decode_rows(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        """Write or add the values in their places."""
        if not add:
            rows.zero_()
        if runs_kernels(rows):
            return kernels.put_largest(wire, rows, 1.0)
        return _add_in_places(*self._split(wire), rows, 1)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the values and of the places, both (rows, blocks, sent)."""
        values, places = wire.view(torch.int16).chunk(2, dim=1)
        shape = len(wire), -1, self.per_block
        return values.view(torch.bfloat16).view(shape), places.view(shape)


def _add_in_places(values: Tensor, places: Tensor, rows: Tensor, sign: int) -> None:
    """Add values in their places, or subtract them. The padding of the last block has no place, and is 0."""
    starts = torch.arange(places.shape[1], device=rows.device).unsqueeze(1) * SPARSE_BLOCK
    for row, value, place in zip(rows, values, places, strict=True):
        indices = (place + starts).flatten()
        inside = torch.where(indices < len(row), indices, 0)
        row.index_add_(0, inside, value.flatten().to(row.dtype), alpha=sign)
