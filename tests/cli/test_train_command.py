"""`shardwise train` from the outside: launching, layouts, stopping, resuming, dying."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import psutil
import pytest
from warm import Command, Server

from shardwise.resilience.forked_process import free_port

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., Command]
Undisturbed = Callable[[int, int], list[float]]
SMALL = [
    "model.preset=bytes-400k",
    "data.sequence_length=32",
    "train.global_batch=8",
]  # its steps wait for messages, not for sums
JOB = ["examples/quickstart.toml", *SMALL, "observe.sample=", "train.evaluate_every=0"]


def records(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [float(str(record["loss"])) for record in records(run)]


def trained(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "Warning" not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def undisturbed(warm: Server, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The losses of so many steps on so many workers, which nothing stops: trained once."""

    @cache
    def trained_on(workers: int, steps: int) -> list[float]:
        run = tmp_path_factory.mktemp("undisturbed")
        arguments = [f"train.steps={steps}", f"layout.data={workers}", f"run.folder={run}"]
        trained(warm.run("train", *JOB, *arguments, cwd=ROOT, environment={}))
        return losses(run)

    return trained_on


ON_FOUR_WORKERS = [
    "layout.data=4 layout.zero=3 train.micro_batch=1",
    *(
        pytest.param(layout, marks=pytest.mark.full)  # tests/parallel has them
        for layout in (
            "layout.replica=2 layout.data=2",
            *(f"layout.data=4 layout.zero={zero} train.micro_batch=1" for zero in range(3)),
        )
    ),
]


@pytest.mark.parametrize("layout", ON_FOUR_WORKERS)
def test_the_losses_of_four_workers_equal_those_of_one(
    shardwise: Shardwise, tmp_path: Path, undisturbed: Undisturbed, layout: str
) -> None:
    done = shardwise("train", *JOB, "train.steps=8", *layout.split(), "--workers", "4", "run.folder=run")
    trained(done)
    assert len(losses(tmp_path / "run")) == 8
    assert losses(tmp_path / "run") == pytest.approx(undisturbed(1, 8), rel=1e-5)


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not ((run / "metrics.jsonl").exists() and len(records(run)) >= step):
        assert time.monotonic() < deadline, f"step {step} never came"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("workers", "signal_sent"), [pytest.param(1, signal.SIGINT, marks=pytest.mark.full), (2, signal.SIGTERM)]
)
def test_a_stopped_run_goes_on_with_the_same_losses_to_the_last_bit(
    shardwise: Shardwise,
    started: Started,
    tmp_path: Path,
    undisturbed: Undisturbed,
    workers: int,
    signal_sent: signal.Signals,
) -> None:
    arguments = ["train.steps=40", f"layout.data={workers}"]
    process = started("train", *JOB, *arguments, "run.folder=halved")
    wait_for_step(tmp_path / "halved", 5)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal_sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 75}[signal_sent], errors
    assert "stopped after step" in errors
    _, left = psutil.wait_procs(children, timeout=30)
    assert not left
    reached = len(records(tmp_path / "halved"))
    assert 5 <= reached < 40
    trained(shardwise("train", *JOB, *arguments, "run.folder=halved"))
    assert losses(tmp_path / "halved") == undisturbed(workers, 40)


def listening(pid: int) -> set[str]:
    """Addresses at which a process and its descendants take calls."""
    host = psutil.Process(pid)
    connections = [
        connection
        for process in [host, *host.children(recursive=True)]
        for connection in process.net_connections("tcp")
    ]
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("copies", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_killed_worker_is_replaced_and_the_losses_are_those_of_a_run_without_a_fault(
    started: Started, tmp_path: Path, undisturbed: Undisturbed, copies: int
) -> None:
    arguments = ["train.steps=40", "layout.data=2", "checkpoint.every=5", f"recovery.copies={copies}"]
    process = started("train", *JOB, *arguments, "run.folder=run")
    wait_for_step(tmp_path / "run", 8)
    known = json.loads(next((tmp_path / "run" / "logs").glob("workers-*.json")).read_text())
    assert listening(known["supervisor"]) == {"127.0.0.1"}, (
        "nobody outside of this machine can reach a run on one host"
    )
    os.kill(next(one["pid"] for one in known["workers"] if one["rank"] == 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "worker 1 was ended by SIGKILL" in " ".join(errors.split())
    assert "recovered in" in errors
    assert "Traceback" not in errors
    assert losses(tmp_path / "run") == undisturbed(2, 40)
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["event"] == "fault"] == ["died"]
    lost = next(event["lost_steps"] for event in events if event["event"] == "recovery")
    assert lost <= (1 if copies else 2 * 5), (
        "a save every 5 steps, and the last of them may still have been under way"
    )
    assert not list((tmp_path / "run").glob("checkpoints.old-*")), "its own checkpoints stay where they are"


def test_a_run_that_goes_on_with_other_data_says_so(shardwise: Shardwise) -> None:
    trained(shardwise("train", *JOB, "train.steps=2", "layout.data=1", "run.folder=run"))
    done = shardwise(
        "train",
        *JOB,
        "train.steps=3",
        "layout.data=1",
        "run.folder=run",
        "train.seed=5",
        "train.global_batch=4",
    )
    trained(done)
    assert "train.seed was 0 and is now 5" in " ".join(done.stderr.split())
    assert "train.global_batch was 8 and is now 4" in " ".join(done.stderr.split())


@pytest.mark.full
def test_a_compiled_run_ends_without_a_warning_of_leaks(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "train",
        *JOB,
        "train.steps=1",
        "layout.data=1",
        "train.compile=true",
    ]
    trained(
        subprocess.run(
            [*command, f"run.folder={tmp_path}/run"], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
    )


@pytest.mark.full  # what torchrun says to its processes is said in tests/mesh and test_signals.py each time
def test_torchrun_starts_it(tmp_path: Path, undisturbed: Undisturbed) -> None:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "-m",
        "shardwise",
        "train",
    ]
    command = [*launcher, *JOB, "train.steps=3", "layout.data=2", f"run.folder={tmp_path}/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(undisturbed(1, 3), rel=1e-5)


def test_srun_with_a_task_a_device_starts_it(started: Started, tmp_path: Path) -> None:
    common = {
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    tasks = [
        started(
            "train",
            *JOB,
            "train.steps=3",
            "layout.data=2",
            "run.folder=run",
            SLURM_PROCID=str(rank),
            SLURM_LOCALID=str(rank),
            **common,
        )
        for rank in range(2)
    ]
    for task in tasks:
        _, errors = task.communicate(timeout=120)
        assert task.returncode == 0, errors
    assert len(losses(tmp_path / "run")) == 3


def test_one_process_a_node_starts_its_workers(started: Started, tmp_path: Path) -> None:
    """What a Kubernetes operator sets for torchrun: two "nodes", here on one machine, with one worker
    each."""
    common = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": "test",
    }
    nodes = [
        started(
            "train",
            *JOB,
            "train.steps=3",
            "layout.data=2",
            "run.folder=run",
            PET_NODE_RANK=str(rank),
            **common,
        )
        for rank in range(2)
    ]
    for node in nodes:
        _, errors = node.communicate(timeout=120)
        assert node.returncode == 0, errors
    assert len(losses(tmp_path / "run")) == 3
    assert {path.name for path in (tmp_path / "run" / "logs").glob("rank-*")} == {"rank-0.log", "rank-1.log"}


def test_a_fresh_start_keeps_the_earlier_checkpoints_aside(shardwise: Shardwise, tmp_path: Path) -> None:
    trained(shardwise("train", *JOB, "train.steps=2", "layout.data=1", "run.folder=run"))
    again = shardwise("train", *JOB, "train.steps=2", "layout.data=1", "run.folder=run")
    trained(again)
    assert "nothing to do" in again.stderr
    assert len(records(tmp_path / "run")) == 2
    trained(
        shardwise(
            "train", *JOB, "train.steps=1", "layout.data=1", "run.folder=run", "checkpoint.resume=never"
        )
    )
    assert (tmp_path / "run" / "checkpoints.old-1" / "step-2").is_dir()
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == [".lock", "step-1"]


def test_a_run_that_goes_on_from_an_older_checkpoint_keeps_what_it_saves(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    common = [*JOB, "layout.data=1", "run.folder=run", "checkpoint.keep=1"]
    trained(
        shardwise("train", *JOB, "layout.data=1", "run.folder=run", "train.steps=4", "checkpoint.every=2")
    )
    trained(shardwise("train", *common, "train.steps=3", "checkpoint.resume=run/checkpoints/step-2"))
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == [".lock", "step-3"]
    assert (tmp_path / "run" / "checkpoints.old-1" / "step-4").is_dir()
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3]


def test_the_run_folder_holds_what_the_design_promises(shardwise: Shardwise, tmp_path: Path) -> None:
    trained(
        shardwise(
            "train",
            *JOB,
            "train.steps=3",
            "layout.data=2",
            "run.folder=run",
            "observe.trace=2",
            "observe.tensorboard=true",
        )
    )
    run = tmp_path / "run"
    fields = {
        "step",
        "loss",
        "tokens_per_second",
        "seconds",
        "learning_rate",
        "gradient_norm",
        "spans",
        "collectives",
        "memory_bytes",
    }
    assert all(fields <= record.keys() for record in records(run))
    for name in (
        "config.toml",
        "plan.json",
        "events.jsonl",
        "logs/rank-0.log",
        "logs/rank-1.log",
        "trace-rank0.json",
        "trace-rank1.json",
    ):
        assert (run / name).is_file(), name
    assert list(run.rglob("events.out.tfevents*"))
    report = shardwise("report", "run", "--json")
    assert json.loads(report.stdout)["steps"] == 3


def test_the_run_keeps_the_job_as_it_was_asked_and_the_plan_says_what_was_chosen(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    words = ["model.preset=bytes-400k", "observe.sample=", "train.steps=1", "layout.data=2"]
    done = shardwise("train", "examples/quickstart.toml", *words)
    trained(done)
    run = tmp_path / "runs" / "quickstart"
    decisions = json.loads((run / "plan.json").read_text())["decisions"]
    assert decisions["layout.data"] == {"value": 2, "asked": True, "why": "as asked"}
    assert (decisions["layout.zero"]["value"], decisions["layout.zero"]["asked"]) == (0, False)
    assert decisions["layout.zero"]["why"].startswith("the lowest stage that fits: states take")
    assert (decisions["train.micro_batch"]["value"], decisions["train.micro_batch"]["asked"]) == (16, False)
    job = tomllib.loads((run / "config.toml").read_text())
    assert job["layout"] == {"data": 2}
    assert "micro_batch" not in job["train"]
    assert "zero 0: the lowest stage that fits" in " ".join(done.stderr.split())
