"""Rows sorted by expert, and put together again: gathers by a permutation in both directions.

Left to autograd, the backward of a gather adds rows by index, in the order in which threads arrive. Here it
gathers by the inverse. Sums over the rows of one token are written as one gather after the other, which the
compiler makes one kernel of: as a sum over a dim they would be a reduction, and take thrice as long on a GPU.
They are made in the wide dtype and rounded once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.models.torch_dtypes import wide


class Sorting(NamedTuple):
    """How rows come into the order of their experts: each `copies` times, row by row, then put in this
    order."""

    order: Tensor
    back: Tensor
    """Its inverse."""
    copies: int


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes this one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


def permute(rows: Tensor, order: Tensor, back: Tensor, copies: int = 1) -> Tensor:
    """Each row `copies` times, row by row, then put in this order; `back` is its inverse."""
    permuted: Tensor = _Permute.apply(rows, order, back, copies)  # type: ignore[no-untyped-call]
    return permuted


class _Permute(torch.autograd.Function):
    """Forward: a gather. Backward: gathers by the inverse, and a sum over copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return take_copies(rows, copied_from(order, copies))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return sum_copies(gradient, back, ctx.copies), None, None, None


def copied_from(order: Tensor, copies: int) -> Tensor:
    """The rows that were copied to these places."""
    return order // copies if copies > 1 else order


def take_copies(rows: Tensor, places: Tensor) -> Tensor:
    """The rows of these places, without a gradient."""
    if rows.dtype.itemsize == 1:
        return rows.view(torch.uint8).index_select(0, places).view(rows.dtype)
    return rows.index_select(0, places)


def sum_copies(rows: Tensor, back: Tensor, copies: int) -> Tensor:
    """Of rows that were put in order, the sum over each one's copies (copies · n, hidden) to (n, hidden)."""
    if copies == 1:
        return rows.index_select(0, back)
    places = back.view(len(back) // copies, copies).unbind(1)
    return sum(rows.index_select(0, place).to(wide(rows.dtype)) for place in places).to(rows.dtype)  # type: ignore[union-attr]


def mix(visited: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Rows (tokens · chosen, hidden) after their experts, in this order, to (tokens, hidden): for each token
    the sum of its rows times their weights (tokens, chosen). `back` is the inverse of the order."""
    mixed: Tensor = _Mix.apply(visited, weights, order, back)  # type: ignore[no-untyped-call]
    return mixed


class _Mix(torch.autograd.Function):
    """Forward: a weighted sum over the rows of a token, each gathered from where its expert left it.
    Backward: each row gets the gradient of its token times its weight, and the weight the product of row and
    gradient. Sums are in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, visited: Tensor, weights: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(visited, weights, order, back)
        dtype = wide(visited.dtype)
        choices = zip(back.view(weights.shape).unbind(1), weights.to(dtype).unbind(1), strict=True)
        rows = (visited.index_select(0, place).to(dtype) * weight.unsqueeze(1) for place, weight in choices)
        return sum(rows).to(visited.dtype)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        visited, weights, order, back = ctx.saved_tensors
        dtype = wide(visited.dtype)
        of_token = gradient.index_select(0, order // weights.shape[1]).to(dtype)
        of_rows = of_token * weights.flatten().index_select(0, order).to(dtype).unsqueeze(1)
        of_weights = (of_token * visited.to(dtype)).sum(1).index_select(0, back).view(weights.shape)
        return of_rows.to(visited.dtype), of_weights.to(weights.dtype), None, None
