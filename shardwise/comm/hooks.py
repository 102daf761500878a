"""What DistributedDataParallel and FSDP2 call in place of their own collectives: the same ones, summed and counted.

torch leaves doors open: a DDP communication hook, and FSDP2's custom all-gather, reduce-scatter and all-reduce hook.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, inside_backward, reduce_scatter_single
from shardwise.comm.comm import EXPOSED, Comm
from shardwise.comm.compressor import Compressor
from shardwise.comm.gathers import EncodedGather, NearbyCopy
from shardwise.comm.in_order import InOrder


class GradientSum:
    """DDP's hook: sum each bucket of gradients while backward goes on.

    Once the last bucket is filled there is no computation left to hide behind: from there to the end is exposed.
    """

    def __init__(
        self, comm: Comm, axis: str, group: dist.ProcessGroup, compressor: Compressor | None, names: Mapping[Tensor, str]
    ) -> None:
        self.comm, self.axis, self.group = comm, axis, group
        self.compressor, self.names = compressor, names
        self._exposed = ExitStack()
        self._queue = InOrder(comm.device) if compressor else None

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the sum of one bucket (a `dist.GradBucket`)."""
        buffer = bucket.buffer()
        if self.compressor is not None and self._queue is not None and self.compressor.begun:
            summed = self._queue.run(partial(self._compress, self.compressor, bucket, buffer))
        else:
            self.comm.count("all_reduce", self.axis, buffer)
            summed = dist.all_reduce(buffer, group=self.group, async_op=True).get_future().then(_first)
        if bucket.is_last():
            self._exposed.enter_context(self.comm.clock.span(EXPOSED))
        return summed

    def _compress(self, compressor: Compressor, bucket: Any, buffer: Tensor) -> Tensor:
        compressor.all_reduce([self.names[parameter] for parameter in bucket.parameters()], bucket.gradients())
        return buffer

    def backward_ended(self) -> None:
        """Call when backward has returned."""
        self._exposed.close()


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


def split(numbers: Tensor, pieces: Mapping[str, torch.Size]) -> list[Tensor]:
    """The pieces of parameters that lie one after the other in the last dim, each a view of its shape."""
    parts = numbers.split_with_sizes([shape.numel() for shape in pieces.values()], dim=-1)
    return [part.view(*numbers.shape[:-1], *shape) for part, shape in zip(parts, pieces.values(), strict=True)]


class _Counted:
    """What FSDP2 asks of a custom collective: a buffer, and the call. On CPU the call blocks, so all of it is exposed."""

    def __init__(self, comm: Comm, axis: str) -> None:
        self.comm, self.axis = comm, axis
        self.ended = 0.0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def timed(self, work: dist.Work | None, started: float) -> dist.Work | None:
        self.ended = time.perf_counter()
        if self.comm.device.type == "cpu":
            self.comm.clock.add(EXPOSED, self.ended - started)
        return work


class CountedAllGather(_Counted):
    """FSDP2 gathers a unit's weights: as they are, encoded, or in backward from a copy nearby."""

    def __init__(self, comm: Comm, axis: str, encoded: EncodedGather | None = None, nearby: NearbyCopy | None = None) -> None:
        super().__init__(comm, axis)
        self.encoded, self.nearby = encoded, nearby

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.encoded is None and self.nearby is None:
            self.comm.count("all_gather", self.axis, output_tensor)
            started = time.perf_counter()
            return self.timed(all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op), started)
        if self.nearby is not None and inside_backward():
            self.nearby.gather(output_tensor, group.size())
            return None
        if self.encoded is not None:
            self.encoded.gather(output_tensor, input_tensor, group)
        else:
            self.comm.count("all_gather", self.axis, output_tensor)
            with self.comm.waiting():
                all_gather_single(output_tensor, input_tensor, group=group)
        if self.nearby is not None:
            self.nearby.keep(output_tensor, group.size())
        return None


class CountedReduceScatter(_Counted):
    """FSDP2 sums a unit's gradients and keeps this rank's piece. The gradients of a unit lie one after the other, each in one
    piece for each device: (devices, numbers of all pieces)."""

    def __init__(
        self, comm: Comm, axis: str, compressor: Compressor | None = None, pieces: Mapping[str, torch.Size] | None = None
    ) -> None:
        super().__init__(comm, axis)
        self.compressor, self.pieces = compressor, pieces or {}

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.compressor is not None and self.compressor.begun:
            rows = input_tensor.view(group.size(), -1)
            self.compressor.reduce_scatter(list(self.pieces), split(rows, self.pieces), split(output_tensor, self.pieces))
            self.ended = time.perf_counter()
            return None
        self.comm.count("reduce_scatter", self.axis, input_tensor)
        started = time.perf_counter()
        work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self.timed(work, started)


class CompressedCopies:
    """FSDP2's hook behind the sum of a unit's gradients over its shards: sums them over the copies, compressed, once a step. What
    earlier micro-batches gave is kept until then, and FSDP2 gets zeros in its place."""

    def __init__(self, comm: Comm, compressor: Compressor, pieces: Mapping[str, torch.Size]) -> None:
        self.comm, self.compressor, self.pieces = comm, compressor, pieces
        self.last = True
        """Whether this is the step's last micro-batch."""
        self._kept: Tensor | None = None

    def __call__(self, gradients: Tensor) -> None:
        if self._kept is not None:
            gradients += self._kept
        if not self.last:
            self._kept = gradients.clone()
            gradients.zero_()
            return
        self._kept = None
        if self.compressor.begun:
            self.compressor.all_reduce(list(self.pieces), split(gradients, self.pieces))
            return
        self.comm.count("all_reduce", self.compressor.label, gradients)
        with self.comm.waiting():
            dist.all_reduce(gradients, group=self.compressor.group)
