"""Copies in a neighbour's memory: what one worker lost comes back to the last bit, on every kind of
layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.jobs import ALONE, FAMILIES, Tables, job, start
from ranks.pool import Pool
from torch import Tensor

from shardwise.config import Layout
from shardwise.mesh import Worker, leave
from shardwise.optim import local
from shardwise.resilience.memory_snapshots import MemorySnapshots
from shardwise.train.build import Training, keep_copy, recall
from shardwise.train.steps import steps


def state(training: Training) -> dict[str, Tensor]:
    moments = training.optimizer.state
    named = list(training.parallel.named_parameters())
    found = {name: local(parameter.detach()).clone() for name, parameter in named}
    found |= {
        f"{name}.{key}": local(value).clone() for name, one in named for key, value in moments[one].items()
    }
    return found | {name: buffer.clone() for name, buffer in training.parallel.named_buffers()}


KEPT: list[MemorySnapshots] = []
"""A rank's process lasts from one case to the next, and so does its memory."""


def train_with_copies(worker: Worker, tables: Tables) -> tuple[list[float], dict[str, Tensor]]:
    """Train to the end, with a copy of every other step; the losses, and the state of this rank after step
    4."""
    KEPT[:] = [MemorySnapshots(every=2)]
    training = start(worker, tables)
    assert not recall(training, KEPT[0])
    losses, kept = [], {}
    for step in steps(training):
        keep_copy(training, KEPT[0])
        losses.append(step.loss)
        kept = state(training) if training.step == 4 else kept
    return losses, kept


def come_back(worker: Worker, tables: Tables, lost: list[int]) -> tuple[bool, dict[str, Tensor], list[float]]:
    """A new team, in which some came new and remember nothing."""
    if worker.rank in lost:
        KEPT[:] = [MemorySnapshots(every=2)]
    training = start(worker, tables)
    recalled = recall(training, KEPT[0])
    return recalled, state(training) if recalled else {}, [step.loss for step in steps(training)]


def stay_behind_alone(worker: Worker, tables: Tables) -> bool:
    copies = MemorySnapshots(every=1)
    training = start(worker, tables)
    recall(training, copies)
    next(steps(training))
    keep_copy(training, copies)
    leave()
    return worker.rank == 0 and recall(start(ALONE, {**tables, "layout": {"data": 1}}), copies)


def test_a_worker_that_is_left_alone_asks_nobody_for_copies(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = job(corpus, train={"steps": 2}, layout={"data": 2}, run={"folder": str(tmp_path)})
    assert ranks(2).run(stay_behind_alone, tables) == [False, False]


LAYOUTS = [
    ("llama", {"data": 4, "zero": 3}),
    ("llama", {"data": 2, "zero": 0}),
    pytest.param("tied", {"pipeline": 2, "data": 2, "zero": 1}, marks=pytest.mark.full),
    pytest.param("experts", {"tensor": 2, "data": 2, "expert": 2, "zero": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_what_one_worker_lost_comes_back_from_its_neighbour(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, model: str, layout: dict[str, Any], lost: int
) -> None:
    tables = job(
        corpus,
        model=FAMILIES[model],
        train={"steps": 5, "micro_batch": 2},
        layout=layout,
        run={"folder": str(tmp_path)},
    )
    pool = ranks(Layout(**layout).world)
    before = pool.run(train_with_copies, tables, stay=True)
    after = pool.run(come_back, tables, [lost])
    for (losses, kept), (recalled, found, again) in zip(before, after, strict=True):
        assert recalled
        assert kept.keys() == found.keys()
        assert all(torch.equal(kept[name], found[name]) for name in kept)
        assert again == losses[4:]


def break_off_last_exchange(worker: Worker) -> None:
    """As when a peer dies while copies are on their way: the neighbour's last one came in part only."""
    last = KEPT[0]._exchanges[-1]
    assert last.thread is not None
    last.thread.join()
    last.remote.content[len(last.remote.content) // 2 :] = 0
    last.complete = False


def test_a_copy_that_came_in_part_is_not_used_but_the_one_before_it(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = job(corpus, train={"steps": 5}, layout={"data": 2, "zero": 3}, run={"folder": str(tmp_path)})
    before = ranks(2).run(train_with_copies, tables, stay=True)
    ranks(2).run(break_off_last_exchange, stay=True)
    for (losses, _), (recalled, _, again) in zip(before, ranks(2).run(come_back, tables, [1]), strict=True):
        assert recalled
        assert again == losses[2:], "copies were kept of steps 2 and 4"


@pytest.mark.parametrize(("lost", "whole"), [([0, 1], True), ([0, 2], False)])
def test_two_may_be_lost_unless_one_had_the_others_copy(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, lost: list[int], whole: bool
) -> None:
    tables = job(corpus, train={"steps": 5}, layout={"data": 4, "zero": 3}, run={"folder": str(tmp_path)})
    ranks(4).run(train_with_copies, tables, stay=True)
    assert [recalled for recalled, *_ in ranks(4).run(come_back, tables, lost)] == [whole] * 4


def test_copies_of_another_layout_are_not_used(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = job(corpus, train={"steps": 5}, layout={"data": 4, "zero": 3}, run={"folder": str(tmp_path)})
    ranks(4).run(train_with_copies, tables, stay=True)
    other = {**tables, "layout": {"data": 4, "zero": 1}}
    assert [recalled for recalled, *_ in ranks(4).run(come_back, other, [])] == [False] * 4
