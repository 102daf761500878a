"""A checkpoint fits any mesh: saved on each of ten layouts, loaded on each of the ten, all axes among them.

The truth is one device that was never interrupted. A pair holds if every weight is the saved one to the last bit after the load,
and if the losses of the next five steps, for which the moments must be right too, are those of the truth, in float64, to 1e-9.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import ALONE, FAMILIES, Tables, job, on_one_device, start, weights
from ranks.pool import Pool

from shardwise.config import Layout
from shardwise.mesh import Worker
from shardwise.train.build import Training, restore, save
from shardwise.train.steps import steps

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "data, zero 0": {"data": 2, "zero": 0},
    "data, zero 1, experts": {"data": 2, "zero": 1, "expert": 2},
    "pipeline in a V": {"pipeline": 2, "data": 1, "schedule": "zbv"},
    "data, zero 3": {"data": 4, "zero": 3},
    "replica, zero 2": {"replica": 2, "data": 2, "zero": 2},
    "tensor, zero 3": {"tensor": 2, "data": 2, "zero": 3},
    "pipeline, zero 1": {"pipeline": 2, "data": 2, "zero": 1},
    "context, experts, zero 2": {"context": 2, "data": 2, "expert": 2, "zero": 2},
    "pipeline, tensor, experts": {"pipeline": 2, "tensor": 2, "data": 1, "expert": 2},
}
SAVED_AT, MORE = 2, 5

Digests = dict[str, str]


def digests(training: Training) -> Digests:
    """A hash of every weight, whole."""
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in sorted(weights(training).items())}


def train_and_save(worker: Worker, tables: Tables) -> Digests:
    training = start(worker, tables)
    generator = steps(training)
    for _ in range(SAVED_AT):
        next(generator)
    save(training)
    return digests(training)


def load_each(worker: Worker, tables: Tables, folders: list[str]) -> list[tuple[Digests, list[float]]]:
    """Load one checkpoint after the other into the same model; what it then is, and how it goes on."""
    training, found = start(worker, tables), []
    for folder in folders:
        restore(training, folder)
        found.append((digests(training), [step.loss for step in steps(training)]))
    return found


def run(ranks: Callable[[int], Pool], tables: Tables, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    world = Layout(**{"data": 1, **tables["layout"]}).world
    return [case(ALONE, tables, *arguments)] if world == 1 else ranks(world).run(case, tables, *arguments)


def tables_of(corpus: str, layout: str, folder: Path) -> Tables:
    train = {"steps": SAVED_AT + MORE, "micro_batch": 2 if "pipeline" in LAYOUTS[layout] else None}
    return job(corpus, model=FAMILIES["experts"], train=train, layout=LAYOUTS[layout], run={"folder": str(folder)})


@pytest.fixture(scope="module")
def written(
    ranks: Callable[[int], Pool], corpus: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, Digests]]:
    """A checkpoint of each layout, and what was in memory when it was made."""
    found = {}
    for number, layout in enumerate(LAYOUTS):
        folder = tmp_path_factory.mktemp(f"layout-{number}")
        states = run(ranks, tables_of(corpus, layout, folder), train_and_save)
        assert all(state == states[0] for state in states), "ranks hold different weights"
        found[layout] = (str(folder / "checkpoints" / f"step-{SAVED_AT}"), states[0])
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoints_of_all_layouts_load_to_the_bit_and_go_on_as_one_device(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path, written: dict[str, tuple[str, Digests]], layout: str
) -> None:
    tables = tables_of(corpus, layout, tmp_path)
    truth = on_one_device(tables).losses[SAVED_AT:]
    assert len(truth) == MORE
    for answers in run(ranks, tables, load_each, [folder for folder, _ in written.values()]):
        for (source, (_, saved)), (loaded, losses) in zip(written.items(), answers, strict=True):
            assert loaded == saved, f"from {source}"
            assert losses == pytest.approx(truth, rel=1e-9, abs=0), f"from {source}"
