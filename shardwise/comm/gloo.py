"""Gathers, exchanges and reduce-scatters over gloo on CPU workers, at the speed of the network.

**Reduce-scatter.** gloo implements it by an all-reduce, which sends twice the bytes and does not tell when it
is done. Here each part goes straight to its device, which adds the parts up in rank order.

**In pieces.** gloo reads a connection until nothing more arrives, and does not write meanwhile. So a large
arriving message delays one that leaves, and a network that could carry both at once carries one after the
other (10 MB each way at 1 Gbit/s: 163 ms in place of 80). Between hosts messages are therefore cut into
pieces, short enough to let others pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.mesh import Worker

PIECE = 1 << 19
"""Bytes of a message between hosts. At 1 Gbit/s, half or twice as many are equally fast, and an eighth or
eight times as many are slower."""
NO_TIMEOUT = timedelta(0)
"""Default of `Work.wait`, which then uses the timeout of the group."""


def pieces(length: int, item_bytes: int, worker: Worker) -> Iterator[slice]:
    """Return the slices into which rows of this length are cut; rows are not cut inside a host."""
    size = PIECE // item_bytes if worker.world > worker.local_world else max(1, length)
    return (slice(start, min(length, start + size)) for start in range(0, max(1, length), size))


class RowExchange:
    """An exchange in progress of rows, of which each device gets one."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup, worker: Worker) -> None:
        cuts = pieces(rows.shape[1], rows.element_size(), worker)
        self._leaving = [rows[:, cut].contiguous() for cut in cuts]
        self._arriving = [torch.empty_like(leaving) for leaving in self._leaving]
        self.works = [
            dist.all_to_all_single(arriving, leaving, group=group, async_op=True)
            for arriving, leaving in zip(self._arriving, self._leaving, strict=True)
        ]

    def arrived(self) -> Tensor:
        """Wait and return the received rows, by sender."""
        for work in self.works:
            work.wait()
        return _joined(self._arriving)

    def total(self) -> Tensor:
        """Wait and return the sum of the received rows; call this once, because it sums in place."""
        totals = []
        for work, arriving in zip(self.works, self._arriving, strict=True):
            work.wait()
            totals.append(arriving[0])
            for part in arriving[1:]:
                totals[-1].add_(part)
        return _joined(totals)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def exchange(rows: Tensor, group: dist.ProcessGroup, worker: Worker) -> Tensor:
    """Send row i to device i and return the received rows, by sender."""
    if rows.device.type == "cpu":
        return RowExchange(rows, group, worker).arrived()
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    return arrived


def reduce_scatter(
    total: Tensor, parts: Tensor, group: dist.ProcessGroup, worker: Worker, async_op: bool = False
) -> dist.Work | None:
    """Sum this device's part of `parts`, which holds one part for each device, over all devices into `total`;
    on a CPU this blocks."""
    if total.device.type == "cpu":
        total.copy_(RowExchange(parts.view(group.size(), -1), group, worker).total().view_as(total))
        return None
    work: dist.Work | None = reduce_scatter_single(
        total, parts, op=dist.ReduceOp.SUM, group=group, async_op=async_op
    )
    return work


def all_gather(output: Tensor, part: Tensor, group: dist.ProcessGroup, worker: Worker) -> None:
    """Write the `part` of every device into `output`, in rank order."""
    if part.device.type == "cpu":
        AsyncGather(output, part, group, worker).wait()
    else:
        all_gather_single(output, part, group=group)


class AsyncGather(dist.Work):
    """An all-gather in progress on a CPU; after `wait`, `output` holds the `part` of every device."""

    def __init__(self, output: Tensor, part: Tensor, group: dist.ProcessGroup, worker: Worker) -> None:
        super().__init__()
        self._part, self._rows = part.flatten(), output.view(group.size(), -1)
        self._gathered: list[tuple[slice, Tensor]] = []
        self.works: list[dist.Work] = []
        cuts = list(pieces(len(self._part), part.element_size(), worker))
        for cut in cuts:
            gathered = self._rows
            if len(cuts) > 1:
                gathered = self._rows.new_empty(len(self._rows), cut.stop - cut.start)
                self._gathered.append((cut, gathered))
            work = all_gather_single(gathered.flatten(), self._part[cut], group=group, async_op=True)
            self.works.append(work)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait for all pieces and put them into the output."""
        for work in self.works:
            work.wait()
        for cut, gathered in self._gathered:
            self._rows[:, cut] = gathered
        self._gathered.clear()
        return True
