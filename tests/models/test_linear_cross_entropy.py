from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.models.loss import ROUND_ROWS, linear_cross_entropy
from shardwise.plans.chunks import chunk_tokens

TOKENS, HIDDEN, VOCABULARY = 37, 12, 29


@pytest.fixture(params=[1, 8], ids=["as it is", "padded"], autouse=True)
def rounding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test twice: with a vocabulary of 29 rows as it is, and padded to 32 as a GPU would have it."""
    monkeypatch.setitem(ROUND_ROWS, "cpu", request.param)


def problem(dtype: torch.dtype = torch.float64, ignored: float = 0.2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    targets[torch.rand(TOKENS, generator=generator) < ignored] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients by torch's own cross-entropy over the full logits, in float64."""
    hidden, weight = (value.detach().double().requires_grad_() for value in (hidden, weight))
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction="sum") * scale
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 8, 36, 37, 100, None])  # 8 leaves a ragged last chunk
def test_loss_and_gradients_equal_plain_cross_entropy(chunk: int | None) -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets, chunk) * 0.37
    loss.backward()
    expected = plain(hidden, weight, targets, 0.37)
    for actual, truth in zip((loss.detach(), hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(actual, truth, rtol=1e-12, atol=1e-12)


def test_all_targets_ignored_gives_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets = problem(ignored=2.0)
    loss = linear_cross_entropy(hidden, weight, targets, 8)
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_without_gradients_only_the_same_loss_is_computed() -> None:
    hidden, weight, targets = problem()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 8)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(hidden, weight, targets)[0], rtol=1e-12, atol=0)


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_still_do() -> None:
    hidden, weight, targets = problem()
    linear_cross_entropy(hidden, weight.detach(), targets, 8).backward()
    torch.testing.assert_close(hidden.grad, plain(hidden, weight, targets)[1], rtol=1e-12, atol=1e-12)


def test_a_weight_used_twice_gets_the_sum_of_its_gradients() -> None:
    _, weight, targets = problem()
    tokens = torch.arange(TOKENS) % VOCABULARY
    linear_cross_entropy(F.embedding(tokens, weight), weight, targets, 8).backward()
    reference = weight.detach().clone().requires_grad_()
    F.cross_entropy(F.embedding(tokens, reference) @ reference.t(), targets, reduction="sum").backward()
    torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-12, atol=1e-12)


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    hidden, weight, targets = problem()
    loss = linear_cross_entropy(hidden, weight, targets, 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_low_precision_is_close_to_float64_and_float32_weights_get_float32_gradients(
    dtype: torch.dtype, tolerance: float
) -> None:
    hidden, weight, targets = problem(dtype)
    master = weight.detach().float().requires_grad_()
    loss = linear_cross_entropy(hidden, master, targets, 8)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert master.grad is not None
    assert (hidden.grad.dtype, master.grad.dtype) == (dtype, torch.float32)
    for actual, truth in zip(
        (loss.detach(), hidden.grad, master.grad), plain(hidden, weight, targets), strict=True
    ):
        assert (actual.double() - truth).norm() <= tolerance * truth.norm()


def test_float16_gradients_under_a_small_final_factor_do_not_vanish() -> None:
    """A large vocabulary makes every probability tiny: softmax tails of 1e-5 must still reach the weight."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(64, 16, generator=generator) * 0.1).half().requires_grad_()
    master = (torch.randn(50_000, 16, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, 100, (64,), generator=generator)
    factor = 65536 / 64  # loss scale over the number of tokens
    (linear_cross_entropy(hidden, master, targets) * factor).backward()
    _, hidden_truth, weight_truth = plain(hidden, master.half(), targets, factor)
    assert hidden.grad is not None
    assert master.grad is not None
    untouched = weight_truth[100:]  # rows that only the tails reach
    assert (master.grad[100:].double() - untouched).norm() <= 5e-3 * untouched.norm()
    assert (hidden.grad.double() - hidden_truth).norm() <= 5e-3 * hidden_truth.norm()


def test_the_traced_chunk_function_gives_the_same_numbers() -> None:
    """What torch.compile sees must be one graph; aot_eager traces it without generating code."""
    from shardwise.models.loss import _chunk_loss_and_gradient

    hidden, weight, targets = problem(torch.float32)
    logits = (hidden @ weight.t()).detach()
    eager, traced = logits.clone(), logits.clone()
    compiled = torch.compile(_chunk_loss_and_gradient, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(traced, targets, traced, 1.0), _chunk_loss_and_gradient(eager, targets, eager, 1.0)
    )
    torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_backward_in_halves_gives_the_bits_of_one_in_one_piece(dtype: torch.dtype) -> None:
    """Also where the loss's factor has no short binary fraction, as one over a number of tokens."""
    found = []
    for split in (False, True):
        hidden, weight, targets = problem(dtype)
        (linear_cross_entropy(hidden, weight, targets, 8, split_backward=split) / 1021).backward()
        found.append((hidden.grad, weight.grad))
    for whole, halves in zip(*found, strict=True):
        assert torch.equal(whole, halves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_of_logits_stays_within_its_budget_and_chunks_are_even(dtype: torch.dtype) -> None:
    rows = chunk_tokens(32768, 128256, dtype.itemsize, "cuda")
    assert 256 * 2**20 <= rows * 128256 * dtype.itemsize <= 512 * 2**20
    assert 32768 % rows == 0
    assert chunk_tokens(4096, 257, dtype.itemsize, "cpu") == 4096
    assert chunk_tokens(1, 10**9, dtype.itemsize, "cpu") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_the_gpu_agrees_with_float64(
    dtype: torch.dtype, tolerance: float, softcap: float | None, compiled: bool
) -> None:
    hidden, weight, targets = problem(dtype)
    device_hidden = hidden.detach().cuda().requires_grad_()
    master = (
        weight.detach()
        .to("cuda", torch.float64 if dtype == torch.float64 else torch.float32)
        .requires_grad_()
    )
    loss = linear_cross_entropy(device_hidden, master, targets.cuda(), 8, compiled=compiled, softcap=softcap)
    loss.backward()
    results = (loss.detach(), device_hidden.grad, master.grad)
    for actual, truth in zip(results, plain(hidden, weight, targets, softcap=softcap), strict=True):
        assert actual is not None
        assert (actual.double().cpu() - truth).norm() <= tolerance * truth.norm()
