"""Saving by the clock, where a job does not say after how many steps to save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks.jobs import ALONE, FAMILIES, Tables, job, start
from ranks.pool import Pool

from shardwise.checkpoint import checkpoints, step_of
from shardwise.config import from_tables
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.resilience.worker_link import WorkerLink
from shardwise.train.run import run
from shardwise.train.steps import steps


def save(worker: Worker, tables: Tables, at: int) -> list[bool]:
    training = start(worker, tables)
    generator = steps(
        training, save_due=lambda: training.step + 1 == at if worker.rank == 0 else training.step + 1 != at
    )
    return [done.save for done in generator]


@pytest.mark.parametrize(
    "layout",
    [pytest.param({"data": 2, "tensor": 2, "zero": 3}, marks=pytest.mark.full), {"pipeline": 2, "data": 2}],
)
def test_all_ranks_save_by_the_clock_of_the_main_one(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, int]
) -> None:
    tables = job(corpus, train={"steps": 4}, layout=layout, model=FAMILIES["llama"])
    assert ranks(4).run(save, tables, 3) == [[False, False, True, False]] * 4


@pytest.mark.parametrize(
    ("checkpoint", "saved", "says"),
    [
        ({}, [3], "every 15 minutes"),
        ({"every_minutes": 1e-9}, [1, 2, 3], "every 1e-09 minutes"),
        ({"every_minutes": 1e-9, "every": 2}, [2, 3], "every 2 steps"),
        ({"every_minutes": 0}, [3], "at the end and when asked to stop"),
    ],
)
def test_a_run_saves_every_so_many_minutes_unless_it_counts_steps(
    corpus: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    checkpoint: dict[str, float],
    saved: list[int],
    says: str,
) -> None:
    tables = job(
        corpus, train={"steps": 3}, checkpoint={"keep": 9, **checkpoint}, run={"folder": str(tmp_path)}
    )
    config = from_tables(tables)
    assert run(config, WorkerLink(ALONE, choose(config, 1))) == 0
    assert sorted(map(step_of, checkpoints(tmp_path / "checkpoints"))) == saved
    header = " ".join(capsys.readouterr().err.split())
    assert f" saving {says}" in header
