"""What a drill counts as survived, on a run folder and on commands that only pretend."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

from shardwise.config import from_tables
from shardwise.proof import disturbed_run
from shardwise.proof.disturbed_run import Baseline, DisturbedRun, NotSurvived
from shardwise.proof.drill_faults import Damage
from shardwise.proof.train_commands import TrainCommands


class Silent:
    def at(self, phase: str, step: int, faults: int) -> None: ...

    def say(self, text: str) -> None: ...


class PretendedCommands:
    """Commands that have ended with these statuses, or (None) run for ever; starting them again writes what
    is given."""

    def __init__(self, statuses: list[int | None], start_again: Callable[[], None] = lambda: None) -> None:
        self._statuses, self._start_again = statuses, start_again
        self.log = Path("a.log")

    def statuses(self) -> list[int | None]:
        return self._statuses

    def running(self) -> bool:
        return None in self._statuses

    def terminate(self) -> None: ...

    def start(self, workers: list[int]) -> None:
        self._statuses = [None]
        self._start_again()

    def workers(self) -> dict[int, int]:
        return {0: 1 << 30}

    def log_tail(self) -> str:
        return "its last words"


def a_run(
    folder: Path, *statuses: int | None, start_again: Callable[[], None] = lambda: None
) -> DisturbedRun:
    folder.mkdir()
    config = from_tables({"data": {"source": "text.txt"}})
    run = DisturbedRun(folder, config, 2, (), Baseline(1.0, 0.1, 0.01, 0.01), Silent())
    run.commands = cast(TrainCommands, PretendedCommands(list(statuses), start_again))
    return run


def event(folder: Path, name: str, at: float, **facts: Any) -> None:
    written = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": written, "event": name, **facts}) + "\n")


def step(folder: Path, number: int, at: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number, "time": at, "seconds": 0.01}) + "\n")


def go_on(folder: Path, number: int, **facts: Any) -> None:
    """The run begins again from a step, and does the next."""
    now = time.time()
    event(folder, "resume", now + 1, step=number, world=2, **facts)
    step(folder, number + 1, now + 2)


@pytest.mark.parametrize("status", [0, 1, 130, -15])
def test_a_command_that_was_asked_to_leave_must_say_that_it_is_to_be_started_again(
    tmp_path: Path, status: int
) -> None:
    folder = tmp_path / "run"
    run = a_run(folder, status, start_again=lambda: go_on(folder, 5))
    step(folder, 5, time.time())
    with pytest.raises(NotSurvived, match=rf"\[{status}\], not 75"):
        run._term(5, time.time(), random.Random(0))


def test_a_command_that_saved_and_left_with_status_75_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = a_run(folder, 75, start_again=lambda: go_on(folder, 5))
    step(folder, 5, time.time())
    survived = run._term(5, time.time(), random.Random(0))
    assert (survived.steps_lost, survived.more["resumed_from"]) == (0, 5)
    assert survived.seconds_to_recover == pytest.approx(2.0, abs=0.5)


@pytest.mark.parametrize(("used", "survives"), [("step-4", False), ("step-2", True)])
def test_a_run_that_goes_on_from_the_spoilt_checkpoint_has_not_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: str, survives: bool
) -> None:
    folder = tmp_path / "run"
    run = a_run(folder, None)
    step(folder, 5, time.time())

    def spoil(*_: object) -> Damage:
        go_on(folder, 2, checkpoint=used)
        return Damage("step-4", "rank-0.data")

    monkeypatch.setattr(disturbed_run, "corrupt", spoil)
    if survives:
        assert run._corrupt(5, time.time(), random.Random(0)).steps_lost == 3
    else:
        with pytest.raises(NotSurvived, match="step-4, which is damaged"):
            run._corrupt(5, time.time(), random.Random(0))


def test_a_run_has_not_recovered_before_it_has_begun_again_and_done_a_step(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", None)
    event(run.folder, "start", 100.0, step=0, world=2)
    step(run.folder, 7, 110.0)
    assert run._resumed(1) is None, "it began before the fault"
    event(run.folder, "resume", 120.0, step=6, world=2)
    assert run._resumed(1) is None, "no step is done since"
    step(run.folder, 7, 121.0)
    begun, first = run._resumed(1) or ({}, {})
    assert (begun["step"], first["time"]) == (6, 121.0)
    assert run._resumed(1, world=3) is None, "others began"


@pytest.mark.parametrize(
    ("status", "failure"), [(0, None), (1, "the command ended with status 1:\nits last words")]
)
def test_a_run_that_ends_with_an_error_has_failed(tmp_path: Path, status: int, failure: str | None) -> None:
    assert a_run(tmp_path / "run", status)._bad_end() == failure


def test_a_run_that_ends_while_its_recovery_is_waited_for_has_not_survived(tmp_path: Path) -> None:
    with pytest.raises(NotSurvived, match="the command ended with status 1"):
        a_run(tmp_path / "run", 1)._wait(lambda: None, "no step was done after it")


def test_an_exception_that_is_never_raised_is_not_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is done before the worker gets to the place."""
    run = a_run(tmp_path / "run", 0)
    monkeypatch.setattr(disturbed_run, "raise_error", lambda pid, place: None)
    step(run.folder, 5, time.time())
    with pytest.raises(NotSurvived, match="the run ended before"):
        run._error(5, time.time(), random.Random(2))


@pytest.mark.parametrize(
    ("second_raises", "says"),
    [
        (
            True,
            "an exception in rank 0 in a collective, then one in rank 1 in the creation of a process group",
        ),
        (
            False,
            "in a collective; rank 1 was replaced before it raised one in the creation of a process group",
        ),
    ],
)
def test_an_exception_counts_as_raised_only_if_the_run_recorded_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_raises: bool, says: str
) -> None:
    run, sent = a_run(tmp_path / "run", None), []
    step(run.folder, 5, time.time())

    def raise_error(pid: int, place: str) -> None:
        sent.append((pid, place))
        if place == "collective":
            event(run.folder, "fault", time.time(), cause="DrillError: raised", kind="failed", step=6)
            if second_raises:
                event(run.folder, "fault", time.time(), cause="DrillError: raised", kind="failed", step=0)
            go_on(run.folder, 4)

    monkeypatch.setattr(disturbed_run, "raise_error", raise_error)
    monkeypatch.setattr(disturbed_run, "ERROR_PLACES", ("group",))
    monkeypatch.setattr(PretendedCommands, "workers", lambda _: {0: 1 << 30, 1: (1 << 30) + 1})
    survived = run._error(5, time.time(), random.Random(3))
    assert survived.rank == 0
    assert sent == [((1 << 30) + 1, "group"), (1 << 30, "collective")]
    assert says in survived.happened
    assert survived.more["exceptions"] == (2 if second_raises else 1)
    run.survived.append(survived)
    assert list(run.unexpected()) == []


def test_a_worker_that_ends_in_another_way_has_raised_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a worker without the drill's handlers does, which the signal kills."""
    run = a_run(tmp_path / "run", None)
    step(run.folder, 5, time.time())

    def kill(pid: int, place: str) -> None:
        event(run.folder, "fault", time.time(), cause="ended by signal 35", kind="died", step=6)
        go_on(run.folder, 4)

    monkeypatch.setattr(disturbed_run, "raise_error", kill)
    with pytest.raises(NotSurvived, match="rank 0 raised no exception; the fault was: ended by signal 35"):
        run._error(5, time.time(), random.Random(3))
