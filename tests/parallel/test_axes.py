"""Every axis and their products, in float64, against one device: tensor, pipeline, context and experts, with all they meet.

Sizes are uneven where the axes allow it: 259 ids and 50 inner features on two or four tensor devices, five blocks on two stages,
three on two; the q/k norms leave some ranks with an empty shard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
from ranks.jobs import FAMILIES as MODELS
from ranks.jobs import job
from ranks.pool import Pool
from ranks.truth import check_trains_as_one_device

from shardwise.config import Layout

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev")


@dataclass(frozen=True)
class Row:
    """One line of the table: a layout and the choices that could go wrong together with it."""

    layout: dict[str, Any]
    model: str = "llama"
    micro_batch: int = 2
    global_batch: int = 8
    recompute: str | float = "none"
    reset: bool = False

    def __str__(self) -> str:
        layout = "-".join(f"{name}{value}" for name, value in self.layout.items() if value != 1)
        odd = f"-{self.global_batch}x{self.micro_batch}" if (self.global_batch, self.micro_batch) != (8, 2) else ""
        recompute = "" if self.recompute == "none" else f"-{self.recompute}"
        return f"{self.model}-{layout}{odd}{recompute}{'-reset' if self.reset else ''}"


def layout(**degrees: Any) -> dict[str, Any]:
    return {"data": 1, **degrees}


ALONE = [
    Row(layout(tensor=2)),
    Row(layout(tensor=2), "gpt"),
    Row(layout(tensor=4)),  # fewer key heads than devices
    Row(layout(tensor=4), "tied", reset=True),
    Row(layout(tensor=2), "experts"),
    Row(layout(context=2, attention="ring")),
    Row(layout(context=2, attention="ulysses"), "gpt"),
    Row(layout(context=3, attention="ring"), "tied"),
    Row(layout(context=2, attention="ring"), "experts", reset=True),
    Row(layout(context=4, attention="ulysses"), reset=True),
    Row(layout(data=2, expert=2), "experts"),
    Row(layout(data=4, expert=2, zero=3), "experts"),
    Row(layout(tensor=2, expert=2), "experts"),
    Row(layout(tensor=4, expert=2), "experts"),  # experts borrow a part of the axis
    Row(layout(context=2, expert=2), "experts"),
]
PIPELINES = [
    *(Row(layout(pipeline=2, schedule=schedule), "tied" if schedule == "zbv" else "llama") for schedule in SCHEDULES),
    *(Row(layout(pipeline=2, schedule=schedule, data=2, zero=3), "tied") for schedule in SCHEDULES),
    *(Row(layout(pipeline=2, schedule="1f1b"), global_batch=count, micro_batch=1) for count in range(1, 10)),
    Row(layout(pipeline=3), "gpt", micro_batch=1),
    Row(layout(pipeline=2, stages=[1, 4]), reset=True),
    Row(layout(pipeline=4, schedule="zb1p"), "experts", micro_batch=1),
    Row(layout(pipeline=2, schedule="interleaved", stages_per_rank=2), "tied", recompute="full"),
]
AXES = ("pipeline", "data", "context", "tensor")
PAIRS = [
    Row(layout(**{one: 2, other: 2}, zero=zero), model)
    for one, other in combinations(AXES, 2)
    for model, zero in (("llama", 3), ("experts", 1))
] + [Row(layout(**{axis: 2}, data=2, zero=zero), "tied") for axis in ("tensor", "context", "pipeline") for zero in range(4)]
PRODUCTS = [
    Row(layout(pipeline=2, data=2, tensor=2, zero=2)),
    Row(layout(pipeline=2, data=2, tensor=2, zero=0), "gpt"),
    Row(layout(context=2, data=2, tensor=2, zero=3)),
    Row(layout(data=2, expert=2, tensor=2, zero=3), "experts"),
    Row(layout(data=2, expert=4, tensor=2, zero=0), "experts"),
    Row(layout(pipeline=2, context=2, data=2, zero=1), "tied", recompute="selective", reset=True),
    Row(layout(replica=2, data=2, tensor=2, zero=3), recompute="full"),
    Row(layout(pipeline=2, context=2, data=2, tensor=2, expert=2, zero=3), "experts"),
]
ROWS = [*ALONE, *PIPELINES, *PAIRS, *PRODUCTS]
MATRIX = [
    Row(degrees, model, recompute=recompute, reset=reset)
    for degrees, model, recompute, reset in product(
        [
            *(layout(**{axis: 2}) for axis in ("tensor", "context", "pipeline")),
            *(layout(**{axis: 2}, data=2, zero=zero) for axis in ("tensor", "context", "pipeline") for zero in range(4)),
            *(layout(pipeline=2, tensor=2, schedule=schedule) for schedule in SCHEDULES),
            *(layout(pipeline=2, data=2, zero=2, schedule=schedule) for schedule in SCHEDULES),
            *(layout(context=2, tensor=2, attention=attention) for attention in ("ring", "ulysses")),
        ],
        MODELS,
        ("none", "selective", "full", 0.5),
        (False, True),
    )
    if Layout(**degrees).pipeline * (2 if degrees.get("schedule") in ("interleaved", "zbv", "dualpipev") else 1)
    <= MODELS[model]["layers"]
]


def check(row: Row, ranks: Callable[[int], Pool], corpus: str) -> None:
    train_table = {"micro_batch": row.micro_batch, "global_batch": row.global_batch, "recompute": row.recompute, "steps": 2}
    tables = job(
        corpus,
        model=MODELS[row.model],
        data={"reset_attention": row.reset},
        train={**train_table, "check_every": 1},
        layout=row.layout,
    )
    check_trains_as_one_device(ranks(Layout(**row.layout).world), tables)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_layout_trains_as_one_device_does(row: Row, ranks: Callable[[int], Pool], corpus: str) -> None:
    check(row, ranks, corpus)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in MATRIX if row not in ROWS], ids=str)
def test_every_combination_trains_as_one_device_does(row: Row, ranks: Callable[[int], Pool], corpus: str) -> None:
    check(row, ranks, corpus)
