"""ZeRO must have the memory its names promise: bytes of model state a rank really holds, against the
planner's formula."""

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


COUNTERS = 4 * (9 * memory.MODEL["layers"] + 3)
"""The optimizer's count of steps, one for each of the model's parameters."""
TOKENS = 1024
"""More than the ids of the micro-batches take, of 16 tokens each."""
LAST_REDUCED = 2 * 4 * 4 * 65 * memory.MODEL["hidden"]
"""The sum still under way, of the unit reduced last, the embedding: what leaves, and room for as much that
comes. 257 rows padded to four times 65, in float32."""


@pytest.mark.parametrize(
    "zero", [pytest.param(zero, marks=[] if zero == 3 else pytest.mark.full) for zero in memory.STAGES]
)
def test_a_rank_holds_the_states_of_the_formula_and_nothing_else_that_has_no_name(
    ranks: Callable[[int], Pool], tokens: Path, zero: int
) -> None:
    most = max(ranks(4).run(memory.measure, tokens, zero), key=lambda rank: rank["held"])
    named = most["formula"] + COUNTERS + (LAST_REDUCED if zero >= 2 else 0)
    assert named <= most["held"] <= named + TOKENS


@pytest.mark.full  # test_predictions.py has the tensors of one device each time
def test_one_device_holds_sixteen_bytes_a_parameter(tokens: Path) -> None:
    measured = memory.measure(ALONE, tokens, 0)
    assert measured["formula"] == 16 * measured["parameters"]
    assert 0 <= measured["held"] - measured["formula"] - COUNTERS <= TOKENS


def test_the_measurement_sees_what_lives_and_forgets_what_does_not() -> None:
    with memory.LiveBytes() as live:
        kept = torch.zeros(1000)
        view = kept[10:].view(3, 330)
        torch.zeros(500)
        assert live.total() == 4000
        kept.untyped_storage().resize_(0)
        assert live.total() == 0
    assert view.shape == (3, 330)
