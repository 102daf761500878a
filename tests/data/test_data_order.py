from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.order import CYCLE, Order, key, permute, quotas


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**70))
@settings(max_examples=60)
def test_permute_is_a_bijection(size: int, seed: int) -> None:
    out = permute(np.arange(size), size, seed)
    assert np.array_equal(np.sort(out), np.arange(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 65535, 65536, 65537, 262145])
def test_permute_is_a_bijection_around_powers_of_four(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, 7)), np.arange(size))


@given(st.integers(0, 2**40), st.integers(1, 64), st.integers(0, 2**32))
@settings(max_examples=40)
def test_permute_of_a_part_equals_the_part_of_the_whole(start: int, count: int, seed: int) -> None:
    size = 2**41 + 12345
    whole = permute(np.arange(start, start + count), size, seed)
    single = [int(permute(np.array([start + offset]), size, seed)[0]) for offset in range(count)]
    assert whole.tolist() == single
    assert len(set(single)) == count
    assert whole.min() >= 0
    assert whole.max() < size


def test_permute_looks_random() -> None:
    """Displacements, neighbours and keys: each against what a uniform permutation gives, at five standard
    deviations."""
    size = 20011
    out = permute(np.arange(size), size, 3)
    correlation = np.corrcoef(np.arange(size), out)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)
    steps = np.corrcoef(out[:-1], out[1:])[0, 1]
    assert abs(steps) < 5 / np.sqrt(size)
    other = permute(np.arange(size), size, 4)
    assert np.count_nonzero(out == other) < 1 + 5 * 1.0 + 1  # a Poisson number with mean 1
    halves = np.histogram(out[: size // 2], bins=16, range=(0, size))[0]
    expected = size / 2 / 16
    assert np.all(np.abs(halves - expected) < 5 * np.sqrt(expected))


def test_keys_are_made_with_splitmix64() -> None:
    """Its published first outputs for the states 0 and 1234567."""
    assert int(key(0)[0]) == 0xE220A8397B1DCDAF
    assert int(key(1234567)[0]) == 6457827717110365317


def test_keys_differ_in_every_part() -> None:
    keys = {int(key(seed, use, number)[0]) for seed in range(10) for use in range(10) for number in range(10)}
    assert len(keys) == 1000


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40))
@settings(max_examples=100)
def test_quotas_sum_to_the_cycle_and_follow_the_weights(weights: list[float]) -> None:
    shares = quotas(weights)
    assert shares.sum() == CYCLE
    assert shares.min() >= 1
    total = sum(map(Fraction, weights))
    for weight, share in zip(weights, shares.tolist(), strict=True):
        exact = Fraction(weight) / total * CYCLE
        assert abs(share - exact) <= max(1, len(weights)) + Fraction(1, 1000)


@given(
    weights=st.lists(st.integers(1, 100), min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=10)
def test_a_cycle_of_the_mixture_has_each_source_in_proportion_and_each_place_once(
    weights: list[int], seed: int
) -> None:
    shares = quotas([float(weight) for weight in weights])
    huge = 10**9  # no source is exhausted, so epochs stay 0 and samples of a source must all differ
    order = Order((huge,) * len(weights), tuple(map(float, weights)), seed)
    sources, samples, epochs = order.at(np.arange(2 * CYCLE))
    assert np.array_equal(np.bincount(sources, minlength=len(weights)), 2 * shares)
    assert np.array_equal(np.bincount(sources[:CYCLE], minlength=len(weights)), shares)
    assert not epochs.any()
    for source in range(len(weights)):
        mine = samples[sources == source]
        assert len(np.unique(mine)) == len(mine)


def test_a_position_of_the_mixture_does_not_depend_on_what_else_is_asked() -> None:
    order = Order((37, 1000), (1.0, 2.0), 5)
    positions = np.array([0, 1, CYCLE - 1, CYCLE, 3 * CYCLE + 17, 10**12])
    together = np.stack(order.at(positions), axis=1)
    alone = np.concatenate([np.stack(order.at(positions[i : i + 1]), axis=1) for i in range(len(positions))])
    assert np.array_equal(together, alone)


def test_a_mixture_is_mixed_from_the_start() -> None:
    sources, _, _ = Order((1000, 1000), (3.0, 1.0), 1).at(np.arange(4000))
    for start in range(0, 4000, 400):  # 300 expected of 400, standard deviation 8.7
        assert 256 < np.count_nonzero(sources[start : start + 400] == 0) < 344


@given(size=st.integers(1, 300), seed=st.integers(0, 2**40))
@settings(max_examples=40)
def test_each_epoch_covers_every_sample_exactly_once(size: int, seed: int) -> None:
    sources, samples, epochs = Order((size,), (1.0,), seed).at(np.arange(3 * size))
    assert not sources.any()
    for epoch in range(3):
        assert np.array_equal(np.sort(samples[epochs == epoch]), np.arange(size))


def test_epochs_of_mixed_sources_cover_every_sample_exactly_once() -> None:
    sizes = (37, 1000, 5)
    sources, samples, epochs = Order(sizes, (1.0, 2.0, 0.5), 9).at(np.arange(2 * CYCLE))
    for source, size in enumerate(sizes):
        mine, turns = samples[sources == source], epochs[sources == source]
        assert np.all(np.diff(turns) >= 0)  # no epoch begins before the one before it is through
        for epoch in range(int(turns.max())):  # the last epoch may be under way
            assert np.array_equal(np.sort(mine[turns == epoch]), np.arange(size))


def test_epochs_and_seeds_reshuffle() -> None:
    _, samples, _ = Order((500,), (1.0,), 0).at(np.arange(1000))
    _, other, _ = Order((500,), (1.0,), 1).at(np.arange(500))
    assert not np.array_equal(samples[:500], samples[500:])
    assert not np.array_equal(samples[:500], other)
    assert not np.array_equal(samples[:500], np.arange(500))


def test_the_order_is_fixed_for_ever() -> None:
    """Runs resume across versions, so these numbers must never change."""
    sources, samples, _ = Order((1000, 77), (2.0, 1.0), 42).at(np.arange(8))
    assert (sources.tolist(), samples.tolist()) == (
        [1, 1, 0, 0, 1, 0, 0, 0],
        [13, 54, 653, 492, 2, 583, 243, 582],
    )
