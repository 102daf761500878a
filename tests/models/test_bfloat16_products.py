"""Products of bfloat16 tensors on a CPU that has no instructions for them: made in float32, and rounded
once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._torch import DispatchMode
from shardwise.config import Model
from shardwise.models import Transformer, products
from shardwise.models.loss import linear_cross_entropy
from shardwise.parallel.blockwise import CPU, attend, attend_backward

SHAPE = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "ffn": 24, "vocabulary": 32}
MODELS = {
    "dense": Model(**SHAPE),
    "biased": Model(**SHAPE, bias=True),
    "capped": Model(**SHAPE, attention_softcap=5.0, logit_softcap=9.0),
    "experts": Model(**SHAPE, experts=4, experts_per_token=2),
}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "flash_attention", "scaled_dot_product")


class SeesProducts(DispatchMode):
    """Notes the dtypes of the factors of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in func.__name__ for name in PRODUCTS):
            self.dtypes |= {value.dtype for value in args if isinstance(value, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.fixture(params=[False, True], ids=["without", "with"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """A processor without and one with instructions for bfloat16."""
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", request.param)
    return bool(request.param)


@pytest.fixture
def emulating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", False)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def is_rounded_once(result: Tensor, exact: Tensor, magnitude: Tensor) -> bool:
    """Whether each number is the exact one rounded once: off by at most half the distance of its neighbours
    in bfloat16, which has 8 bits, and by what a sum of summands with this total magnitude loses in
    float32."""
    half_a_step = exact.abs().log2().floor().exp2() * 2.0**-8
    return bool(((result.double() - exact).abs() <= half_a_step + magnitude * 2.0**-20).all())


@pytest.mark.usefixtures("emulating")
@pytest.mark.parametrize("shape", [(3, 5), (5,)], ids=str)
def test_linear_and_its_gradients_are_those_of_float64_rounded_once(shape: tuple[int, ...]) -> None:
    x, weight, bias, gradient = drawn(*shape, 300), drawn(70, 300), drawn(70), drawn(*shape, 70)
    given = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    result = products.linear(*given)
    result.backward(gradient)
    wide = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    exact = F.linear(*wide)
    exact.backward(gradient.double())
    positive = [tensor.double().abs().requires_grad_() for tensor in (x, weight, bias)]
    largest = F.linear(*positive)
    largest.backward(gradient.double().abs())
    assert result.dtype == torch.bfloat16
    assert is_rounded_once(result.detach(), exact.detach(), largest.detach())
    for found, truth, bound in zip(given, wide, positive, strict=True):
        gradients = found.grad, truth.grad, bound.grad
        assert found.grad is not None
        assert found.grad.dtype == torch.bfloat16
        assert is_rounded_once(*gradients)  # type: ignore[arg-type]


@pytest.mark.usefixtures("emulating")
def test_linear_keeps_nothing_in_float32_for_backward() -> None:
    x, weight = drawn(4, 300).requires_grad_(), drawn(70, 300).requires_grad_()
    kept: list[torch.dtype] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: kept.append(saved.dtype) or saved, lambda saved: saved
    ):
        products.linear(x, weight)
    assert kept == [torch.bfloat16] * 2


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_product_of_a_model_is_in_bfloat16_where_the_processor_has_none(
    model: Model, native: bool
) -> None:
    module = Transformer(model).to(torch.bfloat16)
    nn.init.normal_(module.get_parameter("head.weight"))
    tokens = torch.randint(0, model.vocabulary, (2, 12))
    with SeesProducts() as seen:
        module(tokens, tokens).backward()
        module(tokens)
    assert (torch.bfloat16 in seen.dtypes) == native


def test_no_product_of_a_ring_is_in_bfloat16_where_the_processor_has_none(native: bool) -> None:
    query, key, value, gradient = (drawn(1, 2, 8, 16) for _ in range(4))
    documents = torch.zeros(1, 8, dtype=torch.int64)
    with SeesProducts() as seen:
        for told in (None, (documents, documents)):
            block = attend(CPU, query, key, value, True, told)
            attend_backward(CPU, gradient, query, key, value, block, True, told)
    assert (torch.bfloat16 in seen.dtypes) == native


@pytest.mark.usefixtures("emulating")
def test_under_autocast_too_products_are_in_float32() -> None:
    hidden, weight = drawn(6, 16).requires_grad_(), drawn(32, 16).requires_grad_()
    with SeesProducts() as seen, torch.autocast("cpu", torch.bfloat16):
        products.linear(hidden, weight)
        products.matmul(hidden, weight.t())
        heads = hidden.view(1, 2, 3, 16)
        products.attention(heads, heads, heads, None, enable_gqa=False)
        linear_cross_entropy(hidden, weight, torch.randint(0, 32, (6,)))
    assert seen.dtypes == {torch.float32}


def test_where_the_processor_has_bfloat16_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", True)
    x, weight = drawn(9, 300), drawn(70, 300)
    assert torch.equal(products.linear(x, weight), F.linear(x, weight))
    assert torch.equal(products.matmul(x, weight.t()), x @ weight.t())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_other_dtypes_and_gpus_multiply_as_they_are(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", False)
    assert not products.multiplies_in_float32(dtype, "cpu")
    assert not products.multiplies_in_float32(torch.bfloat16, "cuda")
    assert products.multiplies_in_float32(torch.bfloat16, "cpu")
