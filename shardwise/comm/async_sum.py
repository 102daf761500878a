"""A sum over a mesh axis that may run in the background, plain or encoded.

Every number is added in the order of the devices, wherever in the buffer it is. So devices that hold the same
numbers at different places of their buffers, as those of a tensor axis hold the weights of norms, get the
same bits. A ring would add them in an order that depends on the place.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codecs import RowCodec
from shardwise.comm.comm import Comm


class AsyncSum:
    """A sum over one axis that starts when the object is made; `result` waits for it."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        group: dist.ProcessGroup | None,
        parts: Sequence[Tensor],
        codec: RowCodec | None,
        seed: int,
        in_thread: bool,
        replicated_on: str | None = None,
    ) -> None:
        """Start the sum of the flat tensors `parts`, which are concatenated.

        `group` is the devices along the axis, or None where this device is alone. A codec encodes each part
        by itself. With `in_thread`, a thread makes the sum. `replicated_on` names another axis whose devices
        hold the same numbers: each of them sums a share, and the shares are gathered. It is ignored with a
        codec, because rounding would then depend on the share that a number is in.
        """
        self._comm, self._axis, self._codec, self._seed = comm, axis, codec, seed
        self._parts = parts
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._total = torch.cat(list(parts)) if parts else torch.empty(0, device=comm.device)
        self._numbers, self._replicated_on = self._total.numel(), None
        if group is None or not self._numbers:
            return
        if replicated_on is not None and comm.mesh.size(replicated_on) > 1 and codec is None:
            self._replicated_on, self._total = replicated_on, self._share(replicated_on)
        if in_thread:
            self._thread = threading.Thread(
                target=self._run_in_thread, args=(group,), name="sum", daemon=True
            )
            self._thread.start()
        else:
            self._sum(group)

    def result(self) -> Tensor:
        """Wait for the sum and return it."""
        if self._thread is not None:
            with self._comm.waiting():
                self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        if self._replicated_on is not None:
            self._total = self._comm.all_gather(self._total, self._replicated_on).view(-1)[: self._numbers]
            self._replicated_on = None
        return self._total

    def _share(self, axis: str) -> Tensor:
        """Return this device's share of numbers that all devices along the axis hold."""
        return _rows(self._total, self._comm.mesh.size(axis))[self._comm.mesh.coordinate(axis)]

    def _run_in_thread(self, group: dist.ProcessGroup) -> None:
        try:
            if self._comm.device.type == "cuda":
                torch.cuda.set_device(self._comm.device)
            self._sum(group)
        except BaseException as error:  # `result` raises it
            self._error = error

    @torch.no_grad()
    def _sum(self, group: dist.ProcessGroup) -> None:
        self._total = self._sum_plain(group) if self._codec is None else self._sum_encoded(group, self._codec)

    def _sum_plain(self, group: dist.ProcessGroup) -> Tensor:
        """Return the sum: each device adds up one row of all devices, and gathers the other rows."""
        leaving = _rows(self._total, self._comm.mesh.size(self._axis))  # (devices, n)
        arriving = torch.empty_like(leaving)
        with self._comm.collective("all_to_all", self._axis, leaving):
            dist.all_to_all_single(arriving, leaving, group=group)
        total = arriving[0].clone()
        for other in arriving[1:]:
            total.add_(other)
        with self._comm.collective("all_gather", self._axis, arriving):
            dist.all_gather(list(arriving), total, group=group)
        return arriving.view(-1)[: self._total.numel()]

    def _sum_encoded(self, group: dist.ProcessGroup, codec: RowCodec) -> Tensor:
        """Return the sum: each device gathers the encoded numbers of all devices, decodes and adds them."""
        devices = self._comm.mesh.size(self._axis)
        encoded = [codec.encode(part.unsqueeze(0), self._seed)[0] for part in self._parts]
        wire = torch.cat(encoded)
        arriving = wire.new_empty(devices, wire.numel())
        with self._comm.collective("all_gather", self._axis, arriving, plain=self._total.expand(devices, -1)):
            dist.all_gather(list(arriving), wire, group=group)
        total = torch.zeros_like(self._total)
        sums = torch.split(total, [len(part) for part in self._parts])
        for row in arriving:
            for piece, into in zip(torch.split(row, [len(part) for part in encoded]), sums, strict=True):
                codec.decode(piece.unsqueeze(0), into.unsqueeze(0), self._seed, add=True)
        return total


def _rows(numbers: Tensor, devices: int) -> Tensor:
    """Return flat numbers as (devices, n), padded with zeros."""
    n = -(-numbers.numel() // devices)
    return torch.nn.functional.pad(numbers, (0, devices * n - numbers.numel())).view(devices, n)
