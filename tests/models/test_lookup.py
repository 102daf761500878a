"""The gradient of an embedding is a sum over tokens, as exact as its last rounding, however often a token
occurs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise.models import adapt
from shardwise.models.layers import Embedding, lookup
from shardwise.models.user_module import Cast

ROWS, WIDTH = 11, 5


def frequent_ids(count: int = 4000) -> Tensor:
    """Four in five are the same."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, ROWS, (count,), generator=draw)
    return torch.where(torch.rand(count, generator=draw) < 0.8, 3, ids).view(4, -1)


def gradient_of(weight: Tensor, dtype: torch.dtype | None, padding: int | None = None) -> Tensor:
    weight = weight.detach().requires_grad_()
    ids = frequent_ids()
    pulls = 1 + torch.rand(*ids.shape, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    vectors = lookup(ids, weight, dtype, padding)
    assert vectors.dtype == (dtype or weight.dtype)
    vectors.backward(pulls.to(vectors.dtype))
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize(
    ("stored", "computed", "bound"),
    [
        (torch.bfloat16, torch.bfloat16, 2**-8),  # one rounding
        (torch.bfloat16, None, 2**-8),
        (torch.float32, torch.bfloat16, 1e-6),
        (torch.float16, torch.float16, 2**-11),
        (torch.float64, torch.float64, 1e-14),
    ],
    ids=str,
)
def test_frequent_tokens_lose_nothing(
    stored: torch.dtype, computed: torch.dtype | None, bound: float
) -> None:
    weight = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2))
    found, truth = (
        gradient_of(weight.to(stored), computed).double(),
        gradient_of(weight.double(), torch.float64),
    )
    assert found.isfinite().all()
    assert ((found - truth).abs() / truth.abs()).max() <= bound


def test_a_padding_row_gets_no_gradient() -> None:
    weight = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    truth, found = gradient_of(weight, None), gradient_of(weight, None, padding=3)
    assert not found[3].any()
    assert torch.equal(found[:3], truth[:3])


def test_a_compiled_lookup_has_the_gradient_of_one_that_is_not() -> None:
    weight, ids = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True), frequent_ids(40)
    compiled = torch.compile(lookup, backend="eager")
    truth, found = (
        torch.autograd.grad(look(ids, weight).square().sum(), weight)[0] for look in (lookup, compiled)
    )
    assert torch.equal(found, truth)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(ROWS, WIDTH, padding_idx=2)
        self.scaled = nn.Embedding(ROWS, WIDTH, scale_grad_by_freq=True)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.plain(inputs) + self.scaled(inputs)


def test_embeddings_of_a_users_module_sum_alike_unless_they_have_ways_of_their_own() -> None:
    module = adapt(Own(), torch.bfloat16)
    assert type(module.plain) is Embedding
    assert type(module.scaled).__bases__ == (Cast, nn.Embedding)
    assert module.plain.padding_idx == 2
