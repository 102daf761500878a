"""Ranks, axes and groups: one torch DeviceMesh whose dimensions carry the names of the layout's axes.

Which axes there are and what they are made of is in `plan/grid.py`. Every axis is there even at size 1, so
that the rest of the code asks by name and never by case. Several axes are asked for as one with an "x"
between: `group("data x context")` are the devices that hold the same weights.
"""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from shardwise._torch import count_groups_anew, flatten, forget_meshes, part_of
from shardwise.config import Device, Layout
from shardwise.mesh.devices import pick_device, share_gpus
from shardwise.mesh.launched import Worker, agent_has_store
from shardwise.mesh.sockets import (
    LOOPBACK,
    address_for_other_machines,
    check_resolves,
    listen,
    use_network_towards,
)
from shardwise.plan.grid import JOINED_AXES, devices, grid_dims, joined_name, label, members

AGENT_TIMEOUT = datetime.timedelta(seconds=20)  # torch dials for about three times as long
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """This worker's place on the grid of devices."""

    worker: Worker
    layout: Layout
    device: torch.device
    grid: DeviceMesh | None
    groups: int = 1
    """Grids of this layout, each of which trains by itself; the axis "group" goes over them."""
    _subs: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, compare=False, repr=False)
    _neighbours: dict[tuple[str, int], dist.ProcessGroup] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def data_index(self) -> int:
        """Which share of the global batch is this worker's, from 0 to `groups` times
        `layout.data_parallel`."""
        group = self.coordinate("group") * self.layout.data_parallel
        return group + self.coordinate("replica") * self.layout.data + self.coordinate("data")

    def coordinate(self, axis: str) -> int:
        """This worker's position along an axis, or along several as one."""
        if axis == "group":
            return self.worker.rank // self.layout.world
        index = 0
        for dim, size in members(self.layout, axis).items():
            index = index * size + (0 if self.grid is None else self.grid.get_local_rank(dim))
        return index

    def size(self, axis: str) -> int:
        """Devices along an axis, or along several as one."""
        return self.groups if axis == "group" else int(devices(axis, self.layout))

    def sub(self, *axes: str) -> DeviceMesh:
        """The part of the grid spanned by these axes, one dimension each."""
        assert self.grid is not None, "one device has no grid"
        if axes not in self._subs:
            self._subs[axes] = part_of(self.grid, tuple(self._flat(axis) for axis in axes))
        return self._subs[axes]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The peers along an axis; None where this worker is alone on it."""
        return None if self.grid is None or self.size(axis) == 1 else self.sub(axis).get_group()

    def neighbours(self, axis: str, devices: int) -> dist.ProcessGroup:
        """So many of the peers along an axis that follow one another, this worker among them. All workers ask
        at once."""
        assert self.grid is not None, "one device has no neighbours"
        if (axis, devices) not in self._neighbours:
            dims, names = list(members(self.layout, axis)), list(_dims(self.layout, self.groups))
            order = sorted(
                range(len(names)), key=lambda dim: names[dim] in dims
            )  # the others first; each in its order
            ranks = self.grid.mesh.permute(order).reshape(-1, devices).tolist()
            own, _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
            self._neighbours[axis, devices] = own
        return self._neighbours[axis, devices]

    def second_group(self, axis: str) -> dist.ProcessGroup | None:
        """Another group of the same peers, who make it together, for a thread of its own: the collectives of
        a group must come in one order on all of them, and those of two threads would not."""
        group = self.group(axis)
        if group is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        second: dist.ProcessGroup = dist.new_group(
            ranks, timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
        )
        return second

    def label(self, axis: str) -> str:
        """The axes that an axis consists of here, for people to read: those with several devices."""
        return label(axis, self.layout)

    def _flat(self, axis: str) -> str:
        """The name of a dimension of the grid that is this axis; several become one, which makes a group on
        all ranks."""
        assert self.grid is not None, "one device has no grid"
        if axis == "group":
            return axis
        name = joined_name(self.layout, axis)
        if " x " in name:
            flatten(self.grid[tuple(name.split(" x "))], name)
        return name

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for the run."""
        return self.worker.rank == 0


def _dims(layout: Layout, groups: int) -> dict[str, int]:
    """Of the grid, outermost first."""
    return {**({"group": groups} if groups > 1 else {}), **grid_dims(layout)}


def join(worker: Worker, layout: Layout, asked: Device = "auto", groups: int = 1) -> Mesh:
    """Meet the peers and lay out the grid. A world of one needs none, unless states are offloaded: FSDP2 does
    that, on a mesh."""
    device = pick_device(worker, asked)
    assert groups * layout.world == worker.world, "the plan was made for this world"
    if worker.world == 1 and not layout.offload:
        return Mesh(worker, layout, device, None)
    _meet(worker, device)
    dims = _dims(layout, groups)
    grid = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    mesh = Mesh(worker, layout, device, grid, groups)
    for (
        axis
    ) in JOINED_AXES:  # all ranks must make a group at once; later, some of them may have no use for it
        mesh.group(axis)
    return mesh


def _meet(worker: Worker, device: torch.device) -> None:
    backend = _backend(worker, device)
    dist.init_process_group(
        backend,
        rank=worker.rank,
        world_size=worker.world,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if backend == "nccl" else None,
        **_rendezvous(worker),
    )


def _backend(worker: Worker, device: torch.device) -> str:
    """What carries tensors between workers. NCCL refuses two of them on one GPU."""
    if device.type == "cpu":
        return "gloo"
    if not share_gpus(min(worker.local_world, worker.world)):
        return "nccl"
    from shardwise.mesh import through_host

    through_host.register()
    return through_host.NAME


def _rendezvous(worker: Worker) -> dict[str, Any]:
    if worker.world == 1:
        return {"store": HashStore()}
    if worker.launcher == "torchrun":
        return {"store": _store_of_torchrun(worker)}
    address = (
        worker.address if worker.world == worker.local_world else address_for_other_machines(worker.address)
    )
    if worker.launcher != "shardwise":
        check_resolves(address)  # torch would try for half an hour
    use_network_towards(address, worker.port)
    if worker.launcher != "shardwise" and worker.rank == 0:
        return {"store": _store_at(address, worker.port)}
    store = TCPStore(address, worker.port, is_master=False, timeout=COLLECTIVE_TIMEOUT)
    if worker.launcher != "shardwise":
        return {"store": store}
    # Peers of an earlier team left their addresses in the store, under its own name.
    return {"store": PrefixStore(f"{worker.store_name}-{worker.generation}", store)}


def _store_of_torchrun(worker: Worker) -> Any:
    """Where torchrun says that its workers meet. An agent that does not answer is gone, and nobody waits for
    it long, since a worker that dials hears no signal."""
    patience = AGENT_TIMEOUT if agent_has_store() else COLLECTIVE_TIMEOUT
    store, _, _ = next(rendezvous("env://", worker.rank, worker.world, timeout=patience))
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return store


def _store_at(address: str, port: int) -> TCPStore:
    """torch would listen at every address of this machine, to anyone who calls: it is given a socket that
    does not."""
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


def meeting_place(worker: Worker, timeout: datetime.timedelta = COLLECTIVE_TIMEOUT) -> PrefixStore:
    """Where the ranks of a team leave word for workers that work for it and are none of them."""
    store = TCPStore(worker.address, worker.port, is_master=False, timeout=timeout)
    return PrefixStore(f"{worker.store_name}-{worker.generation}-word", store)


def open_rendezvous_store(address: str = LOOPBACK) -> TCPStore:
    """Where workers of one team after another find each other, at this address: in a process that outlives
    them."""
    return _store_at(address, 0)


def leave() -> None:
    """Part from the peers, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # an answer from the cache would carry the mesh, and the groups, of this team into the next
        forget_meshes()


def abandon() -> None:
    """Let go of peers of whom one is gone: closing the connections tells the others, who may wait for us."""
    with contextlib.suppress(Exception):  # a broken group may complain; there is nobody to part from
        dist.destroy_process_group()
    count_groups_anew()
    forget_meshes()


_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Connection timed out",
)


def peer_is_gone(error: BaseException | None) -> bool:
    """Whether this only tells that another worker ended, hung up, or never came. torch's collectives say so
    in RuntimeErrors; that some server of the user's cannot be reached is another matter.
    """
    while error is not None:
        # Of torch's CheckpointException, which is not named here: its import takes a second.
        inside = [repr(failure) for failure in getattr(error, "failures", {}).values()]
        if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
            return True
        if (inside or isinstance(error, RuntimeError)) and any(text in f"{error}{inside}" for text in _GONE):
            return True
        error = error.__cause__ or error.__context__
    return False
