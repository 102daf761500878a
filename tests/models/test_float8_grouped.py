"""Experts' products in float8 against the same 8-bit numbers multiplied row by row in float64, and what is
seen of them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.config import Model
from shardwise.models.experts import Experts, MixtureOfExperts
from shardwise.models.float8_grouped import GroupedFloat8, GroupedProducts
from shardwise.models.float8_products import E4M3, E5M2, LARGEST, scale_for
from shardwise.models.sorting import Sorting, inverse_permutation

COUNTS = [[3, 0, 9, 1], [0, 0, 13, 0], [4, 3, 3, 3]]
INPUTS, OUTPUTS = 32, 16


def rounded(x: Tensor, largest: float | None = None, dtype: torch.dtype = E4M3) -> Tensor:
    """The nearest 8-bit numbers of a tensor whose largest is brought to the last power of two below the
    range's end."""
    scale = 2.0 ** math.floor(math.log2(LARGEST[dtype] / (largest or x.abs().max().item())))
    return (x.double() * scale).float().to(dtype).double() / scale


def experts_of(counts: list[int]) -> list[int]:
    return [expert for expert, count in enumerate(counts) for _ in range(count)]


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)


def two_weights(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Of quite different size."""
    return tuple((size * torch.randn(4, OUTPUTS, INPUTS)).to(dtype).requires_grad_() for size in (1.0, 0.05))


def scaled_for(product: GroupedFloat8, weights: tuple[Tensor, ...]) -> float:
    largest = max(weight.detach().abs().max().item() for weight in weights)
    product.weight.value.copy_(scale_for(torch.tensor(largest), LARGEST[E4M3]))
    return largest


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_grouped_product_and_its_gradients_are_those_of_the_8_bit_numbers(
    counts: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(13, INPUTS).to(dtype).requires_grad_(), two_weights(dtype)
    gradient = (torch.randn(13, 2 * OUTPUTS) * 1e-4).to(dtype)
    product = GroupedFloat8("gate", "up")
    largest = scaled_for(product, weights)
    y = product(x, ends_of(counts), weights)
    y.backward(gradient)
    x8, g8 = rounded(x.detach()), rounded(gradient, dtype=E5M2)
    w8 = rounded(torch.cat([weight.detach() for weight in weights], dim=1), largest)
    of_rows = experts_of(counts)
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 0.0 if dtype == torch.float64 else 1e-6}
    torch.testing.assert_close(
        y.double(), torch.stack([w8[i] @ row for i, row in zip(of_rows, x8, strict=True)]), **close
    )
    assert x.grad is not None
    close["atol"] *= 1e-3
    expected = torch.stack([row @ w8[i] for i, row in zip(of_rows, g8, strict=True)])
    torch.testing.assert_close(x.grad.double(), expected, **{**close, "rtol": max(close["rtol"], 1e-12)})
    by_expert = torch.zeros(4, 2 * OUTPUTS, INPUTS, dtype=torch.float64)
    for i, of_output, row in zip(of_rows, g8, x8, strict=True):
        by_expert[i] += torch.outer(of_output, row)
    for weight, part in zip(weights, by_expert.split(OUTPUTS, dim=1), strict=True):
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad.double(), part, **{**close, "atol": close["atol"] + 1e-12})
        assert [bool(own.any()) for own in weight.grad] == [count > 0 for count in counts]
    (seen,) = product.observations
    assert seen[:, 0].tolist() == pytest.approx([t.abs().max().item() for t in (x, gradient)], rel=1e-6)


def sorting_of(tokens: int, copies: int, experts: int = 4) -> tuple[Sorting, list[int]]:
    chosen = torch.stack([torch.randperm(experts)[:copies] for _ in range(tokens)]).flatten()
    order = chosen.argsort(stable=True)
    sorting = Sorting(order // copies, inverse_permutation(order), copies)
    return sorting, torch.bincount(chosen, minlength=experts).tolist()


def test_rows_cast_before_they_are_copied_are_rows_cast_after() -> None:
    torch.manual_seed(1)
    tokens, weights = torch.randn(11, INPUTS, dtype=torch.float64, requires_grad=True), two_weights()
    sorting, counts = sorting_of(11, copies=2)
    before, after = GroupedFloat8("gate", "up"), GroupedFloat8("gate", "up")
    scaled_for(before, weights), scaled_for(after, weights)
    copied = tokens[sorting.rows]
    found = before(tokens, ends_of(counts), weights, sorting)
    truth = after(copied, ends_of(counts), weights)
    assert torch.equal(found, truth)
    upstream = torch.randn_like(found)
    inputs = (tokens, *weights)
    for own, expected in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(truth, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(own, expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(before.observations[0], after.observations[0])


def test_backward_keeps_one_row_of_8_bits_for_each_token() -> None:
    kept: list[Tensor] = []
    tokens = torch.randn(40, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    sorting, counts = sorting_of(40, copies=3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        GroupedFloat8("gate", "up")(tokens, ends_of(counts), two_weights(torch.bfloat16), sorting)
    assert [tensor.shape[0] for tensor in kept if tensor.dtype == E4M3] == [40]
    assert not [
        tensor
        for tensor in kept
        if tensor.is_floating_point() and tensor.shape == tokens.shape and tensor.dtype != E4M3
    ]


def test_where_no_row_comes_gradients_are_zeros_and_nothing_is_seen() -> None:
    x, weights = torch.zeros(0, INPUTS, requires_grad=True), two_weights(torch.float32)
    product = GroupedFloat8("gate", "up")
    y = product(x, ends_of([0] * 4), weights)
    assert y.shape == (0, 2 * OUTPUTS)
    y.sum().backward()
    for weight in weights:
        assert weight.grad is not None
        assert not weight.grad.any()
    assert product.observations[0].tolist() == [[0.0, 0.0]] * 2


def test_compiled_code_notes_and_computes_what_eager_code_does() -> None:
    torch.manual_seed(2)
    tokens, weights = torch.randn(12, INPUTS, requires_grad=True), two_weights(torch.float32)
    sorting, counts = sorting_of(12, copies=2)
    eager, compiled = GroupedFloat8("gate", "up"), GroupedFloat8("gate", "up")

    def run(product: GroupedFloat8, call: object) -> tuple[Tensor, ...]:
        y = call(tokens, ends_of(counts), weights, sorting)  # type: ignore[operator]
        return torch.autograd.grad(
            y.square().sum(), (tokens, *weights, *([] if product is eager else [product.probe]))
        )

    truth = run(eager, eager)
    found = run(compiled, torch.compile(compiled.forward, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(found[:3], truth)
    torch.testing.assert_close(found[3], eager.observations[0])


def of_experts(**fields: int) -> Experts:
    torch.manual_seed(3)
    experts = Experts(Model(hidden=INPUTS, expert_ffn=48, experts=4, experts_per_token=2, **fields)).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return experts


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("gate", "up"), ("down",)], ids=str)
def test_experts_with_some_of_their_products_in_float8(names: tuple[str, ...]) -> None:
    experts, x = of_experts(), torch.randn(13, INPUTS, dtype=torch.float64)
    experts.float8 = GroupedProducts(names)
    largest = max(weight.abs().max().item() for weight in (experts.gate, experts.up))
    for product in experts.float8.children():
        assert isinstance(product, GroupedFloat8)
        scaled_for(product, tuple(getattr(experts, name) for name in product.weights))
    counts = [3, 0, 9, 1]
    found = experts.outputs(x, torch.tensor(counts))
    inner_is_cast, last_is_cast = "gate" in names, "down" in names
    with torch.no_grad():
        weights = experts.gate, experts.up
        gate, up = (rounded(weight, largest) if inner_is_cast else weight for weight in weights)
        rows = rounded(x) if inner_is_cast else x
        of_rows = list(zip(experts_of(counts), rows, strict=True))
        inner = torch.stack([F.silu(gate[i] @ row) * (up[i] @ row) for i, row in of_rows])
        down = rounded(experts.down) if last_is_cast else experts.down
        inner = rounded(inner) if last_is_cast else inner
        truth = torch.stack([down[i] @ row for i, row in zip(experts_of(counts), inner, strict=True)])
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)


def test_where_nothing_is_cast_experts_are_what_they_are_without_float8() -> None:
    torch.manual_seed(4)
    fields = {"hidden": INPUTS, "expert_ffn": 48, "experts": 4, "experts_per_token": 2}
    module = MixtureOfExperts(Model(**fields)).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, 9, INPUTS, dtype=torch.float64, requires_grad=True)
    inputs = (x, *module.parameters())
    truth = module(x)
    expected = torch.autograd.grad(truth.square().sum(), inputs)
    module.experts.float8 = GroupedProducts(("gate", "up", "down"))
    for product in module.experts.float8.children():
        assert isinstance(product, GroupedFloat8)
        product.plain, product.dynamic = True, False
    found = module(x)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=1e-12)
    for own, other in zip(torch.autograd.grad(found.square().sum(), inputs), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-10)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="grouped float8 products are for GPUs",
)
@pytest.mark.parametrize("counts", [[3, 900, 0, 41], [0, 0, 700, 0], [128] * 4, [0] * 4, None], ids=str)
def test_the_kernels_of_a_gpu_multiply_the_same_8_bit_numbers(counts: list[int] | None) -> None:
    """None: tokens that are copied to two experts each."""
    torch.manual_seed(5)
    product = GroupedFloat8("gate", "up")
    sorting = None
    if counts is None:
        sorting, counts = sorting_of(333, copies=2)
    rows = torch.randn(sum(counts) // (1 if sorting is None else 2), 128).bfloat16()
    gradient, weights = torch.randn(sum(counts), 192).bfloat16(), 0.3 * torch.randn(2, 4, 96, 128).bfloat16()
    scaled_for(product, (weights,))

    def run(device: str) -> list[Tensor]:
        product.to(device)
        x, gate, up = (each.to(device).requires_grad_() for each in (rows, *weights))
        there = (
            None
            if sorting is None
            else Sorting(sorting.rows.to(device), sorting.inverse.to(device), sorting.copies)
        )
        y = product(x, ends_of(counts).to(device), (gate, up), there)
        return [y, *torch.autograd.grad(y, (x, gate, up), gradient.to(device))]

    for found, truth in zip(run("cuda"), run("cpu"), strict=True):
        assert not found.isnan().any()
        assert (found.cpu().double() - truth.double()).norm() <= 0.005 * truth.double().norm()
