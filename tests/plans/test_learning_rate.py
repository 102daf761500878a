from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Train
from shardwise.plans.learning_rate import learning_rate

TRAIN = Train(steps=110, warmup=10, learning_rate=4.0, final_learning_rate=0.25)


def schedule(name: str, **more: int) -> Train:
    return TRAIN.model_copy(update={"schedule": name, **more})


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_rises_linearly_to_the_peak(name: str) -> None:
    assert [learning_rate(schedule(name), step) for step in (1, 5, 10)] == [0.4, 2.0, 4.0]


@pytest.mark.parametrize(
    ("name", "quarter", "half", "last"),
    [
        # 0.25 + 0.75 (1 + cos πt) / 2 of the peak, at t = 1/4, 1/2, 1.
        ("cosine", 4 * (0.25 + 0.375 * (1 + math.sqrt(0.5))), 4 * 0.625, 1.0),
        ("linear", 4 * (1 - 0.75 / 4), 4 * (1 - 0.75 / 2), 1.0),
        ("constant", 4.0, 4.0, 4.0),
    ],
)
def test_the_fall_is_the_closed_form(name: str, quarter: float, half: float, last: float) -> None:
    found = [learning_rate(schedule(name), step) for step in (35, 60, 110)]
    assert found == pytest.approx([quarter, half, last], rel=1e-14)


def test_wsd_is_stable_and_then_falls_over_a_fifth_of_the_run() -> None:
    train = schedule("wsd")  # decay left out: the last 22 of 110 steps
    assert {learning_rate(train, step) for step in range(10, 89)} == {4.0}
    assert [learning_rate(train, step) for step in (99, 110)] == pytest.approx(
        [4 * (1 - 0.75 / 2), 1.0], rel=1e-14
    )


def test_wsd_falls_over_as_many_steps_as_asked() -> None:
    train = schedule("wsd", decay=4)
    found = [learning_rate(train, step) for step in range(106, 111)]
    assert found == pytest.approx([4.0, 3.25, 2.5, 1.75, 1.0], rel=1e-14)


def test_a_longer_wsd_run_agrees_until_the_shorter_one_falls() -> None:
    short, long = schedule("wsd", decay=20), schedule("wsd", decay=20, steps=500)
    assert all(learning_rate(short, step) == learning_rate(long, step) for step in range(1, 91))


def test_no_warm_up_starts_at_the_first_step_of_the_fall() -> None:
    train = schedule("linear", warmup=0, steps=10)
    assert [learning_rate(train, step) for step in (1, 10)] == pytest.approx([4 * (1 - 0.075), 1.0])


@given(
    name=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    decay=st.none() | st.integers(1, 400),
    final=st.floats(0, 1),
)
def test_every_rate_lies_between_zero_and_the_peak_and_never_rises_after_warm_up(
    name: str, steps: int, warmup: int, decay: int | None, final: float
) -> None:
    values = {
        "schedule": name,
        "steps": steps,
        "warmup": warmup,
        "decay": decay,
        "final_learning_rate": final,
    }
    train = TRAIN.model_copy(update=values)
    rates = [learning_rate(train, step) for step in range(1, steps + 1)]
    assert all(0 <= rate <= 4.0 for rate in rates)
    fall = rates[max(0, warmup - 1) :]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(fall))
    if warmup < steps and name != "constant":
        assert rates[-1] == pytest.approx(4.0 * final)
