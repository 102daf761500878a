"""What ranks say to each other beside training: who has which file, whose copy of a state is whole, how a run begins and ends.

Over a gloo group of its own, from host memory. So it may happen in a thread of its own while a step's collectives run, which must
come in one order on all ranks of a group; and a dead peer is noticed at once. The ledger is a step's, and counts none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from shardwise.mesh import Mesh

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """All ranks of a run, as one of them sees them."""

    world: int
    group: dist.ProcessGroup | None
    """None: this rank is alone."""

    @classmethod
    def meet(cls, mesh: Mesh) -> Peers:
        """Make a group of all ranks, which all of them do together."""
        world = mesh.worker.world
        return cls(world, dist.new_group(backend="gloo") if world > 1 else None)

    def from_everyone(self, mine: T) -> list[T]:
        """What every rank has to say, in rank order."""
        if self.group is None:
            return [mine]
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def from_rank(self, mine: T, source: int) -> T:
        """What one rank has to say, on all of them."""
        said = [mine]
        if self.group is not None:
            dist.broadcast_object_list(said, src=source, group=self.group)
        return said[0]

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
