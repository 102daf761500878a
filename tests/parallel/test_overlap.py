"""What goes on behind computing on CPU workers gives the bits of what blocks, and the ledger that the plan
asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from ranks.jobs import GPT, LLAMA, Tables, Trained, job, train, weights
from ranks.pool import Pool
from torch.distributed.fsdp import FSDPModule

from shardwise._torch import _groups
from shardwise.comm import CountedReduceScatter
from shardwise.config import Model, from_tables
from shardwise.config.parameters import parameter_shapes
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.train.build import Training, build
from shardwise.train.steps import steps


def _built(worker: Worker, tables: Tables, bucket: int | None = None) -> Training:
    config = from_tables(tables)
    return build(config, replace(choose(config, worker.world), bucket_bytes=bucket), worker)


def train_blocking(worker: Worker, tables: Tables) -> Trained:
    """As FSDP2 does it by itself: each sum is waited for, and FSDP2 adds it."""
    training = _built(worker, tables)
    for unit in training.parallel.parts[0].model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_modules_to_forward_prefetch([])
            for group in _groups(unit):
                scatter = group._reduce_scatter_comm
                assert isinstance(scatter, CountedReduceScatter)
                assert scatter.deferred is not None
                scatter.deferred = None
    done = list(steps(training))
    return Trained(done, weights(training))


def train_in_buckets(worker: Worker, tables: Tables, bucket: int) -> list[Any]:
    return list(steps(_built(worker, tables, bucket)))


@pytest.mark.parametrize(
    ("zero", "model"),
    [
        pytest.param(1, LLAMA, id="1-untied"),
        pytest.param(1, GPT, id="1-tied", marks=pytest.mark.full),
        pytest.param(2, LLAMA, id="2-untied", marks=pytest.mark.full),
        pytest.param(2, GPT, id="2-tied"),
        pytest.param(3, LLAMA, id="3-untied", marks=pytest.mark.full),
        pytest.param(3, GPT, id="3-tied"),
    ],
)
def test_sums_behind_backward_have_the_bits_of_sums_that_block(
    ranks: Callable[[int], Pool], corpus: str, model: dict[str, Any], zero: int
) -> None:
    settings = {"precision": "bfloat16", "steps": 3, "micro_batch": 2}
    tables = job(corpus, model=model, train=settings, layout={"data": 2, "zero": zero})
    pool = ranks(2)
    for found, truth in zip(pool.run(train, tables), pool.run(train_blocking, tables), strict=True):
        assert [step.gradient_norm for step in found.steps] == [step.gradient_norm for step in truth.steps]
        assert [step.collectives for step in found.steps] == [step.collectives for step in truth.steps]
        for name, weight in found.weights.items():
            assert torch.equal(_own(weight), _own(truth.weights[name])), name


def _own(weight: Any) -> torch.Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


def test_each_bucket_is_summed_once_it_has_the_bytes_that_the_plan_says(
    ranks: Callable[[int], Pool], corpus: str
) -> None:
    bucket = 5000
    tables = job(corpus, train={"precision": "float32", "steps": 2}, layout={"data": 2, "zero": 0})
    buckets, held = 0, bucket
    for shape in reversed(parameter_shapes(Model(**LLAMA)).values()):
        if held >= bucket:
            buckets, held = buckets + 1, 0
        held += 4 * prod(shape)
    assert buckets > 3
    for found in ranks(2).run(train_in_buckets, tables, bucket):
        assert [step.collectives["all_reduce/data"]["count"] for step in found] == [
            buckets + 1
        ] * 2  # and what ranks share
