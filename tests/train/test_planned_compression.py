"""`layout = "auto+lossy"` in a run: the plan carries the codec and why, and predicts the step with it."""

from __future__ import annotations

from dataclasses import replace

from shardwise.codecs import parse_codec
from shardwise.config import Config, from_tables
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.search.planner import Planner, left_to_the_planner

MODEL = {
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 4096,
    "vocabulary": 32000,
}


def job(**layout: object) -> Config:
    train = {"global_batch": 16, "precision": "bfloat16"}
    return from_tables({"model": MODEL, "data": {"source": "text.txt"}, "train": train, "layout": layout})


def apart(bandwidth: float) -> Cluster:
    """Four H100, each in a node of its own."""
    cluster = named("h100x4")
    return replace(
        cluster, devices_per_node=1, nodes=4, between=replace(cluster.between, bandwidth=bandwidth)
    )


def test_on_a_slow_link_the_plan_of_a_run_compresses_and_says_why() -> None:
    config = job(compression="auto", data=4, zero=0)
    assert left_to_the_planner(config, 4, cluster_is_named=False)
    planner = Planner(config, 4, None, cluster=apart(0.1e9), searches=True)
    decision = planner.first.decisions["layout.compression"]
    assert decision.value == planner.first.layout.compression == str(parse_codec(decision.value))
    assert not decision.asked
    assert planner.searched is not None
    assert f"compression {decision.value}: {decision.why}" in planner.searched
    plain = Planner(job(data=4, zero=0), 4, None, cluster=apart(0.1e9)).first
    assert planner.first.predicted is not None
    assert plain.predicted is not None
    faster = plain.predicted["step_seconds"]["total"] / planner.first.predicted["step_seconds"]["total"]
    assert decision.why.startswith(f"{faster:.3g} times quicker")


def test_on_a_quick_link_it_does_not_and_says_why() -> None:
    planner = Planner(job(compression="auto", data=4, zero=0), 4, None, cluster=apart(400e9), searches=True)
    assert planner.first.layout.compression is None
    assert planner.searched is not None
    assert "compression none: would not pay" in planner.searched
    assert planner.first.decisions["layout.compression"].why in planner.searched


def test_a_codec_that_was_asked_for_stays_when_the_rest_is_planned() -> None:
    planner = Planner(
        job(compression="int8", compression_warmup=7), 4, None, cluster=apart(0.1e9), searches=True
    )
    layout = planner.first.layout
    assert (layout.compression, layout.compression_warmup) == ("int8", 7)
    assert planner.first.decisions["layout.compression"].asked
