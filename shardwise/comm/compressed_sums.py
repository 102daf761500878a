"""Sums over devices that send encoded numbers, and the residuals that encoding leaves.

With n devices, each has n rows, one for each device. A sum takes one or two hops, and each hop encodes once:

    reduce_scatter   each device sends row i, encoded, to device i (an all-to-all); device i decodes the rows
                     that arrive and adds them to its own row
    all_reduce       the same; then each device encodes its sum and sends it to all others (an all-gather)

So n devices send 2 (n - 1) / n of the encoded bytes, as a ring does of the plain ones, however many devices
there are. Sending every device's code to every other (as top-k is often done) grows with n instead. All
devices decode the same bytes, so copies stay equal.

**Error feedback** (Seide et al. 2014; Karimireddy et al. 2019). Devices send C(p) of p = gradient + residual,
and the residual becomes p - C(p): nothing is lost, it is sent later. A device's own row is not sent, so it is
added as it is, and its residual is what the second hop leaves out of it. One residual per number therefore
serves both hops. Summed over all devices, residuals are exactly what the weights still lack, so resharding
may distribute them anew as long as their sum stays the same.

p is computed in the residual's buffer, and what is sent is subtracted from it. If a step is skipped because a
number overflowed in float16, what it has sent is lost, and so is its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codecs import RowCodec
from shardwise.comm.comm import Comm
from shardwise.comm.gloo import all_gather, exchange
from shardwise.models.draw import hashed


@dataclass(frozen=True)
class DeviceRows:
    """Numbers of some tensors, in one row for each device."""

    numbers: Tensor
    """Numbers of all tensors: (devices, n)."""
    parts: list[Tensor]
    """View of each tensor's numbers, in its shape."""

    @classmethod
    def of(cls, numbers: Tensor, shapes: Sequence[torch.Size], scattered: bool) -> DeviceRows:
        """Return rows of tensors that are stored in numbers (devices, n): one after the other, cut into rows
        anywhere; or `scattered`, tensors (devices, ...) side by side, so that every row has a piece of
        each."""
        flat = numbers if scattered else numbers.flatten()[: sum(shape.numel() for shape in shapes)]
        sizes = [shape.numel() // (len(numbers) if scattered else 1) for shape in shapes]
        parts = flat.split_with_sizes(sizes, dim=-1)
        return cls(numbers, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)])


class EncodedSum:
    """Sums along one axis with one codec, which encodes the tensors of one call together."""

    def __init__(self, comm: Comm, axis: str, group: dist.ProcessGroup, codec: RowCodec, seed: int) -> None:
        self.comm, self.axis, self.group, self.seed = comm, axis, group, seed
        self.codec, self.codec_of_sums = codec, codec.for_sums()
        self._step, self._calls = 0, 0

    def rows(self, tensors: Sequence[Tensor], scattered: bool, dtype: torch.dtype) -> DeviceRows:
        """Return zeros for the numbers to be summed and their residuals."""
        devices = self.group.size()
        size = -(-sum(tensor.numel() for tensor in tensors) // devices)
        return DeviceRows.of(
            tensors[0].new_zeros(devices, size, dtype=dtype), [tensor.shape for tensor in tensors], scattered
        )

    def all_reduce(
        self, names: Sequence[str], rows: DeviceRows, totals: Sequence[Tensor], feedback: bool
    ) -> None:
        """Sum each tensor over all devices into `totals`; `feedback` leaves the residuals in the rows."""
        numbers, call, here = rows.numbers, self._call(), self.group.rank()
        local_sum = self._first_hop(numbers, call, feedback)
        wire = self.codec_of_sums.encode(local_sum, self._seed(call, 2, here), feedback)
        gathered = wire.new_empty(self.group.size(), wire.shape[1])
        with self.comm.collective("all_gather", self.axis, gathered, plain=numbers):
            all_gather(gathered.flatten(), wire.flatten(), self.group, self.comm.mesh.worker)
        summed = torch.empty_like(numbers)
        for sender in range(self.group.size()):
            row = slice(sender, sender + 1)
            self.codec_of_sums.decode(gathered[row], summed[row], self._seed(call, 2, sender))
        parts = DeviceRows.of(summed, [total.shape for total in totals], scattered=False).parts
        for total, part in zip(totals, parts, strict=True):
            total.copy_(part)

    def reduce_scatter(
        self, names: Sequence[str], rows: DeviceRows, totals: Sequence[Tensor], feedback: bool
    ) -> None:
        """Sum this device's piece of each (devices, *shape) over all devices into `totals` (*shape)."""
        self._first_hop(rows.numbers, self._call(), feedback)
        here = self.group.rank()
        for total, part in zip(totals, rows.parts, strict=True):
            total.copy_(part[here])
        rows.numbers[here] = 0  # this row is not sent, so nothing is left out of it

    def _first_hop(self, numbers: Tensor, call: int, feedback: bool) -> Tensor:
        """Send each row to its device, add what arrives to this device's row, and return that row: (1, n)."""
        here, seed = self.group.rank(), self._seed(call, 1, self.group.rank())
        row_bytes = self.codec.wire_bytes(numbers.shape[1])
        wire = numbers.new_zeros(self.group.size(), row_bytes, dtype=torch.uint8)
        for others in (slice(0, here), slice(here + 1, None)):
            wire[others] = self.codec.encode(numbers[others], seed, feedback)
        with self.comm.collective("all_to_all", self.axis, wire, plain=numbers):
            arrived = exchange(wire, self.group, self.comm.mesh.worker)
        total = numbers[here : here + 1]
        for sender in range(self.group.size()):
            if sender != here:
                self.codec.decode(arrived[sender : sender + 1], total, self._seed(call, 1, sender), add=True)
        return total

    def _call(self) -> int:
        """Return the number of this sum within its step."""
        self._calls = self._calls + 1 if self._step == self.comm.step else 0
        self._step = self.comm.step
        return self._calls

    def _seed(self, call: int, hop: int, sender: int) -> int:
        """Return a seed that differs from step to step and is the same in a resumed run; codecs that draw
        indices get the same seed in both hops and on all devices."""
        who = "all" if self.codec.same_draws_everywhere else f"{hop}:{sender}"
        return hashed(f"{self.seed}:{self.comm.step}:{call}:{who}") >> 1
