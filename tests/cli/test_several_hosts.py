"""A run over several hosts survives the loss of any of them, the first one too, and takes them back."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from namespaces import ADDRESSES, OURS, POSSIBLE, hosts, inside, kill, plug, pull

ROOT = Path(__file__).parents[2]
JOB = [
    "examples/quickstart.toml",
    "model.preset=bytes-400k",
    "observe.sample=",
    "train.evaluate_every=0",
    "run.folder=run",
]
RUN = "a run under attack"
SETTINGS = ["layout.data=-1", "checkpoint.every=5", "train.global_batch=8", "data.sequence_length=64"]


def start(
    folder: Path, host: str, rank: int, *arguments: str, nodes: int = 2, workers: int = 2, name: str = ""
) -> subprocess.Popen[str]:
    environment = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(workers),
        "PET_RDZV_ENDPOINT": f"{ADDRESSES['a']}:29400",
        "PET_NODE_RANK": str(rank),
        **({"PET_RDZV_ID": name} if name else {}),
    }
    command = inside(host, sys.executable, "-m", "shardwise", "train", *JOB, *SETTINGS, *arguments)
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=(folder / f"{host}.err").open("w"),
        text=True,
    )


def lines(path: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        if path.exists()
        else []
    )


def wait_for(what: str, folder: Path, condition: Any, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        told = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(folder.glob("*.err")))
        assert time.monotonic() < deadline, f"never came: {what}\n{told}"
        time.sleep(0.1)


def worlds(folder: Path) -> list[int]:
    return [
        event["world"]
        for event in lines(folder / "run" / "events.jsonl")
        if event["event"] in ("start", "resume")
    ]


def ports(host: str) -> list[str]:
    """Where others can call a host."""
    listed = subprocess.run(inside(host, "ss", "-ltnH"), capture_output=True, text=True, check=True).stdout
    return [line.split()[3] for line in listed.splitlines() if not line.split()[3].startswith("127.")]


def memory(host: str) -> int:
    """Bytes in memory of all processes of a host."""
    pids = subprocess.run(
        ["ip", "netns", "pids", f"{OURS}-{host}"], capture_output=True, text=True, check=True
    ).stdout
    return sum(psutil.Process(int(pid)).memory_info().rss for pid in pids.split())


def reached(folder: Path) -> int:
    return max((line["step"] for line in lines(folder / "run" / "metrics.jsonl")), default=0)


needs_namespaces = pytest.mark.skipif(
    not POSSIBLE, reason="making network namespaces needs root, and ip and tc of iproute2"
)


@needs_namespaces
@pytest.mark.full
def test_a_host_that_is_cut_off_is_done_without_and_taken_back(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    with hosts():
        bounds = ("--min-workers", "2", "--max-workers", "4")
        ends = [start(tmp_path, host, rank, "train.steps=100000", *bounds) for rank, host in enumerate("ab")]
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
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == list(
        range(1, reached(tmp_path) + 1)
    )
    faults = [event for event in lines(tmp_path / "run" / "events.jsonl") if event["event"] == "fault"]
    assert [event["kind"] for event in faults] == ["host lost"]


@pytest.mark.full
@needs_namespaces
def test_the_first_host_is_lost_for_good_and_the_others_go_on_with_the_same_bits(tmp_path: Path) -> None:
    """Three hosts of a worker each, of which two train: when the first dies, the third steps in, and the
    layout stays."""
    job = ("layout.data=2", "train.steps=40", "--min-workers", "2", "--max-workers", "2")
    runs = {name: tmp_path / name for name in ("whole", "hit")}
    for folder in runs.values():
        folder.mkdir()
        (folder / "examples").symlink_to(ROOT / "examples")
    with hosts():
        alone = subprocess.run(
            [sys.executable, "-m", "shardwise", "train", *JOB, *SETTINGS, "layout.data=2", "train.steps=40"],
            cwd=runs["whole"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert alone.returncode == 0, alone.stderr
        ends = [start(runs["hit"], host, rank, *job, nodes=3, workers=1) for rank, host in enumerate("abc")]
        try:
            wait_for("some steps", runs["hit"], lambda: reached(runs["hit"]) >= 7)
            kill("a")
            assert [end.wait(timeout=120) for end in ends[1:]] == [0, 0], (runs["hit"] / "b.err").read_text()
        finally:
            for end in ends:
                end.kill()
    whole, hit = (
        [(line["step"], line["loss"]) for line in lines(folder / "run" / "metrics.jsonl")]
        for folder in runs.values()
    )
    assert whole == hit
    events = lines(runs["hit"] / "run" / "events.jsonl")
    assert [event["kind"] for event in events if event["event"] == "fault"] == ["host lost"]
    assert [event["event"] for event in events if event["event"] == "lead"] == ["lead"]


@pytest.mark.full
@needs_namespaces
def test_strangers_change_no_bit_of_a_run(tmp_path: Path) -> None:
    """A third host sends everything it can think of to every port of the other two, also what it heard them
    say to each other."""
    runs = {name: tmp_path / name for name in ("attacked", "left alone")}
    losses: dict[str, list[tuple[int, float]]] = {}
    with hosts():
        for name, folder in runs.items():
            folder.mkdir()
            (folder / "examples").symlink_to(ROOT / "examples")
            more = ("layout.data=2", "train.steps=1000000", "checkpoint.every=1000")
            ends = [start(folder, host, rank, *more, workers=1, name=RUN) for rank, host in enumerate("ab")]
            try:
                wait_for("some steps", folder, lambda folder=folder: reached(folder) >= 5)
                if name == "attacked":
                    grown = attack(folder)
                    assert [end.poll() for end in ends] == [None, None], (folder / "a.err").read_text()
                    assert max(grown.values()) < 100 << 20
                else:
                    last = losses["attacked"][-1][0]
                    wait_for(
                        "as many steps",
                        folder,
                        lambda folder=folder, last=last: reached(folder) >= last,
                        seconds=600,
                    )
                ends[0].terminate()
                assert [end.wait(timeout=60) for end in ends] == [75, 75]
            finally:
                for end in ends:
                    end.kill()
            losses[name] = [(line["step"], line["loss"]) for line in lines(folder / "run" / "metrics.jsonl")]
    assert losses["attacked"] == losses["left alone"][: len(losses["attacked"])]
    assert not [
        event for event in lines(runs["attacked"] / "run" / "events.jsonl") if event["event"] == "fault"
    ]


def attack(folder: Path) -> dict[str, int]:
    """Attack every port of two hosts that train; bytes by which the processes of each have grown."""
    places = [place for host in "ab" for place in ports(host)]
    assert len(places) > 4, "the leader, the store, and what workers have between them"
    before = {host: memory(host) for host in "ab"}
    attacker = inside("c", sys.executable, str(ROOT / "tests" / "cli" / "attacker.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RUN_NAME": RUN}
    said = subprocess.run(
        [*attacker, "1", "1000", str(folder / "run" / "meeting.json"), *places],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    counts = [ast.literal_eval(line.partition(" ")[2]) for line in said.splitlines()]
    assert len(counts) == len(places)
    for count in counts:
        assert count["half-open"] == 200, count
        taken = (
            count["sent"] + count.get("ConnectionResetError", 0) + count.get("BrokenPipeError", 0)
        )  # to the end, or cut off
        assert taken >= 900, f"nearly all were taken, but for long ones to ports that read nothing: {count}"
    return {host: memory(host) - before[host] for host in "ab"}
