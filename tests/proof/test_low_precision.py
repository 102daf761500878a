"""Proofs in bfloat16, on data in which nearly all tokens are the same: no sum over tokens is made in eight
bits on any axis."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import FAMILIES

from shardwise.config import from_tables
from shardwise.proof.prove import prove

LENGTH = 128


@pytest.fixture(scope="module")
def frequent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine bytes in ten are spaces."""
    draw, path = random.Random(0), tmp_path_factory.mktemp("frequent") / "text.txt"
    path.write_text(
        "".join(
            " " if draw.random() < 0.9 else draw.choice("abcdefghijklmnopqrstuvwxyz\n") for _ in range(20_000)
        )
    )
    return path


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt", {"data": 2, "zero": 3}),
        *(
            pytest.param(family, layout, marks=pytest.mark.full)
            for family, layout in (
                ("llama", {"data": 2, "zero": 0}),
                ("llama", {"data": 2, "zero": 1}),
                ("llama", {"data": 2, "zero": 2}),
                ("llama", {"replica": 2, "data": 2, "zero": 3}),
                ("tied", {"tensor": 2, "data": 2, "zero": 3}),
                ("gpt", {"tensor": 2}),
                ("llama", {"context": 2}),
                ("tied", {"pipeline": 2}),
                ("tied", {"pipeline": 2, "data": 2, "zero": 1}),
                ("experts", {"data": 2, "expert": 2, "zero": 3}),
                ("experts", {"tensor": 2, "expert": 2}),
            )
        ),
    ],
    ids=str,
)
def test_frequent_tokens_cost_a_layout_what_they_cost_one_device(
    frequent: Path, family: str, layout: dict[str, Any]
) -> None:
    config = from_tables(
        {
            "model": {**FAMILIES[family], "layers": 2, "max_positions": LENGTH},
            "data": {"source": str(frequent), "sequence_length": LENGTH},
            "train": {"global_batch": 16 * layout.get("replica", 1), "micro_batch": 8, "learning_rate": 0.01},
            "layout": {"data": 1, **layout},
        }
    )
    found = prove(config, steps=1, dtype="bfloat16").to_json()
    assert found["pass"], found["worst"]
    for row in found["parameters"]:
        if row["quantity"] == "gradient":
            assert row["relative_error"] < 2 * max(row["rounding_cost"], 2**-7), row
