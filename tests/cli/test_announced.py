"""Before the first worker is heard of: how many start, and what is unlike what the job says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise import mesh
from shardwise.errors import UserError
from shardwise.library import machine, start
from shardwise.mesh import devices
from shardwise.probe import quick_probe
from shardwise.resilience import fork_server
from shardwise.train import launch

JOB = Path(__file__).parents[2] / "examples/quickstart.toml"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a run says up to where its workers would start."""
    monkeypatch.setattr(launch, "launch", lambda *_: 0)
    monkeypatch.setattr(start, "_check_data", lambda config: None)
    monkeypatch.setattr(devices, "local_gpus", lambda: 0)
    monkeypatch.setattr(mesh, "cores", lambda: 2)
    monkeypatch.chdir(JOB.parents[1])

    def say(*overrides: str, workers: int | None = None) -> list[str]:
        assert start.start(JOB, [*overrides, f"run.folder={tmp_path}/run"], workers, (None, None)) == 0
        return capsys.readouterr().err.splitlines()

    return say


def test_how_many_workers_start_is_said_at_once(said: Any) -> None:
    assert said() == ["starting 2 workers…"]
    assert said("layout.data=1") == ["starting 1 worker…"]


def test_more_workers_than_cores_are_warned_of(said: Any) -> None:
    warning, starting = said("layout.data=200", "train.global_batch=200")
    assert warning.startswith("warning: 200 workers on 2 cores take turns")
    assert starting == "starting 200 workers…"


def test_the_warning_comes_before_the_machine_is_measured_with_so_many(
    said: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(workers: int, device: str) -> None:
        raise UserError(f"measured with {workers}")

    monkeypatch.setattr(machine, "this_machine", measure)
    monkeypatch.setattr(fork_server, "start_server", lambda preload: None)
    monkeypatch.setattr(quick_probe, "valid_cache_file", lambda workers, device: None)
    with pytest.raises(UserError, match="measured with 8"):
        said("layout=auto", workers=8)
    assert capsys.readouterr().err.startswith("warning: 8 workers on 2 cores take turns")


def test_a_cluster_that_is_not_this_machine_is_warned_of(said: Any) -> None:
    assert said("layout.data=1", "cluster.preset=h100x64")[1].startswith("on h100x64, planned: ")
    warning, _ = said("layout.data=1", "cluster.preset=h100x64", "train.micro_batch=8")
    assert warning.startswith(
        "warning: the cluster h100x64 (64 x H100-SXM5-80GB) is not this machine, which has no GPU"
    )
    assert len(said("layout.data=1", "cluster.preset=cpu", "train.micro_batch=8")) == 1
