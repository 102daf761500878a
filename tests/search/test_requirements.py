"""Links just good enough leave nothing exposed, and the rules of thumb are those of the layer's own FLOPs and bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.search.requirements import (
    amdahl,
    exposed,
    gustafson,
    least_bandwidth,
    most_latency,
    most_tensor,
    ring_hops,
    serial_share,
    tokens_to_hide_both,
    tokens_to_hide_data,
    wire_bytes,
)

H100, NVLINK, NETWORK = 989e12, 450e9, 50e9
sizes = st.floats(1, 1e12)
times = st.floats(1e-6, 1e4)
shares = st.floats(0, 1)


def test_a_rings_bytes_are_those_sent_when_it_is_played_through() -> None:
    """Eight devices with eight chunks each: one chunk a hop, as many hops as the ring has."""
    for kind, rounds in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("all_to_all", 1)):
        hops = sum(1 for _ in range(rounds) for _ in range(8 - 1))
        assert ring_hops(kind, 8) == hops
        assert wire_bytes(kind, 800.0, 8) == hops * 100
        assert wire_bytes(kind, 800.0, 1) == ring_hops(kind, 1) == 0
    assert (wire_bytes("send", 800.0, 2), ring_hops("broadcast", 8), wire_bytes("send", 800.0, 1)) == (800, 1, 0)


def test_the_bandwidth_for_a_gradient_sum_by_hand() -> None:
    """8B gradients of 4 bytes over 64 devices behind 2 seconds of backward: 2 x 63/64 x 32 GB / 2 s."""
    wire = wire_bytes("all_reduce", 32e9, 64)
    assert least_bandwidth(wire, 2.0) == pytest.approx(31.5e9)
    assert most_latency(wire, 2.0, bandwidth=63e9, hops=ring_hops("all_reduce", 64)) == pytest.approx(1 / 126)


@settings(deadline=None)
@given(sizes, times, st.integers(2, 4096), st.floats(0, 0.5))
def test_the_least_bandwidth_hides_everything_and_less_does_not(wire: float, seconds: float, members: int, share: float) -> None:
    hops = float(ring_hops("all_reduce", members))
    latency = share * seconds / hops
    least = float(least_bandwidth(wire, seconds, hops, latency))
    assert exposed(wire, seconds, least, hops, latency) == pytest.approx(0, abs=1e-9 * seconds)
    assert exposed(wire, seconds, 0.9 * least, hops, latency) > 0
    assert most_latency(wire, seconds, least, hops) == pytest.approx(latency, abs=1e-9 * seconds)


@settings(deadline=None)
@given(sizes, times, st.floats(1.01, 100))
def test_more_bandwidth_or_time_never_exposes_more(wire: float, seconds: float, more: float) -> None:
    assert exposed(wire, seconds, 1e9 * more, 10, 1e-5) <= exposed(wire, seconds, 1e9, 10, 1e-5)
    assert exposed(wire, seconds * more, 1e9, 10, 1e-5) <= exposed(wire, seconds, 1e9, 10, 1e-5)
    assert least_bandwidth(wire, seconds * more) <= least_bandwidth(wire, seconds)


def test_no_bandwidth_is_enough_where_latency_alone_takes_longer() -> None:
    assert least_bandwidth(1.0, 1.0, hops=10, latency=0.1) == np.inf
    assert most_latency(2e9, 1.0, bandwidth=1e9, hops=4) == 0
    assert most_latency(0.0, 1.0, bandwidth=1e9, hops=0) == np.inf


def test_arrays_give_what_their_numbers_give() -> None:
    wire, seconds = np.array([1e9, 2e9, 0.0]), np.array([1.0, 1e-3, 1.0])
    many = np.asarray(least_bandwidth(wire, seconds, 10, 1e-4))
    for place in range(3):
        assert many[place] == least_bandwidth(float(wire[place]), float(seconds[place]), 10, 1e-4)
    assert np.asarray(amdahl(np.array([0.1, 0.5]), 8)).tolist() == [amdahl(0.1, 8), amdahl(0.5, 8)]
    assert np.array_equal(wire_bytes("send", 10.0, np.array([1.0, 2.0, 8.0])), [0, 10, 10])


def test_an_h100_needs_the_tokens_the_scaling_book_says() -> None:
    assert tokens_to_hide_data(H100, NVLINK) == pytest.approx(2200, rel=0.01)
    assert tokens_to_hide_data(H100, NETWORK) == pytest.approx(19_800, rel=0.01)
    assert tokens_to_hide_data(H100, NETWORK, bytes_per_value=4) == 2 * tokens_to_hide_data(H100, NETWORK)
    assert tokens_to_hide_data(H100, NETWORK, active_share=1 / 8) == 8 * tokens_to_hide_data(H100, NETWORK)


@settings(deadline=None)
@given(st.floats(1e12, 1e16), st.floats(1e9, 1e12), st.floats(1e6, 1e12))
def test_at_the_tokens_told_the_data_axis_takes_as_long_as_computing(speed: float, bandwidth: float, weights: float) -> None:
    tokens = float(tokens_to_hide_data(speed, bandwidth))
    backward, gradient_sum = 4 * weights * tokens / speed, 2 * 2 * weights / bandwidth
    assert gradient_sum == pytest.approx(backward)
    forward, gather = 2 * weights * tokens / speed, 2 * weights / bandwidth
    assert gather == pytest.approx(forward)


@settings(deadline=None)
@given(st.floats(1e12, 1e16), st.floats(1e9, 1e12), st.integers(256, 65536), st.sampled_from([2, 3]))
def test_at_the_most_tensor_devices_a_layer_communicates_as_long_as_it_computes(
    speed: float, bandwidth: float, ffn: int, matrices: int
) -> None:
    tensor, tokens, hidden = float(most_tensor(ffn, speed, bandwidth, matrices)), 8192, 4096
    computing = matrices * 2 * tokens * hidden * ffn / tensor / speed
    gather_and_scatter = 2 * (2 * tokens * hidden) / bandwidth
    assert gather_and_scatter == pytest.approx(computing)


@pytest.mark.parametrize("together", [True, False])
def test_the_tokens_for_both_axes_are_where_a_search_over_mixes_begins_to_hide(together: bool) -> None:
    """Plain sums over one feed-forward layer of two matrices, for every share of tensor devices among 4,096."""
    devices, hidden, ffn = 4096, 8192, 28672
    tensor = np.geomspace(1, devices, 100_001)
    data = devices / tensor

    def hides(tokens_per_device: float) -> bool:
        tokens = tokens_per_device * devices
        computing = 2 * 2 * tokens * hidden * ffn / devices / H100
        weights = 2 * 2 * hidden * ffn / tensor / NETWORK
        activations = 2 * 2 * tokens * hidden / data / NVLINK
        both = np.maximum(weights, activations) if together else weights + activations
        return bool(np.any(both <= computing))

    needed = float(tokens_to_hide_both(H100, NETWORK, NVLINK, ffn, together))
    assert hides(needed * 1.01)
    assert not hides(needed * 0.99)


@settings(deadline=None)
@given(shares, st.integers(1, 100_000))
def test_speed_ups_stay_between_one_and_the_devices(serial: float, devices: int) -> None:
    fixed, scaled = amdahl(serial, devices), gustafson(serial, devices)
    assert 1 - 1e-9 <= fixed <= scaled * (1 + 1e-9) <= devices * (1 + 1e-6)
    assert fixed * serial <= 1 + 1e-9  # Amdahl's bound: one over the serial share


@settings(deadline=None)
@given(shares, st.integers(2, 10_000))
def test_the_serial_share_is_read_back_from_the_speed_up(serial: float, devices: int) -> None:
    assert serial_share(amdahl(serial, devices), devices) == pytest.approx(serial, abs=1e-9)


def test_both_laws_by_hand() -> None:
    assert amdahl(0.1, 10) == pytest.approx(1 / 0.19)
    assert gustafson(0.1, 10) == pytest.approx(9.1)
