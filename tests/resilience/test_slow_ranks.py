"""Real ranks, one of them slow: the main rank names it from what travels with the loss, and waiting for it is
not held against the others. Where a clock decides, it is made to lie by far more than any load of the machine
can add."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ranks.jobs import FAMILIES, Tables, job, start
from ranks.pool import Pool

from shardwise.mesh import Worker
from shardwise.observe import EXPOSED
from shardwise.resilience.stragglers import Straggler, StragglerChange
from shardwise.train.reporter import RunReporter
from shardwise.train.steps import StepRecord, steps

LIE = 1000.0
SLEEP = 2.0


def tables(corpus: str, layout: dict[str, Any], steps: int) -> Tables:
    train = {"steps": steps, "micro_batch": 2, "precision": "float32"}
    return job(corpus, model=FAMILIES["llama"], train=train, layout={"data": 1, **layout})


def with_a_slow_clock(worker: Worker, tables: Tables, rank: int, span: str) -> list[StepRecord]:
    """One rank believes that each of its steps took very much longer, in one span."""
    training = start(worker, tables)
    clock = training.comm.clock
    finish = clock.finish

    def lying() -> dict[str, float]:
        split = finish()
        return {**split, span: split[span] + LIE, "total": split["total"] + LIE}

    if worker.rank == rank:
        clock.finish = lying  # type: ignore[method-assign]
    return list(steps(training))


@pytest.mark.parametrize(
    ("rank", "span", "cause"),
    [
        (1, "optimizer", "compute"),
        pytest.param(0, "forward_backward", "compute", marks=pytest.mark.full),
        pytest.param(1, "data", "data", marks=pytest.mark.full),
    ],
)
def test_the_main_rank_names_the_slow_one_and_the_cause(
    ranks: Callable[[int], Pool], corpus: str, rank: int, span: str, cause: str
) -> None:
    main, other = ranks(2).run(with_a_slow_clock, tables(corpus, {"data": 2, "zero": 3}, 15), rank, span)
    assert [(one.rank, one.cause) for done in main for one in done.stragglers.named] == [(rank, cause)]
    assert all(not done.stragglers.named for done in other)


@pytest.mark.parametrize(
    "layout",
    [pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.full), {"pipeline": 2, "context": 2}],
    ids=str,
)
def test_every_rank_knows_everyones_times_of_the_step_before(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, int]
) -> None:
    everyone = ranks(4).run(with_a_slow_clock, tables(corpus, layout, 3), 2, "data")
    for found in everyone:
        assert found[0].rank_seconds == ()
        assert [done.rank_seconds for done in found] == [done.rank_seconds for done in everyone[0]]
        for done in found[1:]:
            assert [data > LIE / 2 for _, data in done.rank_seconds] == [False, False, True, False]


def test_the_voice_writes_down_who_is_slow_and_says_where_it_runs() -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    said: list[str] = []
    team = SimpleNamespace(members=[SimpleNamespace(host=host) for host in ("a", "a", "b", "b")])
    reporter: Any = SimpleNamespace(
        beginning=SimpleNamespace(team=team),
        sinks=SimpleNamespace(event=lambda name, **facts: events.append((name, facts))),
        progress=SimpleNamespace(message=said.append),
    )
    slow, between = Straggler(3, 2.12, "compute", 120), Straggler(None, 1.8, "network", 130)
    done: Any = SimpleNamespace(step=150, stragglers=StragglerChange((slow, between), (slow,)))
    RunReporter._stragglers(reporter, done)
    assert events == [
        ("straggler", {"rank": 3, "factor": 2.12, "cause": "compute", "step": 120}),
        ("straggler", {"rank": None, "factor": 1.8, "cause": "network", "step": 130}),
        ("straggler_gone", {"rank": 3, "cause": "compute", "step": 150}),
    ]
    assert (
        said[0]
        == "rank 3 needs 2.1 times the median time for its own work since step 120: compute; it is on host b"
    )
    assert "since step 130" in said[1]
    assert "network" in said[1]
    assert "rank 3 is as usual again" in said[2]


def with_a_sleeping_rank(worker: Worker, tables: Tables) -> list[StepRecord]:
    """The last rank sleeps before it computes, in its last step."""
    training = start(worker, tables)
    forward_backward = training.parallel.forward_backward

    def sleeping(*arguments: Any) -> Any:
        if training.step == 2 and worker.rank == worker.world - 1:
            time.sleep(SLEEP)
        return forward_backward(*arguments)

    training.parallel.forward_backward = sleeping  # type: ignore[method-assign]
    return list(steps(training))


LAYOUTS = [
    pytest.param({"data": 2, "zero": 0}, marks=pytest.mark.full),
    {"data": 2, "zero": 3},
    {"tensor": 2},
    pytest.param({"context": 2}, marks=pytest.mark.full),
    {"context": 2, "attention": "ring"},
    {"pipeline": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_waiting_for_a_slow_rank_is_communication_and_not_ones_own_work(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, int]
) -> None:
    waiting, slept = (
        found[-1].spans for found in ranks(2).run(with_a_sleeping_rank, tables(corpus, layout, 3))
    )
    assert waiting[EXPOSED] > SLEEP / 2
    assert slept["forward_backward"] >= SLEEP
