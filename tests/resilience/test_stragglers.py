"""Ranks that are made slow on purpose are named with the cause; noise never names anyone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shardwise.resilience.stragglers import Straggler, StragglerWatch

Alter = Callable[[int, np.ndarray], float]
"""Given a step and its (rank, compute and data) seconds, changes them; returns what is added between the
ranks."""


def play(
    watch: StragglerWatch,
    world: int,
    steps: int,
    alter: Alter,
    base: np.ndarray | None = None,
    noise: float = 0.1,
):
    """Steps of ranks with seeded noise. All wait for the slowest; between them 0.2 seconds are spent."""
    draw = np.random.default_rng(0)
    found: list[Straggler] = []
    gone: list[tuple[int, Straggler]] = []
    for number in range(1, steps + 1):
        work = (np.array([[1.0, 0.05]] * world) if base is None else base.copy()) * draw.normal(
            1.0, noise, (world, 2)
        ).clip(0.2)
        between = 0.2 + alter(number, work)
        change = watch.step(
            number, [(float(c), float(d)) for c, d in work], float(work.sum(1).max()) + between
        )
        found += change.named
        gone += [(number, one) for one in change.gone]
    return found, gone


def nothing(number: int, work: np.ndarray) -> float:
    return 0.0


LONG = [2_000, pytest.param(10_000, marks=pytest.mark.full)]


@pytest.mark.parametrize("steps", LONG)
@pytest.mark.parametrize("world", [2, 3, 8])
def test_noisy_steps_name_nobody(world: int, steps: int) -> None:
    assert play(StragglerWatch(world, 1.5), world, steps, nothing) == ([], [])


@pytest.mark.parametrize("steps", LONG)
def test_noisy_steps_of_single_rank_stages_name_nobody(steps: int) -> None:
    stages = np.array([[1.0, 0.05], [2.0, 0.0], [0.5, 0.0], [3.0, 0.0]])
    assert play(StragglerWatch(4, 1.5, [[0], [1], [2], [3]]), 4, steps, nothing, stages) == ([], [])


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_rank_that_computes_slowly_is_named_with_its_factor_and_first_step(world: int) -> None:
    def slow(number: int, work: np.ndarray) -> float:
        work[1, 0] *= 2.0 if number >= 100 else 1.0
        return 0.0

    (one,), gone = play(StragglerWatch(world, 1.5), world, 200, slow)
    assert (one.rank, one.cause, gone) == (1, "compute", [])
    assert one.factor == pytest.approx(2.05 / 1.05, rel=0.1)
    assert abs(one.since_step - 100) <= 2


def test_a_rank_that_reads_slowly_is_named_for_its_data() -> None:
    def slow(number: int, work: np.ndarray) -> float:
        work[3, 1] += 1.2 if number >= 50 else 0.0
        return 0.0

    (one,), _ = play(StragglerWatch(4, 1.5), 4, 120, slow)
    assert (one.rank, one.cause) == (3, "data")


def test_a_rank_slow_from_the_first_step_is_named_within_its_first_steps() -> None:
    def slow(number: int, work: np.ndarray) -> float:
        work[0, 0] *= 3
        return 0.0

    watch = StragglerWatch(4, 1.5)
    (one,), _ = play(watch, 4, 16, slow)
    assert one.rank == 0


def test_a_rank_that_recovers_is_let_off_once_and_may_be_named_again() -> None:
    def slow(number: int, work: np.ndarray) -> float:
        work[2, 0] *= 2.5 if 50 <= number < 100 or number >= 150 else 1.0
        return 0.0

    (first, second), ((when, gone),) = play(StragglerWatch(4, 1.5), 4, 200, slow)
    assert first == gone
    assert 100 < when < 115
    assert (first.rank, second.rank) == (2, 2)


def test_single_slow_steps_name_nobody_however_slow() -> None:
    def hiccup(number: int, work: np.ndarray) -> float:
        work[number // 3 % 4, number % 2] += 20.0 if number % 3 == 0 else 0.0
        return 5.0 if number % 4 == 0 else 0.0

    assert play(StragglerWatch(4, 1.5), 4, 1000, hiccup) == ([], [])


def test_stages_are_compared_within_themselves() -> None:
    """Ranks 2 and 3 do three times the work of the others, as their stage asks; rank 3 is slow for its
    stage."""
    base = np.array([[1.0, 0.0], [1.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    groups = [[0, 1], [2, 3]]
    assert play(StragglerWatch(4, 1.5, groups), 4, 300, nothing, base) == ([], [])

    def slow(number: int, work: np.ndarray) -> float:
        work[1, 0] *= 2.0 if number > 100 else 1.0
        return 0.0

    (one,), _ = play(StragglerWatch(4, 1.5, groups), 4, 300, slow, base)
    assert (one.rank, one.cause) == (1, "compute")


def test_a_rank_without_peers_is_compared_with_its_own_past_for_good() -> None:
    base = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]])

    def slow(number: int, work: np.ndarray) -> float:
        work[0, 0] *= 2.5 if number >= 60 else 1.0
        return 0.0

    (one,), gone = play(StragglerWatch(3, 1.5, [[0], [1], [2]]), 3, 400, slow, base)
    assert (one.rank, one.cause, gone) == (0, "compute", [])


def test_ranks_without_peers_that_slow_down_or_speed_up_together_name_nobody() -> None:
    def all_slow(number: int, work: np.ndarray) -> float:
        work *= 3.0 if number >= 60 else 1.0
        return 0.0

    def one_fast(number: int, work: np.ndarray) -> float:
        work[1] *= 0.3 if number >= 60 else 1.0
        return 0.0

    for alter in (all_slow, one_fast):
        assert play(StragglerWatch(2, 1.5, [[0], [1]]), 2, 200, alter) == ([], [])


def test_time_that_grows_between_the_ranks_is_the_networks_and_names_no_rank() -> None:
    def congested(number: int, work: np.ndarray) -> float:
        return 2.0 if 100 <= number < 200 else 0.0

    (one,), ((when, gone),) = play(StragglerWatch(4, 1.5), 4, 300, congested)
    assert (one.rank, one.cause) == (None, "network")
    assert one.factor == pytest.approx(3.4 / 1.4, rel=0.15)
    assert gone == one
    assert 200 < when < 215


def test_work_that_grows_on_all_ranks_is_not_the_networks_fault() -> None:
    def hot(number: int, work: np.ndarray) -> float:
        work[:, 0] *= 2.5 if number >= 100 else 1.0
        return 0.0

    assert play(StragglerWatch(4, 1.5), 4, 300, hot) == ([], [])


def test_without_compute_times_slow_reading_is_still_found_and_nothing_else_is_guessed() -> None:
    def unknown(number: int, work: np.ndarray) -> float:
        work[:, 0] = 0.0
        work[1, 1] += 2.0 if 50 <= number < 100 else 0.0
        return 4.0 if number >= 120 else 1.0

    (one,), ((_, gone),) = play(StragglerWatch(4, 1.5), 4, 200, unknown)
    assert (one.rank, one.cause) == (1, "data")
    assert gone == one


def test_unequal_reading_too_short_to_matter_names_nobody() -> None:
    def unknown(number: int, work: np.ndarray) -> float:
        work[:, 0] = 0.0
        work[1, 1] *= 4
        return 1.0

    assert play(StragglerWatch(4, 1.5), 4, 200, unknown) == ([], [])


def test_the_latest_rank_of_a_step_and_how_long_the_others_waited_for_it() -> None:
    watch = StragglerWatch(4, 1.5, [[0, 1], [2, 3]])
    times = [(1.0, 0.0), (1.25, 0.0), (3.0, 0.5), (3.0, 0.0)]
    changes = [watch.step(number, times, 4.0) for number in range(1, 6)]
    assert [change.latest for change in changes] == [None, None, None, 2, 2]
    assert changes[-1].behind == pytest.approx(0.5)
