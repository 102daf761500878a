"""No step is shorter than the busiest of its links needs for its bytes, whatever the job, the layout and the
cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from effort import at_least
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.config import Config, from_tables
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import CLUSTERS, named
from shardwise.cost.collectives import group_of
from shardwise.cost.flow import Flow
from shardwise.cost.footprint import hold
from shardwise.cost.predict import predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Array, Space, Workload, space_of
from shardwise.cost.traffic import flows
from shardwise.search.candidates import candidates
from shardwise.search.search import simulate_pipelines, workload_of

often = settings(
    max_examples=at_least(300, 30),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    deadline=None,
)
SMALL = {"hidden": 512, "head_dim": 64, "ffn": 1408, "vocabulary": 3001}
FAMILIES: list[dict[str, Any]] = [
    {},
    {"tied": True},
    {"experts": 8, "experts_per_token": 2, "expert_ffn": 352},
]
TWICE = {"all_reduce": 2.0}


@st.composite
def jobs(draw: st.DrawFn) -> Config:
    heads = draw(st.sampled_from([4, 8, 12]))
    kv_heads = draw(st.sampled_from([count for count in (1, 2, 4, 12) if heads % count == 0]))
    model = {
        **SMALL,
        **draw(st.sampled_from(FAMILIES)),
        "heads": heads,
        "kv_heads": kv_heads,
        "layers": draw(st.integers(1, 12)),
    }
    data = {"source": "x", "sequence_length": draw(st.sampled_from([64, 512, 4096]))}
    train = {"global_batch": draw(st.sampled_from([4, 16, 24])), "precision": "bfloat16"}
    return from_tables({"model": {**model, "max_positions": 4096}, "data": data, "train": train})


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Links and hosts from a millionth of an H100's to a hundred times as quick, in nodes of any size."""
    base = CLUSTERS["cpu"] if draw(st.integers(0, 5)) == 0 else named("h100")
    factor = st.floats(-6, 2).map(lambda power: 10**power)

    def link(name: str) -> dict[str, Any]:
        given = getattr(base, name)
        return {
            name: replace(
                given, bandwidth=given.bandwidth * draw(factor), latency=given.latency * draw(factor)
            )
        }

    device = replace(base.device, host_bandwidth=base.device.host_bandwidth * draw(factor))
    host = base.host_memory_bandwidth * draw(factor)
    per_node = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return replace(
        base,
        device=device,
        host_memory_bandwidth=host,
        devices_per_node=per_node,
        nodes=8,
        **link("inside"),
        **link("between"),
    )


def on_the_wire(flow: Flow, space: Space, cluster: Cluster, visits: int) -> dict[str, Array]:
    """Bytes that a device cannot but put on its node's links, and on its network card. Of a sum or a gather,
    what g members of a node have goes to q nodes through their g cards; of the rows of a token that go to
    experts of one node, one may do.
    """
    group = group_of(flow.axis, space, cluster)
    n, g, q = group.size, group.inside, group.nodes
    if flow.kind == "send":
        return {"inside": flow.bytes * ((q == 1) & (n > 1)), "between": flow.bytes * (q > 1)}
    if flow.kind == "all_to_all":
        copies = visits if flow.axis == "expert" else 1
        return {"inside": flow.bytes * (g - 1) / n, "between": flow.bytes * (q - 1) / q / copies}
    sent = flow.bytes * TWICE.get(flow.kind, 1.0)
    return {"inside": sent * (n - 1) / n * (g - 1) / g, "between": sent * (q - 1) / q / g}


def least_seconds(work: Workload, space: Space, cluster: Cluster) -> Array:
    """What the busiest link of the first device, of a device between the ends of a pipeline, or of a host
    needs."""
    sent = flows(work, space, SHARDWISE, cluster.device_type)
    share, messages = _of_a_middle_rank(work, space)
    links = []
    for name in ("inside", "between"):
        first, middle = np.zeros(len(space)), np.zeros(len(space))
        for flow in sent:
            size = on_the_wire(flow, space, cluster, max(work.model.experts_per_token, 1))[name]
            first = first + size
            if flow.when in ("forward", "backward"):
                middle = middle + share * size
            elif flow.when == "pipeline":
                middle = middle + size / np.maximum(flow.count, 1) * messages
        links.append(np.maximum(first, middle * (share > 0)) / getattr(cluster, name).bandwidth)
    return np.max([*links, _of_the_host(work, space, cluster)], axis=0)


def _of_a_middle_rank(work: Workload, space: Space) -> tuple[Array, Array]:
    """Its blocks for each of the first rank's, and its messages of a step: two for each stage and
    micro-batch; 0 if none is."""
    shares, messages = np.zeros(len(space)), np.zeros(len(space))
    for place in range(len(space)):
        row = space.row(place)
        ranks, per_rank = row["pipeline"], row["stages_per_rank"]
        if ranks > 2:
            folded = SCHEDULES[row["schedule"]] in ("zbv", "dualpipev")
            rank_of = (
                [*range(ranks), *reversed(range(ranks))]
                if folded
                else [stage % ranks for stage in range(ranks * per_rank)]
            )
            own = [0] * ranks
            for rank, blocks in zip(rank_of, work.blocks(ranks * per_rank), strict=True):
                own[rank] += blocks
            shares[place], messages[place] = own[1] / own[0], 2 * per_rank * row["accumulation"]
    return shares, messages


def _of_the_host(work: Workload, space: Space, cluster: Cluster) -> Array:
    """Weights come from the host for every micro-batch, and gradients go there; devices share what its memory
    moves."""
    moved = 4.0 * hold(work, space, SHARDWISE).sharded * (space.accumulation + 1) * space.offload
    devices = np.minimum(cluster.devices_per_node, space.world)
    return moved / np.minimum(cluster.device.host_bandwidth, cluster.host_memory_bandwidth / devices)


@often
@given(
    config=jobs(),
    cluster=clusters(),
    devices=st.sampled_from([1, 2, 4, 6, 8, 16]),
    seed=st.integers(0, 2**32),
)
def test_no_step_is_shorter_than_its_busiest_link_is_busy(
    config: Config, cluster: Cluster, devices: int, seed: int
) -> None:
    space = candidates(config, devices, {}, offloading=cluster.device.overlap > 0).space
    assume(len(space))
    space = space.take(np.random.default_rng(seed).integers(0, len(space), 200))
    work = workload_of(config)
    least = least_seconds(work, space, cluster)
    found = predict(work, space, cluster)
    simulated = simulate_pipelines(work, space.take(slice(0, 8)), cluster).total
    for total in (found.total, simulated):
        short = np.flatnonzero(total < least[: len(total)] * (1 - 1e-9))
        assert not len(short), (space.row(int(short[0])), total[short[0]], least[short[0]])


@often
@given(
    config=jobs(), cluster=clusters(), devices=st.sampled_from([2, 4, 6, 8, 16]), seed=st.integers(0, 2**32)
)
def test_no_pipeline_is_simulated_in_less_than_its_bound(
    config: Config, cluster: Cluster, devices: int, seed: int
) -> None:
    space = candidates(config, devices, {}).space
    space = space.take(space.pipeline > 1)
    assume(len(space))
    space = space.take(np.random.default_rng(seed).integers(0, len(space), 12))
    bound = predict(workload_of(config), space, cluster).least
    simulated = simulate_pipelines(workload_of(config), space, cluster).total
    low = np.flatnonzero(simulated < bound * (1 - 1e-9))
    assert not len(low), (space.row(int(low[0])), simulated[low[0]], bound[low[0]])


def test_on_a_slow_network_a_pipeline_takes_what_its_messages_do() -> None:
    """Four stages on four nodes: a rank between them sends a micro-batch's activations on and its gradients
    back."""
    model = {**SMALL, "layers": 8, "heads": 8, "kv_heads": 8}
    train = {"global_batch": 64, "precision": "bfloat16"}
    config = from_tables({"model": model, "data": {"source": "x", "sequence_length": 512}, "train": train})
    space = space_of([{"pipeline": 4, "accumulation": 64, "schedule": SCHEDULES.index("1f1b")}])
    base = replace(named("h100"), devices_per_node=1, nodes=4)
    slow = replace(base, between=replace(base.between, bandwidth=1e6))
    quick, late = (predict(workload_of(config), space, cluster) for cluster in (base, slow))
    wire = 64 * 2 * 512 * 512 * 2 / 1e6
    assert quick.total[0] < 0.01 * wire
    assert wire <= late.total[0] < 1.1 * wire + quick.total[0], (
        "the messages of filling and draining come on top"
    )
    assert late.seconds["pipeline_sends"][0] > 0.9 * wire
