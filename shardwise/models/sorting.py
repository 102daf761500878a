"""Sort rows by expert and sum the experts' outputs per token: gathers by a permutation in both directions.

autograd's backward of a gather adds rows by index, in the order in which threads arrive. Here backward
gathers by the inverse permutation. Sums over the rows of a token are written as one gather after the other,
which the compiler fuses into one kernel: a sum over a dim would be a reduction, and take three times as long
on a GPU. They are computed in the wide dtype and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from shardwise._torch import AutogradContext
from shardwise.models.torch_dtypes import rounded_to, wide


class Sorting(NamedTuple):
    """How rows are sorted by expert: each row is repeated `copies` times, then the copies are permuted."""

    order: Tensor
    inverse: Tensor
    """The inverse permutation of `order`."""
    copies: int


def inverse_permutation(order: Tensor) -> Tensor:
    """Return the permutation that undoes this one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def permute(rows: Tensor, order: Tensor, inverse_order: Tensor, copies: int = 1) -> Tensor:
    """Return the rows, each repeated `copies` times, in this order; `inverse_order` is the inverse
    permutation."""
    permuted: Tensor = _Permute.apply(rows, order, inverse_order, copies)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """Forward gathers. Backward gathers by the inverse, and sums over copies."""

    @staticmethod
    def forward(
        ctx: AutogradContext, rows: Tensor, order: Tensor, inverse_order: Tensor, copies: int
    ) -> Tensor:
        ctx.save_for_backward(inverse_order)
        ctx.copies = copies
        return take_copies(rows, copied_from(order, copies))

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse_order,) = ctx.saved_tensors
        return sum_copies(gradient, inverse_order, ctx.copies), None, None, None


def copied_from(order: Tensor, copies: int) -> Tensor:
    """Return the indices of the rows whose copies stand in this order."""
    return order // copies if copies > 1 else order


def take_copies(rows: Tensor, places: Tensor) -> Tensor:
    """Return the rows with these indices, without a gradient."""
    if rows.dtype.itemsize == 1:
        return rows.view(torch.uint8).index_select(0, places).view(rows.dtype)
    return rows.index_select(0, places)


def sum_copies(rows: Tensor, inverse_order: Tensor, copies: int) -> Tensor:
    """Return the sum over the copies of each row: (copies · n, hidden) sorted rows to (n, hidden)."""
    if copies == 1:
        return rows.index_select(0, inverse_order)
    places = inverse_order.view(len(inverse_order) // copies, copies).unbind(1)
    return sum(rows.index_select(0, place).to(wide(rows.dtype)) for place in places).to(rows.dtype)  # type: ignore[union-attr]


def weighted_sum(outputs: Tensor, weights: Tensor, order: Tensor, inverse_order: Tensor) -> Tensor:
    """Return for each token the sum of its experts' outputs times their weights: (tokens, hidden).

    `outputs` (tokens · chosen, hidden) are the outputs in this order, `weights` are (tokens, chosen), and
    `inverse_order` is the inverse permutation.
    """
    mixed: Tensor = _WeightedSum.apply(outputs, weights, order, inverse_order)  # type: ignore[no-untyped-call]
    return mixed


class _WeightedSum(torch.autograd.Function):
    """Forward gathers the outputs of a token's experts and sums them with weights. Backward gives each output
    the gradient of its token times its weight, and each weight the product of output and gradient. Sums are
    in the wide dtype."""

    @staticmethod
    def forward(
        ctx: AutogradContext, outputs: Tensor, weights: Tensor, order: Tensor, inverse_order: Tensor
    ) -> Tensor:
        ctx.save_for_backward(outputs, weights, order, inverse_order)
        dtype = wide(outputs.dtype)
        choices = zip(inverse_order.view(weights.shape).unbind(1), weights.to(dtype).unbind(1), strict=True)
        rows = (outputs.index_select(0, place).to(dtype) * weight.unsqueeze(1) for place, weight in choices)
        return rounded_to(outputs.dtype, sum(rows))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        outputs, weights, order, inverse_order = ctx.saved_tensors
        dtype = wide(outputs.dtype)
        token_gradient = gradient.index_select(0, order // weights.shape[1]).to(dtype)
        outputs_gradient = token_gradient * weights.flatten().index_select(0, order).to(dtype).unsqueeze(1)
        products = (token_gradient * outputs.to(dtype)).sum(1)
        weights_gradient = products.index_select(0, inverse_order).view(weights.shape)
        return outputs_gradient.to(outputs.dtype), weights_gradient.to(weights.dtype), None, None
