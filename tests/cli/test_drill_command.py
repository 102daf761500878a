"""`shardwise drill` from the outside: real runs, real faults; mistakes; and nothing left running."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from warm import Command

from shardwise.cli import drill as command
from shardwise.config import from_tables
from shardwise.errors import UserError
from shardwise.library import drill_job as library
from shardwise.library.drill_job import drill_job
from shardwise.plans import Dtypes
from shardwise.proof.compare_runs import TOLERANCE, RunComparison
from shardwise.proof.disturbed_run import Baseline
from shardwise.proof.drill import DrillResult, _prepared

ROOT = Path(__file__).parents[2]
Shardwise = Callable[..., subprocess.CompletedProcess[str]]
Started = Callable[..., Command]
JOB = [
    "examples/drill.toml", "data.sequence_length=32", "layout.data=2", "train.global_batch=4",
    "train.evaluate_sequences=4",
    "checkpoint.every=3", "run.folder=run",
]  # fmt: skip


def result(done: subprocess.CompletedProcess[str], status: int = 0) -> dict[str, Any]:
    assert done.returncode == status, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_run_with_a_killed_worker_and_a_spoilt_checkpoint_is_the_undisturbed_run(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    found = result(
        shardwise(
            "drill",
            *JOB,
            "checkpoint.every=10",
            "train.steps=120",
            "--faults",
            "kill,corrupt",
            "--count",
            "2",
            "--seed",
            "1",
            "--json",
        )
    )
    fields = (
        "pass",
        "faults",
        "loss_equal",
        "weights_equal",
        "data_repeated",
        "data_skipped",
        "goodput",
        "layout_changed",
    )
    assert [found[field] for field in fields] == [
        True,
        found["faults"],
        True,
        True,
        [],
        [],
        found["goodput"],
        False,
    ]
    assert sorted(fault["kind"] for fault in found["faults"]) == ["corrupt", "kill"]
    for fault in found["faults"]:
        assert {"kind", "step", "rank", "seconds_to_recover", "steps_lost"} <= fault.keys()
        assert fault["seconds_to_recover"] > 0
        assert fault["rank"] in (0, 1)
    events = [json.loads(line) for line in (tmp_path / "run/drilled/events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events].count("fault") == 2
    assert [event["event"] for event in events].count("skip_checkpoint") == 1
    assert found["goodput"] > 0
    assert found["unexpected"] == []


def test_a_run_with_exceptions_in_a_collective_a_save_and_a_meeting_is_the_undisturbed_run(
    shardwise: Shardwise, tmp_path: Path
) -> None:
    arguments = ["train.steps=60", "--faults", "error", "--count", "3", "--seed", "3", "--json"]
    found = result(shardwise("drill", *JOB, *arguments))
    assert found["pass"]
    assert [(fault["place"], fault["exceptions"]) for fault in found["faults"]] == [
        ("collective", 1),
        ("save", 1),
        ("group", 2),
    ]
    events = [json.loads(line) for line in (tmp_path / "run/drilled/events.jsonl").read_text().splitlines()]
    faults = [event for event in events if event["event"] == "fault"]
    assert {event["kind"] for event in faults} == {"failed"}
    assert all("DrillError: raised by the drill in " in event["cause"] for event in faults)
    assert len(faults) == 4
    assert found["unexpected"] == []


@pytest.mark.full
def test_four_workers_survive_exceptions_in_every_place(shardwise: Shardwise) -> None:
    arguments = ["checkpoint.every=3", "train.steps=90", "--faults", "error", "--count", "8", "--seed", "3"]
    found = result(shardwise("drill", "examples/drill.toml", *arguments, "--json", "run.folder=run"))
    assert found["pass"]
    assert {fault["place"] for fault in found["faults"]} == {"collective", "group", "communicator", "save"}


@pytest.mark.full
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_four_workers_survive_six_faults_of_four_kinds(shardwise: Shardwise, seed: str) -> None:
    arguments = [
        "examples/drill.toml",
        "--faults",
        "kill,hang,corrupt,term",
        "--count",
        "6",
        "--seed",
        seed,
        "--json",
    ]
    found = result(shardwise("drill", *arguments, "run.folder=run"))
    assert found["pass"]
    assert {fault["kind"] for fault in found["faults"]} == {"kill", "hang", "corrupt", "term"}
    assert not found["layout_changed"]


@pytest.mark.full
def test_a_full_disk_and_a_request_to_leave_cost_no_step(shardwise: Shardwise) -> None:
    arguments = ["examples/drill.toml", "--faults", "full,term", "--count", "2", "--json", "run.folder=run"]
    found = result(shardwise("drill", *arguments))
    assert found["pass"]
    assert [fault["steps_lost"] for fault in found["faults"]] == [0, 0]


@pytest.mark.full
def test_workers_fall_from_four_to_three_and_come_back(shardwise: Shardwise, tmp_path: Path) -> None:
    arguments = [
        "examples/drill.toml",
        "train.steps=300",
        "--faults",
        "lose",
        "--count",
        "1",
        "--json",
        "run.folder=run",
    ]
    found = result(shardwise("drill", *arguments))
    assert found["pass"]
    assert found["layout_changed"]
    events = [json.loads(line) for line in (tmp_path / "run/drilled/events.jsonl").read_text().splitlines()]
    assert [event["world"] for event in events if event["event"] in ("start", "resume")][-3:][::2] == [4, 4]
    assert 3 in [event["world"] for event in events if event["event"] == "resume"]


@pytest.mark.full
def test_a_run_that_does_not_survive_fails_the_drill_with_its_last_words(shardwise: Shardwise) -> None:
    arguments = ["--faults", "kill", "--count", "1", "recovery.step_attempts=1", "--json"]
    done = shardwise("drill", *JOB, *arguments)
    found = result(done, status=1)
    assert (found["pass"], found["faults"], found["loss_equal"]) == (False, [], False)
    assert "kill after step" in found["failure"]
    assert "SIGKILL" in found["failure"]
    assert "SIGKILL" in done.stderr


@pytest.mark.parametrize(
    ("failure", "losses", "status"),
    [(None, [], 0), (None, [7], 1), ("kill after step 3: no step was done after it", None, 1)],
    ids=["the same run", "another run", "no end"],
)
def test_only_a_drill_that_was_survived_without_a_difference_is_status_0(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failure: str | None,
    losses: list[int] | None,
    status: int,
) -> None:
    same = None if losses is None else RunComparison(9, None, [], [], losses, 0.0, [], [], [], {}, 0.0, 4)
    baseline = Baseline(training=1.0, start=0.1, step=0.1, slowest=0.1)
    found = DrillResult((), (), failure, (), same, False, {}, 2, baseline, drilled_seconds=2.0, seconds=4.0)
    monkeypatch.setattr(command, "drill_job", lambda *arguments: found)
    with pytest.raises(typer.Exit) as left:
        command.drill(Path("job.toml"), faults="kill", count=1, seed=0, json=True)
    assert left.value.exit_code == status
    told = capsys.readouterr()
    assert json.loads(told.out)["pass"] is (status == 0)
    assert told.err.strip() == (failure or "")


@pytest.mark.parametrize(
    ("overrides", "faults", "count", "words"),
    [
        ([], "kill,fire", 5, "fire is not known; use some of kill, hang, error, corrupt, full, term, lose"),
        (["layout.data=1"], "kill", 5, "2 workers or more"),
        ([], "kill", 40, "--count 40"),
        (["checkpoint.keep=1"], "corrupt", 1, "checkpoint.keep = 1"),
        (["checkpoint.every=60"], "corrupt", 1, "checkpoint.every = 60"),
        (["train.global_batch=8", "layout.data=4", "train.micro_batch=2"], "lose", 1, "3 workers"),
        (["train.stpes=4"], "kill", 1, "Did you mean train.steps?"),
    ],
)
def test_a_mistake_is_answered_before_anything_runs(
    tmp_path: Path, overrides: list[str], faults: str, count: int, words: str
) -> None:
    overrides = ["checkpoint.every=3", "layout.data=2", f"run.folder={tmp_path}/run", *overrides]
    with pytest.raises(UserError) as raised:
        drill_job(ROOT / "examples/drill.toml", overrides, faults, count, 0, None)
    assert words in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_what_the_job_itself_has_wrong_is_told_as_training_tells_it(shardwise: Shardwise) -> None:
    done = shardwise("drill", *JOB, "data.source=nowhere.txt")
    assert done.returncode == 2, done.stderr
    assert "nowhere.txt" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_is_no_run_is_left_alone(shardwise: Shardwise, tmp_path: Path) -> None:
    (tmp_path / "run" / "drilled").mkdir(parents=True)
    (tmp_path / "run" / "drilled" / "diary.txt").write_text("mine")
    done = shardwise("drill", *JOB)
    assert done.returncode == 2
    assert "exists and is no run folder" in done.stderr
    assert (tmp_path / "run" / "drilled" / "diary.txt").read_text() == "mine"


@pytest.mark.parametrize("signal_sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interrupted_drill_leaves_nothing_running(
    shardwise: Shardwise, started: Started, tmp_path: Path, signal_sent: signal.Signals
) -> None:
    command = ["drill", *JOB, "train.steps=5000", "--count", "1", "--faults", "kill"]
    process = started(*command)
    deadline = time.monotonic() + 90
    while not (tmp_path / "run/undisturbed/metrics.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 3
    again = shardwise(*command)
    assert (again.returncode, "another run is writing there now" in again.stderr) == (2, True), again.stderr
    process.send_signal(signal_sent)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    _, left = psutil.wait_procs(children, timeout=10)
    assert left == []


@pytest.mark.parametrize(
    ("precision", "kinds", "drilled_in"),
    [
        ("float32", ("kill", "lose"), "float64"),
        ("float32", ("kill", "hang"), "float32"),
        ("bfloat16", ("lose",), "bfloat16"),
        ("float8", ("lose",), "float8"),
    ],
)
def test_a_float32_job_that_loses_a_host_is_drilled_in_float64(
    precision: Any, kinds: Any, drilled_in: str
) -> None:
    config = from_tables(
        {"data": {"source": "text.txt"}, "train": {"precision": precision, "state_dtype": "float32"}}
    )
    prepared, said = _prepared(config, kinds)
    assert prepared.train.precision == drilled_in
    assert Dtypes.of(prepared.train).states == ("float64" if drilled_in == "float64" else "float32")
    assert ("train.precision" in said) == (drilled_in != precision)
    assert prepared.train.precision in TOLERANCE or "lose" not in kinds


def test_a_drill_has_as_many_workers_as_the_run_that_it_stands_for() -> None:
    groups = from_tables(
        {
            "model": {"preset": "bytes-400k"},
            "data": {"source": "x"},
            "train": {"driver": "local"},
            "local": {"groups": 2},
            "layout": {"data": 2},
        }
    )
    assert library._workers(groups, None) == 4
    assert library._workers(groups, 8) == 8
