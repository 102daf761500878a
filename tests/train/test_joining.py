"""A worker that joins is compared with the others before its gradients count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ranks.jobs import Tables, job, start
from ranks.pool import Pool

from shardwise.errors import RunFailed
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.train.guard import check_joined


def join_wrongly(worker: Worker, tables: Tables, what: str) -> str:
    training = start(worker, tables)
    if worker.rank == 1:
        if what == "step":
            training.step = 2
        elif what == "loss scale":
            training.scale = replace(training.scale, value=2.0)
        elif what == "data":
            training.dataset = replace(training.dataset, seed=77)
        elif what == "weights":
            with torch.no_grad():
                local(next(iter(training.parallel.named_parameters()))[1]).view(-1)[0] += 1
    try:
        check_joined(training)
    except RunFailed as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["step", "loss scale", "data"])
def test_another_place_is_noticed_and_named(ranks: Callable[[int], Pool], corpus: str, what: str) -> None:
    for message in ranks(2).run(join_wrongly, job(corpus, layout={"data": 2}), what):
        assert message.startswith(f"rank 1 would go on with another {what} than rank 0")


def test_other_weights_are_noticed_and_named(ranks: Callable[[int], Pool], corpus: str) -> None:
    for message in ranks(2).run(join_wrongly, job(corpus, layout={"data": 2, "zero": 0}), "weights"):
        assert "copies of embedding.weight" in message


def test_equal_workers_may_join(ranks: Callable[[int], Pool], corpus: str) -> None:
    for layout in ({"data": 2, "zero": 3}, {"data": 1, "tensor": 2}):
        tables = job(corpus, model={"layers": 2, "hidden": 16, "heads": 2, "kv_heads": 2, "head_dim": 8,
        "ffn": 32,
                                    "vocabulary": 260}, layout=layout)  # fmt: skip
        assert ranks(2).run(join_wrongly, tables, "nothing") == ["", ""]
