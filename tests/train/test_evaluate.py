"""Evaluation, sampling and stopping: the same on every rank of every layout, and without a trace in the
training after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks.faults import snapshot
from ranks.jobs import (
    ALONE,
    FAMILIES,
    Tables,
    Trained,
    job,
    on_one_device,
    start,
    train,
    weights,
    worst_difference,
)
from ranks.pool import Pool

from shardwise.config import Layout
from shardwise.mesh import Worker
from shardwise.train.evaluate import held_out_loss, sample
from shardwise.train.steps import steps

EVALUATED = 13
"""Neither whole micro-batches nor as many for each rank."""


def evaluate(worker: Worker, tables: Tables) -> tuple[list[float | None], str, Trained]:
    """Held-out losses before and after each step, a sample at the end, and the training around them."""
    training, done = start(worker, tables), []
    losses = [held_out_loss(training)]
    for step in steps(training):
        done.append(step)
        losses.append(held_out_loss(training))
    return losses, sample(training, "ab"), Trained(done, weights(training))


def evaluated(corpus: str, **sections: Any) -> Tables:
    train = {"evaluate_sequences": EVALUATED, "micro_batch": 2, **sections.pop("train", {})}
    return {**job(corpus, train=train, **sections), "observe": {"sample_tokens": 6}}


@pytest.mark.parametrize("text", ["corpus", "conversations"])
def test_held_out_loss_is_the_mean_cross_entropy_of_sequences_never_trained_on(
    text: str, request: pytest.FixtureRequest
) -> None:
    data = {"reset_attention": text == "corpus", "held_out": 0.3}
    training = start(ALONE, evaluated(request.getfixturevalue(text), data=data))
    rows = training.dataset.held_out_rows(0, EVALUATED)
    model = training.parallel.model
    with torch.no_grad():
        logits = model(torch.from_numpy(rows.inputs), documents=torch.from_numpy(rows.documents))
    truth = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(rows.targets).flatten(), ignore_index=-100)
    assert held_out_loss(training) == pytest.approx(truth.item(), rel=1e-12)
    assert rows.valid < np.size(rows.targets)


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 4, "zero": 0},
        pytest.param({"data": 4, "zero": 1}, marks=pytest.mark.full),
        pytest.param({"data": 2, "zero": 2}, marks=pytest.mark.full),
        {"replica": 2, "data": 2, "zero": 3},
    ],
    ids=str,
)
def test_evaluation_and_sample_are_those_of_one_device_and_leave_no_trace(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, int]
) -> None:
    tables = evaluated(corpus, layout=layout)
    undisturbed = on_one_device(tables)
    losses, text, _ = evaluate(ALONE, {**tables, "layout": {}})
    for found_losses, found_text, trained in ranks(layout["data"] * layout.get("replica", 1)).run(
        evaluate, tables
    ):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        assert found_text == text
        assert worst_difference(trained, undisturbed) < 1e-9


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama", {"tensor": 2}),
        ("gpt", {"context": 2, "attention": "ring"}),
        pytest.param("gpt", {"pipeline": 2, "tensor": 2}, marks=pytest.mark.full),
        ("tied", {"pipeline": 2, "schedule": "zbv"}),
        pytest.param(
            "llama", {"pipeline": 2, "context": 2, "schedule": "interleaved"}, marks=pytest.mark.full
        ),
        ("experts", {"data": 2, "tensor": 2, "expert": 2, "zero": 3}),
    ],
    ids=str,
)
def test_evaluation_and_sample_of_any_axis_are_those_of_one_device(
    ranks: Callable[[int], Pool], corpus: str, model: str, layout: dict[str, Any]
) -> None:
    shape = FAMILIES[model] if "pipeline" in layout else {**FAMILIES[model], "layers": 2}
    tables = evaluated(
        corpus, model=shape, train={"steps": 1, "global_batch": 4}, layout={"data": 1, **layout}
    )
    losses, text, _ = evaluate(ALONE, {**tables, "layout": {}})
    for found_losses, found_text, _ in ranks(Layout(**tables["layout"]).world).run(evaluate, tables):
        assert found_losses == pytest.approx(losses, rel=1e-9)
        assert found_text == text


def unchanged(worker: Worker, tables: Tables) -> bool:
    """Whether what this rank holds, and would save, is the same before and after an evaluation and a
    sample."""
    training = start(worker, tables)
    next(steps(training))
    before = snapshot(training)
    held_out_loss(training)
    sample(training, "ab")
    after = snapshot(training)
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.full), 3])
def test_weights_are_shards_again_after_an_evaluation(
    ranks: Callable[[int], Pool], corpus: str, zero: int
) -> None:
    assert ranks(2).run(unchanged, evaluated(corpus, layout={"data": 2, "zero": zero})) == [True, True]


def counted(worker: Worker, tables: Tables) -> list[Any]:
    """The collectives of each step, without those of the evaluations that came before it."""
    training, counts = start(worker, tables), []
    generator = steps(training)
    for _ in range(2):
        held_out_loss(training)
        training.comm.ledger.take()
        counts.append(next(generator).collectives)
    return counts


def test_a_step_after_an_evaluation_sends_what_any_step_sends(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    layout = {"pipeline": 2, "data": 2, "zero": 1}
    tables = evaluated(corpus, model=FAMILIES["tied"], train={"steps": 2, "global_batch": 4}, layout=layout)
    pool = ranks(4)
    for counts, plain in zip(pool.run(counted, tables), pool.run(train, tables), strict=True):
        assert counts == [step.collectives for step in plain.steps]


def test_nothing_held_out_means_no_evaluation(corpus: str) -> None:
    assert held_out_loss(start(ALONE, job(corpus, data={"held_out": 0.0}))) is None


def stop(worker: Worker, tables: Tables, on: int, at: int) -> list[tuple[int, bool]]:
    training = start(worker, tables)
    generator = steps(training, lambda: worker.rank == on and training.step + 1 == at)
    return [(done.step, done.stop) for done in generator]


def test_one_rank_asked_to_stop_stops_all_after_the_same_step(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    tables = job(corpus, train={"steps": 6}, layout={"replica": 2, "data": 2, "zero": 3})
    assert ranks(4).run(stop, tables, 2, 3) == [[(1, False), (2, False), (3, True)]] * 4
