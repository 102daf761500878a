"""Who is who on the grid: rank arithmetic against numpy's, and groups as the ranks themselves see them."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks.jobs import ALONE
from ranks.pool import Pool
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.comm import Comm
from shardwise.config import RANK_AXES, Layout
from shardwise.mesh import Mesh, Worker, join, leave, peer_is_gone
from shardwise.mesh import mesh as mesh_module
from shardwise.resilience.forked_process import free_port


@contextmanager
def imagined(rank: int, layout: Layout) -> Iterator[Mesh]:
    """The mesh as one rank of a world that is not there."""

    def pretend(backend: str, *, rank: int, world_size: int, **unused: Any) -> None:
        original("fake", rank=rank, world_size=world_size, store=FakeStore())

    original = dist.init_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", pretend)
        patch.setattr(mesh_module, "_rendezvous", lambda worker: {})
        try:
            yield join(Worker(rank, layout.world, rank, layout.world, "nowhere", 1, "shardwise"), layout)
        finally:
            leave()


degrees = st.integers(1, 3)


@settings(max_examples=12)
@given(
    pipeline=st.integers(1, 2),
    replica=degrees,
    data=degrees,
    context=st.integers(1, 2),
    tensor=st.integers(1, 2),
)
def test_each_share_of_the_batch_has_one_reader_for_each_place_on_the_other_axes(**sizes: int) -> None:
    layout = Layout(**sizes)
    shape = tuple(sizes[axis] for axis in RANK_AXES)
    readers: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.world):
        expected = dict(zip(RANK_AXES, (int(place) for place in np.unravel_index(rank, shape)), strict=True))
        with imagined(rank, layout) as mesh:
            if layout.world > 1:
                assert {axis: mesh.coordinate(axis) for axis in RANK_AXES} == expected
            assert mesh.data_index == expected["replica"] * layout.data + expected["data"]
            assert mesh.is_main == (rank == 0)
            elsewhere = tuple(expected[axis] for axis in ("pipeline", "context", "tensor"))
            readers.setdefault(elsewhere, []).append(mesh.data_index)
    assert len(readers) == layout.world // layout.data_parallel
    assert all(sorted(shares) == list(range(layout.data_parallel)) for shares in readers.values())


def groups(worker: Worker, layout: dict[str, int]) -> dict[str, Any]:
    mesh = join(worker, Layout(**layout))
    comm = Comm(mesh)
    members = {
        axis: group and dist.get_process_group_ranks(group)
        for axis in RANK_AXES
        for group in [mesh.group(axis)]
    }
    both = mesh.group("replica x data")
    assert both is not None
    total = comm.sum_over_data(torch.tensor(2.0**worker.rank))
    return {**members, "both": dist.get_process_group_ranks(both), "total": float(total)}


def test_groups_of_a_hybrid_layout(ranks: Callable[[int], Pool]) -> None:
    found = ranks(4).run(groups, {"replica": 2, "data": 2})
    assert [one["data"] for one in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [one["replica"] for one in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(one["both"] == [0, 1, 2, 3] and one["total"] == 15.0 for one in found)
    assert all(one[axis] is None for one in found for axis in ("pipeline", "context", "tensor"))


@pytest.mark.parametrize("axis", ["data", "replica"])
def test_groups_of_one_axis(ranks: Callable[[int], Pool], axis: str) -> None:
    for one in ranks(4).run(groups, {"replica": 1, "data": 1, axis: 4}):
        assert one[axis] == one["both"] == [0, 1, 2, 3]
        assert one["total"] == 15.0


def test_one_device_needs_no_process_group() -> None:
    mesh = join(ALONE, Layout(data=1))
    assert not dist.is_initialized()
    assert mesh.grid is None
    assert mesh.data_index == 0
    assert all(mesh.group(axis) is None for axis in RANK_AXES)
    assert float(Comm(mesh).sum_over_data(torch.tensor(3.0))) == 3.0
    leave()


@pytest.mark.parametrize(("local_world", "address"), [(4, "node-1"), (2, "10.0.0.5")])
def test_workers_of_several_nodes_meet_where_other_machines_can_call(
    monkeypatch: pytest.MonkeyPatch, local_world: int, address: str
) -> None:
    called: list[str] = []
    monkeypatch.setattr(mesh_module, "check_resolves", lambda name: None)
    monkeypatch.setattr(mesh_module, "address_for_other_machines", lambda name: "10.0.0.5")
    monkeypatch.setattr(mesh_module, "use_network_towards", lambda address, port: called.append(address))
    monkeypatch.setattr(mesh_module, "TCPStore", lambda address, *_, **__: called.append(address))
    mesh_module._rendezvous(Worker(1, 4, 1, local_world, "node-1", 29400, "srun, one process a device"))
    assert called == [address, address]


def test_nobody_waits_long_for_an_agent_of_torchrun_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_module, "AGENT_TIMEOUT", datetime.timedelta(seconds=1))
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    worker = Worker(0, 2, 0, 2, where["MASTER_ADDR"], int(where["MASTER_PORT"]), launcher="torchrun")
    # Without the shorter timeout for the agent, this would take half an hour.
    with pytest.raises(dist.DistNetworkError) as raised:
        mesh_module.join(worker, Layout(data=2))
    assert peer_is_gone(raised.value)
