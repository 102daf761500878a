"""Gathers, exchanges and reduce-scatters over gloo, on CPU workers, as quick as the network is.

**Reduce-scatter**: of a sum over devices, each gets its own part. gloo makes one of an all-reduce, which
sends twice the bytes, and does not tell when it is done. Here parts go straight to the devices that they
belong to, which add them up, by rank.

**In pieces.** gloo reads a connection until nothing more comes, and does not write meanwhile: a large message
that comes keeps one that is to go waiting, and a network that could carry both at once carries one after the
other (10 MB each way at 1 Gbit/s: 163 ms in place of 80). Between hosts messages are cut into pieces, short
enough to let others pass.
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
"""Bytes of a message between hosts. At 1 Gbit/s, half to twice as much is as quick, and an eighth or eight
times are not."""
NO_TIMEOUT = timedelta(0)
"""The group's own."""


def pieces(numbers: int, item: int, worker: Worker) -> Iterator[slice]:
    """Where to cut rows of so many numbers, of so many bytes each; nowhere inside a host."""
    size = PIECE // item if worker.world > worker.local_world else max(1, numbers)
    return (slice(start, min(numbers, start + size)) for start in range(0, max(1, numbers), size))


class PartsUnderWay:
    """Rows on their way to their devices, one for each."""

    def __init__(self, rows: Tensor, group: dist.ProcessGroup, worker: Worker) -> None:
        self._leaving = [
            rows[:, cut].contiguous() for cut in pieces(rows.shape[1], rows.element_size(), worker)
        ]
        self._arriving = [torch.empty_like(leaving) for leaving in self._leaving]
        self.works = [
            dist.all_to_all_single(arriving, leaving, group=group, async_op=True)
            for arriving, leaving in zip(self._arriving, self._leaving, strict=True)
        ]

    def arrived(self) -> Tensor:
        """Wait; the rows that came, by sender."""
        for work in self.works:
            work.wait()
        return _joined(self._arriving)

    def total(self) -> Tensor:
        """Wait; the sum of what came. To be asked for once."""
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
    """Rows to their devices, one for each; the rows that came, by sender."""
    if rows.device.type == "cpu":
        return PartsUnderWay(rows, group, worker).arrived()
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    return arrived


def reduce_scatter(
    total: Tensor, parts: Tensor, group: dist.ProcessGroup, worker: Worker, async_op: bool = False
) -> dist.Work | None:
    """Of `parts`, one for each device, one after the other, sum this device's over all devices into `total`.
    A CPU blocks."""
    if total.device.type == "cpu":
        total.copy_(PartsUnderWay(parts.view(group.size(), -1), group, worker).total().view_as(total))
        return None
    work: dist.Work | None = reduce_scatter_single(
        total, parts, op=dist.ReduceOp.SUM, group=group, async_op=async_op
    )
    return work


def all_gather(output: Tensor, own: Tensor, group: dist.ProcessGroup, worker: Worker) -> None:
    """Everybody's `own`, one after the other, into `output`."""
    if own.device.type == "cpu":
        GatherUnderWay(output, own, group, worker).wait()
    else:
        all_gather_single(output, own, group=group)


class GatherUnderWay(dist.Work):
    """An all-gather on a CPU that has begun: `output` holds everybody's `own`, one after the other, once it
    was waited for."""

    def __init__(self, output: Tensor, own: Tensor, group: dist.ProcessGroup, worker: Worker) -> None:
        super().__init__()
        self._own, self._rows, self._gathered = (
            own.flatten(),
            output.view(group.size(), -1),
            list[tuple[slice, Tensor]](),
        )
        self.works: list[dist.Work] = []
        cuts = list(pieces(len(self._own), own.element_size(), worker))
        for cut in cuts:
            gathered = (
                self._rows if len(cuts) == 1 else self._rows.new_empty(len(self._rows), cut.stop - cut.start)
            )
            self.works.append(
                all_gather_single(gathered.flatten(), self._own[cut], group=group, async_op=True)
            )
            if gathered is not self._rows:
                self._gathered.append((cut, gathered))

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """As of any collective."""
        for work in self.works:
            work.wait()
        for cut, gathered in self._gathered:
            self._rows[:, cut] = gathered
        self._gathered.clear()
        return True
