"""Sending less: never more bytes than the plain sum, nothing gained where links are quick, much where they are slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.cli.plain import plain
from shardwise.config import Config, Model, from_tables
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.search.search import SearchResult, search
from shardwise.search.slow_links import alternatives, exposed_share, factor_bytes, gradient_bytes, worthwhile

MODEL = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "ffn": 4096, "vocabulary": 32000}


def job(zero: int = 0, data: int = 16) -> Config:
    return from_tables(
        {
            "model": MODEL,
            "data": {"source": "text.txt", "sequence_length": 1024},
            "train": {"global_batch": 8 * data, "precision": "bfloat16", "micro_batch": 4},
            "layout": {"data": data, "zero": zero},
        }
    )


def linked(bandwidth: float) -> Cluster:
    """Two nodes of H100 with so many bytes a second between them."""
    cluster = named("h100x16")
    return replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def slow(request: pytest.FixtureRequest) -> SearchResult:
    return search(job(request.param), linked(0.2e9), 16)


def named_like(result: SearchResult, start: str) -> Any:
    return next(each for each in alternatives(result) if each.name.startswith(start))


def test_nothing_sends_more_than_float32(slow: SearchResult) -> None:
    planned = gradient_bytes(slow)
    found = alternatives(slow)
    assert len(found) == 6
    assert all(0 < each.bytes_per_step <= planned for each in found)


def test_bytes_are_those_of_the_ring_by_hand() -> None:
    """4 bytes for each parameter go round a ring of 16 twice; half of it in bfloat16, a 32nd as signs."""
    result = search(job(0), linked(0.2e9), 16)
    parameters = 32000 * 1024 * 2 + 8 * (1024 * 1024 * 3 + 3 * 4096 * 1024 + 2 * 1024) + 1024
    ring = 2 * 15 / 16 * 4 * parameters
    assert gradient_bytes(result) == pytest.approx(ring)
    assert named_like(result, "bfloat16").bytes_per_step == pytest.approx(ring / 2)
    assert named_like(result, "1-bit").bytes_per_step == pytest.approx(ring / 32)
    assert named_like(result, "top-k").bytes_per_step == pytest.approx(15 * 0.01 * 8 * parameters)


def test_zero_two_reduces_for_every_micro_batch_and_zero_one_once() -> None:
    once, each = (search(job(zero), linked(0.2e9), 16) for zero in (1, 2))
    assert gradient_bytes(each) == pytest.approx(2 * gradient_bytes(once))  # 8 sequences a device are 2 micro-batches of 4


def test_slow_links_are_worth_it_and_sending_less_is_quicker(slow: SearchResult) -> None:
    planned = float(slow.total[slow.order[0]])
    assert worthwhile(slow)
    assert all(each.step_seconds < planned for each in alternatives(slow))
    assert all(each.step_seconds >= planned * (1 - exposed_share(slow)) * 0.99 for each in alternatives(slow))


def test_quick_links_are_not_worth_it() -> None:
    result = search(job(0, data=8), named("h100"), 8)
    assert not worthwhile(result)
    assert named_like(result, "1-bit").step_seconds > float(result.total[result.order[0]])


def test_the_quickest_comes_first_and_says_that_it_is_planned(slow: SearchResult) -> None:
    found = alternatives(slow)
    assert [each.step_seconds for each in found] == sorted(each.step_seconds for each in found)
    assert not any(each.runs for each in found)
    assert all("does not run it yet" in each.changes for each in found)
    assert set(plain(found[0])) >= {"name", "bytes_per_step", "step_seconds", "changes", "runs", "fits"}


def test_local_training_exchanges_least_and_its_workers_are_nodes(slow: SearchResult) -> None:
    local = named_like(slow, "DiLoCo")
    assert local.name == "DiLoCo, 2 workers"
    assert local.extra_memory >= 0


def test_a_worker_that_cannot_hold_the_model_is_not_offered() -> None:
    """Where the plan needs the memory of both nodes, neither can train alone."""
    cluster = linked(0.2e9)
    roomy = search(job(3), cluster, 16)
    tight = replace(cluster, device=replace(cluster.device, memory=1.01 * float(roomy.peak[roomy.order[0]]) / 0.92))
    assert not any(each.name.startswith("DiLoCo") for each in alternatives(search(job(3), tight, 16)))


def test_top_k_is_left_out_where_its_gathers_outgrow_the_sum() -> None:
    cluster = replace(linked(0.2e9), nodes=32)
    names = {devices: {each.name for each in alternatives(search(job(0, devices), cluster, devices))} for devices in (16, 128)}
    assert "top-k 1%" in names[16]
    assert "top-k 1%" not in names[128]


def test_one_device_has_nothing_to_send() -> None:
    result = search(job(0, data=1), named("h100"), 1)
    assert alternatives(result) == []
    assert not worthwhile(result)


def test_factors_are_rows_and_columns_times_the_rank() -> None:
    """One matrix of each kind by hand: 4 x rank x (rows + columns), vectors whole."""
    shape = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 256, "vocabulary": 512}
    model = Model.model_validate(shape)
    matrices = [(512, 64)] * 2 + [(64, 64)] * 4 + [(256, 64)] * 3
    sent = sum(4 * 4 * (rows + columns) for rows, columns in matrices) + 3 * 4 * 64
    assert factor_bytes(model) == pytest.approx(sent / (sum(rows * columns for rows, columns in matrices) + 3 * 64))
