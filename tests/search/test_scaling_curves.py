"""Curves: nothing is gained from nothing, the parts sum up, and a count that cannot work says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cli.plain_data import plain_data
from shardwise.config import Config, from_tables
from shardwise.cost.clusters import named
from shardwise.errors import UserError
from shardwise.search.scaling import ScalingPoint, strong, weak

COUNTS = [1, 2, 4, 8]


def job(**train: Any) -> Config:
    return from_tables(
        {
            "model": {
                "layers": 8,
                "hidden": 1024,
                "heads": 16,
                "kv_heads": 8,
                "head_dim": 64,
                "ffn": 4096,
                "vocabulary": 32000,
            },
            "data": {"source": "text.txt", "sequence_length": 1024},
            "train": {"global_batch": 64, "precision": "bfloat16", **train},
        }
    )


@pytest.fixture(scope="module")
def on_a_node() -> list[ScalingPoint]:
    return strong(job(), named("h100"), COUNTS)


def test_on_one_node_no_count_is_more_efficient_than_the_first(on_a_node: list[ScalingPoint]) -> None:
    assert [point.devices for point in on_a_node] == COUNTS
    efficiencies = [point.efficiency or 0.0 for point in on_a_node]
    assert efficiencies[0] == 1.0
    assert all(0 < efficiency <= 1.02 for efficiency in efficiencies)


def test_terms_sum_to_the_step_and_tokens_follow_from_it(on_a_node: list[ScalingPoint]) -> None:
    for point in on_a_node:
        assert point.step_seconds == pytest.approx(sum(point.seconds.values()))
        assert point.tokens_per_second == pytest.approx(64 * 1024 / sum(point.seconds.values()))


def test_the_term_that_breaks_a_curve_is_one_whose_share_grew(on_a_node: list[ScalingPoint]) -> None:
    first, last = on_a_node[0], on_a_node[-1]
    assert first.breaks is None
    assert last.breaks is not None
    grown = {
        name: last.seconds[name] / sum(last.seconds.values())
        - first.seconds[name] / sum(first.seconds.values())
        for name in first.seconds
    }
    assert grown[last.breaks] == max(grown.values()) > 0


def test_slow_links_break_the_curve_and_are_named() -> None:
    cluster = named("h100")
    slow = replace(
        cluster,
        inside=replace(cluster.inside, bandwidth=2e8),
        between=replace(cluster.between, bandwidth=2e8),
    )
    last = strong(job(), slow, [1, 8])[-1]
    assert last.efficiency is not None
    assert last.efficiency < 0.7
    assert last.breaks in ("data", "replica", "tensor", "context", "pipeline_sends", "bubble", "imbalance")


def test_weak_scaling_grows_the_batch_and_keeps_more_of_the_efficiency(on_a_node: list[ScalingPoint]) -> None:
    points = weak(job(), named("h100"), COUNTS)
    assert [point.global_batch for point in points] == [64, 128, 256, 512]
    assert (points[-1].efficiency or 0) >= (on_a_node[-1].efficiency or 0) - 0.02
    assert all(point.efficiency <= 1.05 for point in points if point.efficiency is not None)


def test_a_batch_that_is_not_whole_is_a_point_with_a_reason() -> None:
    points = weak(job(global_batch=3), named("h100"), [2, 3, 4])
    assert [point.works for point in points] == [True, False, True]
    assert points[1].reason is not None
    assert "not a whole number on 3" in points[1].reason
    assert plain_data(points[1])["step_seconds"] is None


def test_what_cannot_be_divided_or_does_not_fit_is_a_point_with_a_reason() -> None:
    undivided = strong(job(), named("h100"), [4, 11])[
        1
    ]  # 11 is no degree of 8 blocks, 16 heads, 1024 tokens, or 64 sequences
    assert not undivided.works
    assert "no layout is possible" in (undivided.reason or "")
    cluster = named("h100")
    device = replace(cluster.device, memory=2 * 2**30, overhead=2.0**30)
    small = replace(cluster, device=device, host_memory=1.0)  # too little to offload
    points = strong(job(), small, [1, 8])
    assert not points[0].works
    assert "nothing fits" in (points[0].reason or "")
    assert points[0].efficiency is None


@pytest.mark.parametrize("counts", [[], [0, 8], [-4]])
def test_counts_must_be_numbers_of_devices(counts: list[int]) -> None:
    with pytest.raises(UserError, match="give one or more counts from 1"):
        strong(job(), named("h100"), counts)
