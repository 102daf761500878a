"""The data axes never change the maths: every row of the table, in float64, against one device.

Each row is trained once. Its collectives and its bytes of state are those that were predicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from ranks.jobs import GPT, LLAMA, Tables, job
from ranks.pairs import every_pair
from ranks.trained import Runs, check_held, check_sent
from ranks.truth import check_as_one_device


@dataclass(frozen=True)
class Row:
    """One line of the table: a layout and the choices that could go wrong together with it."""

    layout: dict[str, Any]
    micro_batch: int = 1
    model: dict[str, Any] = field(default_factory=lambda: LLAMA)
    recompute: str | float = "none"
    reset: bool = False

    def __str__(self) -> str:
        layout = "-".join(f"{name}{value}" for name, value in self.layout.items())
        family = "gpt" if self.model is GPT else "llama-tied" if self.model.get("tied") else "llama"
        return f"{layout}-micro{self.micro_batch}-{family}-{self.recompute}{'-reset' if self.reset else ''}"

    def tables(self, corpus: str) -> Tables:
        return job(
            corpus,
            model=self.model,
            data={"reset_attention": self.reset},
            train={"micro_batch": self.micro_batch, "recompute": self.recompute, "steps": 2},
            layout=self.layout,
        )


TIED = {**LLAMA, "tied": True}
LAYOUTS: list[dict[str, Any]] = [
    *({"data": data, "zero": zero} for data in (4, 2) for zero in range(4)),
    *({"replica": 2, "data": 2, "zero": zero} for zero in range(4)),
    {"replica": 2, "data": 1},
    {"replica": 4, "data": 1},
]
ROWS = [
    *(Row({"data": 2, "zero": zero}, micro_batch=2) for zero in range(4)),  # two micro-batches
    Row({"data": 4, "zero": 1}, micro_batch=2),  # one micro-batch
    *(Row({"replica": 2, "data": 2, "zero": zero}, micro_batch=2) for zero in (0, 3)),
    Row({"replica": 2, "data": 1}, micro_batch=2),
    *(Row({"data": 4, "zero": zero}, model=TIED) for zero in (0, 3)),
    Row({"replica": 2, "data": 2, "zero": 3}, model=GPT),
    *(
        Row({"data": 2, "zero": zero}, recompute=mode)
        for zero, mode in ((0, "full"), (0, 0.5), (3, "selective"), (3, "all-but-attention"))
    ),
    Row({"data": 4, "zero": 0}, reset=True),
    Row({"data": 4, "zero": 3, "offload": True}),
]
"""What is tried each time."""
MORE = [
    *(Row(layout, micro_batch=2) for layout in LAYOUTS),
    *(Row({"data": 4, "zero": zero}, micro_batch=1) for zero in range(4)),
    Row({"replica": 2, "data": 2, "zero": 1}, model=GPT),
    *(
        Row({"data": 2, "zero": zero}, recompute=mode)
        for zero, mode in ((0, "selective"), (3, 0.5), (3, "full"))
    ),
    Row({"data": 4, "zero": 2}, reset=True),
    Row({"replica": 2, "data": 2, "zero": 3}, reset=True, recompute="selective"),
]
ALL = [*ROWS, *(row for row in MORE if row not in ROWS)]
MATRIX = [
    Row(layout, micro_batch, model, recompute, reset)
    for layout, micro_batch, model, recompute, reset in every_pair(
        product(
            LAYOUTS,
            (1, 2),
            (LLAMA, TIED, GPT),
            ("none", "selective", "all-but-attention", "full", 0.5),
            (False, True),
        )
    )
]


def some(rows: Iterable[Row]) -> list[Any]:
    return [
        pytest.param(row, id=str(row), marks=[] if row in ROWS[::2] else pytest.mark.full) for row in rows
    ]


@pytest.mark.parametrize("row", some(ALL))
def test_a_layout_trains_as_one_device_does(row: Row, trained: Runs, corpus: str) -> None:
    check_as_one_device(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.parametrize("row", some(row for row in ALL if not row.reset))
def test_a_layout_sends_what_was_predicted(row: Row, trained: Runs, corpus: str) -> None:
    check_sent(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.parametrize("row", some(row for row in ALL if not row.layout.get("offload")))
def test_a_layout_holds_what_was_predicted(row: Row, trained: Runs, corpus: str) -> None:
    check_held(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in MATRIX if row not in ALL], ids=str)
def test_every_pair_of_choices_trains_as_one_device_does(row: Row, trained: Runs, corpus: str) -> None:
    check_as_one_device(trained(row.tables(corpus)), row.tables(corpus))
