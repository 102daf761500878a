"""Bytes in the price = bytes in the flows, of every candidate, job and program;
tests/parallel/test_predictions.py holds both to the ledger of real steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.test_traffic_formulas import EVEN, EXPERTS, candidates, work
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.codecs import parse_codec
from shardwise.config import Model
from shardwise.config.compression import SumCompression
from shardwise.cost.cluster import Link
from shardwise.cost.clusters import CLUSTERS, named
from shardwise.cost.collectives import group_of, rates
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.software import SHARDWISE, Software
from shardwise.cost.space import AT_ONCE, Space, Workload, space_of
from shardwise.cost.traffic import flows

TIED = EVEN.model_copy(update={"tied": True, "kv_heads": 2})
CUDA, CPU = named("h100x64"), CLUSTERS["cpu"]


@st.composite
def programs(draw: st.DrawFn) -> Software:
    """Ours, and others that differ in everything that decides who sends what."""
    facts = {
        name: draw(st.booleans())
        for name in ("sequence_parallel", "gathers_again", "recompute_all", "reduce_each", "balanced")
    }
    numbers = {
        "gathers_after": draw(st.sampled_from((0, 8))),
        "selective_repeats": draw(st.sampled_from((0.0, 1.0))),
    }
    widths = {
        "reduce_bytes": draw(st.sampled_from((2.0, 4.0))),
        "weight_bytes": draw(st.sampled_from((1.0, 2.0))),
    }
    return draw(st.sampled_from((SHARDWISE, replace(SHARDWISE, **facts, **numbers, **widths))))  # type: ignore[arg-type]


def sent(job: Workload, space: Space, stack: Software = SHARDWISE, device: str = "cuda") -> np.ndarray:
    """Bytes of all flows, for every candidate."""
    return sum((flow.bytes for flow in flows(job, space, stack, device)), np.zeros(len(space)))


def priced(prediction: Prediction) -> np.ndarray:
    return sum(prediction.sent.values(), np.zeros_like(prediction.total))


@settings(max_examples=60)
@given(
    st.lists(candidates(), min_size=1, max_size=12),
    st.sampled_from((EVEN, EXPERTS, TIED)),
    programs(),
    st.sampled_from((CUDA, CPU)),
)
def test_every_byte_of_the_flows_is_in_the_price(
    rows: list[dict[str, int]], model: Model, stack: Software, cluster: object
) -> None:
    space, device = space_of(rows), "cpu" if cluster is CPU else "cuda"
    found = predict(work(model), space, CPU if cluster is CPU else CUDA, stack)
    assert priced(found) == pytest.approx(sent(work(model), space, stack, device), rel=1e-12)


TWO_NODES = {"pipeline": 4, "tensor": 4}
"""Devices of two nodes of h100x64, with one device on every other axis."""


@settings(max_examples=30)
@given(candidates(), st.sampled_from(("tensor", "context", "data", "replica")))
@example({"replica": 1, **TWO_NODES}, "data")
def test_an_axis_of_one_device_has_no_bytes_and_no_seconds(row: dict[str, int], axis: str) -> None:
    found = predict(work(), space_of([{**row, axis: 1, **({"context": 1} if axis == "data" else {})}]), CUDA)
    if axis == "data" and row["replica"] > 1:
        return  # the replicas of unsharded weights are the data axis' too
    assert found.sent[axis] == found.seconds[axis] == 0


@pytest.mark.parametrize(
    ("row", "term"),
    [({"data": 16}, "data"), ({"replica": 16}, "data"), ({**TWO_NODES, "accumulation": 4}, "pipeline_sends"),
     ({"context": 16}, "context"), ({"tensor": 16}, "tensor"), ({"pipeline": 4, "data": 4}, "data")],
)  # fmt: skip
def test_what_nodes_wait_for_each_other_is_in_the_price_of_an_axis_they_are_on(
    row: dict[str, int], term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_waits = predict(work(), space_of([row]), CUDA)
    monkeypatch.setattr("shardwise.cost.predict.LOCKSTEP", 0.0)
    without = predict(work(), space_of([row]), CUDA)
    later = {
        name
        for name, value in with_waits.seconds.items()
        if value > without.seconds[name] and name != "launch"
    }
    assert term in later <= {term, "imbalance", "bubble"}


@pytest.mark.parametrize("model", [EVEN, EXPERTS], ids=["dense", "experts"])
def test_slower_links_cost_more_for_every_candidate_that_sends(model: Model) -> None:
    """Every byte has a price: where a candidate sends anything, slower links never make it quicker, and no
    bytes cost nothing."""
    rows = [
        {"tensor": 2},
        {"data": 4, "zero": 3},
        {"context": 2},
        {"context": 2, "ring": 1},
        {"pipeline": 2, "accumulation": 4},
    ]
    slow = replace(
        CUDA, inside=replace(CUDA.inside, bandwidth=1e6), between=replace(CUDA.between, bandwidth=1e6)
    )
    before, after = (predict(work(model), space_of(rows), cluster) for cluster in (CUDA, slow))
    assert (after.total > before.total).all()


@settings(max_examples=60)
@given(
    st.lists(candidates(), min_size=1, max_size=12),
    st.sampled_from((EVEN, EXPERTS, TIED)),
    st.sampled_from((1e6, 1e8, 1e9, 1e10)),
    st.sampled_from((None, SumCompression(parse_codec("int8"), "all", 0, True))),
)
def test_no_step_of_hosts_is_shorter_than_what_their_network_carries(
    rows: list[dict[str, int]], model: Model, bandwidth: float, compression: SumCompression | None
) -> None:
    hosts = replace(CPU, devices_per_node=1, nodes=4096, between=Link(bandwidth, 0.0))
    space, job = (
        space_of([{**row, "pipeline": 1} for row in rows]),
        replace(work(model), compression=compression),
    )
    wire = np.zeros(len(space))
    for flow in flows(job, space, SHARDWISE, "cpu"):
        wire = wire + flow.bytes * rates(flow.kind, group_of(flow.axis, space, hosts), hosts)[1]
    assert (predict(job, space, hosts).total >= wire * (1 - 1e-9)).all()


def test_hosts_wait_for_their_network_beside_computing() -> None:
    quick, slow = (
        replace(CPU, devices_per_node=1, nodes=2, between=Link(bandwidth, 0.0)) for bandwidth in (1e15, 1e9)
    )
    space = space_of([{"data": 2, "zero": 0}, {"data": 2, "zero": 2}, {"data": 2, "zero": 3}])
    without, with_network = (predict(work(), space, cluster) for cluster in (quick, slow))
    wire = np.zeros(len(space))
    for flow in flows(work(), space, SHARDWISE, "cpu"):
        wire = wire + flow.bytes * rates(flow.kind, group_of(flow.axis, space, slow), slow)[1]
    assert (with_network.total - without.total < 0.9 * wire).all()


def test_more_candidates_than_lie_in_a_cache_are_predicted_in_order() -> None:
    rows = [{"data": 2, "zero": 3}, {"tensor": 2}]
    apart = predict(work(), space_of(rows), CUDA)
    together = predict(work(), space_of([rows[0]] * AT_ONCE + [rows[1]]), CUDA)
    for name in apart.seconds:
        assert list(together.seconds[name][[0, AT_ONCE]]) == list(apart.seconds[name])
    assert {name: list(value[[0, AT_ONCE]]) for name, value in together.sent.items()} == {
        name: list(value) for name, value in apart.sent.items()
    }
