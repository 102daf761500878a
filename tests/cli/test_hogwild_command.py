"""`shardwise train` without locks: what is lost is done again, and every sample counts once."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from warm import Command
from watched import kill_a_worker_and_stop, records

Shardwise = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., Command]
JOB = [
    "examples/ngrams.toml",
    "model.hidden=2048",
    "data.sequence_length=32",
    "train.global_batch=16",
    "train.steps=40",
    "observe.sample=",
]


def test_a_killed_worker_and_a_stop_lose_no_sample(
    started: Started, shardwise: Shardwise, tmp_path: Path
) -> None:
    alone = shardwise("train", *JOB, "layout.data=1", "run.folder=alone")
    assert alone.returncode == 0, alone.stderr
    killed = started("train", *JOB, "checkpoint.every=6", "run.folder=run")
    kill_a_worker_and_stop(tmp_path / "run", killed)
    again = shardwise("train", *JOB, "checkpoint.every=6", "run.folder=run")
    assert again.returncode == 0, again.stderr
    assert "2 devices x 8 micro-batches of 1, each an update without a lock" in " ".join(again.stderr.split())
    serial, lock_free = (records(tmp_path / run) for run in ("alone", "run"))
    assert [record["data"] for record in lock_free] == [record["data"] for record in serial]
    assert all(record["updates"]["made"] == 16 for record in lock_free)
    assert lock_free[-1]["held_out_loss"] == pytest.approx(serial[-1]["held_out_loss"], rel=0.02)
    assert "640, " in shardwise("report", "run").stdout
    summary = json.loads(shardwise("report", "run", "--json").stdout)["updates"]
    total = Counter[str]()
    for record in lock_free:
        total.update(record["updates"])
    assert summary == {
        **total,
        "per_second": pytest.approx(640 / sum(record["seconds"] for record in lock_free)),
    }


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        (["layout.tensor=2"], {}, "leave layout.tensor out"),
        (["train.driver=synchronous", "hogwild.locked=true"], {},
        "hogwild.locked: has no effect without train.driver"),
        (["train.driver=synchronous"], {}, "devices sum dense gradients only"),
        (["model.hidden=16777216", "model.vocabulary=4000000"], {},
        "one weight alone takes more than this machine's memory"),
        ([], {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0",
        "PET_RDZV_ENDPOINT": "127.0.0.1:29433"},
         "share the memory of one host, and this run has 2"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    shardwise: Shardwise, words: list[str], environment: dict[str, str], message: str
) -> None:
    done = shardwise("train", *JOB, *words, "run.folder=run", **environment)
    assert done.returncode == 2, done.stderr
    assert message in " ".join(done.stderr.split())


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_plan_and_verify_speak_of_lockstep(shardwise: Shardwise, command: str) -> None:
    done = shardwise(command, "examples/quickstart.toml", "layout.data=2", "train.driver=hogwild")
    assert done.returncode == 2
    assert "lockstep" in done.stderr


def test_states_that_do_not_fit_into_one_machine_are_refused(shardwise: Shardwise) -> None:
    job = [
        "examples/quickstart.toml",
        "model.preset=llama3-70b",
        "model.layers=4096",
    ]  # 40 TiB: more than any machine has
    done = shardwise("train", *job, "train.driver=hogwild", "run.folder=run")
    assert done.returncode == 2, done.stderr
    assert "GiB of this machine's memory" in " ".join(done.stderr.split())
