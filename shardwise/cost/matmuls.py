"""The matrices of a block, as one device multiplies by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost.space import Array, Space, Workload


@dataclass(frozen=True)
class Product:
    """So many products (m x k) by (k x n) of a block, forward."""

    kind: str
    """As in `plan.float8.Shares`; "router" is in none."""
    m: Array
    n: Array
    k: Array
    count: Array | float = 1.0
    is_last: bool = False
    """Whether its output is the block's."""


def tokens_here(work: Workload, space: Space) -> Array:
    """Tokens of a micro-batch on one context device."""
    return space.micro_batch * work.sequence_length / space.context


def products_of(work: Workload, space: Space) -> list[Product]:
    """(tokens x k) by (k x n), with k or n cut by `tensor`."""
    model, tokens = work.model, tokens_here(work, space)
    hidden, queries = np.full_like(tokens, model.hidden), model.heads * model.head_dim / space.tensor
    keys = np.maximum(model.kv_heads / space.tensor, 1) * model.head_dim  # a device has at least one key head
    products = [
        Product("query", tokens, queries, hidden),
        Product("keys", tokens, keys, hidden, 2),
        Product("output", tokens, hidden, queries),
    ]
    wide = 2 if model.gated else 1
    if not model.experts:
        inner = model.ffn / space.tensor
        return [
            *products,
            Product("up", tokens, inner, hidden, wide),
            Product("down", tokens, hidden, inner, is_last=True),
        ]
    inner, experts = np.full_like(tokens, model.expert_width), np.full_like(tokens, model.experts)
    rows = (
        tokens * model.experts_per_token / space.tensor * space.expert / model.experts
    )  # that come to one expert
    held = (
        model.experts / space.expert
    )  # experts of one device, whole: `tensor` cuts tokens here, not matrices
    products += [
        Product("experts", rows, inner, hidden, wide * held),
        Product("experts", rows, hidden, inner, held, is_last=True),
        Product("router", tokens / space.tensor, experts, hidden),
    ]
    if model.shared_experts:
        shared = model.shared_experts * model.expert_width / space.tensor
        products += [Product("up", tokens, shared, hidden, wide), Product("down", tokens, hidden, shared)]
    return products


def share_in_float8(work: Workload, kind: str) -> float:
    """Of the products of this kind, those that shardwise makes in float8."""
    share: float = getattr(work.float8, kind, 0.0)
    return share


def float8_weights(work: Workload, products: Sequence[Product]) -> Array:
    """Numbers of a block's matrices on one device whose products shardwise makes in float8."""
    counts = [
        share * one.count * one.n * one.k for one in products if (share := share_in_float8(work, one.kind))
    ]
    return sum(counts, np.zeros_like(products[0].k))
