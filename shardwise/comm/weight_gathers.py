"""How sharded weights are gathered with less on the wire: ZeRO++ (Wang et al. 2023).

ZeRO-3 gathers all weights twice in each micro-batch, in forward and in backward, and its sums of gradients
are as large again. Each third shrinks by itself:

    forward    weights are sent in blocks of a few bits (qwZ): layout.weight_compression
    backward   every node keeps a second copy of the weights, sharded over its own devices, and gathers from
               that copy (hpZ): layout.backward_shards
    gradients  each row goes to its device in blocks of a few bits (qgZ): layout.compression
               (comm/compressed_sums.py)

Devices compute with what arrived, their own shard too, so all have the same weights. The optimizer keeps the
exact ones, and what rounding leaves out of a weight is not carried on: the next step rounds the exact weight
anew.
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
    """Of the parameters that may be encoded."""


class EncodedGather:
    """Gathers a unit's weights: matrices encoded, the rest as it is, in one message."""

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
        self.large = [name in names for name in pieces]

    def gather(self, output: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """This device's numbers, and everybody's: (devices x numbers)."""
        large, small = self._parts(own.view(1, -1))
        encoded = self.codec.encode(large, 0)
        message = torch.cat((encoded, small.view(torch.uint8)), dim=1)
        gathered = message.new_empty(group.size(), message.shape[1])
        with self.comm.collective("all_gather", self.axis, gathered, plain=output):
            all_gather(gathered.flatten(), message.flatten(), group, self.comm.mesh.worker)
        rows = large.new_empty(group.size(), large.shape[1])
        self.codec.decode(gathered[:, : encoded.shape[1]].contiguous(), rows, 0)
        rest = small.new_empty(group.size(), small.shape[1])
        rest.view(torch.uint8).copy_(gathered[:, encoded.shape[1] :])
        ends = {True: iter(self._split(rows, True)), False: iter(self._split(rest, False))}
        parts = output.view(group.size(), -1).split_with_sizes(self.sizes, dim=1)
        for is_large, part in zip(self.large, parts, strict=True):
            part.copy_(next(ends[is_large]))

    def _parts(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """What is encoded, in float32 or better, and what is not."""
        parts = list(zip(self.large, numbers.split_with_sizes(self.sizes, dim=1), strict=True))
        empty = numbers[:, :0]
        large, small = (
            torch.cat([empty, *(part for each, part in parts if each is kind)], dim=1)
            for kind in (True, False)
        )
        return large.to(torch.promote_types(large.dtype, torch.float32)), small

    def _split(self, numbers: Tensor, large: bool) -> tuple[Tensor, ...]:
        sizes = [size for each, size in zip(self.large, self.sizes, strict=True) if each is large]
        return numbers.split_with_sizes(sizes, dim=1)


class Float8Gather:
    """Gathers a unit's weights: those that are multiplied in float8 in 8 bits, the rest as it is, in one
    message. What arrives, cast again, is what was sent, so the products are those of a device that has the
    weights whole."""

    def __init__(
        self, comm: Comm, axis: str, pieces: Sequence[torch.Size], products: Sequence[ScaledProduct | None]
    ) -> None:
        self.comm, self.axis, self.products = comm, axis, products
        self.sizes = [shape.numel() for shape in pieces]

    def gather(self, output: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
        """This device's numbers, and everybody's: (devices x numbers)."""
        scales = [
            None if product is None or product.plain else product.weight.value for product in self.products
        ]
        order = sorted(
            range(len(scales)), key=lambda index: scales[index] is not None
        )  # single bytes at the end
        parts = own.split_with_sizes(self.sizes)
        coded = [_in_bytes(parts[index], scales[index]) for index in order]
        message = torch.cat(coded)
        gathered = message.new_empty(group.size(), message.numel())
        with self.comm.collective("all_gather", self.axis, gathered, plain=output):
            all_gather(gathered.flatten(), message, group, self.comm.mesh.worker)
        rows = dict(zip(order, gathered.split_with_sizes([len(one) for one in coded], dim=1), strict=True))
        for index, part in enumerate(output.view(group.size(), -1).split_with_sizes(self.sizes, dim=1)):
            _from_bytes(rows[index], scales[index], part)


def _in_bytes(numbers: Tensor, scale: Tensor | None) -> Tensor:
    return (numbers if scale is None else cast(numbers, scale, E4M3)).contiguous().view(torch.uint8)


def _from_bytes(rows: Tensor, scale: Tensor | None, into: Tensor) -> None:
    if scale is None:
        into.copy_(rows.contiguous().view(into.dtype))
    else:
        into.copy_(rows.contiguous().view(E4M3).to(wide(into.dtype)) / scale)


class NearbyCopy:
    """Of one unit, this device's part of the copy that its neighbours keep among them from forward to
    backward."""

    def __init__(self, comm: Comm, axis: str, group: dist.ProcessGroup) -> None:
        self.comm, self.axis, self.group = comm, axis, group
        self._kept: Tensor | None = None

    def keep(self, gathered: Tensor, devices: int) -> None:
        """Of all devices' numbers, one row in as many as there are neighbours."""
        near = self.group.size()
        own = gathered.view(devices // near, near, -1)[:, self.group.rank()]
        self._kept = own.clone() if self._kept is None else self._kept.copy_(own)

    def gather(self, output: Tensor, devices: int) -> None:
        """All devices' numbers, as forward had them."""
        assert self._kept is not None, "backward follows a forward"
        near = self.group.size()
        gathered = output.new_empty(near, *self._kept.shape)
        with self.comm.collective("all_gather", self.axis, gathered):
            all_gather(gathered.flatten(), self._kept.flatten(), self.group, self.comm.mesh.worker)
        output.view(devices // near, near, -1).copy_(gathered.transpose(0, 1))
