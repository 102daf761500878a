"""A run over two hosts survives the loss of one, and takes it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from two_hosts import ADDRESSES, POSSIBLE, hosts, inside, plug, pull

ROOT = Path(__file__).parents[2]
JOB = ["examples/quickstart.toml", "model.preset=bytes-400k", "observe.sample=", "train.evaluate_every=0", "run.folder=run"]
SETTINGS = ["layout.data=-1", "checkpoint.every=5", "train.global_batch=8", "data.sequence_length=64"]


def start(folder: Path, host: str, rank: int, *arguments: str) -> subprocess.Popen[str]:
    environment = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "2",
        "PET_RDZV_ENDPOINT": f"{ADDRESSES['a']}:29400",
        "PET_RDZV_ID": "two-hosts",
        "PET_NODE_RANK": str(rank),
    }
    command = inside(host, sys.executable, "-m", "shardwise", "train", *JOB, *SETTINGS, *arguments)
    return subprocess.Popen(
        [*command, "--min-workers", "2", "--max-workers", "4"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=(folder / f"{host}.err").open("w"),
        text=True,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def wait_for(what: str, folder: Path, condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        told = (folder / "a.err").read_text()[-2000:] + (folder / "b.err").read_text()[-2000:]
        assert time.monotonic() < deadline, f"never came: {what}\n{told}"
        time.sleep(0.1)


def worlds(folder: Path) -> list[int]:
    return [event["world"] for event in lines(folder / "run" / "events.jsonl") if event["event"] in ("start", "resume")]


def reached(folder: Path) -> int:
    return max((line["step"] for line in lines(folder / "run" / "metrics.jsonl")), default=0)


@pytest.mark.skipif(not POSSIBLE, reason="making network namespaces needs root, and ip and tc of iproute2")
def test_a_host_that_is_cut_off_is_done_without_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with hosts():
        ends = [start(tmp_path, host, rank, "train.steps=100000") for rank, host in enumerate("ab")]
        try:
            wait_for("a step of four workers", tmp_path, lambda: reached(tmp_path) >= 7)
            pull("b")
            wait_for("a run of two workers", tmp_path, lambda: worlds(tmp_path)[-1:] == [2])
            alone_from = reached(tmp_path)
            wait_for("steps of two workers", tmp_path, lambda: reached(tmp_path) > alone_from + 3)
            plug("b")
            wait_for("a run of four workers", tmp_path, lambda: worlds(tmp_path) == [4, 2, 4])
            again_from = reached(tmp_path)
            wait_for("steps of four workers", tmp_path, lambda: reached(tmp_path) > again_from + 3)
            ends[0].terminate()
            assert [end.wait(timeout=60) for end in ends] == [75, 75]
        finally:
            for end in ends:
                end.kill()
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == list(range(1, reached(tmp_path) + 1))
    faults = [event for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "fault"]
    assert [event["kind"] for event in faults] == ["host lost"]
