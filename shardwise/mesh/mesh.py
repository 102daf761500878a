"""Ranks, axes and groups: one torch DeviceMesh whose dimensions carry the names of the layout's axes.

Ranks are laid out with `pipeline` outermost and `tensor` innermost, so that the axes which talk most sit on neighbouring
devices. Every axis is there even at size 1, so that the rest of the code asks by name and never by case.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise._torch import flatten
from shardwise.config import Layout
from shardwise.mesh.devices import pick_device
from shardwise.mesh.launched import Worker

RANK_AXES = ("pipeline", "replica", "data", "context", "tensor")
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)


@dataclass(frozen=True)
class Mesh:
    """This worker's place on the grid of devices."""

    worker: Worker
    layout: Layout
    device: torch.device
    grid: DeviceMesh | None

    @property
    def data_index(self) -> int:
        """Which share of the global batch is this worker's, from 0 to `layout.data_parallel`."""
        return self.coordinate("replica") * self.layout.data + self.coordinate("data")

    def coordinate(self, axis: str) -> int:
        """This worker's position along an axis."""
        return 0 if self.grid is None else self.grid.get_local_rank(axis)

    def sub(self, *axes: str) -> DeviceMesh:
        """The part of the grid spanned by these axes."""
        assert self.grid is not None, "one device has no grid"
        return self.grid[axes] if len(axes) > 1 else self.grid[axes[0]]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The peers along an axis; None where this worker is alone on it."""
        if self.grid is None or getattr(self.layout, axis) == 1:
            return None
        return self.grid.get_group(axis)

    def data_parallel_group(self) -> dist.ProcessGroup:
        """The peers along `replica` and `data` together."""
        assert self.grid is not None, "one device has no peers"
        if self.layout.replica == 1 or self.layout.data == 1:
            return self.grid.get_group("data" if self.layout.replica == 1 else "replica")
        return flatten(self.grid["replica", "data"], "replica_data").get_group()

    @property
    def is_main(self) -> bool:
        """Whether this worker speaks for the run."""
        return self.worker.rank == 0


def join(worker: Worker, layout: Layout) -> Mesh:
    """Meet the peers and lay out the grid. A world of one needs none, unless states are offloaded: FSDP2 does that, on a mesh."""
    device = pick_device(worker)
    assert layout.world == worker.world, "the plan was made for this world"
    if worker.world == 1 and not layout.offload:
        return Mesh(worker, layout, device, None)
    _meet(worker, device)
    shape = tuple(getattr(layout, axis) for axis in RANK_AXES)
    return Mesh(worker, layout, device, init_device_mesh(device.type, shape, mesh_dim_names=RANK_AXES))


def _meet(worker: Worker, device: torch.device) -> None:
    where = "env://" if worker.launcher in ("torchrun", "shardwise") else f"tcp://{worker.address}:{worker.port}"
    alone: dict[str, Any] = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    meeting = alone if worker.world == 1 else {"init_method": where}
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=worker.rank,
        world_size=worker.world,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
        **meeting,
    )


def leave() -> None:
    """Part from the peers, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()
