"""The interval is where least is lost, found by looking, and the rates are those of the papers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.interval import advise, best_interval, expected_goodput, failures

HOUR = 3600.0
costs = st.floats(0.01, 600)
times = st.floats(HOUR, 1e7)


@given(costs, times)
def test_no_other_interval_loses_less(save: float, between: float) -> None:
    best = best_interval(save, between)

    def lost(interval: float) -> float:
        return save / interval + interval / 2 / between

    assert all(lost(best) <= lost(best * factor) * (1 + 1e-12) for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10))


def test_an_interval_twice_too_long_or_short_costs_a_quarter_more() -> None:
    best = best_interval(10, 80_000)
    lost = [1 - expected_goodput(best * factor, 10, 80_000) for factor in (1, 0.5, 2)]
    assert lost[1:] == pytest.approx([1.25 * lost[0]] * 2)


def test_youngs_interval_by_hand() -> None:
    assert best_interval(50, 10_000) == 1000  # the square root of 2 x 50 x 10,000


def test_failures_are_those_of_llama_3_scaled_to_the_devices() -> None:
    """419 interruptions in 54 days are one in 3.1 hours on 16,384 devices."""
    assert failures(16_384).seconds == pytest.approx(54 * 24 * HOUR / 419)
    assert failures(1).seconds / HOUR == pytest.approx(50_700, rel=1e-3)
    assert failures(1024).seconds / HOUR == pytest.approx(49.5, rel=1e-3)
    assert "Llama 3" in failures(8).basis


def test_three_faults_of_its_own_count_for_more_and_two_do_not() -> None:
    assert failures(64, faults=3, seconds=6 * HOUR).seconds == 2 * HOUR
    assert "3 faults" in failures(64, faults=3, seconds=6 * HOUR).basis
    assert failures(64, faults=2, seconds=6 * HOUR) == failures(64)


def test_goodput_is_what_saving_repeating_and_restarting_leave() -> None:
    assert expected_goodput(100, save=1, between_failures=1000, restart=20) == pytest.approx(1 - 0.01 - 0.05 - 0.02)
    assert expected_goodput(1, save=2, between_failures=10) == 0


def test_advice_is_in_whole_steps_and_never_more_often_than_a_save_takes() -> None:
    advice = advise(stall=0.5, save=20.0, step=3.0, devices=64, faults=4, seconds=4 * 10_000.0)
    assert (advice.every_seconds, advice.every_steps) == (100.0, 33)
    assert advice.mtbf_hours == pytest.approx(10_000 / HOUR)
    assert advice.expected_goodput == pytest.approx(1 - 0.5 / 99 - 99 / 20_000)
    assert advise(stall=0.001, save=200.0, step=3.0, devices=64, faults=4, seconds=40_000.0).every_seconds == 200.0
    assert advise(stall=0.01, save=0.01, step=1e6, devices=1).every_steps == 1
    assert math.isfinite(advise(stall=0.0, save=0.0, step=1.0, devices=1).expected_goodput)
