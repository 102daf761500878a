"""The cost of float8 products besides the products: bytes moved by casts, maxima and transposes.

For each product of rows m, inputs k and outputs n (models/float8_products.py), in a compiled block:

- Inputs, and in backward gradients, are written in 8 bits instead of 16 by the kernel that makes them. Where
  none of ours does (attention's output, what the tensor axis gathered), they are read and written once
  more.
- Weights of s bytes are read and written in 8 bits, forward and backward: 2 (s + 1) n k. Where they are
  whole, and a step has several micro-batches, once a step.
- Backward copies both factors of its products transposed: 2 (m n + m k + n k) bytes read and written.
- Backward's kernels also seek the largest magnitudes and count what is lost, of gradients and of the inputs
  that they cast once more, and take half as long again for that. Next to norms they read about as much more
  for this as 8 bits save, so their bytes are those of bfloat16; those of the activation are counted: three
  tensors are written in 8 bits, of gate, up and their product.

Dynamic scales need a tensor whole before it is cast: it is written in 16 bits and read again. Where blocks
are not compiled (if backward comes in halves, plan/compilation.py), each operation of a cast is a kernel.
After a step every weight is read once more, for its largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.config.dtype_names import BYTES
from shardwise.cost.matmuls import BlockProduct, float8_weights, products_of, share_in_float8
from shardwise.cost.space import Array, Bools, Space, Workload, is_compiled, take
from shardwise.plan.chunks import chunk_tokens
from shardwise.plan.engine import engine_of
from shardwise.plan.float8_choice import casts_once

LOOKING = 1.55
"""Time of a kernel that also seeks the largest magnitude and counts what is lost, over that of its bytes (902
us by itself for
2.42 GB, on an H200; in a step such kernels took 1.08 times what they take by themselves)."""
CAST = 3.0
"""Bytes to read a number in 16 bits and write it in 8."""
DYNAMIC = 4.0
"""Bytes to write a number in 16 bits first, and read it again."""
NOT_COMPILED = 60.0
"""Bytes of a number's quantising operation by operation: six for its magnitude, and four for the cast, mostly
in float32."""
KERNELS = 5.0
"""Kernels started besides a product in both passes: two casts of the weight, three transposed copies."""
ADDED = 12.0
"""Bytes to add a chunk's gradient of a weight of the head to those before it, in float32."""


@dataclass(frozen=True)
class Streamed:
    """Values that elementwise kernels read and write for each token, forward: those next to the attention's
    products, to the feed-forward's, and to grouped ones."""

    attention: Array
    feed_forward: Array
    experts: Array | float = 0.0

    @property
    def total(self) -> Array:
        """Values of all three parts."""
        return self.attention + self.feed_forward + self.experts


def block_traffic(
    work: Workload,
    space: Space,
    device_type: str,
    products: Sequence[BlockProduct],
    streamed: Streamed,
    size: int,
    not_fused: float,
) -> tuple[Array, Array]:
    """Bytes that elementwise kernels of a block move, forward and backward. Those that seek maxima count
    LOOKING times; `not_fused` is the traffic of kernels that are not compiled, over that of compiled ones."""
    assert work.float8 is not None
    compiled, tokens = is_compiled(work, space, device_type), products[0].m
    forward, backward = _fused(work, space, products, streamed, size)
    if work.float8.dynamic:
        forward, backward = (
            forward + DYNAMIC * _inputs(work, products),
            backward + DYNAMIC * _gradients(work, products),
        )
    if not compiled.all():
        apart = not_fused * size * streamed.total
        forward = np.where(compiled, forward, apart + NOT_COMPILED * _inputs(work, products))
        backward = np.where(compiled, backward, 2 * apart + NOT_COMPILED * _gradients(work, products))
    forward, backward = tokens * forward, tokens * backward
    once, casts = cast_once(work, space), (stored_bytes(work, space) + 1) * float8_weights(work, products)
    part = np.where(once, 1 / space.accumulation, 1.0)
    return forward + part * casts, backward + np.where(once, 0.0, casts) + _transposed(work, products, part)


def cast_once(work: Workload, space: Space) -> Bools:
    """Whether weights are cast once a step, not in every micro-batch, and kept in 8 bits both ways round."""
    once: Bools = casts_once(space.accumulation, engine_of(space, work.model.experts))
    return once


def kept_weights(work: Workload, space: Space, layers: Array) -> Array | float:
    """Return the bytes of the weights of this many blocks that are kept in 8 bits."""
    if work.float8 is None:
        return 0.0
    return np.where(cast_once(work, space), 2 * layers * float8_weights(work, products_of(work, space)), 0.0)


def stored_bytes(work: Workload, space: Space) -> Array:
    """Return the bytes of a weight before its cast: as it is stored, or as it is gathered."""
    if BYTES[work.state_dtype] == 2:
        return np.full(len(space), 2.0)
    layouts, index = space.layouts
    here = np.where(engine_of(layouts, work.model.experts).zero == 0, float(BYTES[work.state_dtype]), 2.0)
    return take(here, index)


def _fused(
    work: Workload, space: Space, products: Sequence[BlockProduct], streamed: Streamed, size: int
) -> tuple[Array, Array]:
    """Bytes of a compiled block for each token, without those of weights."""
    shares = work.float8
    assert shares is not None
    hidden, whole = work.model.hidden, space.tensor > 1  # what the tensor axis gathered is cast by itself
    of_norms = (shares.query + shares.up) * hidden
    attended = shares.output * next(product.k for product in products if product.kind == "output")
    inner = sum(
        (shares.down * product.k for product in products if product.kind == "down"), np.zeros(len(space))
    )
    # Rows are copied to experts in 8 bits, and in backward from them.
    copied = streamed.experts * (1 - shares.experts / 2)
    forward = (
        size * (streamed.attention + streamed.feed_forward + copied)
        + np.where(whole, CAST, -1.0) * of_norms
        + CAST * attended
        - inner
    )
    beside = (
        (shares.query + 2 * shares.keys + shares.output) / 4,
        (shares.up + shares.down) / 2,
        shares.experts,
    )
    parts = streamed.attention, streamed.feed_forward, copied
    backward = sum(
        2 * size * part * (1 + (LOOKING - 1) * share) for part, share in zip(parts, beside, strict=True)
    )
    # The gradients of gate and up, and their product once more.
    made = (3 if work.model.gated or work.model.experts else 2) * inner
    return forward, backward + LOOKING * (np.where(whole, CAST, 0.0) * of_norms - made)


def _inputs(work: Workload, products: Sequence[BlockProduct]) -> Array:
    """Numbers that are cast for each token before products; queries, keys and values have one input, gate and
    up another."""
    counted = [
        share_in_float8(work, product.kind) * product.k
        for product in products
        if product.kind in ("query", "output", "up", "down")
    ]
    return sum(counted, np.zeros_like(products[0].k))


def _gradients(work: Workload, products: Sequence[BlockProduct]) -> Array:
    """Return the number of gradients of outputs that are cast for each token."""
    counted = [
        share * product.count * product.n * product.m
        for product in products
        if (share := share_in_float8(work, product.kind))
    ]
    return sum(counted, np.zeros_like(products[0].k)) / products[0].m


def _transposed(work: Workload, products: Sequence[BlockProduct], of_weights: Array) -> Array:
    """Bytes read and written to have both factors of a backward product along the dimension that is summed; a
    micro-batch has that part of the weights'."""
    copies = [
        2 * share * product.count * (product.m * (product.n + product.k) + of_weights * product.n * product.k)
        for product in products
        if (share := share_in_float8(work, product.kind))
    ]
    return sum(copies, np.zeros_like(products[0].k))


def head_traffic(work: Workload, space: Space, device_type: str, tokens: Array, loss_bytes: float) -> Array:
    """Bytes of the loss and of its head: gradients of logits are written in 8 bits, not in 16, and copied
    transposed; the weight is cast, in two steps if it is stored wider, and transposed; and every chunk adds a
    product to its gradient."""
    rows = work.model.vocabulary / space.tensor
    stored, weight = stored_bytes(work, space), rows * work.model.hidden
    cast = CAST + np.where(stored > 2, stored + 2, 0.0) + 2.0
    chunks = np.ceil(tokens / head_chunk(work, space, device_type, tokens))
    return tokens * rows * (loss_bytes - 1 + 2) + weight * (cast + ADDED * chunks)


def head_chunk(work: Workload, space: Space, device_type: str, tokens: Array) -> Array:
    """Return the tokens of a chunk of the loss."""
    rows = np.ceil(work.model.vocabulary / space.tensor)
    chunk: Array = np.minimum(chunk_tokens(tokens, rows, 2, device_type, float8=True), tokens)
    return chunk


def head_bytes(work: Workload, space: Space, device_type: str, tokens: Array) -> Array:
    """Alive at once in the head. First a chunk's logits and their gradient; then the gradient, its transposed
    copy and the gradient of the weight, which is added to those before. All the time the weight in 8 bits,
    both ways round, and in 16 where it is stored wider."""
    weight = work.model.vocabulary * work.model.hidden / space.tensor
    chunk = head_chunk(work, space, device_type, tokens)
    logits = chunk * work.model.vocabulary / space.tensor
    first, then = 3 * logits, 2 * logits + 4 * weight
    return np.maximum(first, then) + weight * np.where(stored_bytes(work, space) > 2, 4.0, 2.0)


def kernels(work: Workload) -> float:
    """Return the number of kernels that float8 adds to both passes of a block."""
    return 0.0 if work.float8 is None else KERNELS * work.float8.products / work.model.layers
