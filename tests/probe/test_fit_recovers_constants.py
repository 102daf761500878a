"""Times made from known constants, with noise and with outliers, lead back to the constants."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cost.cluster import KINDS
from shardwise.probe.fit import (
    fit_attention,
    fit_collective,
    fit_products,
    relative_least_squares,
    speed_with_knee,
)
from shardwise.probe.probe_budget import FULL, QUICK

SPEEDS = st.floats(1e9, 1e15)
KNEES = st.floats(5.0, 200.0)
SHAPES = list(product((64, 256, 1024), repeat=3))
LENGTHS = (64, 128, 256, 512, 1024, 2048)
SIZES = tuple(2**power for power in range(10, 26, 2))


def product_time(m: int, n: int, k: int, speed: float, knee: float, launch: float = 0.0) -> float:
    """As the docstring of cost/cluster.py says it."""
    return 2 * m * n * k / speed * (1 + knee * (1 / m + 1 / n + 1 / k)) + launch


def noisy(times: list[float], seed: int, share: float = 0.03) -> list[float]:
    return [
        float(time)
        for time in np.array(times) * (1 + share * np.random.default_rng(seed).uniform(-1, 1, len(times)))
    ]


@settings(max_examples=40)
@given(SPEEDS, KNEES, st.floats(0, 5))
def test_products_without_noise_give_speed_and_knee_exactly(
    speed: float, knee: float, launches: float
) -> None:
    launch = launches * product_time(*SHAPES[0], speed, knee)  # the smallest product may be mostly launch
    found = fit_products(SHAPES, [product_time(*shape, speed, knee, launch) for shape in SHAPES], launch)
    assert found.flops == pytest.approx(speed, rel=1e-6)
    assert found.knee == pytest.approx(knee, rel=1e-5)


@settings(max_examples=40)
@given(st.floats(1e12, 1e15), KNEES)
def test_a_launch_that_is_not_told_is_found_and_left_out(speed: float, knee: float) -> None:
    shapes = FULL["cuda"].shapes
    found = fit_products(shapes, [product_time(*shape, speed, knee, 4e-6) for shape in shapes])
    assert found.flops == pytest.approx(speed, rel=1e-6)
    assert found.knee == pytest.approx(knee, rel=1e-4)


@settings(max_examples=40)
@given(SPEEDS, KNEES, st.integers(0, 10**6))
def test_products_with_noise_give_speed_and_knee_nearly(speed: float, knee: float, seed: int) -> None:
    found = fit_products(SHAPES, noisy([product_time(*shape, speed, knee) for shape in SHAPES], seed), 0.0)
    assert found.flops == pytest.approx(speed, rel=0.1)
    assert found.knee == pytest.approx(knee, rel=0.25, abs=3)


@settings(max_examples=40)
@given(SPEEDS, KNEES, st.integers(0, 10**6))
def test_products_that_something_disturbed_hardly_count(speed: float, knee: float, seed: int) -> None:
    times = noisy([product_time(*shape, speed, knee) for shape in SHAPES], seed, 0.01)
    disturbed = list(times)
    for index in np.random.default_rng(seed).choice(len(times), 3, replace=False):
        disturbed[index] *= 3
    found = fit_products(SHAPES, disturbed, 0.0)
    assert found.flops == pytest.approx(speed, rel=0.15)


@settings(max_examples=40)
@given(SPEEDS, KNEES, st.floats(0, 5))
def test_another_precision_is_found_with_the_knee_given(speed: float, knee: float, launches: float) -> None:
    shapes = FULL["cpu"].few_shapes
    launch = launches * product_time(*shapes[0], speed, knee)
    times = [product_time(*shape, speed, knee, launch) for shape in shapes]
    assert speed_with_knee(shapes, times, knee, launch) == pytest.approx(speed, rel=1e-9)


@settings(max_examples=40)
@given(SPEEDS, st.floats(0, 2000))
def test_attention_gives_speed_and_knee(speed: float, knee: float) -> None:
    flops = [4.0 * 8 * 64 * length**2 / 2 for length in LENGTHS]
    times = [work / speed * (1 + knee / length) for work, length in zip(flops, LENGTHS, strict=True)]
    found = fit_attention(LENGTHS, flops, times)
    assert found.flops == pytest.approx(speed, rel=1e-6)
    assert found.knee == pytest.approx(knee, rel=1e-4, abs=1e-3)


RINGS = {  # seconds by the tables of a ring, full tensor of so many bytes
    "all_reduce": lambda size, n, b: 2 * (n - 1) / n * size / b,
    "all_gather": lambda size, n, b: (n - 1) / n * size / b,
    "reduce_scatter": lambda size, n, b: (n - 1) / n * size / b,
    "all_to_all": lambda size, n, b: (n - 1) / n * size / b,
    "broadcast": lambda size, n, b: size / b,
    "send": lambda size, n, b: size / b,
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(st.integers(2, 64), st.floats(1e-6, 1e-3), st.floats(1e8, 5e11), st.integers(0, 10**6))
def test_collectives_give_latency_and_bus_bandwidth(
    kind: str, members: int, latency: float, bandwidth: float, seed: int
) -> None:
    times = [latency + RINGS[kind](size, members, bandwidth) for size in SIZES]
    exact = fit_collective(kind, members, SIZES, times)
    assert exact.latency + RINGS[kind](SIZES[0], members, exact.bandwidth) == pytest.approx(
        times[0], rel=1e-6
    )
    if times[-1] / latency - 1 > 0.1 and times[0] / latency - 1 < 10:  # both leave their mark on some time
        assert exact.latency == pytest.approx(latency, rel=1e-4)
        assert exact.bandwidth == pytest.approx(bandwidth, rel=1e-4)
    near = fit_collective(kind, members, SIZES, noisy(times, seed))
    for size, time in zip(SIZES, times, strict=True):
        assert near.latency + RINGS[kind](size, members, near.bandwidth) == pytest.approx(time, rel=0.06)


@settings(max_examples=40)
@given(st.lists(st.floats(1e-6, 10.0), min_size=len(SIZES), max_size=len(SIZES)), st.sampled_from(KINDS))
def test_whatever_was_timed_the_figures_are_usable(times: list[float], kind: str) -> None:
    found = fit_collective(kind, 4, SIZES, times)
    assert found.latency >= 0
    assert 0 < found.bandwidth < np.inf
    shapes = SHAPES[: len(times)]
    speed = fit_products(shapes, times)
    assert 0 < speed.flops < np.inf
    assert 0 <= speed.knee < np.inf


@settings(max_examples=40)
@given(st.floats(0.1, 5.0), st.floats(0.1, 5.0), st.floats(0.01, 0.5))
def test_where_a_factor_would_be_negative_it_is_none_and_the_rest_is_the_best_without_it(
    a: float, b: float, less: float
) -> None:
    """Falling times cannot come from a cost that grows with size: what is left is a constant."""
    sizes = np.arange(1.0, 6.0)
    times = a + b - less * b * sizes / 5
    constant, slope = relative_least_squares([np.ones_like(sizes), sizes], times)
    assert slope == 0
    assert times.min() <= constant <= times.max()


@pytest.mark.parametrize("budget", [*FULL.values(), *QUICK.values()])
def test_the_sizes_of_each_budget_tell_the_constants_apart(budget) -> None:
    times = [product_time(*shape, 3e12, 40.0) for shape in budget.shapes]
    found = fit_products(budget.shapes, times, 0.0)
    assert (found.flops, found.knee) == (pytest.approx(3e12, rel=1e-6), pytest.approx(40.0, rel=1e-5))
    flops = [float(length**2) for length in budget.lengths]
    attending = fit_attention(
        budget.lengths,
        flops,
        [work / 1e9 * (1 + 70 / length) for work, length in zip(flops, budget.lengths, strict=True)],
    )
    assert (attending.flops, attending.knee) == (pytest.approx(1e9, rel=1e-6), pytest.approx(70.0, rel=1e-5))
    cost = fit_collective("all_gather", 4, budget.sizes, [5e-5 + 0.75 * size / 2e9 for size in budget.sizes])
    assert (cost.latency, cost.bandwidth) == (pytest.approx(5e-5, rel=1e-6), pytest.approx(2e9, rel=1e-6))
