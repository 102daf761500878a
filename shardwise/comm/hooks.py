"""Collectives that DistributedDataParallel and FSDP2 call in place of their own: summed, not averaged, and
counted.

torch offers a DDP communication hook, and FSDP2's custom all-gather, reduce-scatter and all-reduce hook.

DDP sums buckets while backward goes on. FSDP2 does so on streams, which a CPU does not have: there its
collectives would block. gloo's threads carry them out instead. FSDP2 waits for a gather where it uses the
weights, and the next unit is prefetched (parallel/overlap.py); a sum is added to the gradients when it has
arrived (deferred_sums.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, inside_backward
from shardwise.comm.comm import Comm
from shardwise.comm.deferred_sums import NEUTRAL, DeferredUnitSum
from shardwise.comm.gloo import NO_TIMEOUT, AsyncGather, RowExchange, all_gather, reduce_scatter
from shardwise.comm.gradient_compression import CompressedAxisSum
from shardwise.comm.ordered_sums import OrderedSums
from shardwise.comm.weight_gathers import EncodedGather, Float8Gather, SecondaryShard
from shardwise.observe import EXPOSED, Collective


class _Bucket(Protocol):
    """Methods of `dist.GradBucket`, for which torch has no type."""

    def buffer(self) -> Tensor: ...
    def parameters(self) -> list[Tensor]: ...
    def gradients(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


class GradientSum:
    """DDP's hook: sums each bucket of gradients while backward goes on. When the last bucket is filled, no
    computation is left to overlap with: from there to the end, communication is exposed."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        group: dist.ProcessGroup,
        compressor: CompressedAxisSum | None,
        names: Mapping[Tensor, str],
    ) -> None:
        self.comm, self.axis, self.group = comm, axis, group
        self.compressor, self.names = compressor, names
        self._summed: set[Tensor] = set()
        self._exposed = ExitStack()
        self._queue = OrderedSums(comm.device) if compressor else None

    def reduce(self, bucket: _Bucket) -> torch.futures.Future[Tensor]:
        """Start the sum of one bucket."""
        buffer = bucket.buffer()
        self._summed.update(bucket.parameters())
        if self.compressor is not None and self._queue is not None and self.compressor.active:
            summed = self._queue.run(partial(self._compress, self.compressor, bucket, buffer))
        else:
            begun = self.comm.begin("all_reduce", self.axis, buffer)
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            summed = work.get_future().then(partial(_end, begun))
        if bucket.is_last():
            self._exposed.enter_context(self.comm.clock.span(EXPOSED))
        return summed

    def _compress(self, compressor: CompressedAxisSum, bucket: _Bucket, buffer: Tensor) -> Tensor:
        names = [self.names[parameter] for parameter in bucket.parameters()]
        compressor.all_reduce(names, bucket.gradients())
        return buffer

    def backward_ended(self) -> list[str]:
        """End the exposed time, and return the names of weights that lack a gradient, if any gradient was not
        summed. The caller calls this when backward has returned.

        DDP sums buckets in order, each when all its weights have got a gradient. So a weight without one
        leaves its bucket and all later ones unsummed.
        """
        self._exposed.close()
        unsummed = {
            name: weight
            for weight, name in self.names.items()
            if weight.requires_grad and weight not in self._summed
        }
        self._summed.clear()
        lacking = [name for name, weight in unsummed.items() if weight.grad is None or not weight.grad.any()]
        return lacking or list(unsummed)


def _end(begun: Collective, future: torch.futures.Future[list[Tensor]]) -> Tensor:
    begun.end()
    return future.value()[0]


def split(numbers: Tensor, pieces: Mapping[str, torch.Size]) -> list[Tensor]:
    """Return views of the pieces of parameters that are stored one after the other in the last dim."""
    shapes = pieces.values()
    parts = numbers.split_with_sizes([shape.numel() for shape in shapes], dim=-1)
    return [part.view(*numbers.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_whole(shards: Tensor, pieces: Mapping[str, torch.Size]) -> bool:
    """Return whether all weights of a unit have a gradient: FSDP2 leaves out those that were not used."""
    return shards.numel() == sum(shape.numel() for shape in pieces.values())


class TimedGather(dist.Work):
    """A gather in progress. FSDP2 waits for it where it needs the weights, and that wait is exposed."""

    def __init__(self, comm: Comm, work: AsyncGather, begun: Collective) -> None:
        super().__init__()
        self.comm, self.work = comm, work
        _end_with(work.works[-1], begun)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for the gather, and count the time as exposed communication."""
        with self.comm.waiting():
            return self.work.wait()


def _end_with(work: dist.Work, begun: Collective) -> None:
    """Record the end of a collective when it ends, from a thread of gloo."""
    work.get_future().add_done_callback(lambda _: begun.end())


class _Counted:
    """Base of the collectives that FSDP2 calls: it asks them for a buffer, and then calls them."""

    def __init__(self, comm: Comm, axis: str) -> None:
        self.comm, self.axis = comm, axis

    @property
    def on_cpu(self) -> bool:
        return self.comm.device.type == "cpu"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Counted):
    """Gathers a unit's weights for FSDP2: as they are, encoded, or in backward from a second copy on this
    host."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        encoded: EncodedGather | Float8Gather | None = None,
        secondary: SecondaryShard | None = None,
    ) -> None:
        super().__init__(comm, axis)
        self.encoded, self.secondary = encoded, secondary

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self.secondary is not None and inside_backward():
            self.secondary.gather(output_tensor, group.size())
            return None
        if self.encoded is not None:
            self.encoded.gather(output_tensor, input_tensor, group)
        elif self.secondary is not None:
            with self.comm.collective("all_gather", self.axis, output_tensor):
                all_gather(output_tensor, input_tensor, group, self.comm.mesh.worker)
        else:
            return self._gather(output_tensor, input_tensor, group, async_op)
        if self.secondary is not None:
            self.secondary.store(output_tensor, group.size())
        return None

    def _gather(
        self, output: Tensor, part: Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Start to gather the weights as they are."""
        begun = self.comm.begin("all_gather", self.axis, output)
        if self.on_cpu:
            return TimedGather(self.comm, AsyncGather(output, part, group, self.comm.mesh.worker), begun)
        work: dist.Work | None = all_gather_single(output, part, group=group, async_op=async_op)
        return work


class CountedReduceScatter(_Counted):
    """Sums a unit's gradients for FSDP2 and returns this rank's piece. The gradients of a unit are stored one
    after the other, each in one piece for each device: (devices, numbers of all pieces)."""

    def __init__(
        self,
        comm: Comm,
        axis: str,
        pieces: Mapping[str, torch.Size] | None = None,
        compressor: CompressedAxisSum | None = None,
        deferred: DeferredUnitSum | None = None,
    ) -> None:
        super().__init__(comm, axis)
        self.compressor, self.pieces, self.deferred = compressor, pieces or {}, deferred
        self.ended = 0.0
        """Time when the last blocking call ended."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_whole = _is_whole(output_tensor, self.pieces)
        if self.deferred is not None and is_whole:
            self._start(self.deferred, output_tensor, input_tensor, group)
            return None
        work: dist.Work | None = None
        if self.compressor is not None and self.compressor.active and is_whole:
            self._compress(self.compressor, output_tensor, input_tensor)
        else:
            with self.comm.collective("reduce_scatter", self.axis, input_tensor):
                work = reduce_scatter(output_tensor, input_tensor, group, self.comm.mesh.worker, async_op)
        self.ended = time.perf_counter()
        return work

    def _start(
        self, deferred: DeferredUnitSum, output: Tensor, gradients: Tensor, group: dist.ProcessGroup
    ) -> None:
        """Start the sum; in its place, FSDP2 gets a value that changes nothing."""
        if self.compressor is not None and self.compressor.active:
            total = torch.empty_like(output)
            make = partial(self._compress, self.compressor, total, gradients)
            finish = deferred.sums.queue.run(make).wait
        else:
            begun = self.comm.begin("reduce_scatter", self.axis, gradients)
            parts = RowExchange(gradients.view(group.size(), -1), group, self.comm.mesh.worker)
            _end_with(parts.works[-1], begun)
            finish = parts.total
        output.fill_(NEUTRAL)
        deferred.sums.add(finish, deferred.use)

    def _compress(self, compressor: CompressedAxisSum, total: Tensor, gradients: Tensor) -> Tensor:
        rows = gradients.view(compressor.group.size(), -1)
        compressor.reduce_scatter(list(self.pieces), split(rows, self.pieces), split(total, self.pieces))
        return total


class CompressedReplicaSum:
    """FSDP2's hook after the sum of a unit's gradients over its shards: sums them over the replicas,
    compressed, once per step. Gradients of earlier micro-batches are stored until then, and FSDP2 gets zeros
    in their place."""

    def __init__(self, comm: Comm, compressor: CompressedAxisSum, pieces: Mapping[str, torch.Size]) -> None:
        self.comm, self.compressor, self.pieces = comm, compressor, pieces
        self.last = True
        """Whether this is the step's last micro-batch."""
        self._earlier: Tensor | None = None
        """Sum of the gradients of the step's earlier micro-batches."""

    def __call__(self, gradients: Tensor) -> None:
        if self._earlier is not None:
            gradients += self._earlier
        if not self.last:
            self._earlier = gradients.clone()
            gradients.zero_()
            return
        self._earlier = None
        if self.compressor.active and _is_whole(gradients, self.pieces):
            self.compressor.all_reduce(list(self.pieces), split(gradients, self.pieces))
            return
        with self.comm.collective("all_reduce", self.compressor.label, gradients):
            dist.all_reduce(gradients, group=self.compressor.group)
