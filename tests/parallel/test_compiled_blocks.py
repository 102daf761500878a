"""Compiled blocks that come in pieces, recomputed: the same numbers, side effects once, and compiled in truth.

The compiler's own code generation is left out (`aot_eager`): what is cut into graphs, and what is run again, is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

import pytest
import torch
from ranks.jobs import FAMILIES, Tables, Trained, job, on_one_device, train, worst_difference
from ranks.pool import Pool
from ranks.truth import EXACT
from torch._dynamo.utils import counters

from shardwise.mesh import Worker
from shardwise.models import MixtureOfExperts

SMALL = {"recompute": "full", "compile": True, "global_batch": 4, "micro_batch": 2, "steps": 2}
LAYOUTS = [
    pytest.param("llama", {"data": 1, "tensor": 2}, marks=pytest.mark.full),
    ("experts", {"data": 2}),
    ("experts", {"data": 1, "tensor": 2}),
]


@dataclass(frozen=True)
class Compiled:
    """What a compiled run came to, how many graphs it was cut into, and how many choices of experts a step counted."""

    trained: Trained
    graphs: int
    loads: list[int]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS, ids=str)
def test_blocks_in_pieces_are_compiled_though_they_are_recomputed(
    ranks: Callable[[int], Pool], corpus: str, model: str, layout: dict[str, int]
) -> None:
    tables = job(corpus, model={**FAMILIES[model], "layers": 1}, train=SMALL, layout=layout)
    truth = on_one_device({**tables, "train": {**tables["train"], "compile": False}})
    for found in ranks(2).run(train_compiled, tables):
        assert found.graphs > 0
        assert worst_difference(found.trained, truth) < EXACT
        if model == "experts":  # a load that was counted again, as a block was recomputed, would be twice as large
            tokens = SMALL["global_batch"] * tables["data"]["sequence_length"] // 2  # of a data shard, or of a part of a sequence
            assert found.loads == [tokens * FAMILIES["experts"]["experts_per_token"]] * SMALL["steps"]


def train_compiled(worker: Worker, tables: Tables) -> Compiled:
    torch._dynamo.reset()
    counters.clear()
    loads: list[int] = []
    take = MixtureOfExperts.take_load

    def taken(mixture: MixtureOfExperts) -> torch.Tensor:
        load = take(mixture)
        loads.append(int(load.sum()))
        return load

    with (
        mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        mock.patch.object(MixtureOfExperts, "take_load", taken),
    ):
        return Compiled(train(worker, tables), counters["stats"]["unique_graphs"], loads)
