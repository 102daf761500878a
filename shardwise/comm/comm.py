"""Collectives that count their bytes and the time the program waits for them.

Everything that crosses between devices passes through here: what shardwise sends itself, and what torch sends for it, through
the doors that torch leaves open (a DDP communication hook; FSDP2's custom all-gather and reduce-scatter). The ledger then
holds what really ran, by kind and axis, and the planner can be held to it.

Gradients are always summed, never averaged: the loss is already divided by the global number of tokens.

On a CPU a collective blocks, and the time inside it is time this rank waits for others or for bytes: it is kept apart from the
rank's own work, so that a slow rank can be told from those that wait for it. On a GPU collectives wait on streams; what can be
timed there, and what cannot, is said where it happens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.mesh import Mesh
from shardwise.observe import Ledger, StepClock

EXPOSED = "exposed_communication"


@dataclass
class Comm:
    """This rank's collectives, with their ledger and clock."""

    mesh: Mesh
    ledger: Ledger = field(default_factory=Ledger)
    clock: StepClock = field(init=False)

    def __post_init__(self) -> None:
        self.clock = StepClock("cuda" if self.mesh.device.type == "cuda" else "cpu")

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.mesh.device

    def all_reduce(self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Sum (or `op`) in place over an axis; nothing to do where the axis has one device."""
        group = self.mesh.group(axis)
        if group is not None:
            self.count("all_reduce", axis, tensor)
            with self.waiting():
                dist.all_reduce(tensor, op=op, group=group)
        return tensor

    def waiting(self) -> AbstractContextManager[None]:
        """Around a call that blocks until the peers have come too: on a CPU, its time is exposed communication."""
        return self.clock.span(EXPOSED) if self.device.type == "cpu" else nullcontext()

    def working(self) -> AbstractContextManager[None]:
        """Around work inside a wait: on a CPU, its time is forward and backward again."""
        return self.clock.span("forward_backward") if self.device.type == "cpu" else nullcontext()

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum in place over every device that reads different sequences."""
        self.all_reduce(tensor, "data")
        return self.all_reduce(tensor, "replica")

    def count(self, kind: str, axis: str, full: Tensor) -> None:
        """Enter one collective in the ledger; `full` is the whole tensor it handles."""
        self.ledger.record(kind, axis, full.numel() * full.element_size())


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
