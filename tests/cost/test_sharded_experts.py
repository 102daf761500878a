"""Experts whose only sharers are tensor devices: what ZeRO does to them is in the memory and the seconds of a
step."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.config import Model
from shardwise.cost.clusters import named
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Workload, space_of

MODEL = Model(
    layers=2,
    hidden=64,
    heads=16,
    kv_heads=4,
    head_dim=4,
    ffn=128,
    vocabulary=256,
    experts=8,
    experts_per_token=2,
)
EXPERTS = 8 * 3 * 128 * 64
DENSE = (
    (64 * 64 + 2 * 64 * 16 + 64 * 64) // 4 + 2 * 64 + 8 * 64
)  # a quarter of each matrix; norms and the router whole
EDGES = 2 * 256 * 64 // 4 + 64


def predicted(zero: int, micro_batches: int = 4) -> Prediction:
    """On four tensor devices, each of which has all experts but for ZeRO."""
    space = space_of([{"tensor": 4, "zero": zero, "accumulation": micro_batches}])
    return predict(Workload(MODEL, 64, 8), space, named("h100x8"))


def test_under_zero_3_a_device_has_the_units_in_use_gathered_and_no_copies_of_the_rest() -> None:
    gathered = float(predicted(3).memory["gathered"][0])
    assert gathered == pytest.approx(SHARDWISE.fragmentation * 2 * 3 * (EXPERTS + DENSE))
    assert float(predicted(0).memory["gathered"][0]) == pytest.approx(
        SHARDWISE.fragmentation * SHARDWISE.cast_held * (2 * (EXPERTS + DENSE) + EDGES)
    )


def test_from_zero_2_on_gradients_are_reduced_in_buffers_of_the_largest_unit() -> None:
    buffers = [float(predicted(zero).memory["buffers"][0]) for zero in range(4)]
    assert buffers[0] == buffers[1]
    assert (
        buffers[2]
        == buffers[3]
        == pytest.approx(buffers[0] + SHARDWISE.fragmentation * (4 + 2) * (EXPERTS + DENSE))
    )


def test_what_is_sharded_is_added_up_in_parts_and_cast_once() -> None:
    elementwise = [float(predicted(zero).seconds["elementwise"][0]) for zero in range(4)]
    assert elementwise[0] > elementwise[1] > elementwise[2] == elementwise[3], "no casts, then shards alone"


def test_a_model_without_experts_is_sharded_over_nobody_there() -> None:
    dense = MODEL.model_copy(update={"experts": 0, "experts_per_token": 0})
    space = space_of([{"tensor": 4, "zero": zero, "accumulation": 4} for zero in range(4)])
    memory = predict(Workload(dense, 64, 8), space, named("h100x8")).memory
    assert all(np.ptp(kind) == 0 for kind in memory.values())
