"""Compressed sums that are broken: workers run these in place of the honest task."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from shardwise.codecs.blocks import BlockCodec
from shardwise.comm.weight_gathers import EncodedGather, SecondaryShard
from shardwise.proof.compressed_step import measure_compressed


def residual_forgotten(*arguments: Any) -> Any:
    """What was left out is thrown away."""
    honest = BlockCodec.encode_rows

    def encode(self: BlockCodec, rows: Tensor, seed: int, take: bool) -> Tensor:
        wire = honest(self, rows, seed, take)
        if take:
            rows.zero_()
        return wire

    with patch.object(BlockCodec, "encode_rows", encode):
        return measure_compressed(*arguments)


def ranks_decode_differently(*arguments: Any) -> Any:
    """One rank reads another scale."""
    honest, rank = BlockCodec.decode_rows, arguments[0].rank

    def decode(self: BlockCodec, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        honest(self, wire, rows, seed, add)
        if rank == 1 and not add:
            rows.mul_(1 + 1e-12)

    with patch.object(BlockCodec, "decode_rows", decode):
        return measure_compressed(*arguments)


def shards_stay_exact(*arguments: Any) -> Any:
    """Each rank computes with its own shard as it is, and with the decoded shards of others."""
    honest = EncodedGather.gather

    def gather(self: EncodedGather, output: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        exact = own.clone()  # FSDP2 gives a part of `output`
        honest(self, output, own, group)
        output.view(group.size(), -1)[group.rank()] = exact

    with patch.object(EncodedGather, "gather", gather):
        return measure_compressed(*arguments)


def backward_has_exact_weights(*arguments: Any) -> Any:
    """The copy for backward is the weights as they were before they were rounded, the same on all ranks."""
    honest = EncodedGather.gather, SecondaryShard.store
    exact: list[Tensor] = []

    def gather(self: EncodedGather, output: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        exact[:] = [output.new_empty(output.shape)]
        dist.all_gather_into_tensor(exact[0], own.contiguous(), group=group)
        honest[0](self, output, own, group)

    def store(self: SecondaryShard, gathered: Tensor, devices: int) -> None:
        honest[1](self, exact.pop() if exact else gathered, devices)

    with patch.object(EncodedGather, "gather", gather), patch.object(SecondaryShard, "store", store):
        return measure_compressed(*arguments)
