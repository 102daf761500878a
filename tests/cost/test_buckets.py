"""Buckets for a link: the latency is a small share of a bucket's time, and backward has several to hide."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cost.buckets import bucket_bytes
from shardwise.cost.cluster import Cluster, Link
from shardwise.cost.clusters import named


def two_nodes(bandwidth: float, latency: float) -> Cluster:
    """Two nodes of one GPU each, joined by such a link."""
    link = Link(bandwidth, latency)
    return replace(named("h100x8"), devices_per_node=1, nodes=2, inside=link, between=link)


@pytest.mark.parametrize(("bandwidth", "latency"), [(1.25e8, 1e-3), (1.25e9, 1e-3), (1.25e10, 1e-4)])
def test_the_latency_is_a_twentieth_of_a_buckets_time(bandwidth: float, latency: float) -> None:
    found = bucket_bytes(two_nodes(bandwidth, latency), 2, gradients=1e12)
    on_the_wire = found / bandwidth  # a ring of two sends the tensor once
    assert 2 * latency / on_the_wire == pytest.approx(0.05, rel=1e-6)  # two hops


def test_a_bucket_is_at_most_an_eighth_of_the_gradients_and_at_least_a_mebibyte() -> None:
    far = two_nodes(1.25e9, 1.0)
    assert bucket_bytes(far, 2, gradients=8e8) == 1e8
    assert bucket_bytes(far, 2, gradients=1e6) == 2**20
    assert bucket_bytes(two_nodes(1.25e9, 0.0), 2, gradients=8e8) == 2**20
    assert bucket_bytes(two_nodes(1.25e9, 0.0), 2, gradients=8e8, compressed=True) == 1e8
