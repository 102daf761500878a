"""Ranks, axes and process groups: one torch DeviceMesh whose dimensions have the names of the layout's axes.

`plans/grid.py` says which axes there are and what they consist of. Every axis exists even at size 1, so that
the rest of the code can ask for it by name without special cases. Several axes are joined by an "x":
`group("data x context")` contains the devices that hold the same weights.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from shardwise._torch import count_groups_anew, default_store, flatten, forget_meshes, part_of
from shardwise.config.layout import Layout
from shardwise.config.machine import Device
from shardwise.mesh import nccl
from shardwise.mesh.devices import gpus_are_shared, pick_device
from shardwise.mesh.environment import Worker, agent_has_store
from shardwise.mesh.sockets import (
    LOOPBACK,
    address_for_other_machines,
    check_resolves,
    listen,
    use_network_towards,
)
from shardwise.plans.grid import JOINED_AXES, devices, grid_dims, joined_name, label, members

AGENT_TIMEOUT = datetime.timedelta(seconds=20)
"""Timeout for connecting to torchrun's agent. torch tries for about three times as long."""
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
"""Timeout of collectives, and of connecting to the store."""


@dataclass(frozen=True)
class Mesh:
    """The grid of devices, and this worker's place on it."""

    worker: Worker
    layout: Layout
    device: torch.device
    grid: DeviceMesh | None
    groups: int = 1
    """Number of grids of this layout, each of which trains by itself. The axis "group" goes across them."""
    _subs: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, compare=False, repr=False)
    _neighbours: dict[tuple[str, int], dist.ProcessGroup] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def data_index(self) -> int:
        """Index of this worker's part of the global batch, below `groups` times `layout.data_parallel`."""
        group = self.coordinate("group") * self.layout.data_parallel
        return group + self.coordinate("replica") * self.layout.data + self.coordinate("data")

    def coordinate(self, axis: str) -> int:
        """Return this worker's index along an axis, or along several joined axes."""
        if axis == "group":
            return self.worker.rank // self.layout.world
        index = 0
        for dim, size in members(self.layout, axis).items():
            index = index * size + (0 if self.grid is None else self.grid.get_local_rank(dim))
        return index

    def size(self, axis: str) -> int:
        """Return the number of devices along an axis, or along several joined axes."""
        return self.groups if axis == "group" else int(devices(axis, self.layout))

    def sub(self, *axes: str) -> DeviceMesh:
        """Return the part of the grid that these axes span, with one dimension for each."""
        assert self.grid is not None, "one device has no grid"
        if axes not in self._subs:
            self._subs[axes] = part_of(self.grid, tuple(self._flat(axis) for axis in axes))
        return self._subs[axes]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group along an axis; None if this worker is the only one on it."""
        return None if self.grid is None or self.size(axis) == 1 else self.sub(axis).get_group()

    def neighbours(self, axis: str, devices: int) -> dist.ProcessGroup:
        """Return the process group of this worker and its neighbours along an axis, `devices` in total.

        All workers must call this at the same time.
        """
        assert self.grid is not None, "one device has no neighbours"
        if (axis, devices) not in self._neighbours:
            dims, names = list(members(self.layout, axis)), list(_dims(self.layout, self.groups))
            # The dimensions of this axis come last, so that its devices follow each other in a row.
            order = sorted(range(len(names)), key=lambda dim: names[dim] in dims)
            ranks = self.grid.mesh.permute(order).reshape(-1, devices).tolist()
            group, _ = dist.new_subgroups_by_enumeration(ranks)
            self._neighbours[axis, devices] = group
        return self._neighbours[axis, devices]

    def second_group(self, axis: str) -> dist.ProcessGroup | None:
        """Return another process group of the same peers, for use by a second thread.

        All peers must issue the collectives of one group in the same order. Two threads that shared a group
        could not guarantee that. All peers create the group together.
        """
        group = self.group(axis)
        if group is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        second: dist.ProcessGroup = dist.new_group(
            ranks, timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
        )
        return second

    def missing_at(self, point: str, seconds: float) -> list[int]:
        """Tell the other workers that this one has reached a point of its program, and wait for them. Return
        the ranks that have not reached it in this time. `point` must be new in every call."""
        if self.worker.world == 1:
            return []
        store, deadline, missing = default_store(), time.monotonic() + seconds, []
        store.set(f"{point}/{self.worker.rank}", "")
        for rank in range(self.worker.world):
            left = max(0.001, deadline - time.monotonic())
            try:
                store.wait([f"{point}/{rank}"], datetime.timedelta(seconds=left))
            except dist.DistStoreError:
                missing.append(rank)
        return missing

    def label(self, axis: str) -> str:
        """Return a readable name of an axis: the names of its parts that have more than one device."""
        return label(axis, self.layout)

    def _flat(self, axis: str) -> str:
        """Return the name of the grid dimension that is this axis.

        Several axes are joined into one dimension, which creates a process group on all ranks.
        """
        assert self.grid is not None, "one device has no grid"
        if axis == "group":
            return axis
        name = joined_name(self.layout, axis)
        if " x " in name:
            flatten(self.grid[tuple(name.split(" x "))], name)
        return name

    @property
    def is_main(self) -> bool:
        """Whether this worker is rank 0, which writes logs and records for the run."""
        return self.worker.rank == 0


def _dims(layout: Layout, groups: int) -> dict[str, int]:
    """Return the sizes of the dimensions of the grid, the outermost first."""
    return {**({"group": groups} if groups > 1 else {}), **grid_dims(layout)}


def join(worker: Worker, layout: Layout, asked: Device = "auto", groups: int = 1) -> Mesh:
    """Connect to the peers and create the grid of devices.

    A single worker needs no grid, except with offloaded states: FSDP2 offloads, and it needs a mesh.
    """
    device = pick_device(worker, asked)
    assert groups * layout.world == worker.world, "the plan was made for this world"
    if worker.world == 1 and not layout.offload:
        return Mesh(worker, layout, device, None)
    _meet(worker, device)
    dims = _dims(layout, groups)
    grid = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    mesh = Mesh(worker, layout, device, grid, groups)
    # All ranks must create a group at the same time, also those that do not use it later.
    for axis in JOINED_AXES:
        mesh.group(axis)
    return mesh


def _meet(worker: Worker, device: torch.device) -> None:
    """Create the process group of all workers.

    torch is not given a `device_id`: with it, the second grid that a process creates, for example after a
    fault, ends in a segmentation fault (pytorch/pytorch#192109).
    """
    if device.type == "cuda":
        _prepare_nccl(worker)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=worker.rank,
        world_size=worker.world,
        timeout=COLLECTIVE_TIMEOUT,
        **_rendezvous(worker),
    )


def _prepare_nccl(worker: Worker) -> None:
    """Make the settings of NCCL that it reads when it creates the first communicator."""
    if gpus_are_shared(min(worker.local_world, worker.world)):
        nccl.share_gpus()
    if worker.launcher == "shardwise":  # this worker has a host that watches it
        nccl.leave_faults_to_the_host()


def _rendezvous(worker: Worker) -> dict[str, Any]:
    if worker.world == 1:
        return {"store": HashStore()}
    if worker.launcher == "torchrun":
        return {"store": _store_of_torchrun(worker)}
    address = (
        worker.address if worker.world == worker.local_world else address_for_other_machines(worker.address)
    )
    if worker.launcher != "shardwise":
        check_resolves(address)  # torch would try to resolve it for half an hour
    use_network_towards(address, worker.port)
    if worker.launcher != "shardwise" and worker.rank == 0:
        return {"store": _store_at(address, worker.port)}
    store = TCPStore(address, worker.port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    if worker.launcher != "shardwise":
        return {"store": store}
    # The prefix keeps the addresses of this team apart from those that an earlier team left in the store.
    return {"store": PrefixStore(f"{worker.store_name}-{worker.generation}", store)}


def _store_of_torchrun(worker: Worker) -> Any:
    """Return the store in which torchrun's workers find each other.

    If torchrun's agent does not answer, it has ended. The timeout is short then, because a worker cannot
    handle signals while it tries to connect.
    """
    timeout = AGENT_TIMEOUT if agent_has_store() else COLLECTIVE_TIMEOUT
    store, _, _ = next(rendezvous("env://", worker.rank, worker.world, timeout=timeout))
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return store


def _store_at(address: str, port: int) -> TCPStore:
    """Return a store that listens at one address only.

    torch would accept connections at every address of this machine. It is therefore given a socket that does
    not.
    """
    listener = listen(address, port)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=COLLECTIVE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )


def open_team_store(worker: Worker, timeout: datetime.timedelta = COLLECTIVE_TIMEOUT) -> PrefixStore:
    """Return the store in which a team's ranks leave their addresses for workers that are not part of the
    team.
    """
    store = TCPStore(worker.address, worker.port, is_master=False, timeout=timeout)
    return PrefixStore(f"{worker.store_name}-{worker.generation}-word", store)


def open_rendezvous_store(address: str = LOOPBACK) -> TCPStore:
    """Return a new store in which the workers of one team after another find each other.

    It must be in a process that outlives the workers.
    """
    return _store_at(address, 0)


def leave() -> None:
    """Destroy the process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # An entry of the caches would keep the mesh and the groups of this team alive in the next team.
        forget_meshes()


def abandon() -> None:
    """Destroy the process groups after a peer has ended.

    Closing the connections tells the other peers, who may be waiting for this worker.
    """
    nccl.interrupt()
    with contextlib.suppress(Exception):  # a broken group may raise an error
        dist.destroy_process_group()
    count_groups_anew()
    forget_meshes()


_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Connection timed out",
    # NCCL's
    "Connection closed by remote peer",
    "remote process exited",
    "communicator was aborted",
)


def peer_is_gone(error: BaseException | None) -> bool:
    """Return whether an error only means that another worker ended, closed its connection, or never came.

    torch's collectives report this in RuntimeErrors. A server of the user that cannot be reached does not
    count.
    """
    while error is not None:
        # `failures` belongs to torch's CheckpointException, whose import takes a second.
        inside = [repr(failure) for failure in getattr(error, "failures", {}).values()]
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError | nccl.Interrupted):
            return True
        if (inside or isinstance(error, RuntimeError)) and any(text in f"{error}{inside}" for text in _GONE):
            return True
        error = error.__cause__ or error.__context__
    return False
