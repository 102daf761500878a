"""Matrix products in bfloat16 on every processor.

GPUs and newer CPUs multiply bfloat16 numbers, add the products up in float32, and round each sum once. Other
CPUs have no such instructions. There torch's kernels convert the numbers one by one and take several times as
long as in float32. So on such a CPU the functions here convert whole tensors to float32, multiply, and round
the result to bfloat16. A product of two bfloat16 numbers is exact in float32, so these are the same sums, up
to the order in which they are added.

The cost: two conversions for each tensor, and copies in float32 while a product is made. `linear` keeps its
inputs in bfloat16 for backward; attention keeps them in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._torch import AutogradContext, cpu_multiplies_bfloat16

CPU_MULTIPLIES_BFLOAT16 = cpu_multiplies_bfloat16()
"""Whether this processor has instructions for bfloat16 products."""


def multiplies_in_float32(dtype: torch.dtype, device_type: str) -> bool:
    """Return whether products of this dtype are made in float32 and rounded."""
    return dtype == torch.bfloat16 and device_type == "cpu" and not CPU_MULTIPLIES_BFLOAT16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`: (..., outputs) from (..., inputs) and a weight (outputs, inputs)."""
    if not multiplies_in_float32(x.dtype, x.device.type):
        return F.linear(x, weight, bias)
    product: Tensor = _RoundedLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """Return the matrix product `left @ right`."""
    if not multiplies_in_float32(left.dtype, left.device.type):
        return left @ right
    with torch.autocast("cpu", enabled=False):
        return (left.float() @ right.float()).to(left.dtype)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> Tensor:
    """Return `F.scaled_dot_product_attention` to where the mask is True; None: causal."""
    causal = mask is None
    if not multiplies_in_float32(query.dtype, query.device.type):
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, enable_gqa=enable_gqa
        )
    with torch.autocast("cpu", enabled=False):
        q, k, v = query.float(), key.float(), value.float()
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=enable_gqa)
        return mixed.to(query.dtype)


class _RoundedLinear(torch.autograd.Function):
    """`F.linear` of bfloat16 tensors in float32. Forward and backward round each result once."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

    @staticmethod
    def backward(
        ctx: AutogradContext, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1]).float()  # (n, outputs)
        return (
            (rows @ weight.float()).to(x.dtype).view(x.shape) if needs_x else None,
            (rows.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype) if needs_weight else None,
            rows.sum(0).to(weight.dtype) if needs_bias else None,
        )
