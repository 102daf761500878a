"""`shardwise train` with groups that train by themselves: what is lost is done again, and a stop waits for
the next exchange."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import Command
from watched import kill_a_worker_and_stop, records

Shardwise = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., Command]
JOB = [
    "examples/quickstart.toml",
    "model.preset=bytes-400k",
    "data.sequence_length=32",
    "train.global_batch=8",
    "train.steps=30",
    "observe.sample=",
    "train.evaluate_every=0",
    "train.driver=local",
    "local.sync_every=5",
    "layout.data=1",
]


def test_a_killed_worker_and_a_stop_change_no_loss(
    started: Started, shardwise: Shardwise, tmp_path: Path
) -> None:
    whole = shardwise("train", *JOB, "run.folder=whole")
    assert whole.returncode == 0, whole.stderr
    assert "2 groups of one device" in whole.stderr
    killed = started("train", *JOB, "checkpoint.every=7", "run.folder=run")
    kill_a_worker_and_stop(tmp_path / "run", killed)
    assert len(records(tmp_path / "run")) % 5 == 0, "groups stop where they meet"
    again = shardwise("train", *JOB, "checkpoint.every=7", "run.folder=run")
    assert again.returncode == 0, again.stderr
    one, other = ([record["loss"] for record in records(tmp_path / run)] for run in ("whole", "run"))
    assert one == other


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.precision=float16"], "float16 needs a loss scale"),
        (["train.driver=synchronous"], "local.sync_every: has no effect without train.driver = 'local'"),
    ],
)
def test_what_cannot_work_is_refused(shardwise: Shardwise, words: list[str], message: str) -> None:
    done = shardwise("train", *JOB, *words, "run.folder=run")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
