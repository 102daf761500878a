"""Copies of each rank's state in a neighbour's memory, so that a lost worker needs no read from storage.

Every few steps a rank takes a snapshot of its own state and sends it to the rank that is half the world away,
and so on another host if there are several. It receives a snapshot in the same way, and keeps the last two of
both. When a worker is lost, the other processes still have their snapshots. The newest step of which the
snapshots of all ranks exist is restored, and only the snapshots of lost ranks cross the network. Two are kept
because a failure during an exchange leaves the newer one incomplete.

The cost is four times a rank's weights and optimizer state in host memory, one copy per snapshot during the
step, and one message to the neighbour in the background. It works as long as the layout stays the same; with
another number of workers, the state is read from storage.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.save import State
from shardwise.comm import Peers
from shardwise.files import Json
from shardwise.mesh import Mesh
from shardwise.optim import local

TAG = 7
"""Tag of the messages with snapshots."""


@dataclass
class _Snapshot:
    """State of one rank at one step, as bytes. `extras` are the values that are not tensors."""

    step: int
    rank: int
    extras: Json
    content: Tensor


@dataclass
class _SnapshotExchange:
    """A snapshot that is sent to a neighbour while the snapshot of the other neighbour is received."""

    local: _Snapshot
    remote: _Snapshot
    thread: threading.Thread | None = None
    complete: bool = False


@dataclass
class MemorySnapshots:
    """Snapshots of this worker's state and of a neighbour's. They outlive the teams that the worker is in."""

    every: int
    """Number of steps between two snapshots; 0 for none."""
    _exchanges: deque[_SnapshotExchange] = field(default_factory=lambda: deque(maxlen=2))
    _layout: str = ""
    _peers: Peers | None = None
    _sizes: list[int] = field(default_factory=list)
    _holders: dict[tuple[int, int], int] = field(default_factory=dict)
    """For each (step, rank), a worker that has the snapshot."""

    def join(self, mesh: Mesh, state: State) -> None:
        """Prepare for a new team. All its ranks call this together."""
        self._peers = None  # the connections of the former team are gone
        if not self.every or mesh.worker.world == 1:
            return
        self._peers = Peers.create(mesh)
        self._sizes = self._peers.all_gather(sum(_bytes(tensor) for tensor in state.values()))

    def due(self, mesh: Mesh, step: int) -> bool:
        """Return whether a snapshot of this step is to be taken."""
        return bool(self.every) and mesh.worker.world > 1 and step % self.every == 0

    def take(self, mesh: Mesh, step: int, state: State, extras: Json) -> None:
        """Save a snapshot of this step's state, and exchange it with the neighbours while training
        continues.
        """
        world, rank = mesh.worker.world, mesh.worker.rank
        layout = _key(mesh)
        if self._exchanges and self._exchanges[-1].thread is not None:
            self._exchanges[-1].thread.join()
        if layout != self._layout:
            self._exchanges.clear()
            self._layout = layout
        shift = world // 2
        sender = (rank - shift) % world
        local, remote = self._buffers(self._sizes[rank], self._sizes[sender])
        _pack(state, local)
        exchange = _SnapshotExchange(
            _Snapshot(step, rank, extras, local), _Snapshot(step, sender, extras, remote)
        )
        self._exchanges.append(exchange)
        assert self._peers is not None, "there are neighbours"
        work = (self._peers, exchange, (rank + shift) % world, sender)
        exchange.thread = threading.Thread(target=_swap, args=work, name="copy to a neighbour", daemon=True)
        exchange.thread.start()

    def newest(self, mesh: Mesh) -> int | None:
        """Return the last step for which this team still has the snapshots of all ranks. All ranks get the
        same answer.
        """
        if self._peers is None:
            return None
        usable = self._usable() if self._layout == _key(mesh) else []
        local = [(snapshot.step, snapshot.rank) for snapshot in usable]
        self._holders = _holder_of_each(self._peers.all_gather(local))
        ranks = range(mesh.worker.world)
        steps = {step for step, _ in self._holders}
        complete = [step for step in steps if all((step, rank) in self._holders for rank in ranks)]
        return max(complete, default=None)

    def restore(self, mesh: Mesh, step: int, state: State) -> dict[str, Any]:
        """Restore this step on every rank. Return the extras that were saved with it."""
        rank_here, peers = mesh.worker.rank, self._peers
        assert peers is not None, "there are copies"
        snapshots = {(snapshot.step, snapshot.rank): snapshot for snapshot in self._usable()}
        extras_here = next((snapshot.extras for snapshot in snapshots.values() if snapshot.step == step), {})
        extras = peers.broadcast(extras_here, self._holders[step, 0])
        for rank in range(mesh.worker.world):
            holder = self._holders[step, rank]
            if holder != rank and holder == rank_here:
                peers.send(snapshots[step, rank].content, rank, TAG)
            elif holder != rank and rank == rank_here:
                content = torch.empty(self._sizes[rank_here], dtype=torch.uint8)
                peers.receive(content, holder, TAG)
                snapshots[step, rank] = _Snapshot(step, rank, extras, content)
        _unpack(snapshots[step, rank_here].content, state)
        self._continue_from(snapshots[step, rank_here], mesh)
        return dict(extras)

    def _continue_from(self, restored: _Snapshot, mesh: Mesh) -> None:
        """Drop snapshots of later steps, which will be done again. A new worker keeps the restored one."""
        earlier = [exchange for exchange in self._exchanges if exchange.local.step <= restored.step]
        self._exchanges = deque(earlier, maxlen=2)
        if not self._exchanges:
            sender = (restored.rank - mesh.worker.world // 2) % mesh.worker.world
            empty = torch.empty(self._sizes[sender], dtype=torch.uint8)
            missing = _Snapshot(restored.step, sender, restored.extras, empty)
            self._exchanges.append(_SnapshotExchange(restored, missing))
            self._layout = _key(mesh)

    def _usable(self) -> list[_Snapshot]:
        """Return the snapshots that are complete: this rank's in any case, a neighbour's once all of it has
        arrived.
        """
        for exchange in self._exchanges:
            if exchange.thread is not None:
                exchange.thread.join(timeout=1.0)
        return [
            snapshot
            for exchange in self._exchanges
            for snapshot in ([exchange.local, exchange.remote] if exchange.complete else [exchange.local])
        ]

    def _buffers(self, local: int, remote: int) -> tuple[Tensor, Tensor]:
        """Return memory for two snapshots of these sizes. With two exchanges, it is that of the older one."""
        if len(self._exchanges) == self._exchanges.maxlen:
            oldest = self._exchanges.popleft()
            return oldest.local.content, oldest.remote.content
        return torch.empty(local, dtype=torch.uint8), torch.empty(remote, dtype=torch.uint8)


def _swap(peers: Peers, exchange: _SnapshotExchange, receiver: int, sender: int) -> None:
    try:
        peers.exchange(exchange.local.content, receiver, exchange.remote.content, sender, TAG)
        exchange.complete = True
    except (RuntimeError, ValueError):
        pass  # a peer is gone; the main thread notices it too, and the snapshot before this one is used


def _holder_of_each(snapshots: Sequence[Sequence[tuple[int, int]]]) -> dict[tuple[int, int], int]:
    """Return a worker that has the snapshot of each (step, rank), and that rank itself where it has it.

    `snapshots` are those that each worker has.
    """
    holders: dict[tuple[int, int], int] = {}
    for holder, parts in enumerate(snapshots):
        for step, rank in parts:
            if rank == holder or (step, rank) not in holders:
                holders[step, rank] = holder
    return holders


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
