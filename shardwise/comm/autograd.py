"""Collectives that gradients flow through. Each says what it does forward and what it therefore does
backward.

All act along one axis of the mesh and do nothing where the axis has one device. They are kept out of compiled
graphs: the compiler works on what lies between them, and the ledger sees every one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm.comm import Comm

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of compiled graphs."""
    kept_out: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept_out


@eager
def gather(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    """Forward: put the devices' parts together along `dim`. Backward: sum over the devices, and keep the own
    part."""
    result: Tensor = _Gather.apply(x, comm, axis, dim) if comm.mesh.size(axis) > 1 else x  # type: ignore[no-untyped-call]
    return result


@eager
def scatter_sum(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    """Forward: sum over the devices, and keep the own part along `dim`. Backward: put the parts together."""
    result: Tensor = _ScatterSum.apply(x, comm, axis, dim) if comm.mesh.size(axis) > 1 else x  # type: ignore[no-untyped-call]
    return result


@eager
def collect(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    """Forward: put the parts together along `dim`, for devices that all go on with the same. Backward: keep
    the own part."""
    result: Tensor = _Collect.apply(x, comm, axis, dim) if comm.mesh.size(axis) > 1 else x  # type: ignore[no-untyped-call]
    return result


@eager
def total(x: Tensor, comm: Comm, axis: str) -> Tensor:
    """Forward: sum over the devices, which all go on with the same. Backward: nothing to do."""
    result: Tensor = _Total.apply(x, comm, axis) if comm.mesh.size(axis) > 1 else x  # type: ignore[no-untyped-call]
    return result


@eager
def all_to_all(
    rows: Tensor,
    comm: Comm,
    axis: str,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Forward: part i of the rows goes to device i, and what others sent here comes in their order. Backward:
    the reverse."""
    result: Tensor = _AllToAll.apply(rows, comm, axis, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
        ctx.where = (comm, axis, dim)
        return _gathered(x, comm, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _scattered(gradient, *ctx.where), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
        ctx.where = (comm, axis, dim)
        return _scattered(x, comm, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(gradient, *ctx.where), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
        ctx.part = (dim, comm.mesh.coordinate(axis) * x.shape[dim], x.shape[dim])
        return _gathered(x, comm, axis, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(*ctx.part), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, axis: str) -> Tensor:
        return comm.all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        comm: Comm,
        axis: str,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
    ) -> Tensor:
        ctx.backwards = (comm, axis, received, sent)
        return comm.all_to_all(rows, axis, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        comm, axis, sent, received = ctx.backwards
        return comm.all_to_all(gradient, axis, sent, received), None, None, None, None


def _gathered(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    parts = comm.all_gather(x, axis)  # (devices, *shape)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _scattered(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    size = comm.mesh.size(axis)
    assert x.shape[dim] % size == 0, f"dim {dim} of {tuple(x.shape)} does not split over {axis} {size}"
    return comm.reduce_scatter(torch.stack(x.chunk(size, dim)), axis)
