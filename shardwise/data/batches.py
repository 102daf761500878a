"""Batches for one rank: a thread reads ahead while the device computes.

The only state is how many sequences the run has seen, so resuming is starting at another `seen`. One thread is enough: a
step's rows come from memory-mapped tokens, and numpy and torch let go of the interpreter lock while copying. For a GPU the
thread also copies into pinned memory, from where the copy to the device runs behind the computation. Costs host memory for two
steps of this rank's rows, 16 bytes a token (20 with document numbers).

Every sequence is summed up as it is read: the CRC-32 of its token ids. The sum of these over a global batch does not depend on
who read which sequence, so it is the same on any layout, and a run that was interrupted can show by it that each step saw the
sequences it should have seen. It costs the reading thread a few nanoseconds a token.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.data.dataset import Dataset, Rows

_WAIT = 0.1  # seconds between looks at the stop flag


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
    """Yields, step after step without end, the micro-batches of rows [start_row, start_row + rows) of the global batch."""

    def __init__(
        self,
        dataset: Dataset,
        global_batch: int,
        start_row: int,
        rows: int,
        micro_batch: int,
        device: torch.device | str,
        seen: int = 0,
    ) -> None:
        assert rows % micro_batch == 0, "a rank's rows must split into whole micro-batches"
        assert 0 <= start_row <= start_row + rows <= global_batch, "rows outside the batch"
        self._dataset = dataset
        self._global_batch, self._start_row, self._rows = global_batch, start_row, rows
        self._micro_batch = micro_batch
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._ready: queue.Queue[list[Batch] | BaseException] = queue.Queue(maxsize=1)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(seen,), name="batches", daemon=True)
        self._thread.start()

    def __next__(self) -> list[Batch]:
        """The next step's micro-batches, on the device. An error of the reading thread is raised here."""
        if self._stopped.is_set():
            raise StopIteration
        ready = self._ready.get()
        if isinstance(ready, BaseException):
            self.close()
            raise ready
        # Copied here, on the consumer's stream, so that the copy is ordered before the computation that reads it.
        return [_to(batch, self._device) for batch in ready]

    def close(self) -> None:
        """Stop the thread and wait for it; iterating afterwards ends at once."""
        self._stopped.set()
        self._thread.join()

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _read_ahead(self, seen: int) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # else pinning opens a context on the first GPU, for every rank
            while not self._stopped.is_set():
                first = seen + self._start_row
                rows = self._dataset.sequences(first, self._rows)
                self._hand_over([self._micro_batch_of(rows, start, first) for start in range(0, self._rows, self._micro_batch)])
                seen += self._global_batch
        except BaseException as error:  # whatever it is, it belongs to the consumer
            self._hand_over(error)

    def _micro_batch_of(self, rows: Rows, start: int, first: int) -> Batch:
        """From this row on; the first of all has that number in the run."""
        return replace(host_batch(_part(rows, start, self._micro_batch), self._pinned), first=first + start)

    def _hand_over(self, ready: list[Batch] | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(ready, timeout=_WAIT)
                return
            except queue.Full:
                continue


def to_batch(rows: Rows, device: torch.device) -> Batch:
    """Rows as a batch on a device, without a thread: for evaluation."""
    return _to(host_batch(rows, pinned=False), device)


def host_batch(rows: Rows, pinned: bool) -> Batch:
    """Rows as tensors in host memory."""
    documents = None if rows.documents is None else _tensor(rows.documents, pinned)
    return Batch(_tensor(rows.inputs, pinned), _tensor(rows.targets, pinned), documents, rows.valid, checksum(rows.inputs))


def checksum(inputs: NDArray[np.int64]) -> int:
    """Of sequences, one a row: the sum of the CRC-32 of each, taken over its token ids as 8 bytes each, lowest first."""
    return sum(zlib.crc32(row.data) for row in np.ascontiguousarray(inputs, dtype="<i8"))


def _part(rows: Rows, start: int, count: int) -> Rows:
    part = slice(start, start + count)
    return Rows(rows.inputs[part], rows.targets[part], None if rows.documents is None else rows.documents[part])


def _tensor(values: NDArray[Any], pinned: bool) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if pinned else tensor


def _to(batch: Batch, device: torch.device) -> Batch:
    documents = None if batch.documents is None else batch.documents.to(device, non_blocking=True)
    inputs, targets = (tensor.to(device, non_blocking=True) for tensor in (batch.inputs, batch.targets))
    return replace(batch, inputs=inputs, targets=targets, documents=documents)
