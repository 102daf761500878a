"""Attention of whole sequences, written out in softmax and matrix products: the truth for sequences that are
split over ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.config import Layout
from shardwise.mesh import Worker, join

Attend = Callable[[Tensor, Tensor, Tensor, Comm, Tensor | None], Tensor]
Places = Callable[[int, int, int], Tensor]


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    length: int = 24
    head_dim: int = 8
    ends: tuple[tuple[int, ...], ...] | None = None
    """For each row the places after which a document ends; None: no documents."""
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Sequence:
    """Each tensor is (batch, length, heads, head_dim), as projections leave it; `weight` is the gradient of
    the result."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    documents: Tensor | None


def make(shape: Shape) -> Sequence:
    """The same numbers on every rank."""
    draw = torch.Generator().manual_seed(5)

    def normal(heads: int) -> Tensor:
        size = (shape.batch, shape.length, heads, shape.head_dim)
        return torch.randn(size, generator=draw, dtype=torch.float64).to(shape.dtype)

    tensors = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads), normal(shape.heads)
    if shape.ends is None:
        return Sequence(*tensors, None)
    starts = torch.zeros(shape.batch, shape.length, dtype=torch.int32)
    for row, ends in enumerate(shape.ends):
        starts[row, [end + 1 for end in ends]] = 1
    return Sequence(*tensors, starts.cumsum(1, dtype=torch.int32))


def truth(shape: Shape) -> tuple[Tensor, ...]:
    """Result and gradients of query, key and value, on one device in float64: softmax over an explicit
    triangle."""
    sequence = make(shape)
    leaves = [tensor.double().requires_grad_() for tensor in (sequence.query, sequence.key, sequence.value)]
    query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
    key, value = (tensor.repeat_interleave(shape.heads // shape.kv_heads, 1) for tensor in (key, value))
    visible = torch.ones(shape.length, shape.length).tril().bool().expand(shape.batch, 1, -1, -1)
    if sequence.documents is not None:
        visible = visible & (sequence.documents[:, None, :, None] == sequence.documents[:, None, None, :])
    scores = (query @ key.mT / shape.head_dim**0.5).masked_fill(~visible, -torch.inf)
    out = (scores.softmax(-1) @ value).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, leaves, sequence.weight.double())


def local(
    worker: Worker, shape: Shape, attend: Attend, places: Places, layout: dict[str, int]
) -> tuple[Tensor, ...]:
    """The same of this rank's tokens, and last where they are in the sequence."""
    comm = Comm(join(worker, Layout(**{"data": 1, **layout})))
    mine = places(shape.length, layout["context"], comm.mesh.coordinate("context"))
    sequence = make(shape)
    leaves = [tensor[:, mine].requires_grad_() for tensor in (sequence.query, sequence.key, sequence.value)]
    documents = None if sequence.documents is None else sequence.documents[:, mine]
    query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
    out = attend(query, key, value, comm, documents).transpose(1, 2)
    return out.detach(), *torch.autograd.grad(out, leaves, sequence.weight[:, mine]), mine


def together(parts: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Whole tensors from those of the ranks."""
    order = torch.cat([part[-1] for part in parts]).argsort()
    return [torch.cat(pieces, 1)[:, order] for pieces in list(zip(*parts, strict=True))[:-1]]


def worst(found: list[Tensor], true: tuple[Tensor, ...]) -> float:
    """The largest error of result and gradients: norm of the difference over norm of the truth."""
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))
