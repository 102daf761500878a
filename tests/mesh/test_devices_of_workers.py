"""Which device a worker computes on, and how much memory it may count on."""

from __future__ import annotations

import os

import pytest
import torch

from shardwise.mesh import Worker, device_memory
from shardwise.mesh.devices import pick_device


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


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_on_a_cpu_have_its_memory_together(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert workers * device_memory(workers) == pytest.approx(machine, rel=0.01)
