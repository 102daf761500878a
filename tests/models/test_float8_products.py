"""Products in float8 against the same 8-bit numbers multiplied in float64, and what is seen of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwise.models.float8_products import (
    E4M3,
    E5M2,
    LARGEST,
    SMALLEST,
    Float8Product,
    cast,
    quantise,
    scale_for,
)
from shardwise.models.loss import linear_cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def as_cast_by_hand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest 8-bit numbers of a tensor whose largest is brought to the last power of two below the
    range's end."""
    scale = 2.0 ** math.floor(math.log2(LARGEST[dtype] / x.abs().max().item()))
    return (x.double() * scale).float().to(dtype).double() / scale


@given(st.floats(1e-25, 1e25), st.sampled_from([E4M3, E5M2]))
def test_a_scale_is_the_largest_power_of_two_that_fits(largest: float, dtype: torch.dtype) -> None:
    exact = torch.tensor(largest).item()
    scale = scale_for(torch.tensor(largest), LARGEST[dtype]).item()
    assert math.frexp(scale)[0] == 0.5
    assert exact * scale <= LARGEST[dtype] * (1 + 2**-23)
    assert 2 * exact * scale > LARGEST[dtype] * (1 - 2**-23)


def test_nothing_but_zeros_has_a_scale_of_one() -> None:
    assert scale_for(torch.zeros(()), 448.0).item() == 1


@given(st.integers(-6, 0), st.integers(0, 2**31 - 1))
def test_a_smaller_scale_changes_only_what_falls_below_the_range(power: int, seed: int) -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 0.01
    best, smaller = scale_for(x.abs().max(), LARGEST[E4M3]), 2.0**power
    whole = cast(x, best, E4M3).double() / best
    moved = cast(x, best * smaller, E4M3).double() / (best * smaller)
    normal = x.abs() * best * smaller >= 2**-6  # above, three bits of fraction are kept whatever the scale
    assert torch.equal(whole[normal], moved[normal])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_and_its_gradients_are_those_of_the_8_bit_numbers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = (
        torch.randn(3, 32, 48).to(dtype).requires_grad_(),
        torch.randn(16, 48).to(dtype).requires_grad_(),
    )
    gradient = (torch.randn(3, 32, 16) * 1e-4).to(dtype)
    float8 = Float8Product()
    float8.weight.value.copy_(scale_for(weight.detach().abs().max(), LARGEST[E4M3]))
    y = float8(x, weight)
    y.backward(gradient)
    x8, w8, g8 = (
        as_cast_by_hand(x.detach(), E4M3),
        as_cast_by_hand(weight.detach(), E4M3),
        as_cast_by_hand(gradient, E5M2),
    )
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0 if dtype == torch.float64 else 1e-6}
    torch.testing.assert_close(y.double(), x8 @ w8.T, **close)
    assert x.grad is not None
    assert weight.grad is not None
    close["atol"] *= 1e-4
    torch.testing.assert_close(x.grad.double(), g8 @ w8, **close)
    torch.testing.assert_close(
        weight.grad.double(), g8.flatten(0, 1).T @ x8.flatten(0, 1), **{**close, "atol": 1e-9}
    )
    (seen,) = float8.observations
    assert seen[:, 0].tolist() == pytest.approx([t.abs().max().item() for t in (x, gradient)], rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_tensors_may_lie_column_by_column(device: str) -> None:
    """As the gradient of a single sequence's keys does, when it comes out of attention."""
    torch.manual_seed(0)
    x, weight = (
        torch.randn(48, 32, dtype=torch.float64, device=device).T.requires_grad_(),
        torch.randn(16, 48, device=device),
    )
    weight = weight.double().requires_grad_()
    gradient = torch.randn(16, 32, dtype=torch.float64, device=device).T
    assert not gradient.is_contiguous()
    float8 = Float8Product().to(device)
    float8.weight.value.copy_(scale_for(weight.detach().abs().max(), LARGEST[E4M3]))
    float8(x, weight).backward(gradient)
    x8, w8, g8 = (
        as_cast_by_hand(x.detach(), E4M3),
        as_cast_by_hand(weight.detach(), E4M3),
        as_cast_by_hand(gradient, E5M2),
    )
    torch.testing.assert_close(x.grad, g8 @ w8)
    torch.testing.assert_close(weight.grad, g8.T @ x8)
    assert cast(gradient, float8.input.value, E4M3).is_contiguous()


def test_what_backward_needs_of_the_input_is_kept_in_8_bits() -> None:
    kept: list[Tensor] = []
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        Float8Product()(x, weight)
    of_input = [tensor for tensor in kept if tensor.numel() == x.numel()]
    assert [tensor.dtype for tensor in of_input] == [E4M3]


def test_numbers_below_the_range_are_counted() -> None:
    x = torch.cat((torch.full((96,), SMALLEST[E4M3] / 3), torch.zeros(32), torch.ones(128))).view(2, 128)
    _, _, seen = quantise(x, torch.ones(()), E4M3, dynamic=False, plain=False)
    assert seen.tolist() == [1.0, 96 / 256]


def test_what_is_above_the_range_becomes_its_end_and_is_seen() -> None:
    x8, _, seen = quantise(
        torch.tensor([[1000.0, -1000.0]]), torch.ones(()), E4M3, dynamic=False, plain=False
    )
    assert x8.float().tolist() == [[448.0, -448.0]]
    assert seen[0] == 1000


@needs_gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_compiled_for_a_gpu_what_is_above_the_range_becomes_its_end(dtype: torch.dtype) -> None:
    x = torch.tensor([1e9, -1e9, 1.5, 2 * LARGEST[dtype], math.inf, math.nan], device="cuda").bfloat16()
    found = torch.compile(cast)(x, torch.ones((), device="cuda"), dtype).float().tolist()
    end = LARGEST[dtype]
    assert found[:5] == [end, -end, 1.5, end, end]
    assert math.isnan(found[5])


def test_a_number_that_is_none_is_seen() -> None:
    for value in (math.nan, -math.nan, math.inf):
        _, _, seen = quantise(
            torch.tensor([[1.0, value], [3.0, 2.0]]), torch.ones(()), E4M3, dynamic=False, plain=False
        )
        assert not seen[0].isfinite()


def test_compiled_code_notes_what_eager_code_notes() -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(32, 16, requires_grad=True), torch.randn(32, 16, requires_grad=True)
    eager, compiled = Float8Product(), Float8Product()
    eager(x, weight).square().sum().backward()
    torch.compile(lambda: compiled(x, weight), fullgraph=True)().square().sum().backward()
    torch.testing.assert_close(compiled.observations[0], eager.observations[0])


def test_weights_that_compiled_code_cast_are_to_compiled_code_of_one_size() -> None:
    product, x, weights = Float8Product(), torch.randn(48, 16), [torch.randn(32, 16), torch.randn(64, 16)]
    product.cache_weights(weights, torch.float32, compiled=True)
    kept = product.cached_weights
    seen: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[object]) -> object:
        seen.extend(inputs)
        return graph

    torch.compile(lambda: product(x, weights[0]), backend=backend)()
    assert seen
    assert all(isinstance(one, Tensor) for one in seen), "sizes that are no constants are inputs too"
    product.cache_weights([weight * 2 for weight in weights], torch.float32, compiled=True)
    assert product.cached_weights is kept, "compiled code knows these tensors"
    truth = (torch.cat(weights) * 2).to(E4M3).float()  # the scale is 1
    assert kept is not None
    torch.testing.assert_close(kept[0].float(), truth)
    torch.testing.assert_close(kept[1].float(), truth.T)


@pytest.mark.parametrize("chunk", [None, 24])
def test_the_head_in_float8_is_the_cross_entropy_of_8_bit_products(chunk: int | None) -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(64, 32, dtype=torch.float64), torch.randn(160, 32, dtype=torch.float64) / 6
    targets = torch.randint(0, 160, (64,))
    targets[5] = -100
    hidden.requires_grad_()
    weight.requires_grad_()
    float8 = Float8Product()
    float8.weight.value.copy_(scale_for(weight.detach().abs().max(), LARGEST[E4M3]))
    loss = linear_cross_entropy(hidden, weight, targets, chunk, float8=float8)
    loss.backward()
    h8, w8 = as_cast_by_hand(hidden.detach(), E4M3).requires_grad_(), as_cast_by_hand(weight.detach(), E4M3)
    logits = (h8 @ w8.T).detach().requires_grad_()
    truth = torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-14)
    assert logits.grad is not None
    g8 = (logits.grad * 2**15).float().to(E5M2).double() / 2**15
    assert hidden.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(hidden.grad, g8 @ w8, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(weight.grad, g8.T @ h8.detach(), rtol=1e-13, atol=1e-15)
