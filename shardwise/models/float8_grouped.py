"""Products of experts in float8: rows sorted by expert times the matrix of their expert, in one grouped
product.

    y  = x8 · w8ᵀ     rows (n, inputs) by (experts, outputs, inputs) to (n, outputs)
    dx = g8 · w8
    dw = g8ᵀ · x8     for each expert over its own rows; zeros for an expert without any

Formats, scales and observations of tensors are those of other products (models/float8_products.py). Two
things differ:

- Gate and up have the same input and are one product, with a weight that joins both along the outputs. So one
  product gives the sum of both gradients of the input. It sums over the outputs of both, and summands must
  have one scale: both weights share a scale, from the larger of their magnitudes, and so do the gradients of
  both outputs.
- The input is cast before it is sorted: rows are copied to their experts in 8 bits. The numbers are the same
  as if they were copied and then cast. For backward the cast rows are saved unsorted, one for each token, and
  copied again.

A GPU uses the kernels of models/kernels.py. CPUs, and proofs in float64, multiply the same 8-bit numbers
expert by expert.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch import AutogradContext
from shardwise.models.float8_products import (
    E4M3,
    E5M2,
    ScaledProduct,
    Settings,
    join_weights,
    observe,
    quantise,
    transposed,
)
from shardwise.models.sorting import Sorting, sum_copies, take_copies
from shardwise.models.torch_dtypes import rounded_to, wide
from shardwise.plans.float8_choice import MULTIPLE

SETTINGS = len(Settings._fields)


class GroupedFloat8(ScaledProduct):
    """Multiplies rows sorted by expert by weights of their experts, which are joined along the outputs."""

    def __init__(self, *weights: str) -> None:
        super().__init__(None, weights)

    def forward(
        self, rows: Tensor, ends: Tensor, weights: Sequence[Tensor], sorting: Sorting | None = None
    ) -> Tensor:
        """Return sorted rows with the outputs of all weights (experts, outputs, inputs).

        `rows` (n, inputs) are sorted already, or by `sorting`; those of expert i end before ends[i] (int32).
        """
        inputs = (rows, ends, *(sorting or (None, None, None, None)), *self.settings(), *weights)
        result: Tensor = _GroupedProduct.apply(*inputs)  # type: ignore[no-untyped-call]
        return result


class GroupedProducts(nn.Module):
    """The products of a layer of experts that are made in float8."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.gate_up = GroupedFloat8("gate", "up") if {"gate", "up"} <= set(names) else None
        self.down = GroupedFloat8("down") if "down" in names else None


class _GroupedProduct(torch.autograd.Function):
    """Rows times the transposed weights of their experts."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        ends: Tensor,
        places: Tensor | None,
        inverse: Tensor | None,
        copies: int | None,
        row_ends: Tensor | None,
        *settings_and_weights: Any,
    ) -> Tensor:
        settings, weights = settings_and_weights[:SETTINGS], settings_and_weights[SETTINGS:]
        w8, w8t, _, input_scale, weight_scale, gradient_scale, dynamic, plain, note = Settings(*settings)
        x8, input_scale, seen = quantise(x, input_scale, E4M3, dynamic, plain)
        if w8 is None:
            w8 = join_weights(weights, weight_scale, x.dtype, None if plain else E4M3)
        scales = input_scale, weight_scale, gradient_scale
        ctx.save_for_backward(x8, ends, places, inverse, row_ends, *scales, seen, w8t, *weights)
        ctx.copies, ctx.dynamic, ctx.plain, ctx.note, ctx.dtype = copies, dynamic, plain, note, x.dtype
        rows8 = x8 if places is None else take_copies(x8, places)
        return grouped_product(rows8, w8, ends, input_scale, weight_scale, x.dtype)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, ends, places, inverse, row_ends, *others = ctx.saved_tensors
        input_scale, weight_scale, gradient_scale, seen, w8t, *weights = others
        g8, gradient_scale, gradient_seen = quantise(gradient, gradient_scale, E5M2, ctx.dynamic, ctx.plain)
        if w8t is None:
            w8t = transposed(join_weights(weights, weight_scale, ctx.dtype, None if ctx.plain else E4M3))
        x_gradient = grouped_product(g8, w8t, ends, gradient_scale, weight_scale, ctx.dtype)
        weight_gradients = grouped_outer_product(g8, x8, places, ends, gradient_scale, input_scale, weights)
        if inverse is not None:
            x_gradient = sum_copies(x_gradient, inverse, ctx.copies, row_ends)
        to_probe = observe(seen, gradient_seen, ctx.note)
        return x_gradient, *7 * (None,), to_probe, *6 * (None,), *weight_gradients


def grouped_product(
    rows8: Tensor, weight8: Tensor, ends: Tensor, rows_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return rows (n, k) sorted by expert times weights (experts, m, k), divided by the scales: (n, m)."""
    factor = 1 / (rows_scale * weight_scale)
    if _uses_kernel(rows8, dtype):
        from shardwise.models.kernels import grouped8

        rounded: Tensor = grouped8(rows8, weight8, ends, factor, dtype)
        return rounded
    product: Tensor = _product_per_expert(rows8, weight8, ends, wide(dtype))
    return rounded_to(dtype, product * factor)


def grouped_outer_product(
    left8: Tensor,
    right8: Tensor,
    places: Tensor | None,
    ends: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradient of each weight: leftᵀ · right over the rows of each expert, divided by the scales.

    `left8` (n, m) is sorted by expert; its columns are those of all weights, one after the other. Row i of
    the sorted right matrix (n, k) is row places[i] of `right8`; None: row i.
    """
    factor, heights = 1 / (left_scale * right_scale), [weight.shape[1] for weight in weights]
    if _uses_kernel(left8, weights[0].dtype):
        from shardwise.models.kernels import outer8, transpose_experts8

        left, right = transpose_experts8(left8, ends, None), transpose_experts8(right8, ends, places)
        pairs = zip(left.split_with_sizes(heights), weights, strict=True)
        return [outer8(rows, right, ends, factor, weight.dtype) for rows, weight in pairs]
    sorted8 = right8 if places is None else take_copies(right8, places)
    pairs = zip(left8.split_with_sizes(heights, 1), weights, strict=True)
    return [
        (_outer_product_per_expert(rows, sorted8, ends, wide(weight.dtype)) * factor).to(weight.dtype)
        for rows, weight in pairs
    ]


def _uses_kernel(rows: Tensor, dtype: torch.dtype) -> bool:
    is_float8 = rows.is_cuda and rows.dtype.itemsize == 1
    return is_float8 and dtype != torch.float64 and rows.shape[1] % MULTIPLE == 0


@torch.library.custom_op("shardwise::grouped_one_by_one", mutates_args=())
def _product_per_expert(rows: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply expert by expert in this dtype. It is one operation to the compiler, which would compile again
    whenever the number of rows of an expert changes."""
    result = rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)
    for part, matrix, into in zip(_by_expert(rows, ends), weight, _by_expert(result, ends), strict=True):
        torch.mm(part.to(dtype), matrix.to(dtype).t(), out=into)
    return result


@_product_per_expert.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)


@torch.library.custom_op("shardwise::grouped_outer_one_by_one", mutates_args=())
def _outer_product_per_expert(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    result = left.new_empty(ends.shape[0], left.shape[1], right.shape[1], dtype=dtype)
    parts = zip(_by_expert(left, ends), _by_expert(right, ends), result, strict=True)
    for left_rows, right_rows, into in parts:
        torch.mm(left_rows.to(dtype).t(), right_rows.to(dtype), out=into)
    return result


@_outer_product_per_expert.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1], dtype=dtype)


def _by_expert(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends[:-1].tolist())
