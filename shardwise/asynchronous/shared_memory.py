"""Weights and moments that the processes of one machine share and update without a lock: Hogwild! (Niu et al.
2011).

Every process computes a gradient with the present weights and adds its update to them, whatever others write
at the same time. No process waits. The cost: other processes may change the weights while a gradient is being
computed, and if two processes change one number at the same moment, one change may be lost. If updates
touch few rows of a large table, that is rare, and Niu et al. show that the loss falls as in a serial run. If
all updates touch all weights, the run is asynchronous like others, with additional noise. Niu et al. used
SGD; the two moments of AdamW need more care (optimizers/adamw.py).

The memory is an anonymous file (memfd), which the first process creates and the others open through /proc. It
disappears with the last process, even if that is killed, so nothing has to be cleaned up; and the size of
/dev/shm does not limit it. It holds one copy of weights and moments for all processes, and 8 bytes per row to
detect conflicts.

*Conflicts* are measured. Every row has a stamp: the worker that wrote it last, and the number of that
worker's update. (A dense gradient counts as one row.) Before its forward, a worker notes how many updates
each of the others has finished. If a row that it is about to write has the stamp of a later update of another
worker, it was written after it was read. Stamps are read and written without a lock too, so two workers that
write one row within the same microseconds may both miss the conflict.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from shardwise.checkpoint.save import state_of
from shardwise.checkpoint.state_key import StateKey
from shardwise.comm import Peers
from shardwise.optim import ShardedOptimizer

CACHE_LINE = 64
"""Bytes of a cache line. No two tensors share a line."""
Key = TypeVar("Key", bound=Hashable)


class SharedMemory(Generic[Key]):
    """Tensors that all processes share. They begin with the values of the first process."""

    def __init__(self, peers: Peers, local: Mapping[Key, Tensor]) -> None:
        """All processes call this together, with tensors of the same keys, shapes and dtypes."""
        ends = [0]
        for tensor in local.values():
            ends.append(ends[-1] + -(-tensor.nbytes // CACHE_LINE) * CACHE_LINE)
        file = self._open(peers, ends[-1])
        memory = torch.frombuffer(mmap.mmap(file, ends[-1]), dtype=torch.uint8)
        self.tensors = {
            key: memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, (key, tensor) in zip(ends, local.items(), strict=False)
        }
        if peers.rank == 0:
            for key, tensor in local.items():
                self.tensors[key].copy_(tensor)
        peers.all_gather("has opened it")  # and the values are in place

    def _open(self, peers: Peers, size: int) -> int:
        file = -1
        if peers.rank == 0:
            file = os.memfd_create("shardwise")
            os.ftruncate(file, size)
        path = peers.broadcast(f"/proc/{os.getpid()}/fd/{file}", 0)
        if peers.rank != 0:
            file = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, file)
        self._file = file
        return file

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the memory. The system releases the lock of a process that dies."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


class Stamps:
    """Tells one of the workers who wrote each row last."""

    def __init__(self, last: Tensor, finished: Tensor, worker: int) -> None:
        """`last` has for each row the worker that wrote it last and the number of its update, in one integer.
        `finished` has for each worker the number of its finished updates; only that worker writes it. Both
        are shared."""
        self._last, self._finished, self._worker, self._workers = last, finished, worker, len(finished)
        self._seen = finished.clone()

    def read(self) -> None:
        """Note which updates the others have finished, before weights are read."""
        self._seen = self._finished.clone()

    def write(self, rows: Tensor) -> int:
        """Mark rows that are about to be written. Return how many of them others have written since the
        weights were read."""
        last = self._last[rows]
        number, writer = last // self._workers, last % self._workers
        self._last[rows] = (int(self._finished[self._worker]) + 1) * self._workers + self._worker
        return int(((writer != self._worker) & (number > self._seen[writer])).sum())

    def written(self) -> None:
        """Note that the update of the marked rows is finished."""
        self._finished[self._worker] += 1


class SharedState:
    """Moves a model's weights and its optimizer's states into shared memory."""

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], optimizer: ShardedOptimizer, peers: Peers
    ) -> None:
        self.parameters = [parameter for _, parameter in named]
        rows = torch.tensor([0, *(len(parameter) if parameter.ndim else 1 for parameter in self.parameters)])
        self._first_rows = rows.cumsum(0)
        """The number of each parameter's first row, counted over all parameters."""
        stamps = {
            "last": torch.zeros(int(rows.sum()), dtype=torch.int64),
            "finished": torch.zeros(peers.world, dtype=torch.int64),
        }
        local: dict[StateKey | str, Tensor] = dict([*state_of(named, optimizer).items(), *stamps.items()])
        self.memory = SharedMemory(peers, local)
        tensors = self.memory.tensors
        for name, parameter in named:
            parameter.data = tensors[StateKey.model(name)]
            if parameter.requires_grad:
                optimizer.state[parameter] = {
                    slot: tensors[StateKey.optimizer(name, slot)] for slot in optimizer.state[parameter]
                }
        self.stamps = Stamps(tensors["last"], tensors["finished"], peers.rank)

    def touched(self) -> Tensor:
        """Return the rows that the present gradients touch: those of a sparse gradient, and one for each
        dense gradient."""
        pairs = zip(self.parameters, self._first_rows, strict=False)
        return torch.cat(
            [_rows(parameter.grad, first) for parameter, first in pairs if parameter.grad is not None]
        )


def _rows(gradient: Tensor, first: Tensor) -> Tensor:
    return gradient.indices()[0] + first if gradient.is_sparse else first.reshape(1)
