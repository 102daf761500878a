"""A sum over an axis that goes on while the program does something else, plain or encoded."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from shardwise.comm.codecs import Codec
from shardwise.comm.comm import Comm


class SumUnderWay:
    """Begun when it is made; `result` waits for it. With a codec everybody's numbers are gathered encoded, and added up here."""

    def __init__(
        self, comm: Comm, axis: str, group: dist.ProcessGroup | None, own: Tensor, codec: Codec | None, seed: int
    ) -> None:
        """`group`: of the devices along the axis; None: this one is alone."""
        self._comm, self._codec, self._seed = comm, codec, seed
        self._work: dist.Work | None = None
        self._arriving = own.clone()
        if group is None or not own.numel():
            return
        if codec is None:
            self._begun = comm.begin("all_reduce", axis, self._arriving)
            self._work = dist.all_reduce(self._arriving, group=group, async_op=True)
            return
        wire, devices = codec.encode(own.unsqueeze(0), seed), comm.mesh.size(axis)
        self._wires = wire.new_empty(devices, wire.shape[1])
        self._begun = comm.begin("all_gather", axis, self._wires, plain=own.expand(devices, -1))
        self._work = dist.all_gather(list(self._wires), wire[0], group=group, async_op=True)

    def result(self) -> Tensor:
        """The sum, once it is there."""
        if self._work is None:
            return self._arriving
        with self._comm.waiting():
            self._work.wait()
        self._begun.end()
        self._work = None
        if self._codec is not None:
            self._arriving.zero_()
            for wire in self._wires:
                self._codec.decode(wire.unsqueeze(0), self._arriving.unsqueeze(0), self._seed, add=True)
        return self._arriving
