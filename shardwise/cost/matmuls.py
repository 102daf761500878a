"""The matrix products of a block on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost.space import Array, Space, Workload


@dataclass(frozen=True)
class BlockProduct:
    """`count` products (m x k) by (k x n) in the forward of a block."""

    kind: str
    """Kind of product as in `plans.float8_choice.Float8Shares`, or "router"."""
    m: Array
    n: Array
    k: Array
    count: Array | float = 1.0
    is_last: bool = False
    """Whether its output is the output of the block."""


def tokens_here(work: Workload, space: Space) -> Array:
    """Return the number of tokens of a micro-batch on one context device."""
    return space.micro_batch * work.sequence_length / space.context


def products_of(work: Workload, space: Space) -> list[BlockProduct]:
    """Return the products of a block, with k or n divided by `tensor`."""
    model, tokens = work.model, tokens_here(work, space)
    hidden, queries = np.full_like(tokens, model.hidden), model.heads * model.head_dim / space.tensor
    keys = np.maximum(model.kv_heads / space.tensor, 1) * model.head_dim  # a device has at least one key head
    products = [
        BlockProduct("query", tokens, queries, hidden),
        BlockProduct("keys", tokens, keys, hidden, 2),
        BlockProduct("output", tokens, hidden, queries),
    ]
    wide = 2 if model.gated else 1
    if not model.experts:
        inner = model.ffn / space.tensor
        return [
            *products,
            BlockProduct("up", tokens, inner, hidden, wide),
            BlockProduct("down", tokens, hidden, inner, is_last=True),
        ]
    inner, experts = np.full_like(tokens, model.expert_width), np.full_like(tokens, model.experts)
    rows = tokens * model.experts_per_token / space.tensor * space.expert / model.experts  # of one expert
    local = model.experts / space.expert  # whole experts of one device: `tensor` splits tokens here
    products += [
        BlockProduct("experts", rows, inner, hidden, wide * local),
        BlockProduct("experts", rows, hidden, inner, local, is_last=True),
        BlockProduct("router", tokens / space.tensor, experts, hidden),
    ]
    if model.shared_experts:
        shared = model.shared_experts * model.expert_width / space.tensor
        products += [
            BlockProduct("up", tokens, shared, hidden, wide),
            BlockProduct("down", tokens, hidden, shared),
        ]
    return products


def share_in_float8(work: Workload, kind: str) -> float:
    """Return the share of the products of this kind that are in float8."""
    share: float = getattr(work.float8, kind, 0.0)
    return share


def float8_weights(work: Workload, products: Sequence[BlockProduct]) -> Array:
    """Return the number of weights of a block on one device whose products are in float8."""
    counts = [
        share_in_float8(work, product.kind) * product.count * product.n * product.k for product in products
    ]
    return sum(counts, np.zeros_like(products[0].k))
