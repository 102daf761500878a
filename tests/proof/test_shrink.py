"""A shrunk job is small, valid, and has the structure of the job it stands for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.config import AXES, PRESETS, Config, context_attention, from_tables, read, to_toml
from shardwise.config.parameters import count
from shardwise.data import Dataset, check_vocabulary
from shardwise.plans import choose, make_schedule, stage_blocks
from shardwise.proof.proof_job import prepare_proof
from shardwise.proof.shrink import shrink

KEPT = {
    "model": ("norm", "positions", "qk_norm", "window_layers", "activation", "bias", "tied", "router",
    "normalise_routing",
              "balance_loss", "balance_bias", "router_z_loss", "rope_theta", "rope_scale"),
    "data": ("reset_attention", "held_out"),
    "train": ("recompute", "precision", "clip", "seed", "schedule"),
    "optimizer": ("name", "betas", "weight_decay"),
    "layout": ("zero", "schedule", "stages_per_rank", "offload"),
}  # fmt: skip
LLAMA_70B = {"preset": "llama3-70b"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("text")


def job(model: dict[str, Any], layout: dict[str, Any], length: int = 4096, **train: Any) -> Config:
    data = {"source": "/nowhere/tokens", "sequence_length": length}
    return from_tables(
        {"model": model, "layout": layout, "data": data, "train": {"global_batch": 64, **train}}
    )


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Degrees that fit each other: experts borrow whole axes, innermost first, and then a part of the
    next."""
    degrees = {
        axis: draw(st.sampled_from((1, 1, 2, 3, 4, 8)))
        for axis in ("pipeline", "replica", "data", "context", "tensor")
    }
    tensor, context, data = degrees["tensor"], degrees["context"], degrees["data"]
    whole, size = draw(st.sampled_from([(1, tensor), (tensor, context), (tensor * context, data)]))
    part = draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb1p", "zbv", "dualpipev"]))
    return {
        **degrees,
        "expert": whole * part,
        "schedule": schedule,
        "zero": draw(st.sampled_from((None, 0, 1, 2, 3))),
    }


@st.composite
def models(draw: st.DrawFn, layout: dict[str, Any]) -> dict[str, Any]:
    """A shape of the large presets or of random numbers, with heads and experts that the layout can deal
    out."""
    base = dict(PRESETS[draw(st.sampled_from(sorted(PRESETS)))])
    tensor, stages = (
        layout["tensor"],
        layout["pipeline"] * (2 if layout["schedule"] in ("interleaved", "zbv", "dualpipev") else 1),
    )
    shared = [number for number in range(1, tensor + 1) if tensor % number == 0]
    kv_heads = draw(st.one_of(st.sampled_from(shared), st.integers(1, 8).map(lambda number: tensor * number)))
    base["kv_heads"] = kv_heads
    base["heads"] = math.lcm(kv_heads, tensor) * draw(st.integers(1, 8))
    base["layers"] = stages + draw(st.integers(0, 60))
    if draw(st.booleans()):
        base.update(
            hidden=draw(st.integers(40, 3000)),
            ffn=draw(st.integers(40, 9000)),
            vocabulary=draw(st.integers(257, 90000)),
        )
    if base.get("experts") or (layout["expert"] > 1 and base.get("activation", "swiglu") == "swiglu"):
        experts = layout["expert"] * draw(st.integers(1, 12))
        chosen = draw(st.integers(1, min(experts, 8)))
        base.update(experts=experts, experts_per_token=chosen, shared_experts=draw(st.integers(0, 3)))
        base["normalise_routing"] = chosen > 1
    else:
        layout["expert"] = 1
    base["max_positions"] = max(base["max_positions"], 8192)
    return base


@st.composite
def jobs(draw: st.DrawFn) -> Config:
    layout = draw(layouts())
    model = draw(models(layout))
    rings = model.get("window") is None and model.get("attention_softcap") is None  # else a ring cannot
    if not rings:
        model["heads"] *= layout["context"]
    if model["heads"] // layout["tensor"] % layout["context"] == 0:
        layout["attention"] = draw(st.sampled_from(["auto", "ulysses", *(["ring"] if rings else [])]))
    unit = 2 * layout["context"] * layout["tensor"]
    rows, micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    batch = rows * micro_batches * layout["replica"] * layout["data"]
    micro_batch = {"micro_batch": rows} if micro_batches > 1 or draw(st.booleans()) else {}
    length = unit * max(1, draw(st.integers(32, 4096)) // unit)
    return job(
        model,
        layout,
        length,
        global_batch=batch,
        recompute=draw(st.sampled_from(["none", "full"])),
        **micro_batch,
    )


def axes_above_one(config: Config) -> list[str]:
    return [axis for axis in AXES if getattr(config.layout, axis) > 1]


def micro_batches(config: Config) -> int:
    return choose(config, config.layout.world).accumulation


def stages(config: Config) -> int:
    layout = config.layout
    if layout.pipeline == 1:
        return 1
    return make_schedule(layout.schedule, layout.pipeline, 1, layout.stages_per_rank).stages


ANY_JOB = settings(
    max_examples=examples(60),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@ANY_JOB
@given(config=jobs())
def test_a_shrunk_job_is_valid_small_and_shrinks_no_further(config: Config, folder: Path) -> None:
    small, changed = shrink(config, folder=folder)
    (folder / "job.toml").write_text(to_toml(small))
    assert read(folder / "job.toml") == small
    most = max(16, 2 ** len([axis for axis in axes_above_one(config) if axis != "expert"]))
    assert small.layout.world <= most
    assert count(small.model) <= 2_000_000
    assert small.train.global_batch * small.data.sequence_length <= 2**17
    assert choose(small, small.layout.world).layout.world == small.layout.world
    assert changed is None or changed.keys() == {
        f"{section}.{key}" for section in ("model", "data", "train", "layout") for key,
        value in getattr(config, section)
        if value != getattr(getattr(small, section), key)
    }  # fmt: skip
    assert shrink(small, folder=folder) == (small, None)


@ANY_JOB
@given(config=jobs())
def test_every_axis_stays_and_every_choice_stays(config: Config, folder: Path) -> None:
    small, _ = shrink(config, folder=folder)
    assert axes_above_one(small) == axes_above_one(config)
    for section, names in KEPT.items():
        for name in names:
            assert getattr(getattr(small, section), name) == getattr(getattr(config, section), name), name
    assert all(getattr(small.layout, axis) <= getattr(config.layout, axis) for axis in AXES)


@ANY_JOB
@given(config=jobs())
def test_heads_keep_their_grouping_and_can_be_dealt_out(config: Config, folder: Path) -> None:
    small, _ = shrink(config, folder=folder)
    model, tensor, context = small.model, small.layout.tensor, small.layout.context
    assert model.heads % model.kv_heads == 0
    assert model.heads % tensor == 0
    assert model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    assert (model.kv_heads == model.heads) == (config.model.kv_heads == config.model.heads)
    assert (model.kv_heads < tensor) == (config.model.kv_heads < config.layout.tensor)
    assert (model.kv_heads == tensor > 1) == (config.model.kv_heads == config.layout.tensor > 1)
    if config.model.kv_heads >= config.layout.tensor > 1 or config.layout.tensor == 1:
        assert (model.kv_heads == 1) == (config.model.kv_heads == 1)
    if context > 1:
        assert context_attention(model, small.layout) == context_attention(config.model, config.layout)


@ANY_JOB
@given(config=jobs())
def test_experts_keep_their_kind_and_borrow_from_the_same_axes(config: Config, folder: Path) -> None:
    small, _ = shrink(config, folder=folder)
    old, new = config.model, small.model
    assert (new.experts > 0, new.shared_experts > 0) == (old.experts > 0, old.shared_experts > 0)
    if new.experts:
        assert new.experts % small.layout.expert == 0
        assert 1 <= new.experts_per_token <= new.experts
        ranks = small.layout.tensor * small.layout.context * small.layout.data
        assert ranks % small.layout.expert == 0


@ANY_JOB
@given(config=jobs())
def test_uneven_splits_stay_uneven_and_even_ones_even(config: Config, folder: Path) -> None:
    small, _ = shrink(config, folder=folder)
    assert (small.model.layers % stages(small) == 0) == (config.model.layers % stages(config) == 0)
    assert (small.model.layers == stages(small)) == (config.model.layers == stages(config))
    assert sum(stage_blocks(small.model, small.data.sequence_length, stages(small))) == small.model.layers
    for field in ("vocabulary", "ffn"):
        sizes = getattr(small.model, field), getattr(config.model, field)
        if field == "vocabulary" or config.model.shared_experts < 2:
            assert (sizes[0] % small.layout.tensor == 0) == (sizes[1] % config.layout.tensor == 0), field
    assert small.data.sequence_length % (small.layout.tensor * small.layout.context) == 0
    assert small.data.sequence_length <= small.model.max_positions


@ANY_JOB
@given(config=jobs())
def test_micro_batches_keep_their_relation_to_the_pipeline(config: Config, folder: Path) -> None:
    small, _ = shrink(config, folder=folder)
    assert (micro_batches(small) == 1) == (micro_batches(config) == 1)
    assert (micro_batches(small) > small.layout.pipeline) == (micro_batches(config) > config.layout.pipeline)
    assert (small.train.micro_batch is None) == (config.train.micro_batch is None)


def test_the_70b_job_on_128_devices_becomes_one_of_16_processes_with_a_kv_head_on_each_tensor_device(
    folder: Path,
) -> None:
    layout = {"pipeline": 4, "data": 2, "context": 2, "tensor": 8}
    small, changed = shrink(job(LLAMA_70B, layout, 8192, micro_batch=1), folder=folder)
    found = small.layout
    assert (found.pipeline, found.replica, found.data, found.context, found.tensor) == (2, 1, 2, 2, 2)
    assert small.model.kv_heads == found.tensor < small.model.heads
    assert count(small.model) < 100_000
    assert changed is not None
    assert changed["layout.tensor"] == (8, 2)
    assert changed["model.hidden"] == (8192, small.model.hidden)
    assert changed["data.source"][0] == "/nowhere/tokens"
    assert "layout.data" not in changed


def test_a_small_job_whose_data_are_here_is_left_alone(corpus: str, folder: Path) -> None:
    config = from_tables(
        {"model": {"preset": "bytes-400k"}, "data": {"source": corpus}, "layout": {"tensor": 2, "data": 2}}
    )
    assert shrink(config, folder=folder) == (config, None)


def test_a_large_job_keeps_its_own_data_if_they_are_bytes(corpus: str, folder: Path) -> None:
    config = from_tables(
        {"model": {"preset": "bytes-10m"}, "data": {"source": corpus}, "layout": {"data": 4}}
    )
    small, changed = shrink(config, folder=folder)
    assert small.data.source == corpus
    assert changed is not None


def test_a_small_job_without_its_data_changes_nothing_but_the_data(folder: Path) -> None:
    data = {"source": "/nowhere/x", "tokenizer": "/nowhere/tokenizer.json", "reset_attention": True}
    config = from_tables(
        {"model": {"preset": "moe-tiny", "vocabulary": 201}, "data": data, "layout": {"tensor": 2, "data": 2}}
    )
    small, changed = shrink(config, folder=folder)
    assert changed is not None
    assert changed.keys() == {"data.source", "data.tokenizer", "model.vocabulary"}
    assert small.model.vocabulary >= 257
    assert small.model.vocabulary % 2  # 201 ids do not divide over two devices either
    rows = (dataset := Dataset.open(small.data, 0)).sequences(0, 4)
    check_vocabulary(dataset, small.model.vocabulary)
    assert rows.documents is not None
    assert rows.documents.max() > 1


def test_a_job_that_learns_answers_is_proven_on_answers(folder: Path) -> None:
    (folder / "chat.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'
    )
    data = {
        "source": str(folder / "chat.jsonl"),
        "tokenizer": "/nowhere/tokenizer.json",
        "sequence_length": 16,
    }
    config = from_tables({"model": {"preset": "moe-tiny"}, "data": data, "layout": {"tensor": 2, "data": 2}})
    dataset = Dataset.open(shrink(config, folder=folder)[0].data, 0)
    rows = dataset.sequences(0, 50)
    assert dataset.reset_attention
    assert 0 < rows.valid < rows.targets.size


def test_a_job_on_whatever_devices_there_are_is_proven_on_two(folder: Path) -> None:
    small, changed = shrink(job({"preset": "llama3-8b"}, {}), folder=folder)
    assert changed is not None
    assert changed["layout.data"] == (-1, 2)
    assert small.layout.world == 2


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [((20, 20, 20, 20), (1, 1)), ((18, 21, 21, 20), (1, 2)), ((20, 22, 18, 20), (1, 2))],
)
def test_stages_by_hand_stay_by_hand(
    blocks: tuple[int, ...], expected: tuple[int, ...], folder: Path
) -> None:
    small, changed = shrink(job(LLAMA_70B, {"pipeline": 4, "data": 2, "stages": blocks}), folder=folder)
    assert small.layout.stages == expected
    assert small.model.layers == sum(expected)
    assert changed is not None
    assert changed["layout.stages"] == (blocks, expected)


def test_uneven_depth_is_shown_on_few_layers(folder: Path) -> None:
    uneven, _ = shrink(job({"preset": "llama3-8b", "layers": 61}, {"pipeline": 4, "data": 1}), folder=folder)
    even, _ = shrink(job({"preset": "llama3-8b", "layers": 80}, {"pipeline": 4, "data": 1}), folder=folder)
    assert (uneven.model.layers, even.model.layers) == (5, 4)


def test_fewer_kv_heads_than_tensor_devices_stay_grouped_where_the_processes_suffice(folder: Path) -> None:
    model = {"preset": "qwen3-30b-a3b"}
    roomy, _ = shrink(job(model, {"data": 2, "tensor": 8}), folder=folder)
    tight, _ = shrink(job(model, {"pipeline": 2, "data": 2, "context": 2, "tensor": 8}), folder=folder)
    assert (roomy.model.kv_heads, roomy.layout.tensor, roomy.layout.world) == (2, 4, 8)
    assert (tight.model.kv_heads, tight.layout.tensor, tight.layout.world) == (1, 2, 16)


@pytest.mark.parametrize(("window", "cuts"), [(512, True), (4096, False), (4095, True)])
def test_a_window_that_cuts_the_sequence_still_does(window: int, cuts: bool, folder: Path) -> None:
    small, _ = shrink(
        job({"preset": "mistral-7b", "window": window}, {"context": 2, "tensor": 2, "data": 1}), folder=folder
    )
    assert small.model.window is not None
    assert (1 < small.model.window < small.data.sequence_length) == cuts
    assert context_attention(small.model, small.layout) == "ulysses"


@pytest.mark.parametrize(("batch", "data"), [(8, 2), (7, 1)])
def test_an_open_data_axis_is_the_same_for_a_small_job_and_a_shrunk_one(
    batch: int, data: int, corpus: str, folder: Path
) -> None:
    large = job({"preset": "llama3-8b"}, {}, global_batch=batch)
    small = from_tables(
        {
            "model": {"preset": "bytes-400k"},
            "data": {"source": corpus, "sequence_length": 32},
            "train": {"global_batch": batch},
        }
    )
    assert shrink(large, folder=folder)[0].layout.data == data
    assert prepare_proof(small, 1, "float64")[0].plan.layout.data == data
