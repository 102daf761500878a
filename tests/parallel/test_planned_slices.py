"""The first rank holds the slice of every weight that plan.json writes down."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job, start
from ranks.pool import Pool

from shardwise.config import from_tables
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.plans import choose


def shapes(worker: Worker, tables: Tables) -> dict[str, list[int]]:
    return {
        name: list(local(weight).shape) for name, weight in start(worker, tables).parallel.named_parameters()
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", {"data": 2, "zero": 0}),
        ("llama", {"data": 2, "zero": 3}),
        ("llama", {"tensor": 2, "data": 2, "zero": 2}),
        ("experts", {"data": 2, "expert": 2}),
        ("experts", {"tensor": 2, "expert": 2}),
        ("tied", {"pipeline": 2, "context": 2, "zero": 1}),
    ],
    ids=str,
)
def test_the_first_rank_holds_what_the_plan_writes_down(
    ranks: Callable[[int], Pool], corpus: str, model: str, layout: dict[str, Any]
) -> None:
    tables = job(corpus, model=FAMILIES[model], layout={"data": 1, **layout})
    world = from_tables(tables).layout.world
    written = choose(from_tables(tables), world).to_json()["resolved"]["weights"]
    held = ranks(world).run(shapes, tables)[0]
    assert held
    for name, shape in held.items():
        assert written[re.sub(r"^blocks\.\d+\.", "blocks.*.", name)]["kept"] == shape, name
