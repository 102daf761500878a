"""Every axis and their products, in float64: tensor, pipeline, context and experts, with all they meet.

Each row is trained once. Its losses, norms and weights are those of one device, its collectives and its bytes
of state those that were predicted.

Sizes are uneven where the axes allow it: 259 ids and 50 inner features on two or four tensor devices, three
blocks on two stages, five on four; the q/k norms leave some ranks with an empty shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pytest
from ranks.jobs import FAMILIES as MODELS
from ranks.jobs import Tables, job
from ranks.pairs import every_pair
from ranks.trained import Runs, check_held, check_sent
from ranks.truth import check_as_one_device

from shardwise.config import BY_OPERATOR, SCHEDULES, Layout, splits_backward, stages_per_rank


@dataclass(frozen=True)
class Row:
    """One line of the table: a layout and the choices that could go wrong together with it."""

    layout: dict[str, Any]
    model: str = "llama"
    micro_batch: int = 2
    global_batch: int | None = None
    """None: of four micro-batches where there are stages, else of two."""
    recompute: str | float = "none"
    reset: bool = False

    def __str__(self) -> str:
        layout = "-".join(f"{name}{value}" for name, value in self.layout.items() if value != 1)
        odd = (
            f"-{self.global_batch}x{self.micro_batch}"
            if (self.global_batch, self.micro_batch) != (None, 2)
            else ""
        )
        recompute = "" if self.recompute == "none" else f"-{self.recompute}"
        return f"{self.model}-{layout}{odd}{recompute}{'-reset' if self.reset else ''}"

    def tables(self, corpus: str) -> Tables:
        layout = Layout(**self.layout)
        batch = self.global_batch or self.micro_batch * layout.data_parallel * (
            4 if layout.pipeline > 1 else 2
        )
        train = {
            "micro_batch": self.micro_batch,
            "global_batch": batch,
            "recompute": self.recompute,
            "steps": 2,
        }
        return job(
            corpus,
            model={**MODELS[self.model], "layers": self.layers(layout)},
            data={"reset_attention": self.reset},
            train={**train, "check_every": 2},
            layout=self.layout,
        )

    def layers(self, layout: Layout) -> int:
        """As few as show what is to be seen: two blocks, or one more than stages."""
        if layout.pipeline == 1:
            return 2
        stages = layout.pipeline * (
            layout.stages_per_rank or 1 + (layout.schedule in ("interleaved", "zbv", "dualpipev"))
        )
        return min(stages + 1, MODELS[self.model]["layers"])


def layout(**degrees: Any) -> dict[str, Any]:
    return {"data": 1, **degrees}


ALONE = [
    Row(layout(tensor=2)),
    Row(layout(tensor=2), "gpt"),
    Row(layout(tensor=2), "qwen2"),
    Row(layout(context=2), "mistral"),
    Row(layout(tensor=2), "gemma2"),
    Row(layout(context=2), "gemma2", reset=True),
    Row(layout(pipeline=2, data=2, zero=3), "gemma2"),
    Row(layout(tensor=2), "experts"),
    Row(layout(context=2, attention="ring")),
    Row(layout(context=2, attention="ulysses"), "gpt"),
    Row(layout(context=2, attention="ring"), "experts", reset=True),
    Row(layout(context=4, attention="ulysses"), reset=True),
    Row(layout(data=2, expert=2), "experts"),
    Row(layout(tensor=2, expert=2), "experts"),
    Row(
        layout(tensor=4, expert=2), "experts"
    ),  # experts borrow a part of the axis; fewer key heads than devices
    Row(layout(context=2, expert=2), "experts"),
]
PIPELINES = [
    *(
        Row(layout(pipeline=2, schedule=schedule), "tied" if schedule == "zbv" else "llama")
        for schedule in SCHEDULES
    ),
    Row(layout(pipeline=2, schedule="zbv", data=2, zero=3), "tied"),
    *(Row(layout(pipeline=2, schedule="1f1b"), global_batch=count, micro_batch=1) for count in (1, 3)),
    Row(layout(pipeline=3), "gpt", micro_batch=1),
    Row(layout(pipeline=2, stages=[1, 2]), reset=True),
    Row(layout(pipeline=4, schedule="zb1p"), "experts", micro_batch=1),
    Row(layout(pipeline=2, schedule="interleaved", stages_per_rank=2), "tied", recompute="full"),
]
AXES = ("pipeline", "data", "context", "tensor")
PAIRS = [
    *(
        Row(layout(**{one: 2, other: 2}, zero=3))
        for one, other in combinations(AXES, 2)
        if (one, other) != ("pipeline", "tensor")
    ),
    Row(layout(pipeline=2, tensor=2, zero=1), "experts"),
    Row(layout(pipeline=2, data=2, zero=2), "tied"),
]
PRODUCTS = [
    Row(layout(pipeline=2, data=2, tensor=2, zero=2)),
    Row(layout(data=2, expert=4, tensor=2, zero=0), "experts"),
]
ROWS = [*ALONE, *PIPELINES, *PAIRS, *PRODUCTS]
"""Every axis, schedule and family, and every pair of axes. Every second row is tried each time."""
MORE = [
    Row(layout(context=4), "mistral", reset=True),
    Row(layout(tensor=4)),
    Row(layout(tensor=4), "tied", reset=True),
    Row(layout(context=3, attention="ring"), "tied"),
    *(Row(layout(pipeline=2, schedule=schedule, data=2, zero=3), "tied") for schedule in SCHEDULES[1:]),
    *(Row(layout(pipeline=2, schedule="1f1b"), global_batch=count, micro_batch=1) for count in (2, 5)),
    *(
        Row(layout(**{one: 2, other: 2}, zero=zero), model)
        for one, other in combinations(AXES, 2)
        for model, zero in (("llama", 3), ("experts", 1))
    ),
    *(Row(layout(**{axis: 2}, data=2, zero=zero), "tied") for axis, zero in (("tensor", 0), ("context", 2))),
    Row(layout(data=4, expert=2, zero=3), "experts"),
    Row(layout(context=2, data=2, tensor=2, zero=3)),
    Row(layout(data=2, expert=2, tensor=2, zero=3), "experts"),
    Row(layout(pipeline=2, context=2, data=2, zero=1), "tied", recompute="selective", reset=True),
    Row(layout(replica=2, data=2, tensor=2, zero=3), recompute="full"),
    Row(layout(context=2, tensor=2), "experts", recompute="all-but-attention"),
]
MATRIX = [
    *(
        Row(layout(pipeline=2, schedule="1f1b"), global_batch=count, micro_batch=1)
        for count in (4, 6, 7, 8, 9)
    ),
    *(
        Row(layout(**{axis: 2}, data=2, zero=zero), "tied")
        for axis in ("tensor", "context", "pipeline")
        for zero in (1, 3)
    ),
    Row(layout(pipeline=2, schedule="gpipe", data=2, zero=3), "tied"),
    Row(layout(pipeline=2, data=2, tensor=2, zero=0), "gpt"),
    Row(layout(pipeline=2, context=2, data=2, tensor=2, expert=2, zero=3), "experts"),
    *(
        Row(degrees, model, recompute=recompute, reset=reset)
        for degrees, model, recompute, reset in every_pair(
            (degrees, model, recompute, reset)
            for degrees, model, recompute, reset in product(
                [
                    *(layout(**{axis: 2}) for axis in ("tensor", "context", "pipeline")),
                    *(
                        layout(**{axis: 2}, data=2, zero=zero)
                        for axis in ("tensor", "context", "pipeline")
                        for zero in range(4)
                    ),
                    *(layout(pipeline=2, tensor=2, schedule=schedule) for schedule in SCHEDULES),
                    *(layout(pipeline=2, data=2, zero=2, schedule=schedule) for schedule in SCHEDULES),
                    *(layout(context=2, tensor=2, attention=attention) for attention in ("ring", "ulysses")),
                ],
                MODELS,
                ("none", "selective", "all-but-attention", "full", 0.5),
                (False, True),
            )
            if Layout(**degrees).pipeline * stages_per_rank(Layout(**degrees)) <= MODELS[model]["layers"]
            # which is refused
            and not (recompute in BY_OPERATOR and splits_backward(Layout(**degrees)))
            and not ("window" in MODELS[model] and degrees.get("attention") == "ring")  # and so is this
        )
    ),
]


ANSWERED = [
    Row(layout(data=4, zero=2), micro_batch=1),
    Row(layout(tensor=2), "gpt"),
    Row(layout(context=2, attention="ring")),
    Row(layout(pipeline=2, data=2, zero=3), micro_batch=1),
    Row(layout(data=2, zero=0)),
    Row(layout(replica=2, data=2, zero=3)),
    Row(layout(context=2, attention="ulysses"), "gemma2"),
    Row(layout(context=2, attention="ulysses"), "gpt"),
    Row(layout(pipeline=2, schedule="zbv"), "tied"),
    Row(layout(data=2, expert=2), "experts", recompute="full"),
    Row(layout(pipeline=2, context=2, data=2, tensor=2, zero=3)),
]
"""Where only some targets count, and in some sequences none."""


ALL = [*ROWS, *(row for row in MORE if row not in ROWS)]


def _quick(row: Row) -> Any:
    return pytest.param(row, id=str(row))


def _full(row: Row) -> Any:
    return pytest.param(row, id=str(row), marks=pytest.mark.full)


def some(rows: Iterable[Row]) -> list[Any]:
    return [
        pytest.param(row, id=str(row), marks=[] if row in ROWS[::2] else pytest.mark.full) for row in rows
    ]


@pytest.mark.parametrize("row", some(ALL))
def test_a_layout_trains_as_one_device_does(row: Row, trained: Runs, corpus: str) -> None:
    check_as_one_device(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.parametrize("row", [*map(_quick, ANSWERED[:4]), *map(_full, ANSWERED[4:])])
def test_a_layout_learns_answers_as_one_device_does(row: Row, trained: Runs, conversations: str) -> None:
    found, tables = trained(row.tables(conversations)), row.tables(conversations)
    check_as_one_device(found, tables)
    places = tables["train"]["global_batch"] * tables["data"]["sequence_length"]
    assert all(0 < step.tokens < places / 2 for step in found[0].steps)


@pytest.mark.parametrize("row", some(row for row in ALL if not row.reset))
def test_a_layout_sends_what_was_predicted(row: Row, trained: Runs, corpus: str) -> None:
    check_sent(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.parametrize("row", some(ALL))
def test_a_layout_holds_what_was_predicted(row: Row, trained: Runs, corpus: str) -> None:
    check_held(trained(row.tables(corpus)), row.tables(corpus))


@pytest.mark.full
@pytest.mark.parametrize("row", [row for row in MATRIX if row not in ALL], ids=str)
def test_every_pair_of_choices_trains_as_one_device_does(row: Row, trained: Runs, corpus: str) -> None:
    check_as_one_device(trained(row.tables(corpus)), row.tables(corpus))
