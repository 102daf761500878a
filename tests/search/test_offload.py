"""States in the host's memory: taken where that is quicker, and only as far as there is memory and bandwidth
for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.config import Config, from_tables
from shardwise.config.parameters import count
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import CLUSTERS, named
from shardwise.cost.predict import predict
from shardwise.cost.space import space_of
from shardwise.search.answer import answer
from shardwise.search.reasons import binding, nothing_fits
from shardwise.search.search import SearchResult, search, workload_of
from shardwise.units import GIB


def job(**layout: Any) -> Config:
    data, train = {"source": "x", "sequence_length": 8192}, {"global_batch": 512, "precision": "bfloat16"}
    return from_tables({"model": {"preset": "llama3-70b"}, "data": data, "train": train, "layout": layout})


def with_host(gib: float) -> Cluster:
    return replace(named("h100x16"), host_memory=gib * GIB)


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(job(), named("h100x16"), 16)


def test_it_is_taken_where_it_is_quicker_though_other_layouts_fit(found: SearchResult) -> None:
    best, offloaded = int(found.order[0]), found.space.offload[found.order] == 1
    resident = search(job(offload=False), named("h100x16"), 16)
    assert len(resident.order)
    assert found.space.offload[best] == 1
    assert found.total[best] < 0.8 * resident.total[resident.order[0]]
    assert found.total[found.order[~offloaded]].min() == pytest.approx(
        resident.total[resident.order[0]], rel=0.01
    )
    (sentence,) = [sentence for sentence in binding(job(), found, best) if sentence.startswith("offload")]
    assert "saves time" in sentence


def test_a_node_holds_four_numbers_for_each_parameter_of_its_devices(found: SearchResult) -> None:
    best = int(found.order[0])
    whole = (
        4 * 4 * count(job().model)
    )  # float32: a weight, its gradient and two moments; 8 devices of 16 are in a node
    assert found.host[best] == pytest.approx(whole / 2, rel=0.02)
    assert answer(job(), found)["best"]["host_memory_gib"] == pytest.approx(found.host[best] / GIB)


def test_what_the_host_has_no_room_for_does_not_fit(found: SearchResult) -> None:
    needed = float(found.host[found.order[0]]) / GIB
    for gib, fits in ((1.01 * needed / 0.92, True), (0.99 * needed / 0.92, False)):
        result = search(job(offload=True, data=16), with_host(gib), 16)
        assert bool(len(result.order)) == fits
        if not fits:
            (sentence,) = nothing_fits(job(), result)
            assert "fits on the devices, but its states take" in sentence
            assert "host_memory_gib" in sentence
    little = search(job(), with_host(0.99 * needed / 0.92), 16)
    assert not (little.space.offload[little.order] == 1).any()


def test_devices_of_a_node_share_what_its_memory_moves() -> None:
    """A micro-batch moves 16 bytes a parameter over the link, and the update 40 in the host's memory, at
    twice a link at most."""
    cluster = replace(
        named("h100x8"), host_memory_bandwidth=80e9
    )  # 10 GB/s for each of eight, where a link carries 50
    rows = [{"data": count, "zero": 3, "offload": 1} for count in (1, 8)]
    alone, shared = (
        predict(workload_of(job()), space_of([row]), cluster).seconds["offload"][0] for row in rows
    )
    assert shared / alone == pytest.approx((16 / 10 + 40 / 10) / 8 / (16 / 50 + 40 / 80), rel=1e-2)
    wide = replace(cluster, host_memory_bandwidth=1e15)
    links = [predict(workload_of(job()), space_of([row]), wide).seconds["offload"][0] for row in rows]
    assert links[0] == pytest.approx(8 * links[1], rel=1e-2), (
        "each has a link of its own, and an eighth of the states"
    )


def test_offloaded_bfloat16_states_move_half_the_bytes_and_are_rounded_by_the_host() -> None:
    """A micro-batch moves 8 bytes a parameter. The host has no kernel that rounds at random: torch's
    operators move 500 bytes (optimizers/base.py), where the update of float32 states moves 40."""
    cluster, space = (
        replace(named("h100x8"), host_memory_bandwidth=1e15),
        space_of([{"zero": 3, "offload": 1}]),
    )
    seconds = [
        float(predict(replace(workload_of(job()), state_dtype=dtype), space, cluster).seconds["offload"][0])
        for dtype in ("float32", "bfloat16")
    ]
    link = cluster.device.host_bandwidth
    assert seconds[0] == pytest.approx(count(job().model) * (16 / link + 40 / (2 * link)), rel=1e-2)
    assert seconds[1] == pytest.approx(count(job().model) * (8 / link + 500 / (2 * link)), rel=1e-2)


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_every_preset_has_a_host(name: str) -> None:
    cluster = CLUSTERS[name]
    assert (
        cluster.host_memory
        >= (1 if cluster.shared else 0.5 * cluster.devices_per_node) * cluster.device.memory
    )
    assert np.isfinite(cluster.host_memory_bandwidth)
