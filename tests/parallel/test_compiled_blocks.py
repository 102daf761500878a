"""Compiled blocks that come in pieces, recomputed: the same numbers, side effects once, and compiled in truth.

The compiler's own code generation is left out (`aot_eager`): what is cut into graphs, and what is run again, is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
from ranks.jobs import FAMILIES, Tables, Trained, job, on_one_device, start, train, worst_difference
from ranks.pool import Pool
from ranks.truth import EXACT
from torch._dynamo.utils import counters

from shardwise.mesh import Worker
from shardwise.models import MixtureOfExperts
from shardwise.train.steps import steps

SMALL = {"recompute": "full", "compile": True, "global_batch": 4, "micro_batch": 2}
LAYOUTS = [("llama", {"data": 1, "tensor": 2}), ("experts", {"data": 2}), ("experts", {"data": 1, "tensor": 2})]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_blocks_in_pieces_are_compiled_though_they_are_recomputed(
    ranks: Callable[[int], Pool], corpus: str, model: str, layout: dict[str, int]
) -> None:
    tables = job(corpus, model={**FAMILIES[model], "layers": 1}, train={**SMALL, "steps": 2}, layout=layout)
    for found, graphs in ranks(2).run(train_compiled, tables):
        assert graphs > 0
        assert worst_difference(found, on_one_device({**tables, "train": {**tables["train"], "compile": False}})) < EXACT


def train_compiled(worker: Worker, tables: Tables) -> tuple[Trained, int]:
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        return train(worker, tables), counters["stats"]["unique_graphs"]


def test_a_recomputed_mixture_counts_its_load_once(ranks: Callable[[int], Pool], corpus: str) -> None:
    tables = job(corpus, model={**FAMILIES["experts"], "layers": 1}, train={**SMALL, "steps": 1}, layout={"data": 2})
    [(load, tokens), *_] = ranks(2).run(load_of_a_step, tables)
    assert load == tokens * FAMILIES["experts"]["experts_per_token"]


def load_of_a_step(worker: Worker, tables: Tables) -> tuple[int, int]:
    torch._dynamo.reset()
    counted: list[int] = []
    take = MixtureOfExperts.take_load

    def taken(mixture: MixtureOfExperts) -> torch.Tensor:
        load = take(mixture)
        counted.append(int(load.sum()))
        return load

    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        training = start(worker, tables)
        with mock.patch.object(MixtureOfExperts, "take_load", taken):
            next(steps(training))
    config = training.config
    return counted[0], config.train.global_batch * config.data.sequence_length // worker.world
