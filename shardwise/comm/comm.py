"""Collectives that count their bytes and the time the program waits for them.

Everything that training sends between devices passes through this package: shardwise's own collectives (here;
with gradients flowing through them in autograd.py), and those of torch, through the hooks that it offers
(hooks.py). The ledger therefore holds what really ran, by kind and axis, and checks the planner's
prediction.

Gradients are always summed, never averaged: the loss is already divided by the global number of tokens.

On a CPU a collective blocks, and this rank waits inside it for other ranks or for bytes. That time is
measured separately from computation, so that a slow rank can be told from those that wait for it. On a GPU
collectives wait on streams; the code that issues them says what can be timed there.
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
from shardwise.observe import EXPOSED, Collective, Ledger, StepClock


@dataclass
class Comm:
    """This rank's collectives, with their ledger and clock."""

    mesh: Mesh
    ledger: Ledger = field(init=False)
    clock: StepClock = field(init=False)
    step: int = 0
    """Number of the current step, counted from 1."""
    loss_scale: float = 1.0
    """Factor that the gradients of the current step are multiplied by."""
    discard_gradients: bool = False
    """Whether the gradients of this step are thrown away, so that compression must keep no residual of
    them."""

    def __post_init__(self) -> None:
        on_gpu = self.mesh.device.type == "cuda"
        self.ledger, self.clock = Ledger(timed=not on_gpu), StepClock("cuda" if on_gpu else "cpu")
        self._thread = threading.get_ident()

    @property
    def device(self) -> torch.device:
        """Device that this rank computes on."""
        return self.mesh.device

    def all_reduce(
        self, tensor: Tensor, axis: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Tensor:
        """Sum (or apply `op`) in place over an axis; do nothing where the axis has one device."""
        group = self.mesh.group(axis)
        if group is not None:
            with self.collective("all_reduce", axis, tensor):
                dist.all_reduce(tensor, op=op, group=group)
        return tensor

    def all_gather(self, tensor: Tensor, axis: str) -> Tensor:
        """Return the tensors of all devices, which have one shape: (devices, *shape)."""
        parts = tensor.new_empty(self.mesh.size(axis), *tensor.shape)
        with self.collective("all_gather", axis, parts):
            all_gather_single(parts.flatten(0, 1), tensor.contiguous(), group=self.mesh.group(axis))
        return parts

    def reduce_scatter(self, parts: Tensor, axis: str) -> Tensor:
        """Return the sum over all devices of this device's part of (devices, *shape)."""
        total, group = torch.empty_like(parts[0]), self.mesh.group(axis)
        assert group is not None, "there are devices to exchange with"
        with self.collective("reduce_scatter", axis, parts):
            reduce_scatter(total, parts.flatten(0, 1), group, self.mesh.worker)
        return total

    def all_to_all(
        self,
        rows: Tensor,
        axis: str,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
    ) -> Tensor:
        """Send sent[i] of the rows to device i, and return received[i] rows from each device i, in order;
        None: the same number for each device."""
        leaving = rows.contiguous()
        inputs, outputs = (None if counts is None else list(counts) for counts in (received, sent))
        arriving = leaving.new_empty(leaving.shape[0] if inputs is None else sum(inputs), *leaving.shape[1:])
        with self.collective("all_to_all", axis, leaving):
            dist.all_to_all_single(arriving, leaving, inputs, outputs, group=self.mesh.group(axis))
        return arriving

    def start_exchange(
        self, tensors: Sequence[Tensor], axis: str, to: int, source: int, first_tag: int = 0
    ) -> PeerExchange:
        """Start sending tensors to device `to` of the axis, and receiving tensors of the same shapes from
        device `source`."""
        return PeerExchange(self, tensors, axis, to, source, first_tag)

    def send(self, tensor: Tensor, axis: str, to: int) -> None:
        """Send a tensor to device `to` of the axis, which must receive it."""
        with self.collective("send", axis, tensor):
            dist.send(tensor.contiguous(), group_dst=to, group=self.mesh.group(axis))

    def receive(self, into: Tensor, axis: str, source: int) -> Tensor:
        """Receive into a tensor what device `source` of the axis sends, and return it."""
        dist.recv(into, group_src=source, group=self.mesh.group(axis))
        return into

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a call that blocks until the peers make it too: on a CPU, its time counts as
        exposed communication."""
        # While another thread waits, or a stream of a GPU, this rank goes on computing.
        blocks = self.device.type == "cpu" and threading.get_ident() == self._thread
        return self.clock.span(EXPOSED) if blocks else nullcontext()

    def working(self) -> AbstractContextManager[None]:
        """Return a context for computation inside a wait: on a CPU, its time counts as forward and
        backward."""
        return self.clock.span("forward_backward") if self.device.type == "cpu" else nullcontext()

    def sum_over_data(self, tensor: Tensor) -> Tensor:
        """Sum in place over every device that reads different sequences."""
        self.all_reduce(tensor, "data")
        return self.all_reduce(tensor, "replica")

    @contextmanager
    def collective(self, kind: str, axis: str, full: Tensor, plain: Tensor | None = None) -> Iterator[None]:
        """Record in the ledger a collective that blocks and runs inside this context: see `begin`."""
        begun = self.begin(kind, axis, full, plain)
        with self.waiting():
            yield
        begun.end()

    def begin(self, kind: str, axis: str, full: Tensor, plain: Tensor | None = None) -> Collective:
        """Record in the ledger a collective that begins now; the caller must call `end` on the result. `full`
        is the whole tensor that is sent, and `plain` the one that it encodes."""
        before = None if plain is None else plain.numel() * plain.element_size()
        return self.ledger.record(kind, axis, full.numel() * full.element_size(), before)


class PeerExchange:
    """Tensors on their way to one peer and from another. Sent tensors must not change before `arrived`
    returns."""

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
        """Wait for the peer and return the received tensors."""
        with self.comm.waiting():
            for work in self.works:
                work.wait()
        for sent in self.begun:  # perhaps they ended earlier: gloo does not tell when a message was through
            sent.end()
        self.leaving = []
        return self.arriving
