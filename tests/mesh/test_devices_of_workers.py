"""Which device a worker computes on, and how much memory it may count on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.errors import UserError
from shardwise.mesh import Worker, device_memory, uses_gpus
from shardwise.mesh.devices import pick_device
from shardwise.mesh.mesh import _prepare_nccl


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with two GPUs that are not there; what was set as a process' device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_a_worker_of_the_second_machine_takes_the_gpu_of_its_own_machine(gpus: list[torch.device]) -> None:
    last_of_four = Worker(rank=3, world=4, local_rank=1, local_world=2, address="", port=0, launcher="test")
    assert pick_device(last_of_four) == torch.device("cuda", 1)
    assert gpus == [torch.device("cuda", 1)]


def test_workers_for_which_there_are_too_few_gpus_all_compute_on_the_cpu(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    first_of_three = Worker(rank=0, world=3, local_rank=0, local_world=3, address="", port=0, launcher="test")
    assert pick_device(first_of_three) == torch.device("cpu")
    assert not gpus


def test_workers_that_are_asked_to_share_gpus_take_turns_with_them(gpus: list[torch.device]) -> None:
    five = [
        Worker(rank, world=5, local_rank=rank, local_world=5, address="", port=0, launcher="test")
        for rank in range(5)
    ]
    assert [pick_device(worker, "cuda").index for worker in five] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(("workers", "shared"), [(2, False), (3, True)])
def test_nccl_takes_workers_that_share_a_gpu_for_different_hosts(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, workers: int, shared: bool
) -> None:
    monkeypatch.setattr(os, "environ", {})
    worker = Worker(
        rank=0, world=workers, local_rank=0, local_world=2**20, address="", port=0, launcher="test"
    )
    _prepare_nccl(worker)
    assert ("NCCL_HOSTID" in os.environ) == shared


def test_workers_that_share_a_gpu_have_its_memory_together(
    gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=120))
    assert [device_memory(workers, "cuda") for workers in (1, 2, 3, 6)] == [120, 120, 60, 40]


def test_gpus_that_are_asked_for_and_not_there_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    with pytest.raises(UserError, match="this machine has no GPU"):
        uses_gpus(1, "cuda")


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_on_a_cpu_have_its_memory_together(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    monkeypatch.setattr("shardwise.mesh.devices.CONTAINER_LIMITS", ())
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert workers * device_memory(workers) == pytest.approx(machine, rel=0.01)


@pytest.mark.parametrize(("limit", "memory"), [("1000", 1000), ("max", 5000), ("9223372036854771712", 5000)])
def test_workers_in_a_container_have_the_memory_that_it_may_use(
    limit: str, memory: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    files = (tmp_path / "memory.max", tmp_path / "absent")
    monkeypatch.setattr("shardwise.mesh.devices.CONTAINER_LIMITS", files)
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=5000))
    assert [device_memory(workers) for workers in (1, 4)] == [memory, memory / 4]
