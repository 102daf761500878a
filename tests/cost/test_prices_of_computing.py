"""Priced seconds of computing against counted FLOPs, on a device that reaches its peak and moves memory in no
time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.config import Model
from shardwise.config.parameters import count
from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES
from shardwise.cost import compute
from shardwise.cost.clusters import named
from shardwise.cost.footprint import hold
from shardwise.cost.predict import predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import RECOMPUTE, Workload, space_of
from shardwise.plans.flops import flops_per_token, matmul_weights

PEAK = 1e15
H100S = named("h100x8")
DEVICE = replace(
    H100S.device,
    peak={"bfloat16": PEAK},
    matmul=1.0,
    matmul_knee=0.0,
    attention=1.0,
    attention_knee=0.0,
    bandwidth=1e30,
    launch=0.0,
)
IDEAL = replace(H100S, device=DEVICE)

DENSE = Model(layers=4, hidden=512, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocabulary=1024)
EXPERTS = Model(
    layers=4, hidden=512, heads=8, kv_heads=2, head_dim=128, ffn=2048, vocabulary=1024,
    experts=8, experts_per_token=2, expert_ffn=256, shared_experts=1,
)  # fmt: skip
LENGTH, BATCH = 256, 4
TOKENS = LENGTH * BATCH


def seconds(model: Model, **row: int) -> dict[str, float]:
    space = space_of([{"micro_batch": BATCH, **row}])
    return {
        name: float(value[0])
        for name, value in predict(Workload(model, LENGTH, BATCH), space, IDEAL).seconds.items()
    }


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_matrices_take_what_their_flops_take_at_the_peak(model: Model, tensor: int) -> None:
    assert seconds(model, tensor=tensor)["matmul"] * PEAK * tensor == pytest.approx(
        6 * matmul_weights(model) * TOKENS
    )


@pytest.mark.parametrize("model", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_recomputing_blocks_takes_their_forward_again_but_for_the_last_product_and_what_is_kept(
    model: Model,
) -> None:
    """A third of all FLOPs are forward's; the head is not recomputed, nor what ends a block, whose output
    nobody asks for."""
    head = model.vocabulary * model.hidden
    last = (
        model.layers
        * model.hidden
        * (model.experts_per_token * model.expert_width if model.experts else model.ffn)
    )
    forward = flops_per_token(model, LENGTH) / 3 - 2 * head
    took = seconds(model, recompute=RECOMPUTE.index("full"))["recompute"]
    assert took * PEAK == pytest.approx((forward - 2 * last) * TOKENS)
    assert seconds(model)["recompute"] == 0
    products = (
        model.layers * beside_experts(model) * model.hidden
        if model.experts
        else matmul_weights(model) - head - last
    )
    took = seconds(model, recompute=RECOMPUTE.index("all-but-attention"))["recompute"]
    assert took * PEAK == pytest.approx(2 * products * TOKENS), "all but attention and what routed experts do"


def beside_experts(model: Model) -> int:
    """Queries, keys, values, and gate and up of shared experts, each from the hidden states. Attention and
    shared experts are recomputed by themselves, and the last product of each is not made again."""
    return (model.heads + 2 * model.kv_heads) * model.head_dim + 2 * model.shared_experts * model.expert_width


def test_sharded_states_are_updated_in_parts() -> None:
    device = replace(DEVICE, bandwidth=1e12, stream=1.0)
    space = space_of([{"data": 4, "zero": zero} for zero in range(4)])
    whole, *parts = predict(Workload(DENSE, LENGTH, BATCH), space, replace(IDEAL, device=device)).seconds[
        "optimizer"
    ]
    assert parts == pytest.approx([whole / 4] * 3)
    least = (4 + 4 + 8) + (4 + 8)  # weight, gradient and two moments read, all but the gradient written
    assert least <= whole * 1e12 / count(DENSE) <= 1.5 * least


@pytest.mark.parametrize("setting", ["auto", True, False])
def test_the_update_of_bfloat16_states_has_a_kernel_on_every_gpu_and_on_no_cpu(setting: str | bool) -> None:
    """Ten numbers of two bytes: weight, gradient and two moments read, all but the gradient written, and
    three for the norm. Without a kernel torch's operators move 500 bytes."""
    device = replace(DEVICE, bandwidth=1e12, stream=1.0)
    for cluster, moved in (
        (replace(IDEAL, device=device), 20),
        (replace(IDEAL, device=device, shared=True, devices_per_node=1), 500),
    ):
        work = Workload(DENSE, LENGTH, BATCH, state_dtype="bfloat16", compile=setting)
        took = predict(work, space_of([{"micro_batch": BATCH}]), cluster).seconds["optimizer"][0]
        assert float(took) * 1e12 / count(DENSE) == pytest.approx(moved, rel=1e-3)


@pytest.mark.parametrize("shared", [False, True], ids=["GPU", "CPU"])
@pytest.mark.parametrize("setting", ["auto", True, False])
def test_blocks_that_are_not_compiled_move_more_on_every_device(setting: str | bool, shared: bool) -> None:
    """Values per token as counted in cost/compute.py, for h = 512, (a + k) d = 1280, f = 2048."""
    device = replace(DEVICE, bandwidth=1e12, stream=1.0)
    cluster = replace(IDEAL, device=device, shared=shared, devices_per_node=1)
    work = Workload(DENSE, LENGTH, BATCH, compile=setting)
    block = compute.block(work, space_of([{"micro_batch": BATCH}]), cluster, SHARDWISE)
    values = float(block.elementwise[0]) * 1e12 / (2 * TOKENS)
    compiled, eager = 9 * 512 + 2 * 1280 + 3 * 2048, 20 * 512 + 9 * 1280 + 5 * 2048
    is_compiled = setting is True or (setting == "auto" and not shared)
    assert values == pytest.approx(compiled if is_compiled else eager, rel=1e-9 if is_compiled else 0.05)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if SCHEDULE_FACTS[name].splits_backward])
@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_that_stay_whole_are_added_up_whole_whatever_the_stage(schedule: str, zero: int) -> None:
    """Where backward is split, FSDP2 reduces nothing before the step ends: 10 bytes move for each number on
    the device."""
    rows = {
        name: {"pipeline": 2, "data": 4, "accumulation": 8, "schedule": SCHEDULES.index(name)}
        for name in (schedule, "1f1b")
    }
    slow = replace(IDEAL, device=replace(DEVICE, bandwidth=1e9, stream=1.0))
    work = Workload(DENSE, LENGTH, 4 * 8 * BATCH)

    def elementwise(stage: int) -> list[float]:
        space = space_of(
            [
                {**row, "zero": stage, "stages_per_rank": SCHEDULE_FACTS[name].stages_per_rank}
                for name, row in rows.items()
            ]
        )
        return [float(value) for value in predict(work, space, slow).seconds["elementwise"]]

    (split, plain), (split_one, plain_one) = elementwise(zero), elementwise(1)
    assert split == pytest.approx(split_one, rel=1e-12)
    held = hold(work, space_of([{**rows["1f1b"], "zero": 1}]), SHARDWISE)
    saved = 10.0 * 8 * float(held.parameters[0] - held.sharded[0]) / 1e9
    assert plain_one - plain == pytest.approx(saved, rel=1e-9), "without a split only a shard is added up"
