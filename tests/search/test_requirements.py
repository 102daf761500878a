"""Links just good enough hide what they carry, and less does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.search.requirements import least_bandwidth, ring_hops, wire_bytes

sizes = st.floats(1, 1e12)
times = st.floats(1e-6, 1e4)


def test_a_rings_bytes_are_those_sent_when_it_is_played_through() -> None:
    """Eight devices with eight chunks each: one chunk a hop, as many hops as the ring has."""
    for kind, rounds in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("all_to_all", 1)):
        hops = sum(1 for _ in range(rounds) for _ in range(8 - 1))
        assert ring_hops(kind, 8) == hops
        assert wire_bytes(kind, 800.0, 8) == hops * 100
        assert wire_bytes(kind, 800.0, 1) == ring_hops(kind, 1) == 0
    assert (wire_bytes("send", 800.0, 2), ring_hops("broadcast", 8), wire_bytes("send", 800.0, 1)) == (
        800,
        1,
        0,
    )


def test_the_bandwidth_for_a_gradient_sum_by_hand() -> None:
    """8B gradients of 4 bytes over 64 devices behind 2 seconds of backward: 2 x 63/64 x 32 GB / 2 s."""
    wire = wire_bytes("all_reduce", 32e9, 64)
    assert least_bandwidth(wire, 2.0) == pytest.approx(31.5e9)


@given(sizes, times, st.integers(2, 4096), st.floats(0, 0.5))
def test_the_least_bandwidth_hides_everything_and_less_does_not(
    wire: float, seconds: float, members: int, share: float
) -> None:
    hops = float(ring_hops("all_reduce", members))
    latency = share * seconds / hops
    least = float(least_bandwidth(wire, seconds, hops, latency))
    assert wire / least + hops * latency == pytest.approx(seconds, rel=1e-9)
    assert wire / (0.9 * least) + hops * latency > seconds


@given(sizes, times, st.floats(1.01, 100))
def test_more_time_never_needs_more_bandwidth(wire: float, seconds: float, more: float) -> None:
    assert least_bandwidth(wire, seconds * more) <= least_bandwidth(wire, seconds)


def test_no_bandwidth_is_enough_where_latency_alone_takes_longer() -> None:
    assert least_bandwidth(1.0, 1.0, hops=10, latency=0.1) == np.inf
