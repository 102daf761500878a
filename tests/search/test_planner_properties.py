"""What must hold of every prediction and of every search, whatever the model, the batch and the cluster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from effort import at_least, examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardwise.config import BY_OPERATOR, Config, Layout, from_tables, problems_of_layout, splits_backward
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import CLUSTERS, named
from shardwise.cost.footprint import footprint, hold
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import RECOMPUTE, Space, space_of
from shardwise.plans import choose
from shardwise.plans.memory import state_bytes
from shardwise.plans.schedule import make_schedule
from shardwise.plans.timeline import prepare_schedule, simulate, simulate_times
from shardwise.search.candidates import candidates, fixed_fields
from shardwise.search.search import SearchResult, search, simulate_pipelines, workload_of

few = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
fewer = settings(few, max_examples=examples(8))
often = settings(few, max_examples=at_least(300, 5))
DENSE = {
    "layers": 8,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "ffn": 1408,
    "vocabulary": 3001,
}
EXPERTS = {**DENSE, "experts": 8, "experts_per_token": 2, "expert_ffn": 352, "shared_experts": 1}
TIED = {
    **DENSE,
    "layers": 5,
    "tied": True,
    "norm": "layer",
    "positions": "learned",
    "activation": "gelu",
    "bias": True,
}
FAMILIES: dict[str, dict[str, Any]] = {"dense": DENSE, "experts": EXPERTS, "tied": TIED}


def job(
    model: dict[str, Any],
    batch: int = 16,
    length: int = 512,
    layout: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    tables = {
        "model": model,
        "data": {"source": "x", "sequence_length": length},
        "train": {"global_batch": batch, "precision": "bfloat16", **train},
        "layout": layout or {},
    }
    return from_tables(tables)


@st.composite
def jobs(draw: st.DrawFn) -> Config:
    heads = draw(st.sampled_from([4, 6, 8, 12]))
    kv_heads = draw(st.sampled_from([count for count in (1, 2, 3, 4, 6, 12) if heads % count == 0]))
    model = {
        **FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))],
        "heads": heads,
        "kv_heads": kv_heads,
        "layers": draw(st.integers(1, 12)),
    }
    return job(model, draw(st.sampled_from([4, 6, 16, 24])), draw(st.sampled_from([96, 256, 512])))


devices_of_jobs = st.sampled_from([1, 2, 4, 6, 8])


def space_for(config: Config, devices: int) -> Space:
    space = candidates(config, devices, {}).space
    assume(len(space))
    return space


def small_nodes(devices: int = 8, per_node: int = 4) -> Cluster:
    return replace(named("h100"), devices_per_node=per_node, nodes=max(1, devices // per_node))


def predicted(config: Config, devices: int, cluster: Cluster | None = None) -> Prediction:
    return predict(workload_of(config), space_for(config, devices), cluster or small_nodes())


# -- a better machine ----------------------------------------------------------------------------------------


def _faster_link(cluster: Cluster, name: str, factor: float) -> Cluster:
    link = getattr(cluster, name)
    return replace(cluster, **{name: replace(link, bandwidth=factor * link.bandwidth)})


def _better(cluster: Cluster, what: str, factor: float) -> Cluster:
    device = cluster.device
    if what in ("inside", "between"):
        return _faster_link(cluster, what, factor)
    if what == "latency":
        shorter = {
            name: replace(getattr(cluster, name), latency=getattr(cluster, name).latency / factor)
            for name in ("inside", "between")
        }
        return replace(cluster, **shorter)
    if what == "peak":
        return replace(
            cluster, device=replace(device, peak={name: factor * peak for name, peak in device.peak.items()})
        )
    if what == "host":
        host = replace(device, host_bandwidth=factor * device.host_bandwidth)
        memory, bandwidth = factor * cluster.host_memory, factor * cluster.host_memory_bandwidth
        return replace(cluster, device=host, host_memory=memory, host_memory_bandwidth=bandwidth)
    if what == "launch":
        return replace(cluster, device=replace(device, launch=device.launch / factor))
    return replace(cluster, device=replace(device, **{what: factor * getattr(device, what)}))


@pytest.mark.parametrize(
    "what", ["inside", "between", "latency", "bandwidth", "peak", "launch", "host_bandwidth"]
)
@few
@given(config=jobs(), devices=devices_of_jobs, factor=st.floats(1.01, 50), slow=st.sampled_from([1.0, 0.02]))
def test_a_better_machine_never_slows_a_candidate(
    what: str, config: Config, devices: int, factor: float, slow: float
) -> None:
    cluster = _faster_link(small_nodes(), "between", slow)
    space = space_for(config, devices)
    before = predict(workload_of(config), space, cluster).total
    after = predict(workload_of(config), space, _better(cluster, what, factor)).total
    worse = np.flatnonzero(after > before * (1 + 1e-9))
    assert not len(worse), (space.row(int(worse[0])), before[worse[0]], after[worse[0]])


@pytest.mark.parametrize(
    "what", ["inside", "between", "latency", "bandwidth", "peak", "launch", "host_bandwidth"]
)
@few
@given(
    config=jobs(),
    devices=st.sampled_from([2, 4, 6, 8]),
    factor=st.one_of(st.floats(1.0, 1.3), st.floats(1.0, 50)),
    slow=st.floats(-5, 0).map(lambda power: 10**power),
    seed=st.integers(0, 2**32),
)
def test_a_better_machine_never_slows_a_pipeline_that_is_played(
    what: str, config: Config, devices: int, factor: float, slow: float, seed: int
) -> None:
    cluster = _faster_link(small_nodes(), "between", slow)
    space = space_for(config, devices)
    space = space.take(space.pipeline > 1)
    assume(len(space))
    space = space.take(np.random.default_rng(seed).integers(0, len(space), 30))
    before, after = (
        simulate_pipelines(workload_of(config), space, one).total
        for one in (cluster, _better(cluster, what, factor))
    )
    worse = np.flatnonzero(after > before * (1 + 1e-9))
    assert not len(worse), (space.row(int(worse[0])), before[worse[0]], after[worse[0]])


@pytest.mark.parametrize("what", ["inside", "between", "latency", "memory", "peak", "bandwidth", "host"])
@often
@given(
    config=jobs(),
    devices=devices_of_jobs,
    factor=st.one_of(st.floats(1.0, 1.3), st.floats(1.0, 50)),
    slow=st.sampled_from([1.0, 0.1, 0.02, 1e-4]),
    tight=st.sampled_from([1.0, 0.03, 0.015, 0.007, 0.003]),
)
def test_the_best_plan_is_never_slower_on_a_better_cluster(
    what: str, config: Config, devices: int, factor: float, slow: float, tight: float
) -> None:
    check_the_best_is_never_slower(what, config, devices, factor, slow, tight)


@pytest.mark.parametrize(("what", "layers", "devices"), [("latency", 4, 8), ("peak", 6, 6)])
def test_a_pipeline_at_the_pace_of_its_link_gains_from_a_better_cluster(
    what: str, layers: int, devices: int
) -> None:
    """Found by the above: the slowest rank gained more than the others, and what it waits for them came on
    top of the link."""
    config = job({**TIED, "layers": layers, "heads": 4, "kv_heads": 1}, 4, 96)
    check_the_best_is_never_slower(what, config, devices, factor=1.25, slow=1e-4, tight=1.0)


def check_the_best_is_never_slower(
    what: str, config: Config, devices: int, factor: float, slow: float, tight: float
) -> None:
    base = _better(_faster_link(small_nodes(), "between", slow), "memory", tight)
    cluster = replace(base, device=replace(base.device, overhead=0.0), host_memory=8 * base.device.memory)
    first, second = (search(config, one, devices) for one in (cluster, _better(cluster, what, factor)))
    assert first.fits.sum() <= second.fits.sum()
    if len(first.order):
        assert len(second.order)
        assert winning(second) <= winning(first) * (1 + 1e-9), (
            first.space.row(first.order[0]),
            second.space.row(second.order[0]),
        )


def winning(result: SearchResult) -> float:
    return float(result.total[result.order[0]])


# -- one prediction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cluster", [small_nodes(), CLUSTERS["cpu"], named("h100-hfx16")], ids=lambda one: one.name
)
@fewer
@given(config=jobs(), devices=devices_of_jobs)
def test_terms_are_finite_and_not_negative_and_sum_to_the_total(
    cluster: Cluster, config: Config, devices: int
) -> None:
    found = predicted(config, devices, cluster)
    for parts, total in ((found.seconds, found.total), (found.memory, found.peak)):
        for name, value in parts.items():
            assert np.isfinite(value).all(), name
            assert (value >= -1e-12 * total).all(), name
        assert np.allclose(sum(parts.values()), total, rtol=1e-12)
        assert (total > 0).all()


@fewer
@given(config=jobs(), devices=devices_of_jobs, seed=st.integers(0, 2**32))
def test_a_prediction_does_not_depend_on_the_other_candidates(
    config: Config, devices: int, seed: int
) -> None:
    work, space, cluster = workload_of(config), space_for(config, devices), small_nodes()
    together = predict(work, space, cluster)
    for place in np.random.default_rng(seed).integers(0, len(space), 12):
        alone = predict(work, space.take([place]), cluster)
        for mine, ours in ((alone.seconds, together.seconds), (alone.memory, together.memory)):
            assert {name: value[0] for name, value in mine.items()} == pytest.approx(
                {name: v[place] for name, v in ours.items()}, rel=1e-12
            )


@few
@given(family=st.sampled_from(["dense", "experts"]), layers=st.integers(1, 9), devices=devices_of_jobs)
def test_twice_the_layers_take_twice_the_time_and_activations_in_blocks(
    family: str, layers: int, devices: int
) -> None:
    found = []
    for count in (layers, 2 * layers, 4 * layers):
        config = job({**FAMILIES[family], "layers": count})
        space = candidates(config, devices, {"pipeline": 1, "recompute": "none"}).space
        found.append(predict(workload_of(config), space, small_nodes()))
    one, two, four = found
    assert two.seconds["attention"] == pytest.approx(2 * one.seconds["attention"], rel=1e-12)
    for name in (
        "matmul",
        "elementwise",
        "tensor",
        "context",
        "expert",
    ):  # what is outside of the blocks stays as it is
        assert four.seconds[name] - two.seconds[name] == pytest.approx(
            2 * (two.seconds[name] - one.seconds[name]), rel=1e-9
        )
    more, most = (
        two.memory["activations"] - one.memory["activations"],
        four.memory["activations"] - two.memory["activations"],
    )
    assert most == pytest.approx(2 * more, rel=1e-9)
    assert (more > 0).all()


# -- states --------------------------------------------------------------------------------------------------


ONCE = [
    ("dense", {"precision": "float32"}),
    ("experts", {"state_dtype": "bfloat16"}),
    ("tied", {"precision": "float64"}),
]
"""What is tried each time, beside the usual dtypes."""


@pytest.mark.parametrize(
    ("dtypes", "family"),
    [
        pytest.param(dtypes, family, marks=[] if not dtypes or (family, dtypes) in ONCE else pytest.mark.full)
        for dtypes in ({}, {"state_dtype": "bfloat16"}, {"precision": "float32"}, {"precision": "float64"})
        for family in sorted(FAMILIES)
    ],
    ids=str,
)
def test_states_of_every_candidate_are_those_of_its_layout(family: str, dtypes: dict[str, str]) -> None:
    config = job({**FAMILIES[family], "layers": 7}, 16, 512, None, **dtypes)
    rng = np.random.default_rng(5)
    for devices in (2, 4, 6, 8):
        space = candidates(config, devices, {}).space
        space = space.take(np.unique(rng.integers(0, len(space), 400)))
        work = workload_of(config)
        found = hold(work, space, SHARDWISE).states
        for place in range(len(space)):
            expected = state_bytes(config, space.layout(place), int(space.accumulation[place]))
            assert {name: value[place] for name, value in found.items()} == asdict(expected), space.row(place)


def test_states_are_part_of_the_footprint_and_leave_the_device_when_offloaded() -> None:
    config, cluster = job(DENSE), small_nodes()
    rows = [{"data": 4, "zero": 3, "accumulation": 2, "offload": offload} for offload in (0, 1)]
    work, space = workload_of(config), space_of(rows)
    held = hold(work, space, SHARDWISE)
    memory = footprint(work, space, cluster, SHARDWISE, held)
    for name, value in held.states.items():
        assert list(memory[name]) == [value[0], 0.0]


# -- schedules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
@few
@given(
    ranks=st.integers(2, 6),
    rounds=st.integers(1, 4),
    more=st.integers(0, 5),
    per_rank=st.integers(2, 3),
    data=st.data(),
)
def test_the_quick_simulation_gives_the_times_of_the_timeline(
    name: str, ranks: int, rounds: int, more: int, per_rank: int, data: Any
) -> None:
    schedule = make_schedule(name, ranks, ranks * rounds + more, per_rank if name == "interleaved" else None)
    stages = data.draw(st.lists(st.floats(0.1, 10), min_size=schedule.stages, max_size=schedule.stages))
    thirds = [cost / 3 for cost in stages]
    timeline = simulate(schedule, thirds, thirds, thirds)
    makespan, busiest = simulate_times(prepare_schedule(schedule), stages)
    assert makespan == pytest.approx(timeline.makespan, rel=1e-12)
    assert busiest == pytest.approx(max(timeline.busy), rel=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4, 8])
def test_the_closed_form_of_a_bubble_is_within_five_percent_of_the_step(
    name: str, ranks: int, rounds: int
) -> None:
    """With equal stages: a model of as many blocks a stage, whose embedding and head cost next to nothing."""
    per_rank = {"interleaved": 4, "zbv": 2, "dualpipev": 2}.get(name, 1)
    model = {**DENSE, "layers": 4 * ranks * per_rank, "hidden": 2048, "ffn": 8192, "vocabulary": 64}
    config = job(model, ranks * rounds, 2048)
    row = {
        "pipeline": ranks,
        "schedule": SCHEDULES.index(name),
        "stages_per_rank": per_rank,
        "accumulation": ranks * rounds,
    }
    found = predict(workload_of(config), space_of([row]), named("h100x8"))
    schedule = make_schedule(name, ranks, ranks * rounds, per_rank if name == "interleaved" else None)
    stage = float(found.block_seconds[0]) * model["layers"] / schedule.stages
    timeline = simulate(schedule, stage / 3, stage / 3, stage / 3)
    bubble = timeline.makespan - max(timeline.busy)
    closed = float(found.seconds["bubble"][0] + found.seconds["imbalance"][0])
    assert closed == pytest.approx(bubble, abs=0.05 * timeline.makespan)


# -- the space, and the search -------------------------------------------------------------------------------


@few
@given(config=jobs(), devices=devices_of_jobs, seed=st.integers(0, 2**32))
def test_every_candidate_is_a_layout_that_training_takes(config: Config, devices: int, seed: int) -> None:
    space = space_for(config, devices)
    assert (space.world == devices).all()
    for place in np.random.default_rng(seed).integers(0, len(space), 25):
        row, layout = space.row(int(place)), space.layout(int(place))
        train = config.train.model_copy(
            update={"micro_batch": row["micro_batch"], "recompute": RECOMPUTE[row["recompute"]]}
        )
        asked = config.model_copy(update={"layout": layout, "train": train})
        assert problems_of_layout(asked.model, asked.data, train, layout, devices) == []
        plan = choose(asked, devices)
        decided = (
            {"stages", "stages_per_rank"} if row["pipeline"] > 1 else {"stages_per_rank"}
        )  # which a candidate may leave open
        assert plan.layout.model_dump(exclude=decided) == layout.model_dump(exclude=decided)
        assert (plan.micro_batch, plan.accumulation) == (row["micro_batch"], row["accumulation"])


@fewer
@given(config=jobs(), devices=st.sampled_from([2, 4, 6]))
def test_every_layout_that_the_rules_allow_is_a_candidate(config: Config, devices: int) -> None:
    check_all_allowed_are_candidates(config, devices)


@pytest.mark.full
@fewer
@given(config=jobs(), devices=devices_of_jobs)
def test_every_layout_of_more_devices_that_the_rules_allow_is_a_candidate(
    config: Config, devices: int
) -> None:
    check_all_allowed_are_candidates(config, devices)


def check_all_allowed_are_candidates(config: Config, devices: int) -> None:
    space = candidates(config, devices, {}).space
    names = (
        "pipeline",
        "replica",
        "data",
        "context",
        "tensor",
        "expert",
        "ring",
        "schedule",
        "stages_per_rank",
    )
    found = {tuple(row) for row in np.stack([getattr(space, name) for name in names], axis=1).tolist()}
    assert found == set(_by_trying(config, devices))


TRIED = [
    ("1f1b", 1),
    ("zb1p", 1),
    ("zbv", 2),
    ("dualpipev", 2),
    *(("interleaved", count) for count in (2, 3, 4, 5, 6, 8, 10)),
]


def _by_trying(config: Config, devices: int) -> Iterator[tuple[int, ...]]:
    """All products of degrees, everything tried. Left out is what does nothing of its own: gpipe, which takes
    as long as 1f1b and holds more; replicas inside which nothing is sharded; schedules without a pipeline,
    ways to attend without a context.
    """
    for degrees in product([one for one in range(1, devices + 1) if devices % one == 0], repeat=5):
        if prod(degrees) != devices:
            continue
        pipeline, replica, data, context, tensor = degrees
        attentions = ("ulysses", "ring") if context > 1 else ("auto",)
        experts = range(1, (config.model.experts or 1) + 1)
        for (schedule, per_rank), attention, expert in product(
            TRIED if pipeline > 1 else TRIED[:1], attentions, experts
        ):
            if replica > 1 and data * context == 1 and not (config.model.experts and tensor > expert):
                continue
            axes = dict(zip(("pipeline", "replica", "data", "context", "tensor"), degrees, strict=True))
            stages = per_rank if schedule == "interleaved" else None
            choices = {
                "expert": expert,
                "attention": attention,
                "schedule": schedule,
                "stages_per_rank": stages,
            }
            layout = Layout.model_validate({**axes, **choices})
            if not problems_of_layout(config.model, config.data, config.train, layout, devices):
                yield (*degrees, expert, int(attention == "ring"), SCHEDULES.index(schedule), per_rank)


@fewer
@given(config=jobs(), devices=devices_of_jobs, tight=st.sampled_from([1.0, 0.02, 0.01]))
def test_nothing_that_fits_is_quicker_than_the_winner(config: Config, devices: int, tight: float) -> None:
    cluster = _better(small_nodes(), "memory", tight)
    result = search(config, replace(cluster, device=replace(cluster.device, overhead=0.0)), devices)
    assume(len(result.order))
    best = int(result.order[0])
    assert result.fits[best]
    assert set(result.order.tolist()) == set(np.flatnonzero(result.fits).tolist())
    assert winning(result) <= result.total[result.order].min() * (1 + 1e-9)
    others = np.random.default_rng(devices).permutation(result.order)[:20]
    assert all(
        winning(result) <= float(result.prediction(int(place)).total[0]) * (1 + 1e-9) for place in others
    )
    assert float(result.prediction(best).total[0]) == pytest.approx(winning(result), rel=1e-12), (
        "the winner was simulated"
    )


PINS: list[dict[str, Any]] = [
    {"tensor": 2},
    {"pipeline": 2},
    {"pipeline": 4, "schedule": "zbv"},
    {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 4},
    {"pipeline": 2, "schedule": "gpipe"},
    {"context": 2, "attention": "ring"},
    {"context": 2, "attention": "ulysses"},
    {"zero": 1},
    {"zero": 3, "data": 4},
    {"replica": 2, "data": 4},
    {"data": 8},
    {"offload": True},
    {"data": 2, "tensor": 2, "pipeline": 2},
]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_what_the_user_gives_is_kept(pins: dict[str, Any]) -> None:
    result = search(job(DENSE, layout=pins), small_nodes(), 8)
    assert len(result.order)
    for place in result.order:
        layout = result.space.layout(int(place))
        nothing_to_shard = {"zero": 0} if layout.shards == 1 and "zero" in pins and not layout.offload else {}
        assert {name: getattr(layout, name) for name in pins} == {**pins, **nothing_to_shard}
    assert (result.space.world == 8).all()


def test_a_pinned_micro_batch_and_recomputation_are_kept() -> None:
    result = search(job(DENSE, micro_batch=2, recompute="full"), small_nodes(), 8)
    assert set(result.space.micro_batch.tolist()) == {2}
    assert {RECOMPUTE[mode] for mode in result.space.recompute.tolist()} == {"full"}


def test_pinned_experts_are_kept() -> None:
    result = search(job(EXPERTS, layout={"expert": 4}), small_nodes(), 8)
    assert set(result.space.expert.tolist()) == {4}


def test_no_candidate_recomputes_selectively_where_backward_is_split() -> None:
    space = candidates(job(DENSE), 8, {}).space
    assert not (
        splits_backward(space) & np.isin(space.recompute, [RECOMPUTE.index(mode) for mode in BY_OPERATOR])
    ).any()


def test_attention_alone_is_kept_where_it_is_much_of_the_work() -> None:
    modes = {
        length: candidates(job({**DENSE, "max_positions": 65_536}, length=length), 8, {}).space.recompute
        for length in (512, 65_536)
    }
    tried = {length: {RECOMPUTE[mode] for mode in found.tolist()} for length, found in modes.items()}
    assert tried == {512: {"none", "selective", "full"}, 65_536: set(RECOMPUTE)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_share_of_activations_to_keep_is_costed_with_every_schedule_as_training_accepts_it(
    schedule: str,
) -> None:
    config = job(DENSE, layout={"pipeline": 2, "schedule": schedule}, recompute=0.5)  # training accepts it
    assert len(candidates(config, 2, fixed_fields(config)).space)
