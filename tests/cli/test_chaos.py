"""A parameter server whose processes are killed at random: every portion is in the weights once, and nothing
hangs."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from warm import Command, Server
from watched import records

ROOT = Path(__file__).parents[2]
Started = Callable[..., Command]
STEPS, WORKERS, SERVERS = 30, 3, 2
SECONDS = 120
JOB = [
    "examples/quickstart.toml",
    "model.preset=bytes-400k",
    "data.sequence_length=32",
    "train.global_batch=12",
    f"train.steps={STEPS}",
    "observe.sample=",
    "train.evaluate_every=0",
    f"layout.data={WORKERS}",
]


@pytest.fixture(scope="module")
def lockstep(warm: Server, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run = tmp_path_factory.mktemp("lockstep")
    done = warm.run("train", *JOB, f"run.folder={run}", cwd=ROOT, environment={})
    assert done.returncode == 0, done.stderr
    return records(run)


def kill_now_and_then(run: Path, process: Command, chance: random.Random) -> int:
    """Workers often, servers twice at most; how many were killed."""
    killed, servers = 0, 2
    while process.poll() is None and killed < 6:
        time.sleep(chance.uniform(0.2, 0.8))
        if len(records(run)) < 2:
            continue
        with suppress(OSError, ValueError, StopIteration, IndexError):
            known = json.loads(next((run / "logs").glob("workers-*.json")).read_text())["workers"]
            loose = [one["pid"] for one in known if one["loose"] and psutil.pid_exists(one["pid"])]
            ranks = [one["pid"] for one in known if not one["loose"] and psutil.pid_exists(one["pid"])]
            serves = servers > 0 and chance.random() < 0.3
            os.kill(chance.choice(ranks if serves else loose), signal.SIGKILL)
            killed, servers = killed + 1, servers - serves
    return killed


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_killed_every_portion_counts_once(
    started: Started, tmp_path: Path, lockstep: list[dict[str, Any]], seed: int
) -> None:
    """Each step's record has a number that is a sum over its sequences: over all steps it is that of every
    sequence once."""
    chance = random.Random(seed)
    bound = (0, 2, "unbounded")[seed % 3]
    words = [
        f"server.servers={SERVERS}",
        f"server.max_staleness={bound}",
        f"server.backups={str(seed % 2 == 0).lower()}",
    ]
    process = started("train", *JOB, "train.driver=server", "checkpoint.every=4", "run.folder=run", *words)
    killed = kill_now_and_then(tmp_path / "run", process, chance)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert killed, "somebody was"
    done = records(tmp_path / "run")
    assert [record["step"] for record in done] == list(range(1, STEPS + 1))
    assert sum(int(record["data"], 16) for record in done) == sum(
        int(record["data"], 16) for record in lockstep
    )
    assert sum(len(record["staleness"]) for record in done) == STEPS * WORKERS
    if bound == 0:
        assert [record["loss"] for record in done] == pytest.approx(
            [record["loss"] for record in lockstep], rel=1e-5
        )
    elif bound != "unbounded":
        assert max(age for record in done for age in record["staleness"]) <= bound
