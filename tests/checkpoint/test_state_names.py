"""Names of weights are the user's to choose: none of them is taken for something else of a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardwise.checkpoint.contents import Contents, StoredTensor
from shardwise.checkpoint.save import _expected
from shardwise.config import Layout

LAYOUT = Layout(data=1)  # type: ignore[call-arg]
WEIGHTS = [
    "inner_optimizer.weight", "optimizer.weight", "a.optimizer.b", "model.model.x", "residual.x", "factor.x",
    "group.0.x",
    "file.x", "a.float8.b", "float8.input.weight", "random.0.cpu", "outer.momentum.x",
]  # fmt: skip


def checkpoint(names: list[str]) -> Contents:
    tensors = {name: StoredTensor("float32", (2,), ()) for name in names}
    return Contents("run/step-1", cast(Any, SimpleNamespace(layout=LAYOUT.model_dump(mode="json"))), tensors)


@pytest.mark.parametrize("group", ["", "group.1."])
@pytest.mark.parametrize("absent", WEIGHTS)
def test_a_weight_that_a_checkpoint_lacks_is_asked_for_whatever_its_name(absent: str, group: str) -> None:
    """The reader then refuses the checkpoint by that name; a weight is never left at zero in silence."""
    names = [f"{group}model.{name}" for name in WEIGHTS]
    state = {name: torch.ones(2) for name in names}
    held = [name for name in names if name != f"{group}model.{absent}"]
    expected = _expected(state, checkpoint(held), LAYOUT)
    assert list(expected) == names
    assert all(value.tolist() == [1.0, 1.0] for value in state.values())


@pytest.mark.parametrize("group", ["", "group.1."])
def test_moments_and_maxima_that_a_checkpoint_lacks_begin_at_zero(group: str) -> None:
    weights = [f"{group}model.{name}" for name in WEIGHTS]
    moments = [f"{group}optimizer.{name}.exp_avg" for name in WEIGHTS]
    maxima = [
        f"{group}model.blocks.0.query.float8.input.maxima",
        f"{group}model.blocks.0.experts.float8.gate_up.gradient.maxima",
    ]
    state = {name: torch.ones(2) for name in [*weights, *moments, *maxima]}
    expected = _expected(state, checkpoint([*weights, moments[0], maxima[0]]), LAYOUT)
    assert list(expected) == [*weights, moments[0]]
    assert all(state[name].tolist() == [0.0, 0.0] for name in [*moments[1:], *maxima])
