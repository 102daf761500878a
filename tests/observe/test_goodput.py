"""Histories with times chosen by hand, so that every part can be worked out on paper."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.observe.goodput import PARTS, goodput

T0 = 1_700_000_000.0


def event(at: float, name: str, **facts):
    return {
        "time": datetime.fromtimestamp(T0 + at, UTC).isoformat(timespec="milliseconds"),
        "event": name,
        **facts,
    }


def step(number: int, end: float, seconds: float = 1.0, data: float = 0.0, **more):
    spans = {"data": data, "forward_backward": seconds - data, "exposed_communication": 0.0, "optimizer": 0.0}
    return {"step": number, "time": T0 + end, "seconds": seconds, "spans": spans, **more}


def parts(found, **expected: float):
    """The parts named have these seconds, and all others none."""
    assert found["parts"] == pytest.approx({**dict.fromkeys(PARTS, 0.0), **expected}, abs=2e-3)
    assert sum(found["parts"].values()) == pytest.approx(found["wall_seconds"])


def test_an_undisturbed_run_is_its_steps_its_start_and_its_saves() -> None:
    events = [
        event(0, "start"),
        event(6.5, "evaluate", step=3, held_out_loss=1.0, seconds=1.5),
        event(7.5, "save", step=3, seconds=1.0, stall_seconds=1.0),
        event(11, "end", step=6),
    ]
    steps = [step(1, 3), step(2, 4), step(3, 5), step(4, 8.5, data=0.25), step(5, 9.5), step(6, 10.5)]
    found = goodput(events, steps)
    parts(found, start_up=2.0, productive=5.75, data=0.25, evaluation=1.5, checkpoint=1.0, other=0.5)
    assert found["share"] == pytest.approx(5.75 / 11, abs=1e-3)
    assert (found["faults"], found["recoveries"], found["stragglers"]) == ([], [], [])


def test_a_save_in_the_background_costs_its_stall_and_not_its_writing() -> None:
    events = [event(0, "start"), event(3.9, "save", step=2, seconds=1.8, stall_seconds=0.25)]
    steps = [step(1, 1), step(2, 2), step(3, 3.25), step(4, 4.25), step(5, 5.25)]
    parts(goodput(events, steps), productive=5.0, checkpoint=0.25)


FAULT = {"kind": "died", "rank": 2, "step": 5, "cause": "signal 9", "generation": 1}


def test_a_fault_costs_the_work_after_the_last_save_and_the_time_until_a_step_counts_again() -> None:
    """Steps 3 and 4 are done, lost in the fault at 4.5, and done again after 3 seconds of recovery, of which
    step 3 takes 1."""
    events = [
        event(0, "start"),
        event(2.1, "save", step=2, seconds=0.1, stall_seconds=0.1),
        event(4.7, "fault", **FAULT),
        event(6, "resume", step=2),
        event(
            7.5,
            "recovery",
            step=2,
            lost_steps=2,
            lost_seconds=2.0,
            seconds=3.0,
            generation=2,
            world=4,
            parts={},
        ),
        event(9.6, "end", step=5),
    ]
    steps = [step(1, 1), step(2, 2), step(3, 7.5), step(4, 8.5), step(5, 9.5)]
    found = goodput(events, steps)
    parts(found, productive=5.0, checkpoint=0.1, lost=2.4, recovery=2.0, other=0.1)
    assert found["faults"][0] | FAULT == found["faults"][0]
    assert found["recoveries"][0]["lost_steps"] == 2


def test_pauses_between_steps_that_count_are_not_lost_in_a_later_fault() -> None:
    """Half a second before step 2 is nobody's, whatever happens later; lost is what comes after step 2."""
    events = [
        event(0, "start"),
        event(5, "fault", **FAULT),
        event(8, "recovery", step=2, lost_steps=2, lost_seconds=2.5, seconds=3.0, generation=2),
    ]
    steps = [step(1, 1), step(2, 2.5), step(3, 8)]
    parts(goodput(events, steps), productive=3.0, other=0.5, lost=2.5, recovery=2.0)


def test_a_second_fault_before_a_step_and_a_third_after_some_are_told_apart() -> None:
    events = [
        event(0, "start"),
        event(3, "fault", **FAULT),
        event(4, "resume", step=2),
        event(5, "fault", **{**FAULT, "generation": 2}),
        event(6, "resume", step=2),
        event(8, "recovery", step=2, lost_steps=1, lost_seconds=1.0, seconds=3.0, generation=3),
        event(10, "fault", **{**FAULT, "generation": 3}),
        event(11, "resume", step=2),
        event(13, "recovery", step=2, lost_steps=3, lost_seconds=2.0, seconds=3.0, generation=4),
    ]
    steps = [step(1, 1), step(2, 2), step(3, 13), step(4, 14)]
    parts(goodput(events, steps), productive=4.0, lost=1.0 + 2.0, recovery=2.0 + 3.0 + 2.0)


def test_the_night_between_a_stop_or_a_last_fault_and_a_new_start_is_not_the_runs() -> None:
    for ending in (event(2.5, "stop", step=2), event(2.5, "fault", **{**FAULT, "generation": 9})):
        events = [
            event(0, "start"),
            ending,
            event(50_000, "resume", step=2),
            event(50_002, "end", step=3),
        ]
        found = goodput(events, [step(1, 1), step(2, 2), step(3, 50_001.5)])
        assert found["wall_seconds"] == pytest.approx(4.5)
        assert found["parts"]["productive"] == pytest.approx(3.0)
        assert found["parts"]["start_up"] == pytest.approx(0.5)


def test_parting_for_more_workers_is_recovery_without_loss() -> None:
    events = [
        event(0, "start"),
        event(2, "regroup", step=2),
        event(3, "resume", step=2),
        event(5, "end", step=3),
    ]
    parts(goodput(events, [step(1, 1), step(2, 2), step(3, 5)]), productive=3.0, recovery=2.0)


def test_a_run_started_from_nothing_owes_nothing_to_the_one_before() -> None:
    events = [event(0, "start"), event(1, "fault", **FAULT), event(100, "start"), event(102, "end", step=1)]
    found = goodput(events, [step(1, 102, seconds=2.0)])
    assert (found["wall_seconds"], found["faults"]) == (2.0, [])


def test_a_fault_before_the_first_save_loses_all_steps_but_not_the_start() -> None:
    events = [
        event(0, "start"),
        event(5, "fault", **FAULT),
        event(6, "start"),
        event(8, "recovery", step=0, lost_steps=3, lost_seconds=3.0, seconds=3.0, generation=2),
    ]
    parts(goodput(events, [step(1, 8), step(2, 9)]), start_up=2.0, lost=3.0, recovery=2.0, productive=2.0)


def test_waiting_for_the_latest_rank_and_for_data_is_not_productive() -> None:
    late = {"latest": {"rank": 3, "behind": 0.5}}
    own = {"latest": {"rank": 0, "behind": 0.4}}  # the main rank's reading, which is data and counted once
    events = [event(0, "start"), event(3, "end", step=3)]
    steps = [step(1, 1), step(2, 2, **late), step(3, 3, data=0.4, **own)]
    parts(goodput(events, steps), productive=1 + 0.5 + 0.6, stragglers=0.5, data=0.4)


def test_fetching_behind_a_busy_device_is_no_wait() -> None:
    record = step(1, 1)
    record["spans"] = {"data": 0.9, "forward_backward": 0.7, "optimizer": 0.2}
    parts(goodput([event(0, "start")], [record]), productive=0.9, data=0.1)


def test_stragglers_are_listed_until_they_are_let_off() -> None:
    events = [
        event(0, "start"),
        event(1, "straggler", rank=3, factor=2.1, cause="compute", step=120),
        event(2, "straggler_gone", rank=3, cause="compute", step=140),
        event(3, "straggler", rank=None, factor=1.8, cause="network", step=150),
    ]
    assert goodput(events, [])["stragglers"] == [
        {"rank": 3, "factor": 2.1, "cause": "compute", "step": 120, "until_step": 140},
        {"rank": None, "factor": 1.8, "cause": "network", "step": 150, "until_step": None},
    ]


def test_a_fault_names_its_recovery_by_its_place_among_those_that_are_listed() -> None:
    events = [
        event(0, "start"),
        event(2, "recovery", step=1),  # without the time it took: of no fault
        event(3, "fault", **FAULT),
        event(5, "recovery", step=2, lost_steps=1, seconds=2.5),
    ]
    found = goodput(events, [step(1, 1), step(2, 2)])
    (fault,) = found["faults"]
    assert found["recoveries"][fault["recovery"]]["seconds"] == 2.5


def test_what_an_event_does_not_know_is_null_or_left_out_alike() -> None:
    def history(**unknown):
        return [
            event(0, "start"),
            event(3, "save", step=9, stall_seconds=0.5, **unknown),
            event(4, "fault", **FAULT),
            event(
                6,
                "recovery",
                step=2,
                seconds=2.5,
                **{key.replace("seconds", "lost_seconds"): None for key in unknown},
            ),
        ]

    assert goodput(history(seconds=None), [])["parts"] == goodput(history(), [])["parts"]


@pytest.mark.parametrize("events", [[], [{"event": "start"}]])
def test_records_without_times_have_no_goodput(events) -> None:
    found = goodput(events, [{"step": 1, "seconds": 1.0, "loss": 1.0}])
    assert (found["share"], found["wall_seconds"]) == (None, 0.0)


NAMES = [
    "start",
    "resume",
    "save",
    "evaluate",
    "fault",
    "recovery",
    "regroup",
    "stop",
    "end",
    "straggler",
    "skip",
]


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.sampled_from(NAMES), st.floats(0, 20), st.integers(1, 5)), max_size=20
    ),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 10)), max_size=20),
)
def test_whatever_happens_the_parts_add_up_to_the_whole(happened, done) -> None:
    events = [
        event(at, name, seconds=seconds, step=number, generation=number)
        for at, name, seconds, number in happened
    ]
    steps = [step(number, end, seconds) for number, (end, seconds) in enumerate(sorted(done), start=1)]
    found = goodput(events, steps)
    assert sum(found["parts"].values()) == pytest.approx(found["wall_seconds"], abs=1e-5)
    assert all(seconds >= 0 for seconds in found["parts"].values())
    json.dumps(found)


def history(seed: int):
    """A run as it could have been: pauses, evaluations, saves that end later, faults with their
    recoveries."""
    draw, at, events, steps, saves = random.Random(seed), 1.0, [event(0, "start")], [], []
    for number in range(1, 60):
        at += draw.choice([0.0, 0.01, 0.2])
        seconds = draw.uniform(0.1, 1.0)
        if draw.random() < 0.05:
            lost, restart = draw.uniform(0, 0.5), draw.uniform(0.2, 1.0)
            events.append(event(at + lost, "fault", **{**FAULT, "generation": number}))
            events.append(event(at + lost + restart / 2, "resume", step=number - 1))
            at += lost + restart
            events.append(
                event(at + seconds, "recovery", step=number - 1, lost_seconds=0.0, seconds=restart + seconds)
            )
        at += seconds
        steps.append(
            step(
                number, at, seconds, data=seconds * draw.random(), latest={"rank": 1, "behind": seconds / 10}
            )
        )
        if draw.random() < 0.1:
            at += 0.3
            events.append(event(at, "evaluate", step=number, seconds=0.3))
        if draw.random() < 0.1:
            stall = draw.uniform(0.05, 0.3)
            saves.append(event(at + 2.0, "save", step=number, seconds=2.0, stall_seconds=stall))
            at += stall
    return [*events, *saves], steps


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_are_added_up_while_they_are_read_give_the_parts_of_single_ones(seed: int) -> None:
    events, steps = history(seed)
    # An event after every step keeps the steps from being added up.
    marks = [event(step["time"] - T0, "mark") for step in steps]
    assert goodput(events, iter(steps))["parts"] == pytest.approx(
        goodput([*events, *marks], steps)["parts"], abs=1e-6
    )


def test_what_passed_before_the_first_record_is_start_up():
    began = [{**event(10, "start"), "start_up_seconds": 4.0}, event(14, "end")]
    found = goodput(began, [step(1, 12), step(2, 13)])
    assert found["wall_seconds"] == pytest.approx(8.0)
    assert found["parts"]["start_up"] == pytest.approx(5.0)
