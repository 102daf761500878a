"""The plan: open degrees are filled in, the lowest ZeRO stage that fits is taken, the memory formulas are the
published ones."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Config, Layout, Train, from_tables
from shardwise.config.parameters import ModuleParameters
from shardwise.errors import ConfigError
from shardwise.plans import OriginalJob, Plan, choose, fit
from shardwise.plans.memory import state_bytes


def job(**layout: object) -> Config:
    tables = {
        "model": {"preset": "gpt2"},
        "data": {"source": "text.txt"},
        "train": {"precision": "bfloat16"},
        "layout": layout,
    }
    return from_tables(tables)  # type: ignore[arg-type]


def test_data_takes_the_devices_that_are_left() -> None:
    assert choose(job(replica=2), 8).layout.data == 4
    assert choose(job(), 8).layout.world == 8


def test_a_layout_that_does_not_multiply_to_the_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="data 4 = 4 devices, but 8 are there"):
        choose(job(data=4), 8)
    with pytest.raises(ConfigError, match="does not divide 3"):
        choose(job(replica=2), 3)


def test_zero_is_the_lowest_stage_that_fits() -> None:
    parameters = choose(job(), 4).parameters
    assert parameters == 124_439_808
    needed = [choose(job(zero=zero), 4).state_bytes.total for zero in range(4)]
    stages = [choose(job(), 4, memory_bytes=bytes_ / 0.6 + 1).layout.zero for bytes_ in needed]
    assert stages == [0, 1, 1, 3]  # with one micro-batch, ZeRO-1 costs what ZeRO-2 does
    assert choose(job(), 4, memory_bytes=needed[3] * 1.01).layout.zero == 3
    assert choose(job(replica=2), 4, memory_bytes=1e15).layout.zero == 3
    assert choose(job(zero=2), 4, memory_bytes=1e15).layout.zero == 2
    assert choose(job(zero=3, data=1), 1).layout.zero == 0


def test_a_model_whose_states_fit_on_no_device_is_refused_with_what_would_help() -> None:
    with pytest.raises(ConfigError, match="use more devices"):
        choose(job(), 4, memory_bytes=1e6)
    assert choose(job(offload=True), 4, memory_bytes=1e6).layout.zero == 3


def test_what_would_help_a_model_that_is_too_large_is_only_what_does() -> None:
    needed = [choose(job(zero=zero), 4).state_bytes.total for zero in range(4)]

    def said(memory: float, train: dict[str, str] | None = None, devices: int = 4, **layout: object) -> str:
        config = job(**layout)
        train_section = Train.model_validate({"precision": "bfloat16", **(train or {})})
        with pytest.raises(ConfigError) as refusal:
            choose(config.model_copy(update={"train": train_section}), devices, memory_bytes=memory)
        return str(refusal.value).rpartition("; use ")[2]

    assert (
        said(needed[0] - 1, zero=0)
        == "more devices, layout.zero = 1, train.state_dtype = 'bfloat16', or a smaller model"
    )
    assert (
        said(needed[1] - 1, zero=1)
        == "more devices, layout.zero = 3, train.state_dtype = 'bfloat16', or a smaller model"
    )
    assert said(needed[3] - 1, zero=3) == "more devices, train.state_dtype = 'bfloat16', or a smaller model"
    assert said(1e6, zero=0) == "more devices, or a smaller model"
    assert (
        said(1e6, devices=1, zero=3) == "more devices, or a smaller model"
    )  # one device has nothing to shard with
    assert said(1e6, {"state_dtype": "bfloat16"}, zero=3) == "more devices, or a smaller model"
    for precision in ("float32", "float16", "float64"):  # which refuse states in bfloat16
        assert said(needed[3] - 1, {"precision": precision}, zero=3) == "more devices, or a smaller model"


@pytest.mark.parametrize(
    ("precision", "states", "expected"),
    [
        (
            "bfloat16",
            "auto",
            [16, 6 + 12 / 4, 2 + 16 / 4, 16 / 4],
        ),  # Megatron-LM's 18 → 6 + 12/d, FSDP2's 16/N
        ("float32", "auto", [16, 8 + 12 / 4, 4 + 16 / 4, 16 / 4]),
        ("bfloat16", "bfloat16", [8, 6 + 6 / 4, 2 + 8 / 4, 8 / 4]),
        ("float64", "auto", [32, 16 + 24 / 4, 8 + 32 / 4, 32 / 4]),
    ],
)
def test_bytes_a_parameter_are_the_published_ones(precision: str, states: str, expected: list[float]) -> None:
    train = Train.model_validate({"precision": precision, "state_dtype": states})
    config = job().model_copy(update={"train": train})
    layouts = [Layout(data=4, zero=zero) for zero in (0, 1, 2, 3)]
    assert [
        state_bytes(config, layout, 2, parameters=ModuleParameters(1)).total for layout in layouts
    ] == pytest.approx(expected)


@given(devices=st.integers(1, 64), batch=st.integers(1, 512), replica=st.integers(1, 4))
def test_a_plan_covers_the_batch_exactly_or_is_refused(devices: int, batch: int, replica: int) -> None:
    tables = {"data": {"source": "x"}, "train": {"global_batch": batch}, "layout": {"replica": replica}}
    try:
        plan = choose(from_tables(tables), devices)  # type: ignore[arg-type]
    except ConfigError:
        assert devices % replica or batch % devices
    else:
        assert plan.layout.world == devices
        assert plan.layout.data_parallel * plan.accumulation * plan.micro_batch == batch


@pytest.mark.parametrize(
    ("devices", "world", "degrees"),
    [
        (4, 4, {"tensor": 2, "data": 2}),
        (3, 3, {"tensor": 1, "data": 3}),
        (2, 2, {"tensor": 2, "data": 1}),
        (1, 1, {"tensor": 1, "data": 1}),
        (5, 4, {"tensor": 2, "data": 2}),
    ],
)
def test_a_run_that_lost_devices_gets_a_layout_near_the_one_asked_for(
    devices: int, world: int, degrees: dict[str, int]
) -> None:
    asked = from_tables(
        {"data": {"source": "x"}, "train": {"global_batch": 12}, "layout": {"tensor": 2, "data": 2}}
    )
    plan = fit(asked, devices, least=1)
    assert plan is not None
    assert plan.layout.world == world
    assert {axis: getattr(plan.layout, axis) for axis in degrees} == degrees


def test_fewer_devices_than_allowed_give_no_plan() -> None:
    asked = from_tables({"data": {"source": "x"}, "train": {"global_batch": 4}, "layout": {"data": 4}})
    assert fit(asked, 1, least=2) is None
    three = fit(asked, 3, least=1)
    assert three is not None
    assert (three.layout.world, three.layout.data) != (3, 3), "a batch of 4 does not divide by 3"


def whys(plan: Plan) -> dict[str, tuple[object, bool, str]]:
    return {name: (decision.value, decision.asked, decision.why) for name, decision in plan.decisions.items()}


def test_a_plan_says_of_every_setting_whether_it_was_asked_for_or_chosen_and_why() -> None:
    plan = choose(job(tensor=2, zero=1), 8)
    found = whys(plan)
    assert found.keys() == {f"layout.{field}" for field in Layout.model_fields} | {
        "train.micro_batch",
        "train.recompute",
    }
    assert found["layout.tensor"] == (2, True, "as asked")
    assert found["layout.zero"] == (1, True, "as asked")
    assert found["layout.data"] == (4, False, "the devices that the other axes leave")
    assert found["layout.pipeline"] == (1, False, "the default")
    assert found["train.micro_batch"] == (8, False, "a device's whole share of the batch")
    assert (
        plan.chosen()
        == "data 4: the devices that the other axes leave; micro_batch 8: a device's whole share of the batch"
    )


def test_what_comes_out_otherwise_than_asked_is_not_called_asked() -> None:
    alone = whys(choose(job(zero=3, data=1), 1))
    assert alone["layout.zero"] == (
        0,
        False,
        "3 was asked for; nothing to shard: no other device holds the same weights",
    )
    asked = from_tables(
        {"data": {"source": "x"}, "train": {"global_batch": 12}, "layout": {"tensor": 2, "data": 2}}
    )
    three = fit(asked, 3, least=1)
    assert three is not None
    assert whys(three)["layout.tensor"] == (
        1,
        False,
        "2 was asked for; the nearest that works on 3 of 3 devices",
    )
    assert whys(three)["layout.data"][:2] == (3, False)


def test_a_layout_that_a_plan_completes_leaves_nothing_open() -> None:
    layout = choose(job(pipeline=2, context=2, schedule="interleaved"), 8).layout
    assert (layout.data, layout.zero, layout.stages_per_rank, layout.attention) == (2, 0, 2, "ulysses")
    assert layout.stages is not None
    assert (len(layout.stages), sum(layout.stages)) == (4, 12)


@given(
    devices=st.sampled_from([1, 2, 4, 8, 16]),
    layout=st.fixed_dictionaries(
        {},
        optional={
            "pipeline": st.sampled_from([1, 2]),
            "tensor": st.sampled_from([1, 2]),
            "zero": st.integers(0, 3),
        },
    ),
    memory=st.none() | st.floats(1e8, 1e11),
)
def test_a_plan_is_the_same_after_json(devices: int, layout: dict[str, object], memory: float | None) -> None:
    try:
        plan = choose(job(**layout), devices, memory)
    except ConfigError:
        return
    plan = replace(
        plan,
        cluster_file="here.toml",
        predicted={"step_seconds": {"total": 0.1}, "bytes": [{"axis": "data"}]},
    )
    text = json.dumps(plan.to_json())
    assert Plan.from_json(json.loads(text)) == plan
    assert json.dumps(Plan.from_json(json.loads(text)).to_json()) == text


def test_a_micro_batch_that_nobody_asked_for_is_cut_so_that_all_devices_that_are_left_work() -> None:
    open_job = from_tables({"data": {"source": "x"}, "train": {"global_batch": 24}})
    searched = from_tables(
        {"data": {"source": "x"}, "train": {"global_batch": 24, "micro_batch": 6}, "layout": {"data": 4}}
    )
    plan = fit(searched, 3, least=1, asked=OriginalJob(open_job, "planned"))
    assert plan is not None
    assert (plan.layout.data, plan.micro_batch, plan.accumulation) == (3, 4, 2), (
        "6 does not divide a share of 8"
    )
    assert whys(plan)["train.micro_batch"] == (4, False, "the nearest that works on 3 of 3 devices")
    asked_for = fit(searched, 3, least=1, asked=OriginalJob(searched, "planned"))
    assert asked_for is not None
    assert (asked_for.layout.world, asked_for.micro_batch) == (2, 6), "what was asked for stays"


def test_compression_left_to_the_planner_is_none_unless_a_search_chose_it_and_the_plan_says_why() -> None:
    left_open = job(data=4, compression="auto", compression_warmup=20)
    plan = choose(left_open, 4)
    assert (plan.layout.compression, plan.layout.compression_warmup) == (None, 0)
    assert "no search" in plan.decisions["layout.compression"].why
    assert "compression none: no search" in plan.chosen()
    searched = job(data=4, compression="int8", compression_warmup=20)
    plan = choose(searched, 4, asked=OriginalJob(left_open, "planned", {"compression": "2 times quicker"}))
    assert whys(plan)["layout.compression"] == ("int8", False, "2 times quicker")
    assert whys(plan)["layout.compression_warmup"] == (20, True, "as asked")
    plain = choose(job(data=4), 4, asked=OriginalJob(left_open, "planned", {"compression": "would not pay"}))
    assert whys(plain)["layout.compression"] == (None, False, "would not pay")


def test_between_replicas_of_one_device_all_sums_are_compressed() -> None:
    plan = choose(job(replica=2, tensor=2, data=1, compression="int8", compression_axes="replica"), 4)
    assert plan.layout.compression_axes == "all"
    assert not plan.decisions["layout.compression_axes"].asked


def test_workers_that_use_one_copy_of_the_weights_have_the_engine_of_one_device() -> None:
    shared = job(data=2).model_copy(update={"train": Train.model_validate({"driver": "hogwild"})})
    plan = choose(shared, 2)
    assert (plan.engine.name, plan.to_json()["resolved"]["engine"]) == ("single", "single")


@pytest.mark.parametrize(
    ("layout", "experts", "known"),
    [
        ({"data": 1}, 0, True),
        ({"data": 2, "zero": 0}, 0, True),
        ({"data": 2, "zero": 0}, 4, False),
        ({"data": 2, "zero": 1}, 0, False),
        ({"data": 1, "tensor": 2}, 0, False),
        ({"data": 1, "context": 2, "zero": 0}, 0, False),
    ],
)
def test_on_gpus_waits_are_known_only_with_data_alone_unsharded_and_without_experts(
    layout: dict[str, object], experts: int, known: bool
) -> None:
    model = {"preset": "moe-tiny" if experts else "gpt2"}
    tables = {"model": model, "data": {"source": "text.txt"}, "layout": layout}
    config = from_tables(tables)  # type: ignore[arg-type]
    plan = choose(config, config.layout.world)
    assert (plan.waits_are_known("cuda"), plan.waits_are_known("cpu")) == (known, True)
