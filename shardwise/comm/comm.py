"""Collectives that count their bytes and the time the program waits for them.

Everything that training sends between devices passes through this package: what shardwise sends itself (here;
with gradients flowing through it in autograd.py), and what torch sends for it, through the doors that torch
leaves open (hooks.py). The ledger then holds what really ran, by kind and axis, and the planner can be held
to it.

Gradients are always summed, never averaged: the loss is already divided by the global number of tokens.

On a CPU a collective blocks, and the time inside it is time this rank waits for others or for bytes: it is
kept apart from the rank's own work, so that a slow rank can be told from those that wait for it. On a GPU
collectives wait on streams; what can be timed there, and what cannot, is said where it happens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._torch import all_gather_single
from shardwise.comm.gloo import reduce_scatter
from shardwise.mesh import Mesh
from shardwise.observe import Collective, Ledger, StepClock

EXPOSED = "exposed_communication"


@dataclass
class Comm:
    """This rank's collectives, with their ledger and clock."""

    mesh: Mesh
    ledger: Ledger = field(init=False)
    clock: StepClock = field(init=False)
    step: int = 0
    """The step that is being done, counted from 1."""
    loss_scale: float = 1.0
    """What gradients are multiplied by in it."""
    only_to_look: bool = False
    """Whether gradients of this step are thrown away, so that nothing of them may be left for later."""

    def __post_init__(self) -> None:
        on_gpu = self.mesh.device.type == "cuda"
        self.ledger, self.clock = Ledger(timed=not on_gpu), StepClock("cuda" if on_gpu else "cpu")
        self._thread = threading.get_ident()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.mesh.device

    def all_reduce(
        self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Sum (or `op`) in place over an axis; nothing to do where the axis has one device."""
        group = self.mesh.group(axis)
        if group is not None:
            with self.collective("all_reduce", axis, tensor):
                dist.all_reduce(tensor, op=op, group=group)
        return tensor

    def all_gather(self, tensor: Tensor, axis: str) -> Tensor:
        """Everybody's tensor, of one shape: (devices, *shape)."""
        parts = tensor.new_empty(self.mesh.size(axis), *tensor.shape)
        with self.collective("all_gather", axis, parts):
            all_gather_single(parts.flatten(0, 1), tensor.contiguous(), group=self.mesh.group(axis))
        return parts

    def reduce_scatter(self, parts: Tensor, axis: str) -> Tensor:
        """Of (devices, *shape), one part for each device: the sum of all devices' parts for this one."""
        own, group = torch.empty_like(parts[0]), self.mesh.group(axis)
        assert group is not None, "there are devices to exchange with"
        with self.collective("reduce_scatter", axis, parts):
            reduce_scatter(own, parts.flatten(0, 1), group, self.mesh.worker)
        return own

    def all_to_all(
        self,
        rows: Tensor,
        axis: str,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Rows go to the devices in order, sent[i] of them to device i, and received[i] come from it; None:
        as many to each."""
        leaving = rows.contiguous()
        coming, going = (None if counts is None else list(counts) for counts in (received, sent))
        arriving = leaving.new_empty(leaving.shape[0] if coming is None else sum(coming), *leaving.shape[1:])
        with self.collective("all_to_all", axis, leaving):
            dist.all_to_all_single(arriving, leaving, coming, going, group=self.mesh.group(axis))
        return arriving

    def start_exchange(
        self, tensors: Sequence[Tensor], axis: str, to: int, source: int, first_tag: int = 0
    ) -> Exchange:
        """Start sending these to one device of the axis, and receiving the like from another, which may be
        the same."""
        return Exchange(self, tensors, axis, to, source, first_tag)

    def send(self, tensor: Tensor, axis: str, to: int) -> None:
        """Send to one device of the axis, which receives."""
        with self.collective("send", axis, tensor):
            dist.send(tensor.contiguous(), group_dst=to, group=self.mesh.group(axis))

    def receive(self, into: Tensor, axis: str, source: int) -> Tensor:
        """What a device of the axis sends."""
        dist.recv(into, group_src=source, group=self.mesh.group(axis))
        return into

    def waiting(self) -> AbstractContextManager[None]:
        """Around a call that blocks until the peers have come too: on a CPU, its time is exposed
        communication."""
        stands_still = (
            self.device.type == "cpu" and threading.get_ident() == self._thread
        )  # else others compute meanwhile
        return self.clock.span(EXPOSED) if stands_still else nullcontext()

    def working(self) -> AbstractContextManager[None]:
        """Around work inside a wait: on a CPU, its time is forward and backward again."""
        return self.clock.span("forward_backward") if self.device.type == "cpu" else nullcontext()

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum in place over every device that reads different sequences."""
        self.all_reduce(tensor, "data")
        return self.all_reduce(tensor, "replica")

    @contextmanager
    def collective(self, kind: str, axis: str, full: Tensor, plain: Tensor | None = None) -> Iterator[None]:
        """Around a collective that blocks, which is entered in the ledger: see `begin`."""
        begun = self.begin(kind, axis, full, plain)
        with self.waiting():
            yield
        begun.end()

    def begin(self, kind: str, axis: str, full: Tensor, plain: Tensor | None = None) -> Collective:
        """Enter in the ledger one collective that begins now, and whose end whoever waits for it tells.
        `full` is the whole tensor it handles, `plain` the one that it stands for."""
        before = None if plain is None else plain.numel() * plain.element_size()
        return self.ledger.record(kind, axis, full.numel() * full.element_size(), before)


class Exchange:
    """Tensors on their way to one peer and from another. What is sent must stay as it is until `arrived` has
    returned."""

    def __init__(
        self, comm: Comm, tensors: Sequence[Tensor], axis: str, to: int, source: int, first_tag: int
    ) -> None:
        group = comm.mesh.group(axis)
        self.comm, self.begun = comm, []
        self.leaving = [tensor.contiguous() for tensor in tensors]
        self.arriving = [torch.empty_like(tensor) for tensor in self.leaving]
        operations = []
        for tag, (leaving, arriving) in enumerate(zip(self.leaving, self.arriving, strict=True), first_tag):
            self.begun.append(comm.begin("send", axis, leaving))
            operations.append(dist.P2POp(dist.isend, leaving, group=group, tag=tag, group_peer=to))
            operations.append(dist.P2POp(dist.irecv, arriving, group=group, tag=tag, group_peer=source))
        self.works = dist.batch_isend_irecv(operations)

    def arrived(self) -> list[Tensor]:
        """Wait; what came."""
        with self.comm.waiting():
            for work in self.works:
                work.wait()
        for sent in self.begun:  # or earlier: gloo does not tell when a message was through
            sent.end()
        self.leaving = []
        return self.arriving
