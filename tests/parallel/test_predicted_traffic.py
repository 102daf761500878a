"""The planner's bytes and calls of every collective are those in the ledger of a real step, exactly, on every axis; so are the
bytes that its prediction of the step's time has priced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job, start
from ranks.pool import Pool

from shardwise.config import Layout, from_tables
from shardwise.cost.clusters import CLUSTERS
from shardwise.cost.predict import predict
from shardwise.cost.space import Work, space_of_layout
from shardwise.cost.traffic import flows, totals
from shardwise.mesh import Worker
from shardwise.plan import choose, reduce_dtype, state_dtype
from shardwise.train.steps import steps

Ledger = dict[str, dict[str, int]]
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev")
MODELS: Tables = {
    **FAMILIES,
    "experts": {**FAMILIES["experts"], "experts_per_token": 4},  # all of them, so that every device gets the same load
    "plain experts": {**FAMILIES["experts"], "experts_per_token": 4, "balance_loss": 0.0, "router_z_loss": 0.0},
    "deep": {**FAMILIES["llama"], "layers": 9},
    "deep experts": {**FAMILIES["experts"], "experts_per_token": 4, "layers": 9},
    "wide": {**FAMILIES["llama"], "layers": 2, "hidden": 128, "vocabulary": 4096},  # gradients fill several buckets
    "many ids": {**FAMILIES["llama"], "layers": 1, "vocabulary": 100_001},  # a chunk of the loss is not all of it
}


@dataclass(frozen=True)
class Row:
    """One line of the table: a layout and what else decides who sends what."""

    layout: dict[str, Any]
    model: str = "llama"
    train: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = (f"{name}{value}" for table in (self.layout, self.train) for name, value in table.items() if value != 1)
        return "-".join([self.model, *words])


def row(model: str = "llama", train: dict[str, Any] | None = None, **layout: Any) -> Row:
    return Row({"data": 1, **layout}, model, train or {})


FULL, SELECTIVE, SINGLES = {"recompute": "full"}, {"recompute": "selective"}, {"micro_batch": 1}
AXES = ("pipeline", "data", "context", "tensor")
ALONE = [
    row(),
    *(row(model, tensor=2) for model in ("gpt", "experts", "plain experts")),
    *(row(model, mode, tensor=2) for model in ("llama", "experts") for mode in (FULL, SELECTIVE)),
    row("plain experts", FULL, tensor=2),
    row("many ids", {"micro_batch": 8, "precision": "float32"}, tensor=2),
    row("llama", {"state_dtype": "bfloat16"}, tensor=2),
    row("gpt", tensor=4),
    row("llama", tensor=4),  # fewer key heads than devices
    *(row("llama", mode, context=2, attention="ring") for mode in ({}, FULL, SELECTIVE)),
    *(row("gpt", mode, context=2, attention="ulysses") for mode in ({}, FULL, SELECTIVE)),
    row("llama", context=4, attention="ulysses", zero=3),  # key heads repeated
    row("llama", context=4, attention="ring", zero=1),
    *(row("tied", data=2, zero=zero) for zero in range(4)),
    row("wide", data=2, zero=0),
    row("llama", {"state_dtype": "bfloat16"}, data=2, zero=2),
    *(row("llama", replica=2, data=2, zero=zero) for zero in (0, 1, 3)),
    row("experts", data=2, zero=3),
    row("experts", FULL, data=2, expert=2, zero=3),
    *(row("experts", data=4, expert=2, zero=zero) for zero in (0, 3)),
    row("experts", replica=2, data=2, expert=2, zero=0),
]
PIPELINES = [
    *(row("tied", SINGLES, pipeline=2, schedule=schedule) for schedule in SCHEDULES),
    *(row("tied", SINGLES, pipeline=2, data=2, zero=3, schedule=schedule) for schedule in SCHEDULES),
    *(row("gpt", SINGLES, pipeline=2, data=2, zero=zero) for zero in (0, 1, 3)),
    row("deep", SINGLES, pipeline=2, data=2, zero=1, schedule="interleaved"),  # gathers that nobody waits for
    row("deep", {**SINGLES, "global_batch": 10}, pipeline=2, data=2, zero=3, schedule="interleaved", stages_per_rank=4),
    row("llama", SINGLES, pipeline=2, tensor=2, schedule="zbv"),
    row("llama", {**SINGLES, **FULL}, pipeline=2, context=2, schedule="zbv", attention="ulysses"),
    row("llama", {**SINGLES, **FULL}, pipeline=2, tensor=2, schedule="dualpipev"),
]
PAIRS = [
    *(row("llama", {}, **{one: 2, other: 2}, zero=3) for one, other in combinations(AXES, 2)),
    row("experts", data=2, tensor=2, expert=2, zero=3),
    row("experts", tensor=4, expert=2),
    row("experts", data=2, tensor=2, expert=4, zero=0),
    row("experts", tensor=2, zero=3),  # only experts have somebody to share with
    row("llama", {"precision": "float64"}, data=2, tensor=2, zero=1),
]
ROWS = [*ALONE, *PIPELINES, *PAIRS]
MATRIX = [
    Row({"data": 1, **layout}, model, {**SINGLES, "recompute": mode})
    for layout, model, mode in product(
        [
            *({one: 2, other: 2, "zero": zero} for one, other in combinations((*AXES, "replica"), 2) for zero in range(4)),
            *({"pipeline": 2, axis: 2, "schedule": schedule} for axis in ("tensor", "context", "data") for schedule in SCHEDULES),
            *({"context": 2, "tensor": 2, "attention": attention} for attention in ("ring", "ulysses")),
        ],
        ("tied", "gpt", "deep", "deep experts"),
        ("none", "selective", "full"),
    )
    if not (mode == "selective" and layout.get("schedule") in ("zb1p", "zbv", "dualpipev"))
    and not (model == "gpt" and layout.get("schedule") in ("interleaved", "zbv", "dualpipev"))
]


def ledger_of_a_step(worker: Worker, tables: Tables) -> Ledger:
    """What this rank sends in one step."""
    return [step.collectives for step in steps(start(worker, tables))][-1]


def predicted(tables: Tables, world: int) -> tuple[Ledger, float]:
    """The ledger from the flows, and all bytes that are in the price."""
    config = from_tables(tables)
    plan, train = choose(config, world), config.train
    dtypes = train.precision, state_dtype(train), reduce_dtype(train)
    space = space_of_layout(config, plan.layout, plan.micro_batch, plan.accumulation)
    work = Work(config.model, config.data.sequence_length, train.global_batch, *dtypes)
    priced = predict(work, space, CLUSTERS["cpu"]).sent
    return totals(flows(work, space, device="cpu"), space, 0), sum(float(sent[0]) for sent in priced.values())


def check(row: Row, ranks: Callable[[int], Pool], corpus: str) -> None:
    train = {"precision": "bfloat16", "steps": 1, "warmup": 0, "micro_batch": 2, **row.train}
    tables = job(corpus, model=MODELS[row.model], train=train, layout=row.layout)
    world = Layout(**row.layout).world
    ledger, (expected, priced) = ranks(world).run(ledger_of_a_step, tables)[0], predicted(tables, world)
    assert ledger == expected
    assert priced == sum(entry["bytes"] for entry in ledger.values())


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_step_sends_what_was_predicted(row: Row, ranks: Callable[[int], Pool], corpus: str) -> None:
    check(row, ranks, corpus)


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in MATRIX if row not in ROWS], ids=str)
def test_every_combination_sends_what_was_predicted(row: Row, ranks: Callable[[int], Pool], corpus: str) -> None:
    check(row, ranks, corpus)
