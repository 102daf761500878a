"""Sending less: bytes as the codecs' formulas have them, little gained where links are quick, much where they
are slow."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from shardwise.cli.plain_data import plain_data
from shardwise.config import Config, from_tables
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.library.plan_show import advice_of
from shardwise.search.forecast import is_open, plan_job
from shardwise.search.lossy import search_job
from shardwise.search.search import SearchResult, search
from shardwise.search.slow_links import (
    CODECS,
    WORTHWHILE,
    Alternative,
    alternatives,
    exposed_share,
    gradient_bytes,
    proposed,
    worthwhile,
)
from shardwise.search.whole_run import beyond

MODEL = {
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 4096,
    "vocabulary": 32000,
}


PARAMETERS = 32000 * 1024 * 2 + 8 * (1024 * 1024 * 3 + 3 * 4096 * 1024 + 2 * 1024) + 1024
VECTORS = 8 * 2 * 1024 + 1024


def asking(layout: dict[str, Any], data: int = 16) -> Config:
    return from_tables(
        {
            "model": MODEL,
            "data": {"source": "text.txt", "sequence_length": 1024},
            "train": {"global_batch": 8 * data, "precision": "bfloat16", "micro_batch": 4},
            "layout": layout,
        }
    )


def job(zero: int = 0, data: int = 16, **more: Any) -> Config:
    return asking({"data": data, "zero": zero, **more}, data)


def linked(bandwidth: float) -> Cluster:
    """Sixteen nodes of one H100 with so many bytes a second between them."""
    cluster = replace(named("h100x16"), devices_per_node=1, nodes=16)
    return replace(cluster, between=replace(cluster.between, bandwidth=bandwidth))


def two_nodes(bandwidth: float) -> Cluster:
    """Of eight H100."""
    return replace(linked(bandwidth), devices_per_node=8, nodes=2)


@pytest.fixture(scope="module", params=[0, 1, 2, 3])
def slow(request: pytest.FixtureRequest) -> SearchResult:
    return search(job(request.param), linked(0.2e9), 16)


def named_like(result: SearchResult, start: str) -> Alternative:
    return next(each for each in alternatives(result) if each.name.startswith(start))


def seconds(result: SearchResult) -> float:
    return float(result.total[result.order[0]])


def test_every_codec_is_listed_and_sends_less_than_float32(slow: SearchResult) -> None:
    found = alternatives(slow)
    assert {each.name for each in found} >= set(CODECS)
    assert all(0 < each.bytes_per_step < gradient_bytes(slow) for each in found)


def ring(numbers: float, members: int = 16) -> float:
    """Bytes that one device sends of so many numbers, 4 bytes each, to add them up and share the sums."""
    return 2 * (members - 1) / members * 4 * numbers


def test_bytes_are_those_of_the_formulas_by_hand() -> None:
    """Vectors go round as they are; of matrices, 15/16 of the code there, and 15/16 of the sums' code back. A
    512th of the numbers are scales; top-k keeps 11 of 1,024, of the sums 31, 4 bytes each; PowerSGD sums 4
    (rows + columns) numbers."""
    result = search(job(0), linked(0.2e9), 16)
    matrices = PARAMETERS - VECTORS
    assert gradient_bytes(result) == pytest.approx(ring(PARAMETERS))
    shares = {
        "bfloat16": 1 / 2,
        "int8": (1 + 4 / 512) / 4,
        "qsgd(4)": (1 / 2 + 4 / 512) / 4,
        "sign": (1 / 8 + 4 / 512) / 4,
    }
    for name, share in shares.items():
        assert named_like(result, name).bytes_per_step == pytest.approx(
            ring(VECTORS) + share * ring(matrices), rel=1e-3
        )
    kept = (ceil(0.01 * 1024) + ceil(0.03 * 1024)) / 2 / 1024
    assert named_like(result, "topk").bytes_per_step == pytest.approx(
        ring(VECTORS) + kept * ring(matrices), rel=1e-2
    )
    sides = 2 * (32000 + 1024) + 8 * (2 * (1024 + 1024) + 2 * (512 + 1024) + 3 * (4096 + 1024))
    assert named_like(result, "powersgd").bytes_per_step == pytest.approx(ring(VECTORS) + ring(4 * sides))


def test_zero_two_reduces_for_every_micro_batch_and_zero_one_once() -> None:
    once, each = (search(job(zero), linked(0.2e9), 16) for zero in (1, 2))
    assert gradient_bytes(each) == pytest.approx(
        2 * gradient_bytes(once)
    )  # 8 sequences a device are 2 micro-batches of 4
    assert named_like(each, "int8").bytes_per_step == pytest.approx(
        2 * named_like(once, "int8").bytes_per_step
    )


def test_on_slow_links_every_codec_is_quicker_and_none_beats_no_communication(slow: SearchResult) -> None:
    computing = seconds(slow) * (1 - exposed_share(slow))
    assert all(0.99 * computing <= each.step_seconds < seconds(slow) for each in alternatives(slow))
    assert proposed(alternatives(slow), seconds(slow)) is not None


@pytest.mark.parametrize(
    "bandwidths",
    [(10e9, 1e9), pytest.param((100e9, 10e9, 1e9, 0.1e9), marks=pytest.mark.full)],
    ids=["two", "four"],
)
def test_the_slower_the_link_the_more_a_codec_gains(bandwidths: tuple[float, ...]) -> None:
    results = [search(job(0), linked(bandwidth), 16) for bandwidth in bandwidths]
    for codec in CODECS:
        gains = [seconds(result) / named_like(result, codec).step_seconds for result in results]
        assert gains == sorted(gains)


def test_on_quick_links_no_codec_pays_and_the_answer_shows_by_how_much() -> None:
    config = job(0, data=8)
    result = search(config, named("h100"), 8)
    more = beyond(config, result)
    assert more["compression"] is None
    assert not any("gradients sent as" in sentence for sentence in advice_of(more))
    assert all(
        each["step_seconds"] > more["step_seconds"] for each in more["slow_links"] if each["name"] in CODECS
    )


def test_a_codec_that_pays_is_proposed_with_what_to_write() -> None:
    config = job(0)
    more = beyond(config, search(config, linked(0.2e9), 16))
    sentence = next(each for each in advice_of(more) if "gradients sent as" in each)
    assert f'layout.compression = "{more["compression"]}"' in sentence
    assert "auto+lossy" in sentence


def test_a_job_that_compresses_in_vain_is_told_so() -> None:
    config = job(0, data=8, compression="topk(0.01)")
    more = beyond(config, search(config, named("h100"), 8))
    assert any("does not pay" in sentence for sentence in advice_of(more))


def test_an_all_to_all_between_nodes_of_many_devices_may_cost_more_than_a_ring() -> None:
    """Each device's messages to the other node share nothing, where a ring of eight passes partial sums on:
    half the bytes of float32, but eight times as many of them leave the node."""
    result = search(job(0), two_nodes(0.2e9), 16)
    assert (
        named_like(result, "bfloat16").step_seconds
        > seconds(result)
        > named_like(result, "sign").step_seconds
    )


def test_codecs_that_a_layout_cannot_run_are_not_offered() -> None:
    result = search(asking({"data": 8, "tensor": 2, "zero": 0}), two_nodes(0.2e9), 16)
    names = {each.name for each in alternatives(result)}
    assert "powersgd(4)" not in names
    assert "int8" in names


def test_layouts_that_a_codec_cannot_run_on_are_not_searched() -> None:
    result = search(asking({"compression": "powersgd(4)"}), two_nodes(0.2e9), 16)
    assert set(result.space.tensor) == {1}
    assert any("whole matrices" in why for why in result.refused)


def test_the_quickest_comes_first(slow: SearchResult) -> None:
    found = alternatives(slow)
    assert [each.step_seconds for each in found] == sorted(each.step_seconds for each in found)
    assert set(plain_data(found[0])) >= {"name", "bytes_per_step", "step_seconds", "changes", "fits"}


def test_residuals_take_four_bytes_a_number_and_must_fit() -> None:
    result = search(job(3), linked(0.2e9), 16)
    codec = named_like(result, "int8")
    assert codec.extra_memory == pytest.approx(4 * (PARAMETERS - VECTORS), rel=1e-3)
    cluster = linked(0.2e9)
    tight = replace(
        cluster, device=replace(cluster.device, memory=1.01 * float(result.peak[result.order[0]]) / 0.92)
    )
    full = search(job(3), tight, 16)
    assert not named_like(full, "int8").fits
    assert proposed(alternatives(full), seconds(full)) is None


def test_of_codecs_that_are_as_quick_the_one_that_changes_least_is_taken() -> None:
    assert worthwhile({"int8": 1.01, "sign": 1.0, "bfloat16": 1.1}, 2.0) == "int8"
    assert worthwhile({"int8": 1.01, "sign": 1.0}, 1.105) == "sign"
    assert worthwhile({"int8": 1.01, "sign": 1.0}, 1.05) is None
    assert worthwhile({}, 1.0) is None


# -- layout = "auto+lossy" -----------------------------------------------------------------------------------


def test_compression_is_chosen_only_where_the_job_accepts_it() -> None:
    cluster = two_nodes(0.2e9)
    silent, asked = plan_job(asking({}), cluster, 16)
    assert silent.layout.compression is None
    assert not asked.whys
    lossy, asked = plan_job(asking({"compression": "auto", "compression_warmup": 20}), cluster, 16)
    assert lossy.layout.compression in CODECS
    assert lossy.layout.compression_warmup == 20
    assert "times quicker" in asked.whys["compression"]
    assert "changes the numbers" in asked.whys["compression"]


def test_what_is_chosen_is_a_tenth_quicker_than_the_best_without_and_runs() -> None:
    cluster = two_nodes(0.2e9)
    without, lossy = search(asking({}), cluster, 16), search_job(asking({"compression": "auto"}), cluster, 16)
    assert seconds(without) >= WORTHWHILE * seconds(lossy.result)
    named_by_hand = search(asking({"compression": lossy.config.layout.compression}), cluster, 16)
    assert seconds(named_by_hand) == seconds(lossy.result)


def test_where_it_would_not_pay_nothing_is_chosen_and_the_reason_is_given() -> None:
    searched = search_job(asking({"compression": "auto", "compression_warmup": 20}, data=8), named("h100"), 8)
    assert searched.config.layout.compression is None
    assert searched.config.layout.compression_warmup == 0
    assert searched.why is not None
    assert "would not pay" in searched.why


def test_a_layout_is_left_to_the_planner_with_or_without_compression() -> None:
    assert is_open(asking({}).layout)
    assert is_open(asking({"compression": "auto"}).layout)
    assert not is_open(asking({"compression": "int8"}).layout)


# -- local training ------------------------------------------------------------------------------------------


def test_local_training_exchanges_between_nodes_and_its_workers_are_nodes() -> None:
    for zero in range(4):
        local = named_like(search(job(zero), two_nodes(0.2e9), 16), "local")
        assert local.name == "local, 2 groups"
        assert local.extra_memory >= 0


def test_a_worker_that_cannot_hold_the_model_is_not_offered() -> None:
    """Where the plan needs the memory of both nodes, neither can train alone."""
    cluster = two_nodes(0.2e9)
    roomy = search(job(3), cluster, 16)
    tight = replace(
        cluster, device=replace(cluster.device, memory=1.01 * float(roomy.peak[roomy.order[0]]) / 0.92)
    )
    assert not any(each.name.startswith("local") for each in alternatives(search(job(3), tight, 16)))


def test_one_device_has_nothing_to_send() -> None:
    result = search(job(0, data=1), named("h100"), 1)
    assert alternatives(result) == []
    assert exposed_share(result) == 0
