"""Job files and cluster files: whatever is in them, a job or every problem in words."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from fuzz.damage import SOME_AND_MANY, as_toml, damaged, read_or_refused, rewritten

from shardwise.config import Config, from_tables, read, to_toml
from shardwise.cost.cluster import Cluster
from shardwise.cost.cluster_file import read_cluster, write_cluster
from shardwise.cost.clusters import CLUSTERS
from shardwise.errors import UserError

MODEL = {
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 128,
    "experts": 4,
    "experts_per_token": 2,
}
TABLES = {
    "model": MODEL,
    "data": {"sources": [{"path": "a", "weight": 1.0}, {"path": "b"}], "sequence_length": 128},
    "train": {"global_batch": 16, "micro_batch": 2, "decay": 5},
    "layout": {"pipeline": 2, "data": 2, "tensor": 2, "expert": 2, "zero": 1, "stages": [2, 2]},
    "cluster": {"preset": "h100x8"},
}
JOB = to_toml(from_tables(TABLES))


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_job_file_is_a_job_or_is_refused(tmp_path: Path, count: int) -> None:
    path, taken = tmp_path / "job.toml", 0
    contents = [*damaged(JOB.encode(), 1, count), *map(as_toml, rewritten(tomllib.loads(JOB), 2, 3 * count))]
    for content in contents:
        path.write_bytes(content)
        config = read_or_refused(lambda: read(path), content)
        assert config is None or isinstance(config, Config)
        taken += config is not None
    assert 0 < taken < len(contents)


@pytest.mark.parametrize("count", SOME_AND_MANY)
def test_a_cluster_file_is_a_cluster_or_is_refused(tmp_path: Path, count: int) -> None:
    path, taken, whole = tmp_path / "cluster.toml", 0, write_cluster(CLUSTERS[sorted(CLUSTERS)[0]])
    contents = [
        *damaged(whole.encode(), 3, count),
        *map(as_toml, rewritten(tomllib.loads(whole), 4, 2 * count)),
    ]
    for content in contents:
        path.write_bytes(content)
        cluster = read_or_refused(lambda: read_cluster(path, CLUSTERS), content)
        assert cluster is None or isinstance(cluster, Cluster)
        taken += cluster is not None
    assert 0 < taken < len(contents)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 20_000, "not valid TOML"),
        ("train = " + "{a=" * 200 + "1" + "}" * 200, "nested more than 64 times"),
        ("[train]\nsteps = " + "9" * 4400, "not valid TOML"),
        ("[train]\nsteps = 0x" + "f" * 4400, "train.steps is a number of 17600 bits"),
        ("[model]\nlayers = 1_000_000", "less than or equal to 4096"),
        ("[model]\nhidden = 4_611_686_018_427_387_904", "less than or equal to 16777216"),
        ("[model]\nlayers = 4096\nhidden = 16_777_216\nffn = 16_777_216", "of at most 1e+15"),
        ("[layout]\ntensor = 1_048_576\ndata = 1_048_576", "at most 1048576 can be planned for"),
        ('[run]\nfolder = "\\u001b[2J"', "run.folder = '\\x1b[2J' has a control character"),
    ],
)
def test_what_no_job_means_is_refused_with_place_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        read(path)
    assert str(path) in str(refusal.value)
    assert reason in str(refusal.value)


def test_a_pipe_that_nobody_writes_to_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.toml")
    with pytest.raises(UserError, match=r"job\.toml is not a regular file"):
        read(tmp_path / "job.toml")


@pytest.mark.timeout(60)
def test_the_nearest_layout_of_the_most_divisible_world_is_found_in_time(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        "[model]\nheads = 4\nexperts = 55440\nexperts_per_token = 1\n[data]\nsource = 'x'\n[layout]\ntensor "
        "= 720\ndata = 1001"
    )
    with pytest.raises(UserError, match="does not divide"):
        read(path)
