"""Routers are computed with as they are stored: no layout rounds their weights, whatever the precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks.jobs import FAMILIES, Tables, job, start, weights
from ranks.pool import Pool
from torch import Tensor

from shardwise.config import Layout
from shardwise.mesh import Worker
from shardwise.models.experts import Router
from shardwise.train.steps import steps


def weights_of_routers(worker: Worker, tables: Tables) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of each router: as its first forward sees it, and as its parameter is."""
    training = start(worker, tables)
    seen: dict[str, Tensor] = {}
    modules = training.parallel.model.named_modules()
    names = {module: f"{name}.weight" for name, module in modules if isinstance(module, Router)}

    def look(router: Router, inputs: Any) -> None:
        seen[names[router]] = router.weight.detach().clone()

    for router in names:
        router.register_forward_pre_hook(look)
    stored = {name: value for name, value in weights(training).items() if name in names.values()}
    next(steps(training))
    return seen, stored


@pytest.mark.parametrize(
    "layout",
    [
        {"data": 2, "zero": 3},
        {"data": 2, "expert": 2, "zero": 1},
        pytest.param({"data": 2, "zero": 0}, marks=pytest.mark.full),
        pytest.param({"tensor": 2, "data": 2, "zero": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_no_layout_rounds_a_router(ranks: Callable[[int], Pool], corpus: str, layout: dict[str, Any]) -> None:
    model = {**FAMILIES["experts"], "layers": 2}
    tables = job(
        corpus, model=model, train={"precision": "bfloat16", "steps": 1}, layout={"data": 1, **layout}
    )
    for seen, stored in ranks(Layout(**{"data": 1, **layout}).world).run(weights_of_routers, tables):
        assert seen.keys() == stored.keys()
        for name, value in seen.items():
            assert value.dtype == torch.float32
            assert torch.equal(value, stored[name]), name
