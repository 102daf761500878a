"""Each rank's state, copied into a neighbour's memory every few steps: one lost worker costs no read from
storage.

A rank keeps its own last two snapshots and those of one neighbour, half the world away and so on another host
where there are several. When a worker is lost, the others keep their processes and with them the snapshots;
the newest step of which every rank's part is still somewhere is put back, and only the parts of lost ranks
cross the network. Two snapshots, because a failure in the middle of the exchange leaves the newer one
incomplete.

Cost: four times a rank's weights and optimizer state in host memory, one copy a snapshot on the step's path,
and one message to the neighbour behind it. It works while the layout stays as it is; with other workers than
before, storage is read.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.save import State
from shardwise.comm import Peers
from shardwise.mesh import Mesh
from shardwise.optim import local

TAG = 7


@dataclass
class _Snapshot:
    """One rank's state at one step, as bytes; `extras` is what is not a tensor."""

    step: int
    rank: int
    extras: dict[str, Any]
    content: Tensor


@dataclass
class _SnapshotExchange:
    """A snapshot on its way to the neighbour, and the other neighbour's on its way here."""

    own: _Snapshot
    theirs: _Snapshot
    thread: threading.Thread | None = None
    complete: bool = False


@dataclass
class Copies:
    """What a worker's memory holds of its own state and a neighbour's. It outlives the teams that the worker
    is in."""

    every: int
    _exchanges: deque[_SnapshotExchange] = field(default_factory=lambda: deque(maxlen=2))
    _layout: str = ""
    _peers: Peers | None = None
    _sizes: list[int] = field(default_factory=list)
    _holders: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each (step, rank): a worker that has it."""

    def join(self, mesh: Mesh, state: State) -> None:
        """Begin with a new team: all its ranks call this together."""
        self._peers = None  # those of the team before are gone
        if not self.every or mesh.worker.world == 1:
            return
        self._peers = Peers.meet(mesh)
        self._sizes = self._peers.from_everyone(sum(_bytes(tensor) for tensor in state.values()))

    def due(self, mesh: Mesh, step: int) -> bool:
        """Whether a copy of this step is to be taken."""
        return bool(self.every) and mesh.worker.world > 1 and step % self.every == 0

    def take(self, mesh: Mesh, step: int, state: State, extras: dict[str, Any]) -> None:
        """Keep this step's state, and swap it with the neighbours while training goes on."""
        world, rank = mesh.worker.world, mesh.worker.rank
        layout = _key(mesh)
        if self._exchanges and self._exchanges[-1].thread is not None:
            self._exchanges[-1].thread.join()
        if layout != self._layout:
            self._exchanges.clear()
            self._layout = layout
        shift = world // 2
        sender = (rank - shift) % world
        own, theirs = self._buffers(self._sizes[rank], self._sizes[sender])
        _pack(state, own)
        exchange = _SnapshotExchange(
            _Snapshot(step, rank, extras, own), _Snapshot(step, sender, extras, theirs)
        )
        self._exchanges.append(exchange)
        assert self._peers is not None, "there are neighbours"
        work = (self._peers, exchange, (rank + shift) % world, sender)
        exchange.thread = threading.Thread(target=_swap, args=work, name="copy to a neighbour", daemon=True)
        exchange.thread.start()

    def newest(self, mesh: Mesh) -> int | None:
        """The last step of which this team, together, still has every rank's part; the same answer on all
        ranks."""
        if self._peers is None:
            return None
        held = (
            [(snapshot.step, snapshot.rank) for snapshot in self._usable()]
            if self._layout == _key(mesh)
            else []
        )
        self._holders = {}
        for holder, parts in enumerate(self._peers.from_everyone(held)):
            for step, rank in parts:
                self._holders[step, rank] = (
                    holder if rank == holder else self._holders.get((step, rank), holder)
                )
        steps = {step for step, _ in self._holders}
        complete = [
            step for step in steps if all((step, rank) in self._holders for rank in range(mesh.worker.world))
        ]
        return max(complete, default=None)

    def restore(self, mesh: Mesh, step: int, state: State) -> dict[str, Any]:
        """Put this step back on every rank; returns the extras kept with it."""
        mine, peers = mesh.worker.rank, self._peers
        assert peers is not None, "there are copies"
        held = {(snapshot.step, snapshot.rank): snapshot for snapshot in self._usable()}
        extras_here = next((snapshot.extras for snapshot in held.values() if snapshot.step == step), {})
        extras = peers.from_rank(extras_here, self._holders[step, 0])
        for rank in range(mesh.worker.world):
            holder = self._holders[step, rank]
            if holder != rank and holder == mine:
                peers.send(held[step, rank].content, rank, TAG)
            elif holder != rank and rank == mine:
                content = torch.empty(self._sizes[mine], dtype=torch.uint8)
                peers.receive(content, holder, TAG)
                held[step, rank] = _Snapshot(step, rank, extras, content)
        _unpack(held[step, mine].content, state)
        self._go_on_from(held[step, mine], mesh)
        return dict(extras)

    def _go_on_from(self, own: _Snapshot, mesh: Mesh) -> None:
        """Later snapshots are of steps that will be done again; a worker that came new has one of its own
        now."""
        self._exchanges = deque(
            (exchange for exchange in self._exchanges if exchange.own.step <= own.step), maxlen=2
        )
        if not self._exchanges:
            sender = (own.rank - mesh.worker.world // 2) % mesh.worker.world
            nothing = _Snapshot(
                own.step, sender, own.extras, torch.empty(self._sizes[sender], dtype=torch.uint8)
            )
            self._exchanges.append(_SnapshotExchange(own, nothing))
            self._layout = _key(mesh)

    def _usable(self) -> list[_Snapshot]:
        """Snapshots that can be relied on: one's own in any case, a neighbour's once all of it came."""
        for exchange in self._exchanges:
            if exchange.thread is not None:
                exchange.thread.join(timeout=1.0)
        return [
            snapshot
            for exchange in self._exchanges
            for snapshot in ([exchange.own, exchange.theirs] if exchange.complete else [exchange.own])
        ]

    def _buffers(self, own: int, theirs: int) -> tuple[Tensor, Tensor]:
        """The oldest snapshot's memory, where there are two already."""
        if len(self._exchanges) == self._exchanges.maxlen:
            oldest = self._exchanges.popleft()
            return oldest.own.content, oldest.theirs.content
        return torch.empty(own, dtype=torch.uint8), torch.empty(theirs, dtype=torch.uint8)


def _swap(peers: Peers, exchange: _SnapshotExchange, receiver: int, sender: int) -> None:
    try:
        peers.exchange(exchange.own.content, receiver, exchange.theirs.content, sender, TAG)
        exchange.complete = True
    except (RuntimeError, ValueError):
        pass  # a peer is gone: the main thread meets the same, and the snapshot before this one is used


def _key(mesh: Mesh) -> str:
    return json.dumps(mesh.layout.model_dump(), sort_keys=True)


def _bytes(tensor: Tensor) -> int:
    part = local(tensor)
    return part.numel() * part.element_size()


def _pack(state: State, content: Tensor) -> None:
    start = 0
    for tensor in state.values():
        part = local(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
        content[start : start + part.numel()].copy_(part)
        start += part.numel()


@torch.no_grad()
def _unpack(content: Tensor, state: State) -> None:
    start = 0
    for tensor in state.values():
        part = local(tensor)
        end = start + _bytes(tensor)
        part.copy_(content[start:end].clone().view(part.dtype).reshape(part.shape))
        start = end
