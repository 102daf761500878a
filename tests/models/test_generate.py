from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.models import generate


def successor(tokens: Tensor) -> Tensor:
    """A model that is nearly sure of the next number modulo 10."""
    logits = torch.zeros(10)
    logits[(tokens[0, -1] + 1) % 10] = 5.0
    return logits


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert generate(successor, [3], 9, max_positions=4, temperature=0) == [3, 4, 5, 6, 7, 8, 9, 0, 1, 2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-40, 5e-324])
def test_a_temperature_near_zero_takes_the_likeliest_token_too(temperature: float) -> None:
    assert generate(successor, [3], 3, max_positions=4, temperature=temperature) == [3, 4, 5, 6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_without_finite_numbers_is_said_to_be_one(temperature: float) -> None:
    step = lambda tokens: torch.tensor([0.0, torch.nan])  # noqa: E731
    with pytest.raises(UserError, match="logits are not finite"):
        generate(step, [0], 1, max_positions=4, temperature=temperature)


def test_the_window_slides_once_the_text_is_longer() -> None:
    seen: list[list[int]] = []

    def step(tokens: Tensor) -> Tensor:
        seen.append(tokens[0].tolist())
        return successor(tokens)

    generate(step, [1, 2], 3, max_positions=3, temperature=0)
    assert seen == [[1, 2], [1, 2, 3], [2, 3, 4]]


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    first, again, other = (
        generate(successor, [0], 60, max_positions=8, temperature=3.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == 61


def test_samples_follow_the_softmax() -> None:
    step = lambda tokens: torch.tensor([0.0, 1.0]) * 2  # noqa: E731
    drawn = generate(step, [0], 4000, max_positions=1, temperature=2.0)[1:]
    assert sum(drawn) / 4000 == pytest.approx(torch.tensor([0.0, 1.0]).softmax(0)[1].item(), abs=0.03)


def test_an_empty_prompt_is_refused_with_advice() -> None:
    with pytest.raises(UserError, match="at least one token"):
        generate(successor, [], 3, max_positions=8)
