"""Signals as schedulers send them: to the host of a run, to a worker of it, to every process, once and again,
at any time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from warm import Command

from shardwise.checkpoint import checkpoints, step_of
from shardwise.resilience.forked_process import free_port

ROOT = Path(__file__).parents[2]
Started = Callable[..., Command]
JOB = [
    "train", "examples/quickstart.toml", "model.preset=bytes-400k", "data.sequence_length=32",
    "train.global_batch=8",
    "observe.sample=", "train.evaluate_every=0", "train.steps=100000", "layout.data=2", "run.folder=run",
]  # fmt: skip
STATUS = {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGHUP: 75, signal.SIGUSR1: 75}
TARGETS = ["host", "worker 0", "worker 1", "group", "twice", "start", "save"]
USUAL = {
    (signal.SIGTERM, "group"), (signal.SIGHUP, "worker 1"), (signal.SIGINT, "twice"), (signal.SIGTERM,
    "start"),
    (signal.SIGUSR1, "save"),
}  # fmt: skip
"""What is tried each time; the whole matrix takes minutes."""
SECONDS = 120.0


def matrix(usual: set[tuple[signal.Signals, str]]) -> list[Any]:
    """Every signal to every target, of which only the usual ones are tried each time."""

    def case(sent: signal.Signals, target: str) -> Any:
        marks = [] if (sent, target) in usual else [pytest.mark.full]
        return pytest.param(sent, target, marks=marks, id=f"{sent.name} {target}")

    return [case(sent, target) for sent in STATUS for target in TARGETS]


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.005)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def workers(run: Path) -> dict[int, int]:
    """The process of each rank, as the host wrote it down."""
    known = json.loads(next((run / "logs").glob("workers-*.json")).read_text())
    return {worker["rank"]: worker["pid"] for worker in known["workers"]}


def is_saving(run: Path) -> bool:
    """Whether a checkpoint is being written: its folder is there, and no manifest yet."""
    return any(not (folder / "checkpoint.json").exists() for folder in (run / "checkpoints").glob("step-*"))


def everything_is_saved(run: Path, errors: str) -> None:
    """The last step that was done is in a whole checkpoint, saved once."""
    reached = lines(run / "metrics.jsonl")[-1]["step"]
    assert f"stopped after step {reached};" in errors, errors
    assert max(map(step_of, checkpoints(str(run / "checkpoints")))) == reached
    events = lines(run / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "save"].count(reached) == 1
    assert [event["step"] for event in events if event["event"] == "stop"] == [reached]


@pytest.mark.parametrize(("sent", "target"), matrix(USUAL))
def test_a_run_saves_once_and_says_who_stopped_it(
    started: Started, tmp_path: Path, sent: signal.Signals, target: str
) -> None:
    run = tmp_path / "run"
    command = started(*JOB, "checkpoint.background=false", f"checkpoint.every={int(target == 'save')}")
    if target == "start":  # the server that workers are forked from is there, and they are not
        until(psutil.Process(command.pid).children, "the server")
    else:
        until(lambda: len(lines(run / "metrics.jsonl")) >= 3, "step 3")
    if target == "save":
        until(lambda: is_saving(run), "a save")
    if target.startswith("worker"):
        os.kill(workers(run)[int(target[-1])], sent)
    elif target == "host":
        command.send_signal(sent)
    else:
        os.killpg(command.pid, sent)
    if target == "twice":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, sent)
    _, errors = command.communicate(SECONDS)  # which sees that nothing is left running
    assert command.returncode == STATUS[sent], errors
    assert "Traceback" not in errors
    if target == "start":
        assert "stopped at once" in errors
        assert not (run / "metrics.jsonl").exists()
    else:
        everything_is_saved(run, errors)


@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_all_ranks_of_another_launcher_stop_together_when_one_is_signalled(
    started: Started, tmp_path: Path, sent: signal.Signals
) -> None:
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [started(*JOB, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) >= 3, "step 3")
    ranks[1].send_signal(sent)
    outputs = [rank.communicate(SECONDS)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [STATUS[sent]] * 2, outputs
    everything_is_saved(tmp_path / "run", outputs[0])


RANK = """
import os, sys
from pathlib import Path
from shardwise.cli.main import main
try:
    main()
except SystemExit as ending:
    Path(f"status-{os.environ['RANK']}").write_text(str(ending.code))
    raise
"""


@pytest.fixture
def torchrun(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of two ranks that torchrun started, and that leave their statuses in files."""
    (folder / "rank.py").write_text(RANK)
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
        "rank.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*launcher, *JOB, "checkpoint.every=1"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as agent:
        yield agent
        agent.kill()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("sent", "target"), matrix(set()))
def test_the_ranks_of_torchrun_save_whoever_is_signalled(
    torchrun: subprocess.Popen[str], folder: Path, sent: signal.Signals, target: str
) -> None:
    run = folder / "run"
    if target == "start":
        until(lambda: len(list(run.glob("logs/rank-*.log"))) == 2, "both ranks")
    else:
        until(lambda: len(lines(run / "metrics.jsonl")) >= 3, "step 3")
    ranks = {int(process.environ()["RANK"]): process for process in psutil.Process(torchrun.pid).children()}
    everyone = [psutil.Process(torchrun.pid), *psutil.Process(torchrun.pid).children(recursive=True)]
    if target == "save":
        until(lambda: is_saving(run), "a save")
    signalled = (
        [ranks[int(target[-1])]]
        if target.startswith("worker")
        else everyone[:1]
        if target == "host"
        else everyone
    )
    for _ in range(1 + (target == "twice")):
        for process in signalled:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(sent)
    _, left = psutil.wait_procs(everyone, timeout=SECONDS)
    for process in left:
        process.kill()
    output, _ = torchrun.communicate()
    assert not left, output
    statuses = {path.name: path.read_text() for path in folder.glob("status-*")}
    assert statuses == dict.fromkeys(("status-0", "status-1"), str(STATUS[sent])), output
    if (
        target == "start" and not (run / "metrics.jsonl").exists()
    ):  # torchrun died, and with it the store in which ranks meet
        assert "a peer was lost while the run was stopping" in output
    else:
        everything_is_saved(run, output)


def test_nothing_outlives_a_host_that_is_killed_not_even_what_is_stopped(
    started: Started, tmp_path: Path
) -> None:
    command = started(*JOB)
    until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) >= 3, "step 3")
    server = next(child for child in psutil.Process(command.pid).children() if child.children())
    assert len(server.children()) == 3, "the store and two workers"
    for process in [server, *server.children()]:
        process.suspend()
    command.send_signal(signal.SIGKILL)
    command.communicate(SECONDS)  # which sees that nothing is left running


@pytest.mark.full
def test_a_run_survives_the_death_of_the_server_that_its_workers_were_forked_from(
    started: Started, tmp_path: Path
) -> None:
    command = started(*JOB, "train.steps=60", "checkpoint.every=5")
    until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) >= 8, "step 8")
    next(child for child in psutil.Process(command.pid).children() if child.children()).kill()
    _, errors = command.communicate(SECONDS)
    assert command.returncode == 0, errors
    assert [event["event"] for event in lines(tmp_path / "run/events.jsonl") if event["event"] == "recovery"]
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["step"] == 60


@pytest.mark.full
def test_a_run_survives_the_death_of_the_store_in_which_its_workers_meet(
    started: Started, tmp_path: Path
) -> None:
    command = started(*JOB, "train.steps=60", "checkpoint.every=5")
    until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) >= 8, "step 8")
    server = next(child for child in psutil.Process(command.pid).children() if child.children())
    members = workers(tmp_path / "run")
    (store,) = {child.pid for child in server.children()} - set(members.values())
    for pid in (store, members[1]):
        os.kill(pid, signal.SIGKILL)
    _, errors = command.communicate(SECONDS)
    assert command.returncode == 0, errors
    assert "the store in which workers meet was lost; another is opened" in errors
    assert [event["kind"] for event in lines(tmp_path / "run/events.jsonl") if event["event"] == "fault"] == [
        "died"
    ]
    assert lines(tmp_path / "run/metrics.jsonl")[-1]["step"] == 60


@pytest.mark.full
@pytest.mark.parametrize("sent", STATUS)
def test_all_hosts_save_when_every_process_is_signalled(
    started: Started, tmp_path: Path, sent: signal.Signals
) -> None:
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": "test",
    }
    hosts = [started(*JOB, PET_NODE_RANK=str(rank), **common) for rank in range(2)]
    until(lambda: len(lines(tmp_path / "run/metrics.jsonl")) >= 3, "step 3")
    for host in reversed(hosts):
        os.killpg(host.pid, sent)
    outputs = [host.communicate(SECONDS)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [STATUS[sent]] * 2, outputs
    everything_is_saved(tmp_path / "run", "".join(outputs))
