"""`shardwise train` with a parameter server: the losses of a synchronous run where nothing may be stale,
whoever is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from warm import Command, Server
from watched import records, wait_for_step

from shardwise.resilience.forked_process import free_port

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., Command]
JOB = [
    "examples/quickstart.toml",
    "model.preset=bytes-400k",
    "data.sequence_length=32",
    "train.global_batch=8",
    "observe.sample=",
    "train.evaluate_every=0",
    "layout.data=2",
]
SERVER = [*JOB, "train.driver=server"]


def losses(run: Path) -> list[float]:
    return [float(record["loss"]) for record in records(run)]


def trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "Warning")), done.stderr


@pytest.fixture(scope="module")
def synchronous(warm: Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[str]]:
    """Losses and data of 30 steps in lockstep."""
    run = tmp_path_factory.mktemp("synchronous")
    trained(warm.run("train", *JOB, "train.steps=30", f"run.folder={run}", cwd=ROOT, environment={}))
    return losses(run), [record["data"] for record in records(run)]


def pid_of(run: Path, rank: int) -> int:
    known = json.loads(next((run / "logs").glob("workers-*.json")).read_text())
    return int(next(one["pid"] for one in known["workers"] if one["rank"] == rank))


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.full), 2])
def test_without_staleness_it_is_the_synchronous_run(
    shardwise: Shardwise, tmp_path: Path, synchronous: tuple[list[float], list[str]], servers: int
) -> None:
    trained(shardwise("train", *SERVER, "train.steps=30", f"server.servers={servers}", "run.folder=run"))
    assert losses(tmp_path / "run") == pytest.approx(synchronous[0], rel=1e-5)
    assert [record["data"] for record in records(tmp_path / "run")] == synchronous[1]
    assert all(set(record["staleness"]) == {0} for record in records(tmp_path / "run"))


@pytest.mark.parametrize(
    ("bound", "portions"),
    [
        pytest.param(1, 2, marks=pytest.mark.full),
        (4, 4),
        pytest.param("unbounded", 4, marks=pytest.mark.full),
    ],
)
def test_staleness_stays_within_its_bound_and_every_portion_is_used_once(
    shardwise: Shardwise,
    tmp_path: Path,
    synchronous: tuple[list[float], list[str]],
    bound: int | str,
    portions: int,
) -> None:
    words = [
        f"server.max_staleness={bound}",
        f"server.portions={portions}",
        "train.steps=30",
        "run.folder=run",
    ]
    trained(shardwise("train", *SERVER, *words))
    seen = Counter(staleness for record in records(tmp_path / "run") for staleness in record["staleness"])
    assert sum(seen.values()) == 30 * portions
    assert bound == "unbounded" or max(seen) <= int(bound)
    total = sum(int(record["data"], 16) for record in records(tmp_path / "run"))
    assert total == sum(int(data, 16) for data in synchronous[1]), "the same sequences, each once"


@pytest.mark.parametrize(
    "codec", ["int8", *(pytest.param(codec, marks=pytest.mark.full) for codec in ("bfloat16", "topk(0.1)"))]
)
def test_gradients_can_be_pushed_in_fewer_bits(
    shardwise: Shardwise, tmp_path: Path, synchronous: tuple[list[float], list[str]], codec: str
) -> None:
    """What is left out is fed back, so that the losses stay near those of whole gradients, and are not the
    same."""
    trained(
        shardwise(
            "train",
            *SERVER,
            "train.steps=30",
            "server.servers=2",
            f"server.compression={codec}",
            "run.folder=run",
        )
    )
    found = losses(tmp_path / "run")
    assert found != pytest.approx(synchronous[0], rel=1e-7)
    assert found == pytest.approx(synchronous[0], rel=0.2 if codec == "topk(0.1)" else 0.02)


@pytest.mark.parametrize("rank", [0, *(pytest.param(rank, marks=pytest.mark.full) for rank in (1, 2))])
def test_a_killed_server_or_worker_changes_no_loss(
    started: Started, tmp_path: Path, synchronous: tuple[list[float], list[str]], rank: int
) -> None:
    """Rank 0 and 1 are servers, 2 is the first worker's."""
    words = ["server.servers=2", "train.steps=30", "checkpoint.every=5", "run.folder=run"]
    process = started("train", *SERVER, *words)
    wait_for_step(tmp_path / "run", 8)
    os.kill(pid_of(tmp_path / "run", rank if rank < 2 else 2 + 2), signal.SIGKILL)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors
    assert losses(tmp_path / "run") == pytest.approx(synchronous[0], rel=1e-5)
    assert [record["data"] for record in records(tmp_path / "run")] == synchronous[1]


def connections_to_server(run: Path) -> set[int]:
    """Ports at which workers of the host without the server are connected to it."""
    known = [json.loads(path.read_text())["workers"] for path in (run / "logs").glob("workers-*.json")]
    servers = [one["pid"] for workers in known for one in workers if not one["loose"]]
    others = [one["pid"] for workers in known if all(one["loose"] for one in workers) for one in workers]
    connections = {pid: psutil.Process(pid).net_connections("tcp") for pid in (*servers, *others)}
    ports = {one.laddr.port for pid in servers for one in connections[pid] if one.status == "LISTEN"}
    return {
        one.laddr.port
        for pid in others
        for one in connections[pid]
        if one.status == "ESTABLISHED" and one.raddr.port in ports
    }


def test_a_worker_on_another_host_joins(started: Started, tmp_path: Path) -> None:
    """Two "hosts", here on one machine. A worker that does not know the key would be hung up on, and call
    again from another port."""
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": "test",
    }
    words = ["server.portions=2", "train.steps=100000", "run.folder=run"]
    hosts = [started("train", *SERVER, *words, PET_NODE_RANK=str(rank), **common) for rank in range(2)]
    seen: set[int] = set()
    deadline = time.monotonic() + 90
    wait_for_step(tmp_path / "run", 3)
    while not seen & (now := connections_to_server(tmp_path / "run")):
        assert time.monotonic() < deadline, "no connection lasts for a second"
        seen = now
        time.sleep(1.0)
    for host in hosts:
        host.send_signal(signal.SIGTERM)
    for host in hosts:
        _, errors = host.communicate(timeout=60)
        assert host.returncode == 75, errors


def test_a_stopped_run_goes_on_to_the_last_bit(
    started: Started, shardwise: Shardwise, tmp_path: Path
) -> None:
    trained(shardwise("train", *SERVER, "train.steps=30", "run.folder=whole"))
    process = started("train", *SERVER, "train.steps=30", "run.folder=halved")
    wait_for_step(tmp_path / "halved", 5)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert 5 <= len(records(tmp_path / "halved")) < 30
    trained(shardwise("train", *SERVER, "train.steps=30", "run.folder=halved"))
    assert losses(tmp_path / "halved") == losses(tmp_path / "whole")


def test_workers_that_always_fail_end_the_run_with_the_reason(shardwise: Shardwise, tmp_path: Path) -> None:
    module = (
        (ROOT / "examples" / "own_model.py")
        .read_text()
        .replace("        x = inputs\n", "        raise ValueError('not today')\n")
    )
    (tmp_path / "failing.py").write_text(module)
    words = [
        "model.module=failing.py:OwnModel",
        "layout.data=2",
        "train.driver=server",
        "train.evaluate_every=0",
        "run.folder=run",
    ]
    done = shardwise("train", "examples/own_model.toml", "train.micro_batch=4", *words)
    assert done.returncode == 1, done.stderr
    assert re.search(r"\nfailing.py, line \d+, in forward: ValueError: not today", done.stderr)
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["layout.tensor=2"], "leave layout.tensor out"),
        (["server.portions=3"], "server.portions = 3: does not divide train.global_batch = 8"),
        (["train.precision=float16"], "float16 needs a loss scale"),
        (["server.compression=powersgd(4)"], "works on whole matrices, and here slices of them are sent"),
        (
            ["train.driver=synchronous", "server.damping=true"],
            "server.damping: has no effect without train.driver = 'server'",
        ),
    ],
)
def test_what_cannot_work_is_refused(shardwise: Shardwise, words: list[str], message: str) -> None:
    done = shardwise("train", *SERVER, *words, "run.folder=run")
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
