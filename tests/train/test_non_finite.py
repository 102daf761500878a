"""A number that is not finite ends the run before it touches a weight, and says where it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks.faults import fail, snapshot
from ranks.jobs import ALONE, job, start
from ranks.pool import Pool

from shardwise.checkpoint import checkpoints
from shardwise.config import from_tables
from shardwise.errors import RunFailed
from shardwise.plans import choose
from shardwise.resilience.worker_link import WorkerLink
from shardwise.train.build import restore
from shardwise.train.run import run
from shardwise.train.steps import steps

PARAMETER = "blocks.1.attention.value.weight"


@pytest.mark.parametrize(
    ("zero", "precision"),
    [
        *((0, "float32"), (1, "bfloat16"), (3, "float32")),
        *(
            pytest.param(zero, precision, marks=pytest.mark.full)
            for zero, precision in (
                (0, "bfloat16"),
                (1, "float32"),
                (2, "float32"),
                (2, "bfloat16"),
                (3, "bfloat16"),
            )
        ),
    ],
)
def test_a_nan_in_one_gradient_of_one_rank_stops_all_ranks(
    ranks: Callable[[int], Pool], corpus: str, zero: int, precision: str
) -> None:
    train = {"precision": precision, "micro_batch": 2, "steps": 5}
    tables = job(corpus, train=train, layout={"data": 2, "zero": zero})
    for message, untouched in ranks(2).run(fail, tables, PARAMETER, 3, 1):
        assert message.startswith("step 3: ")
        assert f"the gradient of {PARAMETER} is the first that is not finite" in message
        assert untouched


def test_a_nan_is_found_in_hybrid_sharding_and_in_float64(ranks: Callable[[int], Pool], corpus: str) -> None:
    tables = job(corpus, train={"micro_batch": 1}, layout={"replica": 2, "data": 2, "zero": 2})
    for message, untouched in ranks(4).run(fail, tables, "blocks.0.feed_forward.down.weight", 2, 3):
        assert message.startswith("step 2: ")
        assert "the gradient of blocks.0.feed_forward.down.weight is the first that is not finite" in message
        assert untouched


def test_a_loss_that_is_not_finite_names_the_first_parameter_it_spoils(corpus: str) -> None:
    training = start(ALONE, job(corpus, train={"precision": "float32"}))
    with torch.no_grad():
        training.parallel.model.blocks[0].feed_forward.up.weight[0, 0] = torch.nan
    before = snapshot(training)
    with pytest.raises(
        RunFailed, match=r"step 1: the loss is nan and the gradient of embedding\.weight is the first"
    ):
        next(steps(training))
    after = snapshot(training)
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(corpus: str, tmp_path: Path) -> None:
    train = {
        "precision": "float32",
        "learning_rate": 1e25,
        "clip": False,
        "warmup": 0,
        "schedule": "constant",
        "steps": 9,
    }
    tables = job(corpus, train=train, checkpoint={"every": 1, "keep": 20}, run={"folder": str(tmp_path)})
    config = from_tables(tables)
    with pytest.raises(RunFailed, match="The weights were not touched, and checkpoints are kept"):
        run(config, WorkerLink(ALONE, choose(config, 1)))
    saved = checkpoints(tmp_path / "checkpoints")
    assert saved
    training = start(ALONE, tables)
    restore(training, saved[-1])
    assert training.step == len(saved)
    assert all(torch.isfinite(parameter).all() for parameter in training.parallel.model.parameters())
