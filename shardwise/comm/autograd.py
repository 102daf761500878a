"""Collectives that gradients flow through; each docstring states the forward and the backward.

All act along one axis of the mesh and do nothing where the axis has one device. They are kept out of compiled
graphs: the compiler works on what lies between them, and the ledger counts every one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise._torch import AutogradContext
from shardwise.comm.comm import Comm

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function out of compiled graphs."""
    uncompiled: Callable[P, R] = torch.compiler.disable(function)
    return uncompiled


@eager
def gather(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    """Forward: concatenate the devices' parts along `dim`. Backward: sum over the devices and return this
    device's part."""
    if comm.mesh.size(axis) == 1:
        return x
    result: Tensor = _Gather.apply(x, comm, axis, dim)  # type: ignore[no-untyped-call]
    return result


@eager
def scatter_sum(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    """Forward: sum over the devices and return this device's part along `dim`. Backward: concatenate the
    parts."""
    if comm.mesh.size(axis) == 1:
        return x
    result: Tensor = _ScatterSum.apply(x, comm, axis, dim)  # type: ignore[no-untyped-call]
    return result


@eager
def collect(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    """Forward: concatenate the parts along `dim`, where all devices then compute the same. Backward: return
    this device's part."""
    if comm.mesh.size(axis) == 1:
        return x
    result: Tensor = _Collect.apply(x, comm, axis, dim)  # type: ignore[no-untyped-call]
    return result


@eager
def total(x: Tensor, comm: Comm, axis: str) -> Tensor:
    """Forward: sum over the devices, which then all compute the same. Backward: return the gradient as it
    is."""
    if comm.mesh.size(axis) == 1:
        return x
    result: Tensor = _Total.apply(x, comm, axis)  # type: ignore[no-untyped-call]
    return result


@eager
def replicate(x: Tensor, comm: Comm, axis: str) -> Tensor:
    """Forward: return `x` as it is, which all devices have alike. Backward: sum over the devices, each of
    which uses it in another way."""
    if comm.mesh.size(axis) == 1:
        return x
    result: Tensor = _Replicate.apply(x, comm, axis)  # type: ignore[no-untyped-call]
    return result


@eager
def all_to_all(
    rows: Tensor,
    comm: Comm,
    axis: str,
    sent: Sequence[int] | None = None,
    received: Sequence[int] | None = None,
) -> Tensor:
    """Forward: send part i of the rows to device i, and return the received rows in device order. Backward:
    the reverse."""
    result: Tensor = _AllToAll.apply(rows, comm, axis, sent, received)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
        ctx.comm, ctx.axis, ctx.dim = comm, axis, dim
        return _gather(x, comm, axis, dim)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _scatter_sum(gradient, ctx.comm, ctx.axis, ctx.dim), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
        ctx.comm, ctx.axis, ctx.dim = comm, axis, dim
        return _scatter_sum(x, comm, axis, dim)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(gradient, ctx.comm, ctx.axis, ctx.dim), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
        # Arguments of `narrow` that select this device's part.
        ctx.part = (dim, comm.mesh.coordinate(axis) * x.shape[dim], x.shape[dim])
        return _gather(x, comm, axis, dim)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.narrow(*ctx.part), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, comm: Comm, axis: str) -> Tensor:
        return comm.all_reduce(x.clone(), axis)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor, comm: Comm, axis: str) -> Tensor:
        ctx.comm, ctx.axis = comm, axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.all_reduce(gradient.contiguous().clone(), ctx.axis), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        rows: Tensor,
        comm: Comm,
        axis: str,
        sent: Sequence[int] | None,
        received: Sequence[int] | None,
    ) -> Tensor:
        ctx.comm, ctx.axis = comm, axis
        ctx.sent, ctx.received = received, sent  # in backward
        return comm.all_to_all(rows, axis, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows_gradient = ctx.comm.all_to_all(gradient, ctx.axis, ctx.sent, ctx.received)
        return rows_gradient, None, None, None, None


def _gather(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    parts = comm.all_gather(x, axis)  # (devices, *shape)
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def _scatter_sum(x: Tensor, comm: Comm, axis: str, dim: int) -> Tensor:
    size = comm.mesh.size(axis)
    assert x.shape[dim] % size == 0, f"dim {dim} of {tuple(x.shape)} does not split over {axis} {size}"
    return comm.reduce_scatter(torch.stack(x.chunk(size, dim)), axis)
