"""Products of experts in float8: rows sorted by expert, each by the matrix of its expert, all in one grouped
product.

    y  = x8 · w8ᵀ     rows (n, inputs) by (experts, outputs, inputs) to (n, outputs)
    dx = g8 · w8
    dw = g8ᵀ · x8     for each expert over its own rows; zeros for an expert without any

Formats, scales, and what is noted of tensors are as for other products (models/float8_products.py). Two
things differ:

- Gate and up have the same input and are one product, of a weight that is both, one above the other. So one
  product gives the sum of both gradients of the input. It sums over the outputs of both, and what is summed
  must have one scale: both weights share one, from the larger of their magnitudes, and so do the gradients of
  both outputs.
- The input is cast before it is sorted: rows are copied to their experts in 8 bits, numbers being the same as
  if they were copied and then cast. Backward keeps the cast rows unsorted, one for each token, and copies
  them again.

A GPU makes the products by kernels of ours (models/kernels.py). CPUs and proofs in float64 multiply the same
8-bit numbers expert after expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.models.float8_products import (
    E4M3,
    E5M2,
    ScaledProduct,
    joined,
    quantise,
    rounded_to,
    transposed,
)
from shardwise.models.sorting import Sorting, copied_from, sum_copies, take_copies
from shardwise.models.torch_dtypes import wide
from shardwise.plan.float8_choice import MULTIPLE


class GroupedFloat8(ScaledProduct):
    """How rows sorted by expert are multiplied by some weights of their experts, joined along the outputs."""

    def __init__(self, *weights: str) -> None:
        super().__init__(None, weights)

    def forward(
        self, rows: Tensor, ends: Tensor, weights: Sequence[Tensor], sorting: Sorting | None = None
    ) -> Tensor:
        """Rows (n, inputs), sorted or to be sorted, of which those of expert i end before ends[i] (int32),
        and weights (experts, outputs, inputs), to sorted rows with the outputs of all weights."""
        order, back, copies = sorting or (None, None, 1)
        result: Tensor = _GroupedProduct.apply(rows, ends, order, back, copies, *self.settings(), *weights)  # type: ignore[no-untyped-call]
        return result


class GroupedProducts(nn.Module):
    """Of experts, which products are made in float8."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.gate_up = GroupedFloat8("gate", "up") if {"gate", "up"} <= set(names) else None
        self.down = GroupedFloat8("down") if "down" in names else None


class _GroupedProduct(torch.autograd.Function):
    """Rows times the weights of their experts, transposed."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        ends: Tensor,
        order: Tensor | None,
        back: Tensor | None,
        copies: int,
        kept: Tensor | None,
        kept_transposed: Tensor | None,
        probe: Tensor | None,
        of_input: Tensor,
        of_weight: Tensor,
        of_gradient: Tensor,
        dynamic: bool,
        plain: bool,
        note: Callable[[Tensor], None] | None,
        *weights: Tensor,
    ) -> Tensor:
        x8, of_input, seen = quantise(x, of_input, E4M3, dynamic, plain)
        w8 = joined(weights, of_weight, x.dtype, None if plain else E4M3) if kept is None else kept
        ctx.save_for_backward(
            x8, ends, order, back, of_input, of_weight, of_gradient, seen, kept_transposed, *weights
        )
        ctx.copies, ctx.dynamic, ctx.plain, ctx.note, ctx.dtype = copies, dynamic, plain, note, x.dtype
        rows8 = x8 if order is None else take_copies(x8, copied_from(order, copies))
        return grouped(rows8, w8, ends, of_input, of_weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x8, ends, order, back, of_input, of_weight, of_gradient, seen, w8t, *weights = ctx.saved_tensors
        g8, of_gradient, seen_of_gradient = quantise(gradient, of_gradient, E5M2, ctx.dynamic, ctx.plain)
        if w8t is None:
            w8t = transposed(joined(weights, of_weight, ctx.dtype, None if ctx.plain else E4M3))
        x_gradient = grouped(g8, w8t, ends, of_gradient, of_weight, ctx.dtype)
        places = None if order is None else copied_from(order, ctx.copies)
        weight_gradients = grouped_outer(g8, x8, places, ends, of_gradient, of_input, weights)
        if back is not None:
            x_gradient = sum_copies(x_gradient, back, ctx.copies)
        all_seen = torch.stack((seen, seen_of_gradient))
        if ctx.note is not None:
            ctx.note(all_seen)
        to_probe = all_seen if ctx.note is None else None
        return x_gradient, *6 * (None,), to_probe, *6 * (None,), *weight_gradients


def grouped(
    rows8: Tensor, weight8: Tensor, ends: Tensor, of_rows: Tensor, of_weight: Tensor, dtype: torch.dtype
) -> Tensor:
    """Rows (n, k) sorted by expert by weights (experts, m, k) to (n, m), without their scales."""
    factor = 1 / (of_rows * of_weight)
    if _by_kernel(rows8, dtype):
        from shardwise.models.kernels import grouped8

        by_kernel: Tensor = grouped8(rows8, weight8, ends, factor, dtype)
        return by_kernel
    product: Tensor = _one_by_one(rows8, weight8, ends, wide(dtype))
    return rounded_to(dtype, product * factor)


def grouped_outer(
    left8: Tensor,
    right8: Tensor,
    places: Tensor | None,
    ends: Tensor,
    of_left: Tensor,
    of_right: Tensor,
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Of rows (n, m) and (n, k) sorted by expert, leftᵀ · right over the rows of each expert, without their
    scales: for each weight (experts, own part of m, k) in its dtype. Row i of the sorted right ones is its
    row places[i]; None: row i."""
    factor, heights = 1 / (of_left * of_right), [weight.shape[1] for weight in weights]
    if _by_kernel(left8, weights[0].dtype):
        from shardwise.models.kernels import outer8, transpose_experts8

        left, right = transpose_experts8(left8, ends, None), transpose_experts8(right8, ends, places)
        own = zip(left.split_with_sizes(heights), weights, strict=True)
        return [outer8(rows, right, ends, factor, weight.dtype) for rows, weight in own]
    sorted8 = right8 if places is None else take_copies(right8, places)
    own = zip(left8.split_with_sizes(heights, 1), weights, strict=True)
    return [(_outer_one_by_one(rows, sorted8, ends, wide(w.dtype)) * factor).to(w.dtype) for rows, w in own]


def _by_kernel(rows: Tensor, dtype: torch.dtype) -> bool:
    return (
        rows.is_cuda and rows.dtype.itemsize == 1 and dtype != torch.float64 and rows.shape[1] % MULTIPLE == 0
    )


@torch.library.custom_op("shardwise::grouped_one_by_one", mutates_args=())
def _one_by_one(rows: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Expert after expert, in this dtype. For the compiler one operation: how many rows an expert has is
    another each time."""
    result = rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)
    for own, matrix, into in zip(_by_expert(rows, ends), weight, _by_expert(result, ends), strict=True):
        torch.mm(own.to(dtype), matrix.to(dtype).t(), out=into)
    return result


@_one_by_one.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)


@torch.library.custom_op("shardwise::grouped_outer_one_by_one", mutates_args=())
def _outer_one_by_one(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    result = left.new_empty(ends.shape[0], left.shape[1], right.shape[1], dtype=dtype)
    for own, others, into in zip(_by_expert(left, ends), _by_expert(right, ends), result, strict=True):
        torch.mm(own.to(dtype).t(), others.to(dtype), out=into)
    return result


@_outer_one_by_one.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1], dtype=dtype)


def _by_expert(rows: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return rows.tensor_split(ends[:-1].tolist())
