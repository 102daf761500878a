"""Messages between ranks beside training: who has which file, whose copy of a state is whole, how a run
begins and ends.

They travel over a separate gloo group, from host memory. So a thread can exchange them while a step's
collectives run, which must come in one order on all ranks of a group; and a dead peer is noticed at once. The
ledger counts the collectives of a step, and none of these.

Messages are JSON, and their lengths are sent first. torch's own way (`all_gather_object` and the like)
unpickles what arrives, so whoever reaches a worker's port could run code there; JSON can hold nothing but
values. It turns tuples into lists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RunFailed
from shardwise.mesh import Mesh

T = TypeVar("T")
MAX_BYTES = 1 << 30
"""Size limit of one message: more than any rank sends, so that a wrong length cannot fill the memory."""


@dataclass(frozen=True)
class Peers:
    """All ranks of a run, as one of them sees them."""

    rank: int
    world: int
    group: dist.ProcessGroup | None
    """Process group of all ranks; None where this rank is alone."""

    @classmethod
    def create(cls, mesh: Mesh) -> Peers:
        """Make a group of all ranks; all of them must call this together."""
        worker = mesh.worker
        return cls(worker.rank, worker.world, dist.new_group(backend="gloo") if worker.world > 1 else None)

    def all_gather(self, message: T) -> list[T]:
        """Return the messages of all ranks, in rank order, on every rank."""
        text = _encode(message)
        if self.group is None:
            return [_decode(text)]
        lengths = self._lengths(text)
        texts = [torch.empty(max(lengths), dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, _pad(text, max(lengths)), group=self.group)
        return [_decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]

    def gather(self, message: T) -> list[T] | None:
        """Return the messages of all ranks on rank 0 and None elsewhere. Use it for long messages."""
        text = _encode(message)
        if self.group is None:
            return [_decode(text)]
        lengths = self._lengths(text)
        ranks = range(self.world if self.rank == 0 else 0)
        texts = [torch.empty(max(lengths), dtype=torch.uint8) for _ in ranks]
        dist.gather(_pad(text, max(lengths)), texts or None, dst=0, group=self.group)
        if not texts:
            return None
        return [_decode(text[:length]) for text, length in zip(texts, lengths, strict=True)]

    def scatter(self, messages: Sequence[T] | None) -> T:
        """Return rank 0's message for this rank; rank 0 passes one message per rank, the others None."""
        texts = None if messages is None else [_encode(message) for message in messages]
        if self.group is None:
            assert texts is not None, "a rank that is alone is rank 0"
            first: T = _decode(texts[0])
            return first
        lengths = torch.tensor([len(text) for text in texts] if texts else [0] * self.world)
        dist.broadcast(lengths, src=0, group=self.group)
        longest = _check_length(int(lengths.max()))
        text = torch.empty(longest, dtype=torch.uint8)
        padded = [_pad(each, longest) for each in texts] if texts else None
        dist.scatter(text, padded, src=0, group=self.group)
        received: T = _decode(text[: int(lengths[self.rank])])
        return received

    def broadcast(self, message: T | None, source: int) -> T:
        """Return the message of rank `source` on every rank; that of the other ranks is ignored."""
        text = _encode(message)
        if self.group is not None:
            length = torch.tensor([len(text)])
            dist.broadcast(length, src=source, group=self.group)
            if self.rank != source:
                text = torch.empty(_check_length(int(length)), dtype=torch.uint8)
            dist.broadcast(text, src=source, group=self.group)
        received: T = _decode(text)
        return received

    def _lengths(self, text: Tensor) -> list[int]:
        """Return the length of each rank's message."""
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self.group)
        return [_check_length(int(length)) for length in lengths]

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send a tensor to a rank, which must receive it."""
        dist.send(tensor, to, group=self.group, tag=tag)

    def receive(self, into: Tensor, source: int, tag: int) -> None:
        """Receive into a tensor what a rank sends."""
        dist.recv(into, source, group=self.group, tag=tag)

    def exchange(self, leaving: Tensor, to: int, arriving: Tensor, source: int, tag: int) -> None:
        """Send to one rank and receive from another, both at once."""
        receiving = dist.irecv(arriving, source, group=self.group, tag=tag)
        sending = dist.isend(leaving, to, group=self.group, tag=tag)
        for work in (receiving, sending):
            assert work is not None, "this rank is in the group"
            work.wait()


def _encode(message: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    try:
        return json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError):
        raise RunFailed(
            "a worker received a message that no worker of this run sent: does another program use its port?"
        ) from None


def _pad(text: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(text, (0, length - len(text)))


def _check_length(length: int) -> int:
    if not 0 <= length <= MAX_BYTES:
        raise RunFailed(f"a worker announced a message of {length} bytes, which no worker of this run sends")
    return length
