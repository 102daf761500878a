"""Proofs in float8: with the scales of one device, a layout computes its numbers to the rounding of
float64."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import from_tables
from shardwise.proof.prove import prove

MODEL = {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 48, "vocabulary": 259}
EXPERTS = {"layers": 2, "experts": 4, "experts_per_token": 2, "expert_ffn": 32, "shared_experts": 1}


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (EXPERTS, {"tensor": 2, "data": 2, "expert": 2, "zero": 3}),
        *(
            pytest.param(model, layout, marks=pytest.mark.full)
            for model, layout in (
                ({}, {"pipeline": 2, "context": 2}),
                ({}, {"tensor": 2, "data": 2, "zero": 3}),
                ({}, {"data": 2, "zero": 0}),
                ({}, {"data": 2, "zero": 1}),
                ({}, {"data": 2, "zero": 2}),
                ({}, {"replica": 2, "data": 2, "zero": 3}),
                ({}, {"context": 2, "attention": "ring"}),
                ({}, {"context": 2, "attention": "ulysses"}),
                ({}, {"pipeline": 2, "data": 2}),
                ({}, {"pipeline": 2, "schedule": "zb1p"}),
                ({}, {"pipeline": 2, "schedule": "zbv"}),
                (EXPERTS, {"data": 2, "zero": 3}),
                (EXPERTS, {"data": 2, "expert": 2, "zero": 3}),
                (EXPERTS, {"data": 4, "expert": 2, "zero": 2}),
                (EXPERTS, {"tensor": 2}),
                (EXPERTS, {"tensor": 2, "expert": 2}),
                (EXPERTS, {"tensor": 2, "data": 2, "zero": 3}),
                (EXPERTS, {"pipeline": 2, "schedule": "zb1p"}),
            )
        ),
    ],
    ids=str,
)
def test_a_layout_in_float8_is_one_device_in_float8(
    corpus: str, model: dict[str, Any], layout: dict[str, Any]
) -> None:
    config = from_tables(
        {
            "model": {**MODEL, **model},
            "data": {"source": corpus, "sequence_length": 32},
            "train": {"global_batch": 8, "micro_batch": 2, "precision": "float8", "learning_rate": 0.01},
            "layout": {"data": 1, **layout},
        }
    )
    found = prove(config, steps=3)
    assert found.proof.config.train.precision == "float8"
    assert found.verdict.passes, found.to_json()["worst"]
    assert found.to_json()["worst"]["relative_error"] < 1e-12
