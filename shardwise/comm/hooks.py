"""What DistributedDataParallel and FSDP2 call in place of their own collectives: the same ones, summed and counted.

torch leaves doors open: a DDP communication hook, and FSDP2's custom all-gather, reduce-scatter and all-reduce hook.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.comm.comm import EXPOSED, Comm


class GradientSum:
    """DDP's hook: sum each bucket of gradients while backward goes on.

    Once the last bucket is filled there is no computation left to hide behind: from there to the end is exposed.
    """

    def __init__(self, comm: Comm, axis: str, group: dist.ProcessGroup) -> None:
        self.comm, self.axis, self.group = comm, axis, group
        self._exposed = ExitStack()

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Start the sum of one bucket (a `dist.GradBucket`)."""
        buffer = bucket.buffer()
        self.comm.count("all_reduce", self.axis, buffer)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        if bucket.is_last():
            self._exposed.enter_context(self.comm.clock.span(EXPOSED))
        summed: torch.futures.Future[Tensor] = work.get_future().then(_first)
        return summed

    def backward_ended(self) -> None:
        """Call when backward has returned."""
        self._exposed.close()


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


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
    """FSDP2 gathers a unit's weights."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.comm.count("all_gather", self.axis, output_tensor)
        started = time.perf_counter()
        return self.timed(all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op), started)


class CountedReduceScatter(_Counted):
    """FSDP2 sums a unit's gradients and keeps this rank's piece."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.comm.count("reduce_scatter", self.axis, input_tensor)
        started = time.perf_counter()
        work = reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self.timed(work, started)
