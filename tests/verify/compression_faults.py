"""Compressed sums that are broken: workers run these in place of the honest task."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from torch import Tensor

from shardwise.comm.codecs import Blockwise
from shardwise.verify.compressed import measure_compressed


def residual_forgotten(*arguments: Any) -> Any:
    """What was left out is thrown away."""
    honest = Blockwise._encode

    def encode(self: Blockwise, rows: Tensor, seed: int, take: bool) -> Tensor:
        wire = honest(self, rows, seed, take)
        if take:
            rows.zero_()
        return wire

    with patch.object(Blockwise, "_encode", encode):
        return measure_compressed(*arguments)


def ranks_decode_differently(*arguments: Any) -> Any:
    """One rank reads another scale."""
    honest, rank = Blockwise._decode, arguments[0].rank

    def decode(self: Blockwise, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        honest(self, wire, rows, seed, add)
        if rank == 1 and not add:
            rows.mul_(1 + 1e-12)

    with patch.object(Blockwise, "_decode", decode):
        return measure_compressed(*arguments)
