"""What ranks say to each other beside training: who has which file, whose copy of a state is whole, how a run
begins and ends.

Over a gloo group of its own, from host memory. So it may happen in a thread of its own while a step's
collectives run, which must come in one order on all ranks of a group; and a dead peer is noticed at once. The
ledger is a step's, and counts none of it.

Messages are JSON, whose lengths go ahead of them. torch's own way (`all_gather_object` and the like)
unpickles what arrives, so whoever reaches a worker's port could run code there; a JSON text can be nothing
but a value. It brings tuples back as lists.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.errors import RunFailed
from shardwise.mesh import Mesh

MOST_BYTES = 1 << 30
"""Of one message: more than any rank ever says, and what a wrong length costs at most."""


@dataclass(frozen=True)
class Peers:
    """All ranks of a run, as one of them sees them."""

    rank: int
    world: int
    group: dist.ProcessGroup | None
    """None: this rank is alone."""

    @classmethod
    def meet(cls, mesh: Mesh) -> Peers:
        """Make a group of all ranks, which all of them do together."""
        worker = mesh.worker
        return cls(worker.rank, worker.world, dist.new_group(backend="gloo") if worker.world > 1 else None)

    def from_everyone(self, mine: Any) -> list[Any]:
        """What every rank has to say, on all of them, in rank order."""
        said = _encoded(mine)
        if self.group is None:
            return [_decoded(said)]
        lengths = self._lengths(said)
        texts = [torch.empty(max(lengths), dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, _padded(said, max(lengths)), group=self.group)
        return [_decoded(text[:length]) for text, length in zip(texts, lengths, strict=True)]

    def at_main(self, mine: Any) -> list[Any] | None:
        """What every rank has to say, on rank 0 alone: for what is too long to be sent to everyone."""
        said = _encoded(mine)
        if self.group is None:
            return [_decoded(said)]
        lengths = self._lengths(said)
        texts = (
            [torch.empty(max(lengths), dtype=torch.uint8) for _ in range(self.world)]
            if self.rank == 0
            else None
        )
        dist.gather(_padded(said, max(lengths)), texts, dst=0, group=self.group)
        return (
            None
            if texts is None
            else [_decoded(text[:length]) for text, length in zip(texts, lengths, strict=True)]
        )

    def from_main(self, messages: Sequence[Any] | None) -> Any:
        """What rank 0 has to say to this rank; rank 0 gives a message for each."""
        said = None if messages is None else [_encoded(message) for message in messages]
        if self.group is None:
            assert said is not None, "a rank that is alone is rank 0"
            return _decoded(said[0])
        lengths = torch.tensor([text.numel() for text in said] if said else [0] * self.world)
        dist.broadcast(lengths, src=0, group=self.group)
        most = _checked(int(lengths.max()))
        mine = torch.empty(most, dtype=torch.uint8)
        dist.scatter(mine, [_padded(text, most) for text in said] if said else None, src=0, group=self.group)
        return _decoded(mine[: int(lengths[self.rank])])

    def from_rank(self, mine: Any, source: int) -> Any:
        """What one rank has to say, on all of them."""
        said = _encoded(mine)
        if self.group is not None:
            length = torch.tensor([said.numel()])
            dist.broadcast(length, src=source, group=self.group)
            if self.rank != source:
                said = torch.empty(_checked(int(length)), dtype=torch.uint8)
            dist.broadcast(said, src=source, group=self.group)
        return _decoded(said)

    def _lengths(self, said: Tensor) -> list[int]:
        """How long each rank's message is."""
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([said.numel()]), group=self.group)
        return [_checked(int(length)) for length in lengths]

    def send(self, tensor: Tensor, to: int, tag: int) -> None:
        """Send to one rank, which receives."""
        dist.send(tensor, to, group=self.group, tag=tag)

    def receive(self, into: Tensor, source: int, tag: int) -> None:
        """What one rank sends."""
        dist.recv(into, source, group=self.group, tag=tag)

    def exchange(self, leaving: Tensor, to: int, arriving: Tensor, source: int, tag: int) -> None:
        """Send to one rank and receive from another, both at once."""
        coming = dist.irecv(arriving, source, group=self.group, tag=tag)
        going = dist.isend(leaving, to, group=self.group, tag=tag)
        for work in (coming, going):
            assert work is not None, "this rank is in the group"
            work.wait()


def _encoded(message: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8)


def _decoded(text: Tensor) -> Any:
    try:
        return json.loads(text.numpy().tobytes())
    except (ValueError, RecursionError):
        raise RunFailed(
            "a worker received what no worker of this run has sent: is some other program on its network?"
        ) from None


def _padded(text: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(text, (0, length - text.numel()))


def _checked(length: int) -> int:
    if not 0 <= length <= MOST_BYTES:
        raise RunFailed(f"a worker announced a message of {length} bytes, which no worker of this run sends")
    return length
