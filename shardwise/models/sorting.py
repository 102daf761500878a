"""Copy rows and sort the copies, and sum over the copies of each row: gathers by a permutation in both
directions.

Copying and summing are each other's backward. autograd's own backward of a gather adds rows by index, in the
order in which threads arrive. Here every sum gathers the copies of a row in a fixed order. Sums are computed
in the wide dtype and rounded once.

All rows may have the same number of copies: one device has all experts of a token. Then a sum is written as
one gather after the other, which the compiler fuses into one kernel: a sum over a dim would be a reduction,
and take three times as long on a GPU. Or the number differs from row to row: several devices share the
experts. Then a GPU uses the kernels of models/kernels.py, which read each copy once and keep nothing between,
and CPUs sum segments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwise._torch import AutogradContext
from shardwise.models.torch_dtypes import rounded_to, wide


class Sorting(NamedTuple):
    """How copies of rows are sorted. Before, they are in the order of their rows: first the copies of row
    0."""

    rows: Tensor
    """The row that each sorted copy is of: (n,)."""
    inverse: Tensor
    """The place of each copy among the sorted ones: (n,)."""
    copies: int | None
    """Number of copies of each row; None: it differs."""
    ends: Tensor | None = None
    """If it differs, where the copies of each row end in `inverse`."""


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the permutation that undoes this one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def count_values(numbers: Tensor, size: int) -> Tensor:
    """Return how often each number from 0 to size - 1 occurs."""
    return numbers.new_zeros(size).scatter_add_(0, numbers, torch.ones_like(numbers))


def sort_evenly(keys: Tensor) -> Sorting:
    """Return the sorting by key of the copies of rows, from the keys (rows, copies)."""
    order, copies = keys.flatten().argsort(stable=True), keys.shape[1]
    return Sorting(order // copies, inverse_permutation(order), copies)


def sort_unevenly(rows: Tensor, inverse: Tensor, size: int) -> Sorting:
    """Return the sorting whose i-th sorted copy is of row rows[i], where there are `size` rows; `inverse` has
    the place of each copy."""
    return Sorting(rows, inverse, None, count_values(rows, size).cumsum(0))


def permute(rows: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
    """Return the rows in this order; `inverse_order` is the inverse permutation."""
    return copy_rows(rows, Sorting(order, inverse_order, 1))


def copy_rows(rows: Tensor, sorting: Sorting) -> Tensor:
    """Return the sorted copies of the rows: (n, ...)."""
    copied: Tensor = _CopyRows.apply(rows, *sorting)  # type: ignore[no-untyped-call]
    return copied


def sum_rows(copies: Tensor, sorting: Sorting) -> Tensor:
    """Return the sum over the sorted copies of each row."""
    total: Tensor = _SumRows.apply(copies, *sorting)  # type: ignore[no-untyped-call]
    return total


def weighted_sum(copies: Tensor, weights: Tensor, sorting: Sorting) -> Tensor:
    """Return for each row the sum over its sorted copies (n, hidden), times their weights. The weights (n,)
    are in the order of the rows."""
    total: Tensor = _WeightedSum.apply(copies, weights, *sorting)  # type: ignore[no-untyped-call]
    return total


class _CopyRows(torch.autograd.Function):
    """Forward gathers the copies. Backward sums over the copies of each row."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        rows: Tensor,
        places: Tensor,
        inverse: Tensor,
        copies: int | None,
        ends: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(inverse, ends)
        ctx.copies = copies
        return take_copies(rows, places)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        inverse, ends = ctx.saved_tensors
        return sum_copies(gradient, inverse, ctx.copies, ends), None, None, None, None


class _SumRows(torch.autograd.Function):
    """Forward sums over the copies of each row. Backward gives each copy the gradient of its row."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        rows: Tensor,
        places: Tensor,
        inverse: Tensor,
        copies: int | None,
        ends: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(places)
        return sum_copies(rows, inverse, copies, ends)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        (places,) = ctx.saved_tensors
        return take_copies(gradient, places), None, None, None, None


class _WeightedSum(torch.autograd.Function):
    """Forward gathers the copies of a row and sums them with weights. Backward gives each copy the gradient
    of its row times its weight, and each weight the product of copy and gradient. Sums are in the wide
    dtype."""

    @staticmethod
    def forward(
        ctx: AutogradContext,
        rows: Tensor,
        weights: Tensor,
        places: Tensor,
        inverse: Tensor,
        copies: int | None,
        ends: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, weights, places, inverse)
        ctx.even = ends is None
        return sum_copies(rows, inverse, copies, ends, weights)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        rows, weights, places, inverse = ctx.saved_tensors
        sorted_weights = torch.empty_like(weights).scatter_(0, inverse, weights)
        if rows.is_cuda and not ctx.even:
            from shardwise.models.kernels import weigh_rows

            rows_gradient, products = weigh_rows(gradient.contiguous(), rows, sorted_weights, places)
        else:
            dtype = wide(rows.dtype)
            row_gradient = gradient.index_select(0, places).to(dtype)
            rows_gradient = row_gradient * sorted_weights.to(dtype).unsqueeze(1)
            products = (row_gradient * rows.to(dtype)).sum(1)
        weights_gradient = products.index_select(0, inverse)
        return rows_gradient.to(rows.dtype), weights_gradient.to(weights.dtype), None, None, None, None


def take_copies(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows with these indices, without a gradient."""
    if rows.dtype.itemsize == 1:
        return rows.view(torch.uint8).index_select(0, places).view(rows.dtype)
    return rows.index_select(0, places)


def sum_copies(
    rows: Tensor, inverse: Tensor, copies: int | None, ends: Tensor | None, weights: Tensor | None = None
) -> Tensor:
    """Return the sum over the copies of each row, times their weights, without a gradient. `rows` are the
    sorted copies (n, hidden), the weights (n,) are in the order of the rows."""
    if copies is None:
        assert ends is not None, "the numbers of copies differ"
        return _sum_unevenly(rows, inverse, ends, weights)
    if copies == 1 and weights is None:
        return rows.index_select(0, inverse)
    dtype, shape = wide(rows.dtype), (inverse.shape[0] // copies, copies)
    summands = (rows.index_select(0, place).to(dtype) for place in inverse.view(shape).unbind(1))
    if weights is not None:
        factors = weights.to(dtype).view(shape).unbind(1)
        summands = (row * factor.unsqueeze(1) for row, factor in zip(summands, factors, strict=True))
    return rounded_to(rows.dtype, sum(summands))  # type: ignore[arg-type]


def _sum_unevenly(rows: Tensor, inverse: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Return the same where copies[i] differ: those of row i end in `inverse` before ends[i]."""
    if rows.is_cuda:
        from shardwise.models.kernels import sum_segments

        total: Tensor = sum_segments(rows.contiguous(), inverse, ends, weights)
        return total
    summands = rows.index_select(0, inverse).to(wide(rows.dtype))
    if weights is not None:
        summands = summands * weights.to(summands.dtype).unsqueeze(1)
    if not len(summands):
        return rows.new_zeros(ends.shape[0], *rows.shape[1:])
    begins = torch.cat((ends.new_zeros(1), ends))
    return torch.segment_reduce(summands, "sum", offsets=begins, axis=0, unsafe=True).to(rows.dtype)
