"""ZeRO must have the memory its names promise: bytes of model state a rank really holds, against the planner's formula."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks.jobs import ALONE
from ranks.pool import Pool

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import memory
import random_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_tokens.write(tmp_path_factory.mktemp("tokens"), 20_000, memory.VOCABULARY)


@pytest.mark.parametrize("zero", memory.STAGES)
def test_measured_bytes_of_state_are_within_three_percent_of_the_formula(
    ranks: Callable[[int], Pool], tokens: Path, zero: int
) -> None:
    measured = ranks(4).run(memory.measure, tokens, zero)
    for rank in measured:
        assert rank["held"] == pytest.approx(rank["formula"], rel=0.03)


def test_one_device_holds_sixteen_bytes_a_parameter(tokens: Path) -> None:
    measured = memory.measure(ALONE, tokens, 0)
    assert measured["held"] == pytest.approx(measured["formula"], rel=0.03)


def test_the_measurement_sees_what_lives_and_forgets_what_does_not() -> None:
    with memory.LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept[10:].view(3, 330)
        torch.zeros(500)
        assert live.total() == 4000
        kept.untyped_storage().resize_(0)
        assert live.total() == 0
    assert view.shape == (3, 330)
