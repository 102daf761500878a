"""`shardwise probe` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cost.cluster_file import read_cluster


def test_the_quick_probe_writes_a_file_and_prints_only_json(shardwise, tmp_path: Path) -> None:
    done = shardwise("probe", "--quick", "--workers", "2", "--json", "--output", "found.toml")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.keys() >= {"file", "seconds", "cluster"}
    cluster = read_cluster(tmp_path / "found.toml", {})
    assert cluster.devices == 2
    assert cluster.device.peak["float32"] == pytest.approx(
        answer["cluster"]["device"]["peak"]["float32"], rel=1e-4
    )
    assert "measuring float32 products" in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "examples"] == ["found.toml"]


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("nowhere/cluster.toml", "there is no folder"),
        (".", "is a folder"),
        ("examples", "is a folder"),
        ("x" * 300, "cannot be read: File name too long. Give another path."),
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    shardwise, output: str, says: str
) -> None:
    done = shardwise("probe", "--output", output)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --output {output}: ")
    assert says in done.stderr
    assert "measuring" not in done.stderr


def test_workers_that_a_launcher_started_are_joined_and_the_first_writes(shardwise, tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = shardwise("probe", "--workers", "2", **alone)
    assert done.returncode == 2
    assert "torchrun has started the workers, 1 of them; leave it out" in done.stderr
    done = shardwise("probe", "--quick", **alone)
    assert done.returncode == 0, done.stderr
    assert read_cluster(tmp_path / "cluster.toml", {}).devices == 1
    assert "cluster.toml written after" in done.stdout


def test_a_missing_torch_is_said_with_the_line_that_mends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.cli.probe import _probe
    from shardwise.errors import UserError
    from shardwise.library import torch_version

    monkeypatch.setattr(
        torch_version, "torch_problem", lambda: "torch is not installed; pip install torch==2.13.0"
    )
    with pytest.raises(UserError, match="pip install torch"):
        _probe(None, Path("cluster.toml"), quick=True)
    assert not Path("cluster.toml").exists()
