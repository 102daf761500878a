"""A user's module that draws: the same numbers on any layout, in recomputation and after a resume, and none in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks.jobs import ALONE, Tables, Trained, start, train, weights, worst_difference
from ranks.pool import Pool
from test_own_module import own, plain_module, tables_of

from shardwise.mesh import Worker
from shardwise.train.build import restore, save
from shardwise.train.evaluate import held_out_loss
from shardwise.train.steps import steps


def dropping(corpus: str, layout: dict[str, Any] | None = None, **more: Any) -> Tables:
    return tables_of(corpus, own("Dropping"), layout or {}, **more)


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "zero": 3},
        {"pipeline": 2, "schedule": "1f1b"},
        pytest.param({"replica": 2, "data": 2, "zero": 1}, marks=pytest.mark.full),
        pytest.param({"pipeline": 2, "data": 2, "schedule": "zbv"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_layouts_drop_what_one_device_drops(ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]) -> None:
    truth, world = train(ALONE, dropping(corpus)), 1
    for axis in ("data", "pipeline", "replica"):
        world *= layout.get(axis, 1)
    for found in ranks(world).run(train, dropping(corpus, layout)):
        assert worst_difference(found, truth) < 1e-12


def test_steps_and_seeds_drop_others(corpus: str) -> None:
    """Else the tests above would pass without any dropout: one batch, over and over, and weights that hardly move."""
    still = {"learning_rate": 1e-12, "steps": 3}
    one, other = (train(ALONE, dropping(corpus, seed=seed, **still)) for seed in (3, 4))
    losses = [*one.losses, *other.losses]
    assert len({round(loss, 9) for loss in losses}) == len(losses)
    assert train(ALONE, dropping(corpus, seed=3, **still)).losses == one.losses


@pytest.mark.parametrize("mode", ["full", "selective", "all-but-attention", 0.5])
def test_recomputation_drops_what_forward_dropped(corpus: str, mode: str | float) -> None:
    found, truth = train(ALONE, dropping(corpus, recompute=mode)), train(ALONE, dropping(corpus))
    assert found.losses == truth.losses
    assert found.norms == truth.norms
    assert all(torch.equal(found.weights[name], value) for name, value in truth.weights.items())


def test_a_resumed_run_drops_what_the_undisturbed_one_drops_on_another_layout_too(
    ranks: Callable[[int], Pool], corpus: str, tmp_path: Path
) -> None:
    tables = {**dropping(corpus), "run": {"folder": str(tmp_path)}}
    training = start(ALONE, tables)
    next(steps(training))
    folder = save(training)
    for found in ranks(2).run(resumed, {**tables, "layout": {"data": 2}}, folder):
        truth = train(ALONE, tables)
        assert found.losses == pytest.approx(truth.losses[1:], rel=1e-12)


def resumed(worker: Worker, tables: Tables, folder: str) -> Trained:
    training = start(worker, tables)
    restore(training, folder)
    done = list(steps(training))
    return Trained(done, weights(training))


def test_evaluation_drops_nothing_and_leaves_every_module_in_its_mode(corpus: str) -> None:
    training = start(ALONE, dropping(corpus, evaluate_sequences=3))
    modes = {name: module.training for name, module in training.parallel.model.named_modules()}
    plain, rows = plain_module(training.config).eval(), training.dataset.held_out_rows(0, 3)
    with torch.no_grad():
        logits = plain(torch.from_numpy(rows.inputs))
    truth = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(rows.targets).flatten())
    assert held_out_loss(training) == pytest.approx(truth.item(), rel=1e-12)
    assert {name: module.training for name, module in training.parallel.model.named_modules()} == modes
    assert modes["drop"]
    assert not modes["idle"]
