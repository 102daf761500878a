"""Sums over devices of which only encoded bytes cross the wire, and what encoding left out.

With n devices, each has n rows, one for each device. A sum is made in one or two hops, and each hop encodes
once:

    reduce_scatter   each device sends row i, encoded, to device i (an all-to-all); device i decodes the rows
                     that arrive and adds them to its own row
    all_reduce       the same; then each device encodes its sum and sends it to all others (an all-gather)

So n devices send 2 (n - 1) / n of the encoded bytes, as a ring does of the plain ones, however many devices
there are. Sending every device's code to every other (as top-k is often done) grows with n instead. All
devices decode the same bytes, so copies stay equal.

**Error feedback** (Seide et al. 2014; Karimireddy et al. 2019). What is sent is C(p) of p = gradient +
residual, and the residual becomes p - C(p): nothing is lost, it comes later. A device's own row crosses no
wire, so it is added as it is; what the second hop leaves out of that row is its residual. One residual a
number therefore holds both hops, and over all devices residuals are exactly what the weights have not yet
been told: resharding may deal them out anew as long as their sum stays.

So p is made where the residual lies, what is sent is taken out of it, and what stays is the residual. A step
that is skipped, because a number overflowed in float16, has sent what it sent: that is lost, as the gradient
is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codecs import RowCodec
from shardwise.comm.comm import Comm
from shardwise.comm.gloo import all_gather, exchange


@dataclass(frozen=True)
class Rows:
    """Numbers of some tensors, in one row for each device."""

    numbers: Tensor
    """(devices, n)."""
    parts: list[Tensor]
    """Of each tensor, its numbers in them, as a view of its shape."""

    @classmethod
    def of(cls, numbers: Tensor, shapes: Sequence[torch.Size], scattered: bool) -> Rows:
        """Of numbers (devices, n) that lie so: tensors one after the other, cut into rows wherever that
        falls; or `scattered`, tensors (devices, ...) side by side, so that every row has a piece of each."""
        flat = numbers if scattered else numbers.flatten()[: sum(shape.numel() for shape in shapes)]
        sizes = [shape.numel() // (len(numbers) if scattered else 1) for shape in shapes]
        parts = flat.split_with_sizes(sizes, dim=-1)
        return cls(numbers, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


class EncodedSum:
    """Sums along one axis with one codec. Tensors that are summed at once are encoded as one."""

    def __init__(self, comm: Comm, axis: str, group: dist.ProcessGroup, codec: RowCodec, seed: int) -> None:
        self.comm, self.axis, self.group, self.seed = comm, axis, group, seed
        self.codec, self.codec_of_sums = codec, codec.for_sums()
        self._step, self._calls = 0, 0

    def rows(self, tensors: Sequence[Tensor], scattered: bool, dtype: torch.dtype) -> Rows:
        """Zeros for what is added up and for what is left out of it."""
        devices = self.group.size()
        size = -(-sum(tensor.numel() for tensor in tensors) // devices)
        return Rows.of(
            tensors[0].new_zeros(devices, size, dtype=dtype), [tensor.shape for tensor in tensors], scattered
        )

    def all_reduce(self, names: Sequence[str], rows: Rows, totals: Sequence[Tensor], take: bool) -> None:
        """Sum each over all devices into `totals`. To `take` leaves in the rows what was left out."""
        numbers, call, here = rows.numbers, self._call(), self.group.rank()
        own = self._first_hop(numbers, call, take)
        wire = self.codec_of_sums.encode(own, self._seed(call, 2, here), take)
        gathered = wire.new_empty(self.group.size(), wire.shape[1])
        with self.comm.collective("all_gather", self.axis, gathered, plain=numbers):
            all_gather(gathered.flatten(), wire.flatten(), self.group, self.comm.mesh.worker)
        summed = torch.empty_like(numbers)
        for sender in range(self.group.size()):
            row = slice(sender, sender + 1)
            self.codec_of_sums.decode(gathered[row], summed[row], self._seed(call, 2, sender))
        for total, part in zip(
            totals, Rows.of(summed, [total.shape for total in totals], scattered=False).parts, strict=True
        ):
            total.copy_(part)

    def reduce_scatter(self, names: Sequence[str], rows: Rows, totals: Sequence[Tensor], take: bool) -> None:
        """Of each (devices, *shape), one piece for each device, sum this device's over all devices into
        `totals` (*shape)."""
        self._first_hop(rows.numbers, self._call(), take)
        here = self.group.rank()
        for total, part in zip(totals, rows.parts, strict=True):
            total.copy_(part[here])
        rows.numbers[here] = 0  # it crosses no wire

    def _first_hop(self, numbers: Tensor, call: int, take: bool) -> Tensor:
        """Rows to their devices. This device's own becomes the sum of all: (1, n)."""
        here, seed = self.group.rank(), self._seed(call, 1, self.group.rank())
        wire = numbers.new_zeros(
            self.group.size(), self.codec.wire_bytes(numbers.shape[1]), dtype=torch.uint8
        )
        for others in (slice(0, here), slice(here + 1, None)):
            wire[others] = self.codec.encode(numbers[others], seed, take)
        with self.comm.collective("all_to_all", self.axis, wire, plain=numbers):
            arrived = exchange(wire, self.group, self.comm.mesh.worker)
        own = numbers[here : here + 1]
        for sender in range(self.group.size()):
            if sender != here:
                self.codec.decode(arrived[sender : sender + 1], own, self._seed(call, 1, sender), add=True)
        return own

    def _call(self) -> int:
        """The number of this sum in its step."""
        self._calls = self._calls + 1 if self._step == self.comm.step else 0
        self._step = self.comm.step
        return self._calls

    def _seed(self, call: int, hop: int, sender: int) -> int:
        """Of what is drawn: the same again in a resumed run, other in each step, and for random places the
        same in both hops and everywhere."""
        who = "all" if self.codec.same_draws_everywhere else f"{hop}:{sender}"
        text = f"{self.seed}:{self.comm.step}:{call}:{who}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
