"""Jobs in float8, as shardwise runs them, against FLOPs and bytes counted by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.config import Model, from_tables
from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.clusters import named
from shardwise.cost.float8_work import LOOKING
from shardwise.cost.footprint import footprint, hold
from shardwise.cost.predict import predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Space, Workload, space_of
from shardwise.cost.traffic import flows
from shardwise.plans.chunks import chunk_tokens
from shardwise.plans.flops import matmul_weights
from shardwise.search.search import workload_of

PEAK = 1e15
H100S = named("h100x8")
DEVICE = replace(
    H100S.device,
    peak={"bfloat16": PEAK, "float8": 2 * PEAK},
    matmul=1.0,
    matmul_float8=1.0,
    matmul_knee=0.0,
    bandwidth=1e12,
    stream=1.0,
)
CLUSTER = replace(H100S, device=DEVICE)

HIDDEN, QUERIES, KEYS, FFN, VOCABULARY = 512, 1024, 256, 2048, 1024
SIZES: dict[str, Any] = {
    "layers": 4, "hidden": HIDDEN, "heads": 8, "kv_heads": 2, "head_dim": 128, "ffn": FFN,
    "vocabulary": VOCABULARY,
}  # fmt: skip
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_ffn": 256}
WITHOUT_EXPERTS = {"float8_leave_out": ["*.experts.*"]}
LENGTH, BATCH = 256, 4
TOKENS = LENGTH * BATCH
WEIGHTS = {  # of a block: (outputs, inputs)
    "query": (QUERIES, HIDDEN),
    "key": (KEYS, HIDDEN),
    "value": (KEYS, HIDDEN),
    "output": (HIDDEN, QUERIES),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
}


def job(model: dict[str, Any] | None = None, **train: Any) -> Workload:
    tables = {
        "model": SIZES | (model or {}),
        "data": {"source": "unused", "sequence_length": LENGTH},
        "train": {"global_batch": BATCH, "precision": "float8", **train},
    }
    return workload_of(from_tables(tables))


def one(**row: int) -> Space:
    return space_of([{"micro_batch": BATCH, **row}])


def matmul_flops(work: Workload) -> float:
    """Seconds of all products at the peak of bfloat16, in FLOPs."""
    return float(predict(work, one(), CLUSTER).seconds["matmul"][0]) * PEAK


def flops(*shapes: tuple[int, int]) -> float:
    return sum(6.0 * rows * columns * TOKENS for rows, columns in shapes)


HEAD = flops((VOCABULARY, HIDDEN))


def test_a_dense_model_takes_half_of_what_its_products_take_in_bfloat16() -> None:
    assert matmul_flops(job(precision="bfloat16")) == pytest.approx(
        6 * matmul_weights(Model(**SIZES)) * TOKENS
    )
    assert matmul_flops(job()) == pytest.approx(3 * matmul_weights(Model(**SIZES)) * TOKENS)


def test_a_head_that_is_left_out_takes_what_it_does_in_bfloat16() -> None:
    assert matmul_flops(job(float8_head=False)) - matmul_flops(job()) == pytest.approx(HEAD / 2)


def test_products_that_are_left_out_take_what_they_do_in_bfloat16() -> None:
    """Of one block all of them, of the others one more."""
    left_out = matmul_flops(job(float8_leave_out=["blocks.0.*", "*.attention.value"])) - matmul_flops(job())
    assert left_out == pytest.approx((flops(*WEIGHTS.values()) + 3 * flops(WEIGHTS["value"])) / 2)


def test_a_router_stays_in_bfloat16_and_grouped_products_reach_less_than_others() -> None:
    attention = 4 * flops(*(WEIGHTS[name] for name in ("query", "key", "value", "output")))
    bfloat16, alone = (
        matmul_flops(job(EXPERTS, precision="bfloat16")),
        matmul_flops(job(EXPERTS, **WITHOUT_EXPERTS)),
    )
    assert bfloat16 - alone == pytest.approx((attention + HEAD) / 2)
    grouped = 4 * flops(*3 * [(EXPERTS["expert_ffn"], HIDDEN)]) * EXPERTS["experts_per_token"]
    assert alone - matmul_flops(job(EXPERTS)) == pytest.approx(grouped * (1 - 0.5 / compute.GROUPED_FLOAT8))


FLOAT32 = replace(CLUSTER, device=replace(DEVICE, peak={**DEVICE.peak, "float32": PEAK / 15}))


def test_a_part_of_a_weight_that_does_not_fit_takes_what_it_does_in_float32() -> None:
    """2064 / 2 = 1032 features are no multiple of 16; the products of attention and the head fit."""
    work, ffn = job({"ffn": 2064}), 3 * flops((2064, HIDDEN))
    fitting = 4 * flops(*(WEIGHTS[name] for name in ("query", "key", "value", "output"))) + HEAD
    whole, half = (float(predict(work, one(tensor=n), FLOAT32).seconds["matmul"][0]) for n in (1, 2))
    assert whole * PEAK == pytest.approx((fitting + 4 * ffn) / 2)
    assert half * PEAK == pytest.approx((fitting / 2 + 4 * ffn * 15) / 2)


@pytest.mark.parametrize(("row", "batch"), [({}, 1), ({"context": 2}, 2)], ids=["alone", "context"])
def test_a_number_of_tokens_that_does_not_fit_takes_what_all_products_do_in_float32(
    row: dict[str, int], batch: int
) -> None:
    """264 tokens are no multiple of 16."""
    work, tokens = replace(job(), sequence_length=264, global_batch=batch), 264
    took = float(predict(work, one(**{"micro_batch": batch, **row}), FLOAT32).seconds["matmul"][0])
    assert took * PEAK == pytest.approx(15 * 6 * matmul_weights(Model(**SIZES)) * tokens)


def test_only_the_last_chunk_of_a_head_does_not_fit() -> None:
    """8200 tokens are a chunk of 4112 and one of 4088, which is no multiple of 16."""
    vocabulary = 131_072
    assert chunk_tokens(8200, vocabulary, 2, "cuda", float8=True) == 4112
    work = replace(job({"vocabulary": vocabulary}), sequence_length=8200)
    took = float(compute.head(work, one(micro_batch=1), FLOAT32, SHARDWISE)[0][0])
    assert took * PEAK == pytest.approx(6 * vocabulary * HIDDEN * (4112 / 2 + 4088 * 15))


def test_the_head_of_another_program_stays_in_bfloat16() -> None:
    theirs = replace(job(), float8=None)
    assert matmul_flops(theirs) - matmul_flops(job()) == pytest.approx(HEAD / 2)


def block_bytes(work: Workload, **row: int) -> tuple[float, float]:
    seconds = compute.block(work, one(**row), CLUSTER, SHARDWISE)
    return float(seconds.elementwise[0]) * 1e12, float(seconds.elementwise_backward[0]) * 1e12


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_kernels_of_a_block_move_what_is_counted_by_hand(stored: str) -> None:
    weights = sum(rows * columns for rows, columns in WEIGHTS.values())
    casts = weights * ({"float32": 4, "bfloat16": 2}[stored] + 1)
    norms, rotary = 9 * 2 * HIDDEN, 2 * 2 * (QUERIES + KEYS)
    # Forward: both norms put out 8 bits; attention's output is read and written; gate and up are read, 8 bits
    # written.
    forward = TOKENS * (norms - 2 * HIDDEN + rotary + 3 * QUERIES + 5 * FFN) + casts
    # Backward: gate, up and a gradient are read, three times 8 bits written; all of it half as long again,
    # for the maxima.
    looking = LOOKING * TOKENS * (2 * norms + 2 * rotary + 9 * FFN)
    copies = sum(2 * (TOKENS * (rows + columns) + rows * columns) for rows, columns in WEIGHTS.values())
    assert block_bytes(job(state_dtype=stored)) == pytest.approx((forward, looking + casts + copies))


def test_dynamic_scales_write_and_read_every_tensor_once_more() -> None:
    delayed, dynamic = block_bytes(job()), block_bytes(job(float8_scaling="dynamic"))
    inputs = HIDDEN + QUERIES + HIDDEN + FFN
    gradients = QUERIES + 2 * KEYS + HIDDEN + 2 * FFN + HIDDEN
    assert np.subtract(dynamic, delayed) == pytest.approx([4 * TOKENS * inputs, 4 * TOKENS * gradients])


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if SCHEDULE_FACTS[name].splits_backward])
def test_blocks_that_are_not_compiled_move_far_more(schedule: str) -> None:
    row = {"pipeline": 2, "accumulation": 4, "stages_per_rank": 2, "schedule": SCHEDULES.index(schedule)}
    plain = {**row, "schedule": SCHEDULES.index("interleaved")}
    assert sum(block_bytes(job(), **row)) > 2 * sum(block_bytes(job(), **plain))
    bfloat16 = job(precision="bfloat16")
    assert block_bytes(bfloat16, **row) == block_bytes(bfloat16, **plain), (
        "in bfloat16 they are compiled in any case"
    )


def memory(work: Workload, cluster: Cluster = CLUSTER, **row: int) -> dict[str, float]:
    space = one(**row)
    parts = footprint(work, space, cluster, SHARDWISE, hold(work, space, SHARDWISE))
    return {name: float(value[0]) for name, value in parts.items()}


def test_a_block_keeps_what_stands_before_the_norms_and_goes_into_attention_and_activation() -> None:
    """Residual stream twice; queries, keys, values and attention's output; gate and up. The model's input
    once."""
    values = 4 * (2 * HIDDEN + QUERIES + 2 * KEYS + QUERIES + 2 * FFN) + HIDDEN
    assert memory(job())["activations"] == pytest.approx(2 * TOKENS * values)
    in_bfloat16 = memory(job(precision="bfloat16"))["activations"]
    assert in_bfloat16 == pytest.approx(2 * TOKENS * (values + 4 * (2 * HIDDEN + FFN)))
    assert memory(job(compile=False))["activations"] == in_bfloat16


def test_only_what_no_other_product_needs_is_made_anew() -> None:
    """A norm's output is kept where one of three products is not in float8; before experts, where the router
    needs it."""
    kept = memory(job())["activations"]
    assert memory(job(float8_leave_out=["*.value"]))["activations"] - kept == pytest.approx(
        4 * 2 * TOKENS * HIDDEN
    )
    assert memory(job(float8_leave_out=["*.down"]))["activations"] - kept == pytest.approx(
        4 * 2 * TOKENS * FFN
    )
    of_experts = (
        memory(job(EXPERTS, precision="bfloat16"))["activations"] - memory(job(EXPERTS))["activations"]
    )
    assert of_experts == pytest.approx(4 * 2 * TOKENS * HIDDEN)


def test_weights_are_not_kept_in_bfloat16_too() -> None:
    assert memory(job(precision="bfloat16"))["gathered"] > 0
    assert memory(job())["gathered"] == 0
    assert memory(job(float8_head=False))["gathered"] == 2 * VOCABULARY * HIDDEN


def test_weights_are_cast_once_for_all_micro_batches_of_a_step() -> None:
    """And kept in 8 bits both ways round; not where they are sharded, nor where there is one micro-batch."""
    weights = sum(rows * columns for rows, columns in WEIGHTS.values())
    alone, four = block_bytes(job()), block_bytes(job(), accumulation=4)
    assert alone[0] - four[0] == pytest.approx(3 / 4 * 5 * weights)
    assert alone[1] - four[1] == pytest.approx(5 * weights + 3 / 4 * 2 * weights)
    held, sharded = (
        {n: memory(job(), accumulation=n, **row)["gathered"] for n in (1, 2)}
        for row in ({}, {"data": 2, "zero": 3})
    )
    assert held[2] - held[1] == pytest.approx(2 * 4 * weights)
    assert sharded[2] == pytest.approx(sharded[1])


@pytest.mark.parametrize(("batch", "chunks"), [(4, 1), (16, 2)], ids=["one chunk", "several"])
def test_the_head_holds_the_larger_of_two_moments(batch: int, chunks: int) -> None:
    """Logits with their gradient; or the gradient, its copy and a product in float32. Beside them
    the weight in 8 bits twice, and in bfloat16."""
    vocabulary, length = 131_072, 1024
    work = replace(job({"vocabulary": vocabulary}), sequence_length=length)
    tokens, weight = batch * length, vocabulary * HIDDEN
    chunk = chunk_tokens(tokens, vocabulary, 2, "cuda", float8=True)
    assert tokens == chunks * chunk
    expected = max(3 * chunk * vocabulary, 2 * chunk * vocabulary + 4 * weight) + 4 * weight
    assert memory(work, micro_batch=batch)["logits"] == pytest.approx(expected)
    small = memory(work, micro_batch=1)["logits"]
    assert small == pytest.approx(
        max(3 * length * vocabulary, 2 * length * vocabulary + 4 * weight) + 4 * weight
    )


@pytest.mark.parametrize(
    ("row", "stages", "on_rank_0"),
    [
        ({}, None, (0, 1, 2, 3)),
        ({"pipeline": 2}, (2, 2), (0, 1)),
        (
            {"pipeline": 2, "stages_per_rank": 2, "schedule": SCHEDULES.index("interleaved")},
            (1, 1, 1, 1),
            (0, 2),
        ),
        ({"pipeline": 2, "stages_per_rank": 2, "schedule": SCHEDULES.index("zbv")}, (1, 1, 1, 1), (0, 3)),
    ],
    ids=["alone", "1f1b", "interleaved", "in a V"],
)
def test_each_block_gathers_its_own_weights_in_8_bits_whatever_other_blocks_leave_out(
    row: dict[str, int], stages: tuple[int, ...] | None, on_rank_0: tuple[int, ...]
) -> None:
    """Block 0 leaves out all products, block 2 one of them: the other weights are gathered in 8 bits."""
    weights = sum(rows * columns for rows, columns in WEIGHTS.values())
    narrow = {0: 0, 1: weights, 2: weights - KEYS * HIDDEN, 3: weights}
    ends = (
        HIDDEN + 2 * VOCABULARY * HIDDEN if 3 in on_rank_0 else VOCABULARY * HIDDEN
    )  # embedding, norm, head
    numbers = len(on_rank_0) * (weights + 2 * HIDDEN) + ends
    in_8_bits = sum(narrow[block] for block in on_rank_0) + (VOCABULARY * HIDDEN if 3 in on_rank_0 else 0)
    work = replace(job(float8_leave_out=["blocks.0.*", "blocks.2.attention.value"]), stages=stages)
    sent = flows(work, one(data=2, zero=1, accumulation=2, **row), SHARDWISE, "cuda")
    assert sum(float(flow.bytes[0]) for flow in sent if flow.kind == "all_gather") == 2 * numbers - in_8_bits


def test_devices_that_share_a_vocabulary_meet_once_for_each_of_the_larger_chunks() -> None:
    work = replace(job({"vocabulary": 131_072}), sequence_length=8192)
    space = one(tensor=2)
    calls = [
        sum(
            float(flow.count[0])
            for flow in flows(each, space, SHARDWISE, "cuda")
            if flow.kind == "all_reduce" and flow.when == "ends"
        )
        for each in (work, replace(work, precision="bfloat16", float8=None, scales=0, cast=()))
    ]
    tokens = BATCH * 8192
    chunks = [math.ceil(tokens / chunk_tokens(tokens, 65_536, 2, "cuda", narrow)) for narrow in (True, False)]
    assert chunks == [2, 8]
    assert calls == [2 * count for count in chunks]
