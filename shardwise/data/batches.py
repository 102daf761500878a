"""Batches for one rank. A thread reads ahead while the device computes.

The only state is the number of sequences that the run has seen, so a run resumes by starting at another
`seen`. One thread is enough: the rows of a step come from memory-mapped tokens, and numpy and torch release
the interpreter lock while they copy. For a GPU, the thread also copies into pinned memory, from where the
copy to the device overlaps with the computation. It costs host memory for two steps of this rank's rows, 16
bytes per token (20 with document positions).

Each sequence that is read has a checksum: the CRC-32 of its token ids. The sum of these over a global batch
does not depend on which rank read which sequence, so it is the same on any layout. A run that was interrupted
can show with it that each step saw the right sequences. It costs the reading thread a few nanoseconds per
token.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data.dataset import Dataset, Rows


@dataclass(frozen=True)
class Batch:
    """The rows of one forward. Each tensor is (micro_batch, sequence_length)."""

    inputs: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    valid: int
    """Number of targets that count in the loss, known without reading from the device."""
    checksum: int = 0
    """Sum of the checksums of the sequences."""
    first: int = 0
    """Number of the first sequence in the run."""


class Batches(Iterator[list[Batch]]):
    """Yields this rank's rows of the global batch, step after step without end, split into micro-batches.

    The micro-batches are as equal in size as possible. The rows of a rank may change from step to step: the
    argument of `take` says which rows to read for the step after the one that it returns.
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
        """Return the next step's micro-batches on the device. The step after it gets the same rows of its
        batch.
        """
        return self.take(self._rows)

    def take(self, then: range) -> list[Batch]:
        """Return the next step's micro-batches on the device. The step after it gets the rows `then` of its
        batch.

        An error of the reading thread is raised here.
        """
        if self._closed:
            raise StopIteration
        self._want(then)
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self.close()
            raise ready
        # The copy runs on the consumer's stream, so that it comes before the computation that reads it.
        return [_to(batch, self._device) for batch in ready]

    def close(self) -> None:
        """Stop the thread and wait for it. Iterating afterwards ends at once."""
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
                # Without this, pinning would create a context on the first GPU for every rank.
                torch.cuda.set_device(self._device)
            while not self._closed and (wanted := self._wanted.get()) is not None:
                first = seen + wanted.start
                rows = self._dataset.sequences(first, len(wanted))
                micro_batches = split_evenly(len(wanted), self._micro_batches)
                self._ready.put([self._micro_batch_of(rows, part, first) for part in micro_batches])
                seen += self._global_batch
        except BaseException as error:  # every error is raised in the consumer's thread
            self._ready.put(error)

    def _micro_batch_of(self, rows: Rows, part: range, first: int) -> Batch:
        """Return the micro-batch of some of these rows; `first` is the number of the first row in the run."""
        return replace(host_batch(_part(rows, part), self._pinned), first=first + part.start)


def split_evenly(rows: int, count: int) -> list[range]:
    """Split rows into `count` ranges whose sizes differ by at most one. The first ranges are the
    larger ones.
    """
    ends = [0, *accumulate(rows // count + (index < rows % count) for index in range(count))]
    return [range(start, end) for start, end in pairwise(ends)]


def to_batch(rows: Rows, device: torch.device) -> Batch:
    """Return rows as a batch on a device, without a thread; for evaluation."""
    return _to(host_batch(rows, pinned=False), device)


def host_batch(rows: Rows, pinned: bool) -> Batch:
    """Return rows as a batch in host memory."""
    documents = None if rows.documents is None else _tensor(rows.documents, pinned)
    return Batch(
        _tensor(rows.inputs, pinned),
        _tensor(rows.targets, pinned),
        documents,
        rows.valid,
        checksum(rows.inputs),
    )


def checksum(inputs: NDArray[np.int64]) -> int:
    """Return the sum of the CRC-32 of each row, over its token ids as little-endian integers of 8 bytes."""
    return sum(zlib.crc32(row.data) for row in np.ascontiguousarray(inputs, dtype="<i8"))


def _part(rows: Rows, part: range) -> Rows:
    some = slice(part.start, part.stop)
    documents = None if rows.documents is None else rows.documents[some]
    return Rows(rows.inputs[some], rows.targets[some], documents)


def _tensor(values: NDArray[np.generic], pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if pinned else tensor


def _to(batch: Batch, device: torch.device) -> Batch:
    documents = None if batch.documents is None else batch.documents.to(device, non_blocking=True)
    inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, documents=documents)
