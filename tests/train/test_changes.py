"""What a resumed job says of itself where it does something else than the run it continues."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.checkpoint import Manifest
from shardwise.config import Config, Train, from_tables
from shardwise.plans.learning_rate import learning_rate
from shardwise.train.changes import changes

TRAIN = {"steps": 100, "global_batch": 8, "warmup": 10, "learning_rate": 1e-3}


def config(**train: Any) -> Config:
    return from_tables({"data": {"source": "text.txt"}, "train": {**TRAIN, **train}})


def said(step: int, before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old = config(**before)
    train, data = old.train.model_dump(mode="json"), old.data.model_dump(mode="json")
    return list(
        changes(
            Manifest(step, {}, train, data, {}, {}, 1, "2.13", {}, sequences=step * old.train.global_batch),
            config(**now),
        )
    )


def test_a_job_that_changes_nothing_says_nothing() -> None:
    assert said(50, {}, {"micro_batch": 2, "evaluate_every": 5, "precision": "bfloat16"}) == []
    assert list(changes(Manifest(0, {}, {}, {}, {}, {}, 1, "2.13", {}), config(steps=7))) == [], (
        "imported weights"
    )


def test_another_batch_says_where_the_data_goes_on() -> None:
    (note,) = said(50, {}, {"global_batch": 16})
    assert note.startswith(
        "train.global_batch was 8 and is now 16: the data goes on after the 400 sequences seen"
    )
    assert "learning rate goes on by the step" in note


def test_another_order_is_no_promise_of_unseen_sequences() -> None:
    (note,) = said(50, {}, {"global_batch": 16, "seed": 1})
    assert note == (
        "train.global_batch was 8 and is now 16 and train.seed was 0 and is now 1, so the data goes on in "
        "another order "
        "than the run began with"
    )


@pytest.mark.parametrize(
    ("before", "now", "end"),
    [
        # Of a cosine from 1 to 0.1: 41 of 90 steps after warm-up, and 41 of 190.
        ({}, {"steps": 200},
        "train.steps was 100 and is now 200, so the learning rate follows another schedule than the run "
         "began with: 0.0009 at step 51, where it would have been 0.000613"),
        # A stable part is prolonged: nothing changes before step 81, where the decay would have begun.
        ({"schedule": "wsd"}, {"schedule": "wsd", "steps": 200},
        "0.001 at step 81, where it would have been 0.000955"),
        ({}, {"learning_rate": 5e-4},
        "train.learning_rate was 0.001 and is now 0.0005, so the learning rate follows another "
         "schedule than the run began with: 0.000306 at step 51, where it would have been 0.000613"),
    ],
)  # fmt: skip
def test_another_schedule_says_from_which_step_the_learning_rate_differs(
    before: dict[str, Any], now: dict[str, Any], end: str
) -> None:
    (note,) = said(50, before, now)
    assert note.endswith(end)


@pytest.mark.parametrize(
    ("before", "now", "end"),
    [
        (
            {"schedule": "wsd"},
            {"schedule": "wsd", "steps": 2 * 10**9},
            " at step 800000001, where it would have been 0.001",
        ),
        ({"schedule": "wsd"}, {"schedule": "wsd", "decay": 10**9 // 5}, None),
        (
            {"schedule": "wsd", "decay": 1},
            {"schedule": "constant"},
            "0.001 at step 1000000000, where it would have been 0.0001",
        ),
        ({"schedule": "constant"}, {"schedule": "constant", "warmup": 51}, None),
        ({"schedule": "constant"}, {"schedule": "constant", "steps": 2 * 10**9}, None),
        ({}, {"warmup": 52}, "0.000981 at step 51, where it would have been 0.001"),
    ],
)
def test_schedules_of_very_many_steps_are_compared_where_they_can_part(
    monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], now: dict[str, Any], end: str | None
) -> None:
    asked: list[int] = []

    def counted(train: Train, step: int) -> float:
        asked.append(step)
        assert len(asked) < 100_000, "it compares step by step"
        return learning_rate(train, step)

    monkeypatch.setattr("shardwise.train.changes.learning_rate", counted)
    notes = said(50, {"steps": 10**9, **before}, {"steps": 10**9, **now})
    assert notes == [] if end is None else notes[0].endswith(end)


def test_a_longer_run_at_a_constant_rate_is_no_other_schedule() -> None:
    assert (
        said(50, {"schedule": "constant"}, {"schedule": "constant", "steps": 200, "final_learning_rate": 0.5})
        == []
    )


def test_a_run_that_reached_its_end_says_what_going_on_does_to_the_rate() -> None:
    (note,) = said(100, {}, {"steps": 200})
    assert note.endswith("at step 101, where it would have been 0.0001")
