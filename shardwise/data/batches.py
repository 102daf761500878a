"""Batches for one rank: a thread reads ahead while the device computes.

The only state is how many sequences the run has seen, so resuming is starting at another `seen`. One thread
is enough: a step's rows come from memory-mapped tokens, and numpy and torch let go of the interpreter lock
while copying. For a GPU the thread also copies into pinned memory, from where the copy to the device runs
behind the computation. Costs host memory for two steps of this rank's rows, 16 bytes a token (20 with
document numbers).

Every sequence is summed up as it is read: the CRC-32 of its token ids. The sum of these over a global batch
does not depend on who read which sequence, so it is the same on any layout, and a run that was interrupted
can show by it that each step saw the sequences it should have seen. It costs the reading thread a few
nanoseconds a token.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data.dataset import Dataset, Rows


@dataclass(frozen=True)
class Batch:
    """What one forward sees; each tensor is (micro_batch, sequence_length)."""

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    valid: int
    """Targets that count in the loss, known without asking the device."""
    checksum: int = 0
    """The sum of the sequences' own checksums."""
    first: int = 0
    """The number in the run of the first of its sequences."""


class Batches(Iterator[list[Batch]]):
    """Yields, step after step without end, this rank's rows of the global batch in as many micro-batches, as
    even as can be.

    Whose rows are whose may change from step to step: `take` says which are to be read for the step after the
    one it returns.
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        rows: range,
        micro_batches: int,
        device: torch.device | str,
        seen: int = 0,
    ) -> None:
        self._dataset, self._global_batch, self._micro_batches = dataset, global_batch, micro_batches
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._wanted: queue.SimpleQueue[range | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[list[Batch] | BaseException] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._read_ahead, args=(seen,), name="batches", daemon=True)
        self._thread.start()
        self._want(rows)

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches, on the device; the step after it gets the same rows of its batch."""
        return self.take(self._rows)

    def take(self, then: range) -> list[Batch]:
        """The next step's micro-batches, on the device; the step after it gets those rows of its batch. An
        error of the reading thread is raised here.
        """
        if self._closed:
            raise StopIteration
        self._want(then)
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self.close()
            raise ready
        # Copied here, on the consumer's stream, so that the copy is ordered before the computation that reads
        # it.
        return [_to(batch, self._device) for batch in ready]

    def close(self) -> None:
        """Stop the thread and wait for it; iterating afterwards ends at once."""
        self._closed = True
        self._wanted.put(None)
        self._thread.join()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _want(self, rows: range) -> None:
        assert 0 <= rows.start <= rows.stop <= self._global_batch, "rows outside the batch"
        assert len(rows) >= self._micro_batches, "every micro-batch has a row"
        self._rows = rows
        self._wanted.put(rows)

    def _read_ahead(self, seen: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(
                    self._device
                )  # else pinning opens a context on the first GPU, for every rank
            while not self._closed and (wanted := self._wanted.get()) is not None:
                first = seen + wanted.start
                rows = self._dataset.sequences(first, len(wanted))
                self._ready.put(
                    [
                        self._micro_batch_of(rows, part, first)
                        for part in parts(len(wanted), self._micro_batches)
                    ]
                )
                seen += self._global_batch
        except BaseException as error:  # whatever it is, it belongs to the consumer
            self._ready.put(error)

    def _micro_batch_of(self, rows: Rows, part: range, first: int) -> Batch:
        """Of some of these rows, the first of which has that number in the run."""
        return replace(host_batch(_part(rows, part), self._pinned), first=first + part.start)


def parts(rows: int, count: int) -> list[range]:
    """Rows in so many parts, as even as can be; the first ones have one row more."""
    ends = [0, *accumulate(rows // count + (index < rows % count) for index in range(count))]
    return [range(start, end) for start, end in pairwise(ends)]


def to_batch(rows: Rows, device: torch.device) -> Batch:
    """Rows as a batch on a device, without a thread: for evaluation."""
    return _to(host_batch(rows, pinned=False), device)


def host_batch(rows: Rows, pinned: bool) -> Batch:
    """Rows as tensors in host memory."""
    documents = None if rows.documents is None else _tensor(rows.documents, pinned)
    return Batch(
        _tensor(rows.inputs, pinned),
        _tensor(rows.targets, pinned),
        documents,
        rows.valid,
        checksum(rows.inputs),
    )


def checksum(inputs: NDArray[np.int64]) -> int:
    """Of sequences, one a row: the sum of the CRC-32 of each, taken over its token ids as 8 bytes each,
    lowest first."""
    return sum(zlib.crc32(row.data) for row in np.ascontiguousarray(inputs, dtype="<i8"))


def _part(rows: Rows, part: range) -> Rows:
    own = slice(part.start, part.stop)
    return Rows(rows.inputs[own], rows.targets[own], None if rows.documents is None else rows.documents[own])


def _tensor(values: NDArray[Any], pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if pinned else tensor


def _to(batch: Batch, device: torch.device) -> Batch:
    documents = None if batch.documents is None else batch.documents.to(device, non_blocking=True)
    inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, documents=documents)
