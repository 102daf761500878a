"""What DistributedDataParallel and FSDP2 call in place of their own collectives: the same ones, summed and
counted.

torch leaves doors open: a DDP communication hook, and FSDP2's custom all-gather, reduce-scatter and
all-reduce hook.

DDP sums buckets while backward goes on. FSDP2 does so on streams, which a CPU does not have: there its
collectives would block. gloo's own threads carry them out instead. A gather is waited for where FSDP2 uses
its weights, and the next unit is asked for before (parallel/data.py); a sum is added to the gradients when it
has come (deferred_sums.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, inside_backward
from shardwise.comm.comm import EXPOSED, Comm
from shardwise.comm.deferred_sums import NEUTRAL, UnitBehind
from shardwise.comm.gloo import NO_TIMEOUT, GatherUnderWay, PartsUnderWay, all_gather, reduce_scatter
from shardwise.comm.gradient_compression import Compressor
from shardwise.comm.ordered_sums import InOrder
from shardwise.comm.weight_gathers import EncodedGather, Float8Gather, NearbyCopy
from shardwise.observe import Collective


class GradientSum:
    """DDP's hook: sum each bucket of gradients while backward goes on.

    Once the last bucket is filled there is no computation left to hide behind: from there to the end is
    exposed.
    """

    def __init__(
        self,
        comm: Comm,
        axis: str,
        group: dist.ProcessGroup,
        compressor: Compressor | None,
        names: Mapping[Tensor, str],
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
            begun = self.comm.begin("all_reduce", self.axis, buffer)
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            summed = work.get_future().then(partial(_ended, begun))
        if bucket.is_last():
            self._exposed.enter_context(self.comm.clock.span(EXPOSED))
        return summed

    def _compress(self, compressor: Compressor, bucket: Any, buffer: Tensor) -> Tensor:
        compressor.all_reduce(
            [self.names[parameter] for parameter in bucket.parameters()], bucket.gradients()
        )
        return buffer

    def backward_ended(self) -> None:
        """Call when backward has returned."""
        self._exposed.close()


def _ended(begun: Collective, future: torch.futures.Future[list[Tensor]]) -> Tensor:
    begun.end()
    return future.value()[0]


def split(numbers: Tensor, pieces: Mapping[str, torch.Size]) -> list[Tensor]:
    """The pieces of parameters that lie one after the other in the last dim, each a view of its shape."""
    parts = numbers.split_with_sizes([shape.numel() for shape in pieces.values()], dim=-1)
    return [
        part.view(*numbers.shape[:-1], *shape) for part, shape in zip(parts, pieces.values(), strict=True)
    ]


class UnderWay(dist.Work):
    """A collective under way. FSDP2 waits for it where it needs the result, and that wait is exposed."""

    def __init__(self, comm: Comm, work: GatherUnderWay, begun: Collective) -> None:
        super().__init__()
        self.comm, self.work = comm, work
        _end_with(work.works[-1], begun)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """As of any collective."""
        with self.comm.waiting():
            return self.work.wait()


def _end_with(work: dist.Work, begun: Collective) -> None:
    """Note the end of a collective when it comes, from whichever thread of gloo's."""
    work.get_future().add_done_callback(lambda _: begun.end())


class _Counted:
    """What FSDP2 asks of a custom collective: a buffer, and the call."""

    def __init__(self, comm: Comm, axis: str) -> None:
        self.comm, self.axis = comm, axis

    @property
    def on_cpu(self) -> bool:
        return self.comm.device.type == "cpu"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Counted):
    """FSDP2 gathers a unit's weights: as they are, encoded, or in backward from a copy nearby."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        encoded: EncodedGather | Float8Gather | None = None,
        nearby: NearbyCopy | None = None,
    ) -> None:
        super().__init__(comm, axis)
        self.encoded, self.nearby = encoded, nearby

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.nearby is not None and inside_backward():
            self.nearby.gather(output_tensor, group.size())
            return None
        if self.encoded is not None:
            self.encoded.gather(output_tensor, input_tensor, group)
        elif self.nearby is not None:
            with self.comm.collective("all_gather", self.axis, output_tensor):
                all_gather(output_tensor, input_tensor, group, self.comm.mesh.worker)
        else:
            begun = self.comm.begin("all_gather", self.axis, output_tensor)
            if self.on_cpu:
                return UnderWay(
                    self.comm,
                    GatherUnderWay(output_tensor, input_tensor, group, self.comm.mesh.worker),
                    begun,
                )
            work: dist.Work | None = all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        if self.nearby is not None:
            self.nearby.keep(output_tensor, group.size())
        return None


class CountedReduceScatter(_Counted):
    """FSDP2 sums a unit's gradients and keeps this rank's piece. The gradients of a unit lie one after the
    other, each in one piece for each device: (devices, numbers of all pieces)."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        pieces: Mapping[str, torch.Size] | None = None,
        compressor: Compressor | None = None,
        behind: UnitBehind | None = None,
    ) -> None:
        super().__init__(comm, axis)
        self.compressor, self.pieces, self.behind = compressor, pieces or {}, behind
        self.ended = 0.0
        """When the last call that blocked was over."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_whole = self._is_whole(output_tensor)
        if self.behind is not None and is_whole:
            self._start(self.behind, output_tensor, input_tensor, group)
            return None
        work: dist.Work | None = None
        if self.compressor is not None and self.compressor.begun and is_whole:
            self._compress(self.compressor, output_tensor, input_tensor)
        else:
            with self.comm.collective("reduce_scatter", self.axis, input_tensor):
                work = reduce_scatter(output_tensor, input_tensor, group, self.comm.mesh.worker, async_op)
        self.ended = time.perf_counter()
        return work

    def _is_whole(self, output: Tensor) -> bool:
        """Whether all of the unit's weights were used: FSDP2 leaves out those that have no gradient."""
        return output.numel() == sum(shape.numel() for shape in self.pieces.values())

    def _start(self, behind: UnitBehind, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Start the sum; in place of it, FSDP2 gets what changes nothing."""
        if self.compressor is not None and self.compressor.begun:
            finish = behind.all.queue.run(
                partial(self._compress, self.compressor, torch.empty_like(output), gradients)
            ).wait
        else:
            begun = self.comm.begin("reduce_scatter", self.axis, gradients)
            parts = PartsUnderWay(gradients.view(group.size(), -1), group, self.comm.mesh.worker)
            _end_with(parts.works[-1], begun)
            finish = parts.total
        output.fill_(NEUTRAL)
        behind.all.follow(finish, behind.use)

    def _compress(self, compressor: Compressor, total: Tensor, gradients: Tensor) -> Tensor:
        rows = gradients.view(compressor.group.size(), -1)
        compressor.reduce_scatter(list(self.pieces), split(rows, self.pieces), split(total, self.pieces))
        return total


class CompressedCopies:
    """FSDP2's hook behind the sum of a unit's gradients over its shards: sums them over the copies,
    compressed, once a step. What earlier micro-batches gave is kept until then, and FSDP2 gets zeros in its
    place."""

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
        is_whole = gradients.numel() == sum(shape.numel() for shape in self.pieces.values())
        if self.compressor.begun and is_whole:
            self.compressor.all_reduce(list(self.pieces), split(gradients, self.pieces))
            return
        with self.comm.collective("all_reduce", self.compressor.label, gradients):
            dist.all_reduce(gradients, group=self.compressor.group)
