"""Gathers of sharded weights that send fewer bytes: ZeRO++ (Wang et al. 2023).

ZeRO-3 gathers all weights twice in each micro-batch, in forward and in backward, and its sums of gradients
send as many bytes again. Each of the three can be reduced by itself:

    forward    weights are sent in blocks of a few bits (qwZ): layout.weight_compression
    backward   every node holds a second copy of the weights, sharded over its devices, and gathers from that
               copy (hpZ): layout.backward_shards
    gradients  each row goes to its device in blocks of a few bits (qgZ): layout.compression
               (comm/compressed_sums.py)

All devices compute with the decoded weights, also of their own shard, so all have the same weights. The
optimizer holds the exact ones, so weights need no residuals: the next step rounds the exact weight anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codecs import RowCodec
from shardwise.comm.comm import Comm
from shardwise.comm.gloo import all_gather
from shardwise.config.compression import WeightGathers
from shardwise.models.float8_products import E4M3, ScaledProduct, cast
from shardwise.models.torch_dtypes import wide


@dataclass(frozen=True)
class GatherSettings:
    """How a model's weights are gathered."""

    how: WeightGathers
    names: frozenset[str]
    """Names of the parameters that may be encoded."""


class EncodedGather:
    """Gathers a unit's weights in one message: matrices encoded, the others exact."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        codec: RowCodec,
        names: frozenset[str],
        pieces: Mapping[str, torch.Size],
    ) -> None:
        self.comm, self.axis, self.codec = comm, axis, codec
        self.sizes = [shape.numel() for shape in pieces.values()]
        self.is_encoded = [name in names for name in pieces]

    def gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Gather the shards of all devices into `output` (devices x numbers)."""
        matrices, exact = self._parts(shard.view(1, -1))
        encoded = self.codec.encode(matrices, 0)
        message = torch.cat((encoded, exact.view(torch.uint8)), dim=1)
        gathered = message.new_empty(group.size(), message.shape[1])
        with self.comm.collective("all_gather", self.axis, gathered, plain=output):
            all_gather(gathered.flatten(), message.flatten(), group, self.comm.mesh.worker)
        decoded = matrices.new_empty(group.size(), matrices.shape[1])
        self.codec.decode(gathered[:, : encoded.shape[1]].contiguous(), decoded, 0)
        others = exact.new_empty(group.size(), exact.shape[1])
        others.view(torch.uint8).copy_(gathered[:, encoded.shape[1] :])
        sources = {True: iter(self._split(decoded, True)), False: iter(self._split(others, False))}
        parts = output.view(group.size(), -1).split_with_sizes(self.sizes, dim=1)
        for is_encoded, part in zip(self.is_encoded, parts, strict=True):
            part.copy_(next(sources[is_encoded]))

    def _parts(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers to encode, in float32 or better, and the others."""
        parts = list(zip(self.is_encoded, numbers.split_with_sizes(self.sizes, dim=1), strict=True))
        empty = numbers[:, :0]
        matrices, exact = (
            torch.cat([empty, *(part for is_encoded, part in parts if is_encoded is kind)], dim=1)
            for kind in (True, False)
        )
        return matrices.to(torch.promote_types(matrices.dtype, torch.float32)), exact

    def _split(self, numbers: Tensor, encoded: bool) -> tuple[Tensor, ...]:
        sizes = [size for kind, size in zip(self.is_encoded, self.sizes, strict=True) if kind is encoded]
        return numbers.split_with_sizes(sizes, dim=1)


class Float8Gather:
    """Gathers a unit's weights in one message: those that are multiplied in float8 as 8 bits, the others
    exact. Casting a received weight again gives the sent bits, so products equal those of a device that holds
    whole weights."""

    def __init__(
        self, comm: Comm, axis: str, pieces: Sequence[torch.Size], products: Sequence[ScaledProduct | None]
    ) -> None:
        self.comm, self.axis, self.products = comm, axis, products
        self.sizes = [shape.numel() for shape in pieces]

    def gather(self, output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> None:
        """Gather the shards of all devices into `output` (devices x numbers)."""
        scales = [
            None if product is None or product.plain else product.weight.value for product in self.products
        ]
        # Single bytes come last, so that the wider numbers before them stay aligned.
        order = sorted(range(len(scales)), key=lambda index: scales[index] is not None)
        parts = shard.split_with_sizes(self.sizes)
        coded = [_to_bytes(parts[index], scales[index]) for index in order]
        message = torch.cat(coded)
        gathered = message.new_empty(group.size(), message.numel())
        with self.comm.collective("all_gather", self.axis, gathered, plain=output):
            all_gather(gathered.flatten(), message, group, self.comm.mesh.worker)
        rows = dict(zip(order, gathered.split_with_sizes([len(part) for part in coded], dim=1), strict=True))
        for index, part in enumerate(output.view(group.size(), -1).split_with_sizes(self.sizes, dim=1)):
            _from_bytes(rows[index], scales[index], part)


def _to_bytes(numbers: Tensor, scale: Tensor | None) -> Tensor:
    return (numbers if scale is None else cast(numbers, scale, E4M3)).contiguous().view(torch.uint8)


def _from_bytes(rows: Tensor, scale: Tensor | None, into: Tensor) -> None:
    if scale is None:
        into.copy_(rows.contiguous().view(into.dtype))
    else:
        into.copy_(rows.contiguous().view(E4M3).to(wide(into.dtype)) / scale)


class SecondaryShard:
    """This device's shard of the second copy of a unit's weights, which the devices of a node hold from
    forward to backward."""

    def __init__(self, comm: Comm, axis: str, group: dist.ProcessGroup) -> None:
        self.comm, self.axis, self.group = comm, axis, group
        self._shard: Tensor | None = None

    def store(self, gathered: Tensor, devices: int) -> None:
        """Store this device's share of the gathered weights: every n-th row, where the node has n devices."""
        n = self.group.size()
        shard = gathered.view(devices // n, n, -1)[:, self.group.rank()]
        self._shard = shard.clone() if self._shard is None else self._shard.copy_(shard)

    def gather(self, output: Tensor, devices: int) -> None:
        """Gather the weights of all devices, as forward had them, into `output`."""
        assert self._shard is not None, "backward follows a forward"
        n = self.group.size()
        gathered = output.new_empty(n, *self._shard.shape)
        with self.comm.collective("all_gather", self.axis, gathered):
            all_gather(gathered.flatten(), self._shard.flatten(), self.group, self.comm.mesh.worker)
        output.view(devices // n, n, -1).copy_(gathered.transpose(0, 1))
