"""Compiled blocks that come in pieces, recomputed: the same numbers, side effects once, and compiled in
truth.

The compiler's own code generation is left out (`aot_eager`): what is cut into graphs, and what is run again,
is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from shardwise.train.evaluate import held_out_loss

SMALL = {"recompute": "full", "compile": True, "global_batch": 4, "micro_batch": 2, "steps": 2}
LAYOUTS = [
    pytest.param("llama", {"data": 1, "tensor": 2}, marks=pytest.mark.full),
    pytest.param("experts", {"data": 2}, marks=pytest.mark.full),
    pytest.param("experts", {"data": 1, "tensor": 2}, marks=pytest.mark.full),
]


@dataclass(frozen=True)
class Compiled:
    """What a compiled run came to, how many graphs it was cut into, and how many choices of experts a step
    counted."""

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
        if (
            model == "experts"
        ):  # a load that was counted again, as a block was recomputed, would be twice as large
            tokens = (
                SMALL["global_batch"] * tables["data"]["sequence_length"] // 2
            )  # of a data shard, or of a part of a sequence
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


def test_all_blocks_run_what_the_first_compiled(ranks: Callable[[int], Pool], corpus: str) -> None:
    """The compiler allows few versions of a function: blocks for which it made one each would not all be
    compiled."""
    train = {"compile": True, "micro_batch": 2, "evaluate_sequences": 2}
    tables = job(
        corpus, model={**FAMILIES["llama"], "layers": 2}, train=train, layout={"data": 1, "tensor": 2}
    )
    for first, second in ranks(2).run(graphs_after_blocks, tables):
        assert second == first > 0


def graphs_after_blocks(worker: Worker, tables: Tables) -> list[int]:
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        training = start(worker, tables)
        for block in training.parallel.model.get_submodule("blocks").children():
            block.register_forward_hook(lambda *call: graphs.append(counters["stats"]["unique_graphs"]))
        held_out_loss(training)
    return graphs
