"""The layouts on which every optimizer is proven: each stage of ZeRO and each axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job

LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "zero 0": ({"data": 2, "zero": 0}, "llama"),
    "zero 1": ({"data": 2, "zero": 1}, "llama"),
    "zero 2": ({"data": 2, "zero": 2}, "tied"),
    "zero 3": ({"data": 2, "zero": 3}, "llama"),
    "tensor": ({"data": 1, "tensor": 2}, "llama"),
    "pipeline": ({"data": 1, "pipeline": 2}, "tied"),
    "context": ({"data": 1, "context": 2, "attention": "ring"}, "llama"),
    "expert": ({"data": 2, "expert": 2}, "experts"),
    "tensor, zero 3": ({"data": 2, "tensor": 2, "zero": 3}, "llama"),
}
SOME_LAYOUTS = [
    pytest.param(layout, marks=[] if layout in ("tensor, zero 3", "pipeline", "expert") else pytest.mark.full)
    for layout in LAYOUTS
]
"""All layouts, most of them for the full suite alone: every axis is in one of the others."""
EXACT = 1e-12


def tables_of(corpus: str, optimizer: Mapping[str, Any], layout: str, **train: Any) -> Tables:
    """The job of a layout with this table [optimizer]."""
    degrees, model = LAYOUTS[layout]
    batch = {"micro_batch": 1, "global_batch": 8, "steps": 2, "warmup": 0, **train}
    return job(corpus, model=FAMILIES[model], layout=degrees, train=batch, optimizer=dict(optimizer))
