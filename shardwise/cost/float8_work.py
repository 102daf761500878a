"""The cost of float8 products besides the products: bytes moved by casts, maxima and transposes.

For each product of rows m, inputs k and outputs n (models/float8_products.py), in a compiled block:

- The kernel that makes an input, or in backward a gradient, writes it in 8 bits instead of 16. Tensors that
  come from other kernels (attention's output, what the tensor axis gathered) are read and written once more.
- Weights of s bytes are read and written in 8 bits, forward and backward: 2 (s + 1) n k bytes. This happens
  once a step if weights are whole and a step has several micro-batches.
- Backward copies both factors of its products transposed: 2 (m n + m k + n k) bytes read and written.
- The kernels of backward cast inputs once more. They also find the largest magnitudes of inputs and
  gradients, and count the values that are lost, which makes them half as slow again. Next to norms they read
  about as much more for this as 8 bits save, so their bytes are those of bfloat16. Those of the activation
  are counted: three tensors are written in 8 bits, the gate, up and their product.

Dynamic scales need a whole tensor before it is cast, so it is written in 16 bits and read again. If blocks
are not compiled (because backward comes in halves, plans/compilation.py), each operation of a cast is a
kernel. After a step every weight is read once more, to find its largest magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.config.dtype_names import BYTES
from shardwise.cost.matmuls import BlockProduct, float8_weights, products_of, share_in_float8
from shardwise.cost.space import Array, Bools, Space, Workload, is_compiled, take
from shardwise.plans.chunks import chunk_tokens
from shardwise.plans.engine import engine_of
from shardwise.plans.float8_choice import casts_once

LOOKING = 1.55
"""Time of a kernel that also finds the largest magnitude and counts the lost values, over the time that its
bytes need (by itself 902 us for 2.42 GB on an H200; in a step such kernels took 1.08 times as long)."""
CAST = 3.0
"""Bytes moved to read an element in 16 bits and write it in 8."""
DYNAMIC = 4.0
"""Bytes moved to write an element in 16 bits first, and to read it again."""
NOT_COMPILED = 60.0
"""Bytes moved to quantise an element with one kernel per operation: six for its magnitude and four for the
cast, mostly in float32."""
KERNELS = 5.0
"""Kernels started besides a product in both passes: two casts of the weight, three transposed copies."""
ADDED = 12.0
"""Bytes moved to add the gradient of a weight from one chunk of the head to the sum, in float32."""


@dataclass(frozen=True)
class Streamed:
    """Values that elementwise kernels read and write for each token in forward."""

    attention: Array
    """Values of the kernels next to the products of attention."""
    feed_forward: Array
    experts: Array | float = 0.0
    """Values of the kernels next to the grouped products of experts."""

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
    """Return the bytes that elementwise kernels of a block move, forward and backward.

    Bytes of kernels that find maxima are counted LOOKING times. `not_fused` is the traffic of kernels that
    are not compiled, over that of compiled ones.
    """
    assert work.float8 is not None
    compiled, tokens = is_compiled(work, space, device_type), products[0].m
    forward, backward = _fused(work, space, products, streamed, size)
    if work.float8.dynamic:
        forward = forward + DYNAMIC * _inputs(work, products)
        backward = backward + DYNAMIC * _gradients(work, products)
    if not compiled.all():
        eager = not_fused * size * streamed.total
        forward = np.where(compiled, forward, eager + NOT_COMPILED * _inputs(work, products))
        backward = np.where(compiled, backward, 2 * eager + NOT_COMPILED * _gradients(work, products))
    forward, backward = tokens * forward, tokens * backward
    once, casts = cast_once(work, space), (stored_bytes(work, space) + 1) * float8_weights(work, products)
    part = np.where(once, 1 / space.accumulation, 1.0)
    return forward + part * casts, backward + np.where(once, 0.0, casts) + _transposed(work, products, part)


def cast_once(work: Workload, space: Space) -> Bools:
    """Return whether weights are cast once a step, not in every micro-batch. Then they are kept in 8 bits, as
    they are and transposed."""
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
    """Return the bytes that kernels of a compiled block move for each token, without those of weights."""
    shares = work.float8
    assert shares is not None
    is_gathered = space.tensor > 1  # what the tensor axis gathered is cast by a kernel of its own
    of_norms = (shares.query + shares.up) * work.model.hidden
    attended = shares.output * next(product.k for product in products if product.kind == "output")
    of_down = (shares.down * product.k for product in products if product.kind == "down")
    inner = sum(of_down, np.zeros(len(space)))
    # Rows are copied to experts in 8 bits in forward, and from them in backward.
    copied = streamed.experts * (1 - shares.experts / 2)
    forward = (
        size * (streamed.attention + streamed.feed_forward + copied)
        + np.where(is_gathered, CAST, -1.0) * of_norms
        + CAST * attended
        - inner
    )
    parts = (
        (streamed.attention, (shares.query + 2 * shares.keys + shares.output) / 4),
        (streamed.feed_forward, (shares.up + shares.down) / 2),
        (copied, shares.experts),
    )
    backward = sum(2 * size * values * (1 + (LOOKING - 1) * share) for values, share in parts)
    # The gradients of gate and up, and the product of gate and up once more.
    made = (3 if work.model.gated or work.model.experts else 2) * inner
    return forward, backward + LOOKING * (np.where(is_gathered, CAST, 0.0) * of_norms - made)


def _inputs(work: Workload, products: Sequence[BlockProduct]) -> Array:
    """Return the number of elements of inputs that are cast for each token. Queries, keys and values have one
    input, gate and up another."""
    counts = [
        share_in_float8(work, product.kind) * product.k
        for product in products
        if product.kind in ("query", "output", "up", "down")
    ]
    return sum(counts, np.zeros_like(products[0].k))


def _gradients(work: Workload, products: Sequence[BlockProduct]) -> Array:
    """Return the number of elements of gradients of outputs that are cast for each token."""
    counts = [
        share_in_float8(work, product.kind) * product.count * product.n * product.m for product in products
    ]
    return sum(counts, np.zeros_like(products[0].k)) / products[0].m


def _transposed(work: Workload, products: Sequence[BlockProduct], weights_share: Array) -> Array:
    """Return the bytes moved to copy both factors of each product of backward transposed, for a micro-batch
    that makes this share of the copies of weights."""
    copies = [
        2
        * share_in_float8(work, product.kind)
        * product.count
        * (product.m * (product.n + product.k) + weights_share * product.n * product.k)
        for product in products
    ]
    return sum(copies, np.zeros_like(products[0].k))


def head_traffic(work: Workload, space: Space, device_type: str, tokens: Array, loss_bytes: float) -> Array:
    """Return the bytes that the loss and its head move.

    Gradients of logits are written in 8 bits, not in 16, and copied transposed. The weight is cast, in two
    steps if it is stored in more than 16 bits, and copied transposed. Every chunk adds a product to the
    gradient of the weight.
    """
    rows = work.model.vocabulary / space.tensor
    stored, weight = stored_bytes(work, space), rows * work.model.hidden
    cast = CAST + np.where(stored > 2, stored + 2, 0.0) + 2.0
    chunks = np.ceil(tokens / head_chunk(work, space, device_type, tokens))
    return tokens * rows * (loss_bytes - 1 + 2) + weight * (cast + ADDED * chunks)


def head_chunk(work: Workload, space: Space, device_type: str, tokens: Array) -> Array:
    """Return the number of tokens in a chunk of the loss."""
    rows = np.ceil(work.model.vocabulary / space.tensor)
    chunk: Array = np.minimum(chunk_tokens(tokens, rows, 2, device_type, float8=True), tokens)
    return chunk


def head_bytes(work: Workload, space: Space, device_type: str, tokens: Array) -> Array:
    """Return the bytes that exist at once in the head.

    First these are the logits of a chunk and their gradient; then that gradient, its transposed copy, and the
    gradient of the weight. The weight exists all the time: in 8 bits, as it is and transposed, and in 16 if
    it is stored in more.
    """
    weight = work.model.vocabulary * work.model.hidden / space.tensor
    chunk = head_chunk(work, space, device_type, tokens)
    logits = chunk * work.model.vocabulary / space.tensor
    gradients = 2 * logits + 4 * weight
    return np.maximum(3 * logits, gradients) + weight * np.where(stored_bytes(work, space) > 2, 4.0, 2.0)


def kernels(work: Workload) -> float:
    """Return the number of kernels that float8 adds to both passes of a block."""
    return 0.0 if work.float8 is None else KERNELS * work.float8.products / work.model.layers
