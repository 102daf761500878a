"""Which values of a constructor are lost, because weights have none while a module is built."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardwise.models.unallocated import lost_values

TABLE = torch.arange(64.0).reshape(8, 8)


class Built(nn.Module):
    """A linear layer, and what a test does with it in the constructor."""

    def __init__(self, then: Callable[[Built], object]) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        with torch.no_grad():
            then(self)


def replaced(module: Built) -> None:
    module.proj.weight = nn.Parameter(TABLE.clone())


def made_anew(module: Built) -> None:
    module.table = nn.Embedding.from_pretrained(TABLE, freeze=False)


def filled_before(module: Built) -> None:
    values = torch.empty(8, 8)
    values.copy_(TABLE)
    module.weight = nn.Parameter(values)


LOST: dict[str, tuple[Callable[[Built], object], dict[str, float | None]]] = {
    "eye": (lambda module: setattr(module, "weight", nn.Parameter(torch.eye(8))), {"weight": None}),
    "computed": (lambda module: setattr(module, "weight", nn.Parameter(TABLE.cos() / 2)), {"weight": None}),
    "half": (lambda module: setattr(module, "scale", nn.Parameter(torch.full((8,), 0.5))), {"scale": 0.5}),
    "replaced": (replaced, {"proj.weight": None}),
    "from_pretrained": (made_anew, {"table.weight": None}),
    "filled before": (filled_before, {"weight": None}),
    "data.copy_": (lambda module: module.proj.weight.data.copy_(TABLE), {"proj.weight": None}),
    "copy_": (lambda module: module.proj.weight.copy_(TABLE), {"proj.weight": None}),
    "rows": (lambda module: module.proj.weight[2:4].copy_(TABLE[2:4]), {"proj.weight": None}),
    "assigned rows": (
        lambda module: module.proj.weight.__setitem__(slice(2), TABLE[:2]),
        {"proj.weight": None},
    ),
    "filled rows": (lambda module: module.proj.weight.__setitem__(slice(4), 7.0), {"proj.weight": None}),
    "a row of zeros": (lambda module: module.proj.weight[0].zero_(), {"proj.weight": None}),
    "padding": (
        lambda module: setattr(module, "table", nn.Embedding(8, 4, padding_idx=0)),
        {"table.weight": None},
    ),
    "zeros_": (lambda module: nn.init.zeros_(module.proj.weight), {"proj.weight": 0.0}),
    "constant_": (lambda module: nn.init.constant_(module.proj.bias, 0.1), {"proj.bias": 0.1}),
}


@pytest.mark.parametrize("case", LOST)
def test_values_that_a_constructor_gives_are_found_by_the_name_of_their_weight(case: str) -> None:
    then, lost = LOST[case]
    assert lost_values(lambda: Built(then), seed=0) == pytest.approx(lost)


def drawn_again(module: Built) -> None:
    module.proj.weight.copy_(TABLE)
    nn.init.normal_(module.proj.weight)


def drawn_and_scaled(module: Built) -> None:
    module.weight = nn.Parameter(torch.linalg.qr(torch.randn(8, 8) * 0.02)[0])


@pytest.mark.parametrize(
    "then",
    [
        pytest.param(lambda module: None, id="nothing"),
        pytest.param(lambda module: module.proj.reset_parameters(), id="reset"),
        pytest.param(lambda module: setattr(module, "weight", nn.Parameter(torch.empty(8, 8))), id="empty"),
        pytest.param(lambda module: setattr(module, "cells", nn.LSTM(4, 4)), id="lstm"),
        pytest.param(lambda module: module.register_buffer("angles", TABLE.sin()), id="buffer"),
        pytest.param(drawn_again, id="drawn again"),
        pytest.param(drawn_and_scaled, id="drawn and scaled"),
    ],
)
def test_what_is_drawn_or_left_empty_is_not_counted(then: Callable[[Built], object]) -> None:
    assert lost_values(lambda: Built(then), seed=0) == {}
