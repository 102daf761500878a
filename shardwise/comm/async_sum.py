"""A sum over an axis that may go on while the program does something else, plain or encoded.

Everybody's numbers are added in the order of the devices, wherever in the buffer they are. So those that hold
the same numbers at other places of other buffers, as the devices of a tensor axis hold its norms, get the
same bits; a ring would add them in an order that depends on the place.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codecs import RowCodec
from shardwise.comm.comm import Comm


class SumUnderWay:
    """Begun when it is made; `result` waits for it."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        group: dist.ProcessGroup | None,
        parts: Sequence[Tensor],
        codec: RowCodec | None,
        seed: int,
        behind: bool,
        same_on: str | None = None,
    ) -> None:
        """Of these flat parts, one after the other. `group`: the devices along the axis; None: this one is
        alone. With a codec each part is encoded by itself. `behind`: a thread makes the sum. `same_on`:
        another axis, whose devices hold the same numbers: each of them sums a share, and they give each other
        theirs; not with a codec, for what a number is rounded to would depend on the share that it is in."""
        self._comm, self._axis, self._codec, self._seed = comm, axis, codec, seed
        self._parts = parts
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._total = torch.cat(list(parts)) if parts else torch.empty(0, device=comm.device)
        self._numbers, self._same_on = self._total.numel(), None
        if group is None or not self._numbers:
            return
        if same_on is not None and comm.mesh.size(same_on) > 1 and codec is None:
            self._same_on, self._total = same_on, self._share(same_on)
        if behind:
            self._thread = threading.Thread(target=self._try, args=(group,), name="sum", daemon=True)
            self._thread.start()
        else:
            self._make(group)

    def result(self) -> Tensor:
        """The sum, once it is there."""
        if self._thread is not None:
            with self._comm.waiting():
                self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        if self._same_on is not None:
            self._total = self._comm.all_gather(self._total, self._same_on).view(-1)[: self._numbers]
            self._same_on = None
        return self._total

    def _share(self, axis: str) -> Tensor:
        """This device's, of numbers that all along the axis have."""
        mesh = self._comm.mesh
        own = -(-self._numbers // mesh.size(axis))
        padded = torch.nn.functional.pad(self._total, (0, mesh.size(axis) * own - self._numbers))
        return padded.view(-1, own)[mesh.coordinate(axis)]

    def _try(self, group: dist.ProcessGroup) -> None:
        try:
            if self._comm.device.type == "cuda":
                torch.cuda.set_device(self._comm.device)
            self._make(group)
        except BaseException as error:  # of whoever waits for the sum
            self._error = error

    @torch.no_grad()
    def _make(self, group: dist.ProcessGroup) -> None:
        self._total = self._plain(group) if self._codec is None else self._encoded(group, self._codec)

    def _plain(self, group: dist.ProcessGroup) -> Tensor:
        """Each device adds up a part of all numbers, and gives the others its sum."""
        devices, numbers = self._comm.mesh.size(self._axis), self._total.numel()
        own = -(-numbers // devices)
        leaving = torch.nn.functional.pad(self._total, (0, devices * own - numbers)).view(devices, own)
        arriving = torch.empty_like(leaving)
        with self._comm.collective("all_to_all", self._axis, leaving):
            dist.all_to_all_single(arriving, leaving, group=group)
        total = arriving[0].clone()
        for other in arriving[1:]:
            total.add_(other)
        with self._comm.collective("all_gather", self._axis, arriving):
            dist.all_gather(list(arriving), total, group=group)
        return arriving.view(-1)[:numbers]

    def _encoded(self, group: dist.ProcessGroup, codec: RowCodec) -> Tensor:
        """Everybody's bytes to everybody, who decode and add them."""
        devices = self._comm.mesh.size(self._axis)
        wires = [codec.encode(part.unsqueeze(0), self._seed)[0] for part in self._parts]
        wire = torch.cat(wires)
        arriving = wire.new_empty(devices, wire.numel())
        with self._comm.collective("all_gather", self._axis, arriving, plain=self._total.expand(devices, -1)):
            dist.all_gather(list(arriving), wire, group=group)
        total = torch.zeros_like(self._total)
        for device in arriving:
            pieces = torch.split(device, [len(each) for each in wires])
            for piece, sums in zip(
                pieces, torch.split(total, [len(part) for part in self._parts]), strict=True
            ):
                codec.decode(piece.unsqueeze(0), sums.unsqueeze(0), self._seed, add=True)
        return total
