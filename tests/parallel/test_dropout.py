"""A user's module that draws: the same numbers on any layout, in recomputation and after a resume, and none
in evaluation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropping_attention import ATTEND, DroppingAttention
from ranks.jobs import ALONE, Tables, Trained, start, train, weights, worst_difference
from ranks.pool import Pool
from test_own_module import own, plain_module, tables_of
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.mesh import Worker
from shardwise.parallel import recompute
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
def test_layouts_drop_what_one_device_drops(
    ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]
) -> None:
    truth, world = train(ALONE, dropping(corpus)), 1
    for axis in ("data", "pipeline", "replica"):
        world *= layout.get(axis, 1)
    for found in ranks(world).run(train, dropping(corpus, layout)):
        assert worst_difference(found, truth) < 1e-12


def test_steps_and_seeds_drop_others(corpus: str) -> None:
    """Else the tests above would pass without any dropout: one batch, over and over, and weights that hardly
    move."""
    still = {"learning_rate": 1e-12, "steps": 3}
    one, other = (train(ALONE, dropping(corpus, seed=seed, **still)) for seed in (3, 4))
    losses = [*one.losses, *other.losses]
    assert len({round(loss, 9) for loss in losses}) == len(losses)
    assert train(ALONE, dropping(corpus, seed=3, **still)).losses == one.losses


@pytest.mark.parametrize("mode", ["none", "full"])
def test_each_block_of_each_micro_batch_drops_numbers_of_its_own(
    corpus: str, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Else blocks that all draw alike would pass every comparison here: both sides would draw so."""
    masks: list[tuple[bool, ...]] = []
    honest, training = F.dropout, start(ALONE, dropping(corpus, steps=1, recompute=mode))

    def recorded(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mask = honest(torch.ones_like(x), p, training)
        if p == 0.2:  # a block's first
            masks.append(tuple((mask != 0).flatten().tolist()))
        return x * mask

    monkeypatch.setattr(F, "dropout", recorded)
    next(steps(training))
    layers, micro_batches = training.config.model.layers, training.plan.accumulation
    assert layers > 1 < micro_batches
    assert len(masks) == layers * micro_batches * (2 if mode == "full" else 1)
    assert len(set(masks)) == layers * micro_batches, "no two alike, but for what is computed again"


@pytest.mark.parametrize("mode", ["full", "selective", "all-but-attention", 0.5])
def test_recomputation_drops_what_forward_dropped(corpus: str, mode: str | float) -> None:
    found, truth = train(ALONE, dropping(corpus, recompute=mode)), train(ALONE, dropping(corpus))
    assert found.losses == truth.losses
    assert found.norms == truth.norms
    assert all(torch.equal(found.weights[name], value) for name, value in truth.weights.items())


@pytest.mark.parametrize("mode", ["selective", "all-but-attention"])
def test_attention_that_drops_is_computed_again_so_that_what_follows_drops_the_same(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """torch's attention on a CPU drops only in parts that are never kept. This one is a single operator, as
    on a GPU."""
    monkeypatch.setitem(recompute._DROPOUT, ATTEND, 1)
    monkeypatch.setattr(recompute, "_ATTENTION", {*recompute._ATTENTION, ATTEND})
    gradients = []
    for wanted in ("none", mode):
        torch.manual_seed(5)
        block, x = DroppingAttention(), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
        model = nn.Sequential(block)
        recompute.recompute(model, [block], wanted, compiled=False, draws=True)
        model(x).square().sum().backward()
        gradients.append((x.grad, block.weight.grad))
    for exact, found in zip(*gradients, strict=True):
        assert torch.equal(exact, found)


@pytest.mark.parametrize("operation", recompute._DROPOUT, ids=str)
@pytest.mark.parametrize("by_name", [False, True], ids=["by place", "by name"])
def test_attention_of_every_kernel_is_kept_only_where_it_drops_nothing(operation: Any, by_name: bool) -> None:
    arguments = [argument.name for argument in operation._schema.arguments]
    for share, wanted in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
        given: list[Any] = [share if name == "dropout_p" else None for name in arguments]
        args, kwargs = (given[:3], {"dropout_p": share}) if by_name else (given, {})
        assert recompute._attention(None, operation, *args, **kwargs) is wanted
        assert recompute._products(None, operation, *args, **kwargs) is wanted


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
