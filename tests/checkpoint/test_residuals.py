"""What compression left out of gradients is part of a checkpoint: a run goes on with it to the bit, elsewhere
with its sum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import FAMILIES, Tables, job, start, weights
from ranks.pool import Pool
from ranks.residuals import left_out
from torch import Tensor

from shardwise.config import Layout
from shardwise.mesh import Worker
from shardwise.train.build import restore, save
from shardwise.train.steps import steps

Ranks = Callable[[int], Pool]
Numbers = list[tuple[float, float]]
SAVED_AT = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero 0": {"data": 2, "zero": 0},
    "zero 2": {"data": 4, "zero": 2},
    "hybrid": {"replica": 2, "data": 2, "zero": 3},
    "tensor": {"data": 2, "tensor": 2, "zero": 1},
    "pipeline": {"data": 2, "pipeline": 2, "zero": 0},
}


def tables_of(corpus: str, layout: dict[str, Any], codec: str, folder: Path) -> Tables:
    return job(
        corpus,
        model=FAMILIES["llama"],
        layout={**layout, "compression": codec},
        train={"micro_batch": 1, "steps": 4},
        run={"folder": str(folder)},
    )


def train_and_save(
    worker: Worker, tables: Tables
) -> tuple[str, Numbers, dict[str, Tensor], dict[str, Tensor]]:
    """Train to the last step, saving on the way: where, the numbers since, the weights at the end, and the
    residuals saved."""
    training, numbers, folder, residuals = start(worker, tables), [], "", {}
    for step in steps(training):
        numbers.append((step.loss, step.gradient_norm))
        if step.step == SAVED_AT:
            folder = save(training, wait=True)
            residuals = left_out(training, weights(training))
    return folder, numbers[SAVED_AT:], weights(training), residuals


def load_and_train(
    worker: Worker, tables: Tables, folder: str
) -> tuple[str, Numbers, dict[str, Tensor], dict[str, Tensor]]:
    training = start(worker, tables)
    restore(training, folder)
    residuals = left_out(training, weights(training))
    numbers = [(step.loss, step.gradient_norm) for step in steps(training)]
    return folder, numbers, weights(training), residuals


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        ("zero 0", "topk(0.05)"),
        ("zero 0", "powersgd(2)"),
        ("zero 2", "qsgd(4)"),
        pytest.param("hybrid", "int4", marks=pytest.mark.full),
        pytest.param("tensor", "sign", marks=pytest.mark.full),
        pytest.param("hybrid", "powersgd(2)", marks=pytest.mark.full),
        pytest.param("zero 2", "randomk(0.1)", marks=pytest.mark.full),
        pytest.param("pipeline", "topk(0.05)", marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_to_the_bit(ranks: Ranks, corpus: str, tmp_path: Path, layout: str, codec: str) -> None:
    tables = tables_of(corpus, LAYOUTS[layout], codec, tmp_path)
    pool = ranks(Layout(**LAYOUTS[layout]).world)
    through = pool.run(train_and_save, tables)
    resumed = pool.run(load_and_train, tables, through[0][0])
    for (_, numbers, after, residuals), (_, again, found, loaded) in zip(through, resumed, strict=True):
        assert again == numbers
        assert all(torch.equal(found[name], after[name]) for name in after)
        assert all(torch.equal(loaded[name], residuals[name]) for name in residuals)
        assert any(residual.any() for residual in residuals.values())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero 0", "zero 2"),
        pytest.param("hybrid", "tensor", marks=pytest.mark.full),
        pytest.param("zero 2", "hybrid", marks=pytest.mark.full),
        pytest.param("tensor", "pipeline", marks=pytest.mark.full),
        pytest.param("pipeline", "zero 0", marks=pytest.mark.full),
    ],
)
def test_on_another_layout_the_sum_stays(
    ranks: Ranks, corpus: str, tmp_path: Path, before: str, after: str
) -> None:
    written = ranks(Layout(**LAYOUTS[before]).world).run(
        train_and_save, tables_of(corpus, LAYOUTS[before], "topk(0.05)", tmp_path)
    )
    tables = tables_of(corpus, LAYOUTS[after], "topk(0.05)", tmp_path)
    read = ranks(Layout(**LAYOUTS[after]).world).run(load_and_train, tables, written[0][0])
    for _, _, _, residuals in read:
        for name, residual in residuals.items():
            torch.testing.assert_close(residual, written[0][3][name], rtol=1e-12, atol=1e-15)


def test_a_plain_run_takes_up_a_compressed_one_and_the_other_way_round(
    ranks: Ranks, corpus: str, tmp_path: Path
) -> None:
    compressed = tables_of(corpus, LAYOUTS["zero 0"], "int8", tmp_path / "compressed")
    plain = job(
        corpus,
        model=FAMILIES["llama"],
        layout=LAYOUTS["zero 0"],
        train={"micro_batch": 1, "steps": 4},
        run={"folder": str(tmp_path / "plain")},
    )
    written = ranks(2).run(train_and_save, compressed)
    assert len(ranks(2).run(load_and_train, plain, written[0][0])[0][1]) == 2
    written = ranks(2).run(train_and_save, plain)
    _, numbers, _, residuals = ranks(2).run(load_and_train, compressed, written[0][0])[0]
    assert len(numbers) == 2
    assert not any(residual.any() for residual in residuals.values())
