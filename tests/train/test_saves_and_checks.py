"""What ranks say to each other while a save goes on in the background."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks.jobs import ALONE, Tables, job, start
from ranks.pool import Pool

from shardwise.config import from_tables
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.resilience.worker_link import WorkerLink
from shardwise.resilience.worker_messages import Phase
from shardwise.train.build import save
from shardwise.train.run import run
from shardwise.train.steps import steps


def check_while_saving(worker: Worker, tables: Tables) -> list[int]:
    """Every step is saved in the background and followed by one whose copies are compared."""
    training = start(worker, tables)
    for _ in steps(training):
        save(training, wait=False)
    training.checkpointer.finish()
    return [outcome.step for outcome in training.checkpointer.outcomes() if hasattr(outcome, "folder")]


def test_copies_are_compared_while_a_save_goes_on(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = job(
        corpus,
        train={"steps": 12, "check_every": 1, "precision": "float32"},
        layout={"data": 2},
        checkpoint={"folder": str(tmp_path), "keep": 99},
    )
    assert ranks(2).run(check_while_saving, tables) == [list(range(1, 13))] * 2


class Phases(WorkerLink):
    """Notes what a worker tells its host of."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.told: list[tuple[Phase, int]] = []

    def progress(self, phase: Phase, step: int) -> None:
        self.told.append((phase, step))


@pytest.mark.parametrize("background", [True, False])
def test_the_host_is_told_of_every_save_and_of_its_end(corpus: str, tmp_path: Path, background: bool) -> None:
    checkpoint = {"every": 2, "background": background}
    config = from_tables(
        job(corpus, train={"steps": 5}, checkpoint=checkpoint, run={"folder": str(tmp_path)})
    )
    link = Phases(ALONE, choose(config, 1))
    assert run(config, link) == 0
    saves = [index for index, (phase, _) in enumerate(link.told) if phase == "save"]
    assert [link.told[index] for index in saves] == [("save", 2), ("save", 4), ("save", 5)]
    assert [link.told[index + 1] for index in saves] == [("step", 2), ("step", 4), ("step", 5)]
