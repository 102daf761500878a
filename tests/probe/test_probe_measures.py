"""A probe of a few milliseconds a figure, really run: what it writes, what it remembers, and what it does
when a worker dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from shardwise.cost.cluster import KINDS, Cluster, Device, Link, Measured
from shardwise.cost.cluster_file import read_cluster
from shardwise.errors import RunFailed, UserError
from shardwise.library.machine import this_machine
from shardwise.mesh import ALONE, Node, cache_folder
from shardwise.probe import (
    device_speed,
    link_speed,
    measure_this_machine,
    quick_cluster,
    quick_probe,
    worker_count,
)
from shardwise.probe.bench import Bench
from shardwise.probe.device_speed import data_sheet
from shardwise.probe.fit import Speed, fit_collective
from shardwise.probe.link_speed import groups_between_nodes, groups_inside_nodes
from shardwise.probe.probe_budget import Budget
from shardwise.probe.probe_progress import ProbeProgress, no_progress
from shardwise.probe.quick_probe import save_cluster

TINY = dict.fromkeys(
    ("cpu", "cuda"),
    Budget(
        window=0.001,
        windows=1,
        shapes=((16, 16, 16), (64, 64, 64), (128, 128, 128)),
        few_shapes=((64, 64, 64),),
        lengths=(16, 64),
        stream_bytes=2**20,
        sustained=0.0,
        sizes=(2**10, 2**14, 2**18),
        every_group=True,
    ),
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "shardwise"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each measurement of the quick probe, which here takes no time."""
    calls: list[int] = []

    def pretend(workers: int, budgets: object, on_progress: object, asked: str) -> Cluster:
        calls.append(workers)
        return cluster(workers, len(calls))

    monkeypatch.setattr(quick_probe, "measure_this_machine", pretend)
    monkeypatch.setattr(quick_probe, "busy_warning", lambda: None)
    return calls


def cluster(workers: int, speed: float) -> Cluster:
    link = Link(1e9, 1e-4, (Measured("all_reduce", workers, 2e-4, 1e9),))
    device = Device("cpu", memory=2.0**33, peak={"float32": speed * 1e11}, bandwidth=1e10, overlap=0.0)
    return Cluster(f"cpu x {workers}", device, workers, 1, link, Link(1e9, 1e-4), shared=True)


def test_two_workers_measure_a_cluster_that_reads_back(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    found = measure_this_machine(2, TINY, lambda what, share: told.append((what, share)))
    path = tmp_path / "cluster.toml"
    save_cluster(path, found)
    back = read_cluster(path, {})
    assert (back.devices, back.nodes, back.shared) == (2, 1, True)
    device = back.device
    assert device.peak["float32"] > 0
    assert set(device.peak) <= {"float32", "bfloat16", "float64"}
    figures = (
        device.memory,
        device.bandwidth,
        device.launch,
        device.overhead,
        device.host_bandwidth,
        device.attention,
    )
    assert min(figures) > 0
    assert (device.matmul, device.stream, device.overlap) == (1.0, 1.0, 0.0)
    assert [(row.kind, row.members) for row in back.inside.measured] == [(kind, 2) for kind in KINDS]
    assert all(row.bandwidth > 0 and row.latency >= 0 for row in back.inside.measured)
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert told[-1] == ("done", 1.0)


def test_one_worker_has_no_collectives_to_measure(tmp_path: Path) -> None:
    found = measure_this_machine(1, TINY)
    assert (found.devices, found.inside.measured) == (1, ())
    assert found.inside.bandwidth > 0


def test_a_worker_that_is_killed_ends_the_probe_with_its_name() -> None:
    slow = {"cpu": replace(TINY["cpu"], window=60.0)}
    before = set(multiprocessing.active_children())

    def kill_the_second(what: str, share: float) -> None:
        workers = sorted(
            set(multiprocessing.active_children()) - before, key=lambda process: process.pid or 0
        )
        os.kill(workers[1].pid or 0, signal.SIGKILL)

    with pytest.raises(RunFailed, match="worker 1 of 2 failed"):
        measure_this_machine(2, slow, kill_the_second)
    assert set(multiprocessing.active_children()) <= before


def test_an_interrupt_leaves_no_worker_behind() -> None:
    before = set(multiprocessing.active_children())  # the pool of ranks that other tests keep

    def interrupt(what: str, share: float) -> None:
        pids.extend(process.pid or 0 for process in set(multiprocessing.active_children()) - before)
        raise KeyboardInterrupt

    pids: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        measure_this_machine(2, TINY, interrupt)
    assert pids
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("count", [1, 2, 6, 8])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_groups_have_each_rank_once_and_stay_in_or_cross_the_node(count: int, nodes: int) -> None:
    world = count * nodes
    for grouping in groups_inside_nodes(world, count):
        assert sorted(rank for group in grouping.groups for rank in group) == list(range(world))
        assert all(
            len(group) == grouping.members and len({rank // count for rank in group}) == 1
            for group in grouping.groups
        )
    for grouping in groups_between_nodes(world, count):
        assert sorted(rank for group in grouping.groups for rank in group) == list(range(world))
        assert all(len({rank // count for rank in group}) == grouping.members for group in grouping.groups)
        assert all(len({rank % count for rank in group}) == 1 for group in grouping.groups)
    assert [grouping.members for grouping in groups_inside_nodes(world, count)] == [
        n for n in range(2, count + 1) if count % n == 0
    ]
    assert [grouping.members for grouping in groups_inside_nodes(world, count, every=False)] == [count] * (
        count > 1
    )


@pytest.mark.parametrize(
    ("name", "gib", "preset"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40"),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H100 NVL", 93.0, None),
        ("NVIDIA RTX 4090", 24.0, None),
        ("AMD Instinct MI300X", 191.5, "mi300x"),
        ("cpu", 16.0, None),
    ],
)
def test_a_data_sheet_is_taken_only_for_the_very_device(name: str, gib: float, preset: str | None) -> None:
    found = data_sheet(name, gib * 2**30)
    assert (found.name if found else None) == preset


def test_more_workers_than_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 2)
    assert worker_count(None) == 2
    with pytest.raises(UserError, match=r"--workers 3: this machine has 2 GPUs; give at most 2"):
        worker_count(3)
    assert 2 <= worker_count(None, asked="cpu") <= 4


def test_what_is_measured_for_a_job_are_the_devices_that_its_workers_will_use(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "H200")
    devices: list[tuple[int, str]] = []

    def measure(workers: int, budgets: object, on_progress: object, asked: str) -> Cluster:
        devices.append((workers, asked))
        return cluster(workers, 1)

    monkeypatch.setattr(quick_probe, "measure_this_machine", measure)
    monkeypatch.setattr(quick_probe, "busy_warning", lambda: None)
    wanted: list[tuple[int, Any]] = [(2, "auto"), (2, "cpu"), (3, "auto"), (3, "cuda")]
    for workers, device in wanted:
        this_machine(workers, device)
    assert devices == wanted
    kinds = sorted("H200" in path.name for path in cache.iterdir())
    assert kinds == [False, False, True, True]


def test_a_cpu_gets_as_many_workers_as_asked_or_as_the_node_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    assert 2 <= worker_count(None) <= 4
    assert worker_count(7) == 7
    assert worker_count(None, Node(2, 0, 3, "localhost", 1, "id", "test")) == 3


def test_a_quick_probe_is_remembered_for_each_number_of_workers(cache: Path, measured: list[int]) -> None:
    first, again = quick_cluster(2), quick_cluster(2)
    assert again.device.peak == pytest.approx(first.device.peak)
    assert again.inside.measured[0].latency == pytest.approx(first.inside.measured[0].latency)
    quick_cluster(3)
    assert measured == [2, 3]
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("text", ["", "not = [toml", 'name = "x"\n[device]\nmemory_gib = -1\n', "\x00"])
def test_a_broken_memory_is_measured_anew(cache: Path, measured: list[int], text: str) -> None:
    quick_cluster(2)
    next(cache.iterdir()).write_text(text)
    assert quick_cluster(2).device.peak["float32"] == pytest.approx(2e11)
    assert quick_cluster(2).device.peak["float32"] == pytest.approx(2e11)
    assert measured == [2, 2]


def test_an_old_memory_is_measured_anew(cache: Path, measured: list[int]) -> None:
    quick_cluster(2)
    year_ago = time.time() - 365 * 24 * 3600
    os.utime(next(cache.iterdir()), (year_ago, year_ago))
    quick_cluster(2)
    assert measured == [2, 2]


def test_a_busy_machine_is_said_and_measured_anew_within_hours(
    cache: Path, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quick_probe, "busy_warning", lambda: "other programs use 90% of this machine's cores")
    said: list[str] = []
    for _ in range(2):
        quick_cluster(2, warn=said.append)
    assert (measured, len(said)) == ([2], 1)
    path = next(cache.iterdir())
    earlier = path.stat().st_mtime - 2 * 3600
    os.utime(path, (earlier, earlier))
    quick_cluster(2, warn=said.append)
    assert measured == [2, 2]


def test_a_cache_that_cannot_be_written_only_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[int]
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said: list[str] = []
    assert quick_cluster(2, warn=said.append).devices == 2
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_the_cache_is_where_the_user_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "shardwise"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unusable in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_folder() == tmp_path / ".cache" / "shardwise"


def test_a_known_gpu_keeps_its_data_sheet_and_gets_the_shares_it_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An H200 with the speeds once seen on one; the arithmetic only, since there is none here."""
    monkeypatch.setattr(device_speed, "device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(device_speed, "device_memory", lambda workers: 139.8 * 2**30)
    monkeypatch.setattr(device_speed, "_to_host_and_back", lambda bench, progress: 50e9)
    bench = Bench(torch.device("cuda", 0), None, 0.1, 1)
    reached = device_speed._Products(
        "bfloat16", Speed(820e12, 70.0), 700e12, {"float16": 690e12, "float8": 1262e12}
    )
    found = device_speed._gpu(
        bench, reached, Speed(434e12, 300.0), 4.1e12, 4e-6, ProbeProgress(1, no_progress)
    )
    assert found.peak == {"bfloat16": 989.5e12, "float16": 989.5e12, "float8": 1979e12}
    assert found.matmul == pytest.approx(700 / 989.5)
    assert found.matmul_float8 == pytest.approx(1262 / 1979)
    assert found.attention == pytest.approx(434 / 989.5)
    assert (found.bandwidth, found.stream) == (4.8e12, pytest.approx(4.1 / 4.8))
    assert (found.overlap, found.host_bandwidth, found.launch) == (1.0, 50e9, 4e-6)


class Known(Bench):
    """Takes what a machine of known speed would, given what a call did."""

    def __init__(self, seconds: Callable[[Any], float]) -> None:
        super().__init__(torch.device("cpu"), None, 0.0, 1)
        object.__setattr__(self, "seconds", lambda run: seconds(run()))


def test_memory_of_known_speed_is_found() -> None:
    bench = Known(lambda made: 2 * made.nbytes / 20e9)  # what a kernel read, and as much that it wrote
    assert device_speed._stream(bench, TINY["cpu"], ProbeProgress(1, no_progress)) == pytest.approx(20e9)


def test_the_clock_and_the_width_of_an_h100_give_the_bandwidth_of_its_data_sheet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert device_speed._clocked_bandwidth(torch.device("cuda", 0)) == pytest.approx(3.35e12, rel=0.01)


@pytest.mark.parametrize("members", [2, 4, 8])
def test_a_ring_of_known_links_is_found_whatever_its_length(
    monkeypatch: pytest.MonkeyPatch, members: int
) -> None:
    """An all-reduce hands one member's part of 4-byte numbers on in each of 2 (n - 1) hops."""
    monkeypatch.setattr(link_speed, "_collective", lambda kind, part, group, device, worker: lambda: part)
    bench = Known(lambda part: 30e-6 + 2 * (members - 1) * 4 * part / 10e9)
    group: Any = None
    measured = link_speed._times(
        bench, ALONE, "all_reduce", group, members, (2**14, 2**18, 2**22), ProbeProgress(3, no_progress)
    )
    found = fit_collective("all_reduce", members, *measured)
    assert (found.latency, found.bandwidth) == (pytest.approx(30e-6), pytest.approx(10e9))
