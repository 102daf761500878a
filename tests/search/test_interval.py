"""The interval is where least is lost, found by looking, and the rates are those of the papers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.search.interval import (
    DEVICE_HOURS,
    advise,
    best_interval,
    expected_goodput,
    failures,
    plan_checkpoints,
    storage_bytes,
)

HOUR = 3600.0
costs = st.floats(0.01, 600)
times = st.floats(HOUR, 1e7)


@given(costs, times)
def test_no_other_interval_loses_less(save: float, between: float) -> None:
    best = best_interval(save, between)

    def lost(interval: float) -> float:
        return save / interval + interval / 2 / between

    assert all(
        lost(best) <= lost(best * factor) * (1 + 1e-12) for factor in (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 10)
    )


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
    assert expected_goodput(100, save=1, between_failures=1000, restart=20) == pytest.approx(
        1 - 0.01 - 0.05 - 0.02
    )
    assert expected_goodput(1, save=2, between_failures=10) == 0


def test_advice_is_in_whole_steps_and_never_more_often_than_a_save_takes() -> None:
    advice = advise(stall=0.5, save=20.0, step=3.0, devices=64, faults=4, seconds=4 * 10_000.0)
    assert (advice.every_seconds, advice.every_steps) == (100.0, 33)
    assert advice.mtbf_hours == pytest.approx(10_000 / HOUR)
    assert advice.expected_goodput == pytest.approx(1 - 0.5 / 99 - 99 / 20_000)
    assert (
        advise(stall=0.001, save=200.0, step=3.0, devices=64, faults=4, seconds=40_000.0).every_seconds
        == 200.0
    )
    assert advise(stall=0.01, save=0.01, step=1e6, devices=1).every_steps == 1
    assert math.isfinite(advise(stall=0.0, save=0.0, step=1.0, devices=1).expected_goodput)


def test_a_failure_rate_of_ones_own_is_not_called_llamas() -> None:
    own = failures(10, device_hours=1000.0)
    assert own.seconds == 100 * HOUR
    assert "1,000 hours" in own.basis
    assert "Llama" not in own.basis


def test_checkpoints_of_a_70b_model_by_hand() -> None:
    """840 GB: 128 devices copy 6.5625 GB each at 50 GB/s; 16 nodes write 5.25 GB/s each, 10 s; and read them
    again."""
    plan = plan_checkpoints(
        70e9, 128, 84e9, step_seconds=5.0, device_hours=1280.0, bytes_per_parameter=12, restart=90.0
    )
    assert plan.bytes == pytest.approx(840e9)
    assert plan.stall_seconds == pytest.approx(0.13125)
    assert plan.save_seconds == pytest.approx(10.13125)
    assert plan.restart_seconds == pytest.approx(100)
    assert (
        plan.storage_bytes == storage_bytes(70e9, 12) == pytest.approx(3 * 840e9)
    )  # two kept, and the one being written
    assert plan.advice.every_seconds == pytest.approx(math.sqrt(2 * 0.13125 * 10 * HOUR))
    every = plan.advice.every_steps * 5.0
    assert plan.advice.expected_goodput == pytest.approx(
        1 - 0.13125 / every - every / (20 * HOUR) - 100 / (10 * HOUR)
    )


def test_saving_in_the_foreground_stops_for_the_whole_save_and_so_saves_less_often() -> None:
    front = plan_checkpoints(70e9, 128, 84e9, 5.0, background=False, bytes_per_parameter=12)
    behind = plan_checkpoints(70e9, 128, 84e9, 5.0, bytes_per_parameter=12)
    assert front.stall_seconds == front.save_seconds == pytest.approx(10)
    assert front.advice.every_steps > behind.advice.every_steps
    assert front.advice.expected_goodput < behind.advice.expected_goodput


@given(st.floats(1e8, 1e12), st.integers(1, 2048), st.floats(1e8, 1e11), st.floats(1.1, 10))
def test_faster_storage_or_rarer_failures_never_lower_goodput(
    size: float, nodes: int, bandwidth: float, more: float
) -> None:
    def goodput(bandwidth: float, device_hours: float = DEVICE_HOURS) -> float:
        plan = plan_checkpoints(
            size, 8 * nodes, nodes * bandwidth, 0.001, device_hours, bytes_per_parameter=12
        )
        return plan.advice.expected_goodput

    plain, faster = goodput(bandwidth), goodput(bandwidth * more)
    rarer = goodput(bandwidth, device_hours=50_000 * (1 + more))
    assert faster >= plain - 1e-6  # intervals are whole steps
    assert rarer >= plain - 1e-6


def test_more_checkpoints_kept_need_more_room() -> None:
    assert storage_bytes(1e9, 12, kept=1) == 24e9
    assert storage_bytes(1e9, 24, kept=4) == 120e9  # float64
