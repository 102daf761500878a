"""What a step sends and what a rank holds in mixed precision is what was predicted, to the call and the byte,
on every axis.

In bfloat16 weights are gathered in two bytes and gradients summed in four, so that a collective or a buffer
of the wrong dtype shows. The same of float64, where they are all alike, is in test_axes.py and
test_layouts.py, for every layout that is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job
from ranks.pairs import every_pair
from ranks.trained import Runs, check_held, check_sent

from shardwise.config import BY_OPERATOR, SCHEDULES, Layout, splits_backward, stages_per_rank

MODELS: Tables = {
    **FAMILIES,
    "experts": {
        **FAMILIES["experts"],
        "experts_per_token": 4,
    },  # all of them, so that every device gets the same load
    "plain experts": {
        **FAMILIES["experts"],
        "experts_per_token": 4,
        "balance_loss": 0.0,
        "router_z_loss": 0.0,
    },
    "deep": {**FAMILIES["llama"], "layers": 9},
    "deep experts": {**FAMILIES["experts"], "experts_per_token": 4, "layers": 9},
    "wide": {
        **FAMILIES["llama"],
        "layers": 2,
        "hidden": 128,
        "vocabulary": 4096,
    },  # gradients fill several buckets
    "fitting": {
        **{**FAMILIES["experts"], "experts_per_token": 4, "expert_ffn": 32},
        **{"hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 16},
    },  # into float8
    "deep fitting": {
        **{**FAMILIES["llama"], "layers": 9, "ffn": 64},
        **{"hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 16},
    },
    "many ids": {
        **FAMILIES["llama"],
        "layers": 1,
        "vocabulary": 100_001,
    },  # a chunk of the loss is not all of it
}


@dataclass(frozen=True)
class Row:
    """One line of the table: a layout and what else decides who sends and holds what."""

    layout: dict[str, Any]
    model: str = "llama"
    train: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = (
            f"{name}{value}"
            for table in (self.layout, self.train)
            for name, value in table.items()
            if value != 1
        )
        return "-".join([self.model, *words])

    def tables(self, corpus: str) -> Tables:
        """Two blocks and two micro-batches, where there are no stages: the others do the same again."""
        model, layout = MODELS[self.model], Layout(**self.layout)
        train = {"precision": "bfloat16", "steps": 2, "warmup": 0, "micro_batch": 2, **self.train}
        if layout.pipeline == 1:
            model = {**model, "layers": min(2, model["layers"])}
            train = {"global_batch": 2 * train["micro_batch"] * layout.data_parallel, **train}
        return job(corpus, model=model, train=train, layout=self.layout)


def row(model: str = "llama", train: dict[str, Any] | None = None, **layout: Any) -> Row:
    return Row({"data": 1, **layout}, model, train or {})


FULL, SELECTIVE, ATTENTION, SINGLES = (
    *({"recompute": mode} for mode in ("full", "selective", "all-but-attention")),
    {"micro_batch": 1},
)
ONE_MICRO_BATCH = {"micro_batch": 2, "global_batch": 8}
AXES = ("pipeline", "data", "context", "tensor")
ALONE = [
    row(),
    *(row(model, mode, tensor=2) for model, mode in (("llama", FULL), ("experts", SELECTIVE))),
    row("many ids", {"micro_batch": 8, "global_batch": 8, "precision": "float32", "steps": 1}, tensor=2),
    *(row("llama", mode, context=2, attention="ring") for mode in (FULL, ATTENTION)),
    *(row("gpt", mode, context=2, attention="ulysses") for mode in (FULL, SELECTIVE)),
    *(row("tied", data=2, zero=zero) for zero in range(4)),
    row("wide", data=2, zero=0),
    row("llama", {"state_dtype": "bfloat16"}, data=2, zero=2),
    row("experts", FULL, data=2, expert=2, zero=3),
    row("fitting", {"precision": "float8", "float8_leave_out": ["blocks.0.*"]}, data=2, tensor=2, zero=3),
]
PIPELINES = [
    *(row("tied", SINGLES, pipeline=2, schedule=schedule) for schedule in ("interleaved", "zb1p")),
    row("gpt", SINGLES, pipeline=2, data=2, zero=1),
    row("deep", SINGLES, pipeline=2, data=2, zero=1, schedule="interleaved"),  # gathers that nobody waits for
]
PAIRS = [
    row("experts", tensor=2, zero=3),  # only experts have somebody to share with
]
ROWS = [*ALONE, *PIPELINES, *PAIRS]
MORE = [
    row("llama", {**SINGLES, **FULL}, pipeline=2, context=2, schedule="zbv", attention="ulysses"),
    row("llama", {**SINGLES, **FULL}, pipeline=2, tensor=2, schedule="dualpipev"),
    *(row(model, tensor=2) for model in ("gpt", "experts", "plain experts")),
    row("llama", {"state_dtype": "bfloat16"}, tensor=2),
    row("llama", tensor=4),  # fewer key heads than devices
    *(row("llama", mode, tensor=2) for mode in (SELECTIVE, ATTENTION)),
    row("llama", SELECTIVE, context=2, attention="ring"),
    row("experts", FULL, tensor=2),
    row("plain experts", FULL, tensor=2),
    row("gpt", tensor=4),
    row("llama", context=2, attention="ring"),
    row("gpt", context=2, attention="ulysses"),
    row("llama", context=4, attention="ring", zero=1),
    row("llama", context=4, attention="ulysses", zero=3),  # key heads repeated
    *(row("llama", replica=2, data=2, zero=zero) for zero in (0, 1, 3)),
    row("experts", data=2, zero=3),
    row("experts", replica=2, data=2, expert=2, zero=0),
    *(row("tied", SINGLES, pipeline=2, schedule=schedule) for schedule in SCHEDULES),
    *(row("tied", SINGLES, pipeline=2, data=2, zero=3, schedule=schedule) for schedule in SCHEDULES),
    *(row("gpt", SINGLES, pipeline=2, data=2, zero=zero) for zero in (0, 3)),
    row(
        "deep",
        {**SINGLES, "global_batch": 10},
        pipeline=2,
        data=2,
        zero=3,
        schedule="interleaved",
        stages_per_rank=4,
    ),
    row("llama", SINGLES, pipeline=2, tensor=2, schedule="zbv"),
    *(row("llama", {}, **{one: 2, other: 2}, zero=3) for one, other in combinations(AXES, 2)),
    *(row("experts", data=2, tensor=2, expert=4, zero=zero) for zero in (0, 1)),
    row("experts", data=2, tensor=2, expert=2, zero=3),
    row("experts", tensor=4, expert=2),
    row("gpt", {"state_dtype": "bfloat16"}, data=2, tensor=2, zero=0),
    row("llama", {"precision": "float64"}, data=2, tensor=2, zero=1),
    *(row(data=4, zero=zero) for zero in range(4)),
    *(row("gpt", data=4, zero=zero) for zero in (1, 2, 3)),
    row("tied", data=2, context=2, zero=2),
    *(
        row("llama", ONE_MICRO_BATCH, data=4, zero=zero) for zero in (0, 1, 2)
    ),  # zero 1: gradients are never whole
    row("llama", {"precision": "float32"}, data=4, zero=1),
    *(row("llama", {"state_dtype": "bfloat16"}, data=4, zero=zero) for zero in (0, 1, 2)),
    *(row(data=2, tensor=2, zero=zero) for zero in (0, 1, 2)),
    row(replica=2, data=2, zero=2),
    *(row("experts", data=4, expert=2, zero=zero) for zero in range(4)),
    row("experts", tensor=2, zero=1),
    # Gathers that nobody waits for, where experts have somebody to share with and the rest has not, and where
    # all have.
    *(
        row("deep experts", SINGLES, pipeline=2, zero=3, schedule="interleaved", **{axis: 2})
        for axis in ("tensor", "data")
    ),
    *(row("tied", SINGLES, pipeline=2, data=2, zero=zero) for zero in (0, 1, 2)),
    *(row("llama", SINGLES, pipeline=2, data=2, zero=zero, schedule="zbv") for zero in (0, 1)),
    row("gpt", SINGLES, pipeline=2, tensor=2, schedule="zb1p"),
]
MATRIX = [
    Row({"data": 1, **layout}, model, {**SINGLES, "recompute": mode})
    for layout, model, mode in every_pair(
        (layout, model, mode)
        for layout, model, mode in product(
            [
                *(
                    {one: 2, other: 2, "zero": zero}
                    for one, other in combinations((*AXES, "replica"), 2)
                    for zero in range(4)
                ),
                *(
                    {"pipeline": 2, axis: 2, "schedule": name}
                    for axis in ("tensor", "context", "data")
                    for name in SCHEDULES
                ),
                *({"context": 2, "tensor": 2, "attention": attention} for attention in ("ring", "ulysses")),
            ],
            ("tied", "gpt", "deep", "deep experts"),
            ("none", "selective", "all-but-attention", "full"),
        )
        if not (mode in BY_OPERATOR and splits_backward(Layout(**layout)))
        and not (model == "gpt" and stages_per_rank(Layout(**layout)) > 1)
    )
]
MORE += [
    row("fitting", {**SINGLES, "precision": "float8"}, pipeline=2, context=2),
    *(row("fitting", {"precision": "float8"}, data=4, expert=2, zero=zero) for zero in (1, 3)),
    row("fitting", {"precision": "float8", "float8_leave_out": ["*.experts.up"]}, data=2, zero=3),
    row("fitting", {"precision": "float8"}, data=2, tensor=2, zero=3),
    row(
        "deep fitting",  # block 6 is gathered without being used
        {**SINGLES, "precision": "float8", "float8_leave_out": ["blocks.1.*", "blocks.6.*"]},
        pipeline=2,
        data=2,
        zero=1,
        schedule="interleaved",
    ),
]
REST = [one for one in [*MORE, *MATRIX] if one not in ROWS]
QUICK = [
    pytest.param(row, id=str(row), marks=[pytest.mark.full] if index % 2 else [])
    for index, row in enumerate(ROWS)
]


@pytest.mark.parametrize("row", QUICK)
def test_a_step_sends_what_was_predicted(row: Row, trained: Runs, corpus: str) -> None:
    check_sent(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.parametrize("row", QUICK)
def test_states_held_are_those_predicted(row: Row, trained: Runs, corpus: str) -> None:
    if row.train.get("steps", 2) > 1:  # later steps hold the states
        check_held(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.full
@pytest.mark.parametrize("row", REST, ids=str)
def test_every_pair_of_choices_sends_what_was_predicted(row: Row, trained: Runs, corpus: str) -> None:
    check_sent(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in REST if row in MORE], ids=str)
def test_states_held_are_those_predicted_on_more_layouts(row: Row, trained: Runs, corpus: str) -> None:
    check_held(trained(row.tables(corpus)), row.tables(corpus))
