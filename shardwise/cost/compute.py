"""Seconds that one device computes: products, attention, what only moves memory, and the host that starts it
all.

Everything is counted for one micro-batch through one block, the embedding, and the head, as this device's
part: T tokens (its part of the sequence), matrices cut by `tensor`. Backward multiplies each matrix twice as
often as forward, with the same three lengths in another order, so by the model of `cost/cluster.py` it takes
exactly twice as long. Flash attention computes the scores again in backward, five products in place of two
(Dao, 2023). Elementwise kernels are bounded by the memory's bandwidth; their traffic in a compiled block is,
in values of the computing dtype a token: 9 h for norms and residuals (13 h with norms after attention and
feed-forward too), 2 (a + k) d for rotary, 3 f for a gated activation (2 f without a gate). A CPU's blocks are
not compiled. What shardwise's products in float8 add to that is in `cost/float8_work.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.config.dtype_names import BYTES
from shardwise.cost.cluster import Cluster, Device
from shardwise.cost.float8_work import Streamed, block_traffic, head_traffic
from shardwise.cost.matmuls import BlockProduct, products_of, share_in_float8, tokens_here
from shardwise.cost.software import Software
from shardwise.cost.space import Array, Space, Workload
from shardwise.plan import dtypes

ATTENTION_BACKWARD = 2.5
BACKWARD_SHARE = 0.9
"""Speed of attention's backward, relative to its forward."""
HEAD_DIM_KNEE = {True: 50.0, False: 30.0}
"""Width of a head at which attention reaches half of what wide ones do: kernels written for the device, and
portable ones."""
HOST_HEAD_DIM_KNEE = 10.0
HOST_ATTENTION_BACKWARD = 1.9
"""The same two for torch's attention on a CPU, as backward's seconds over forward's (profiles of bytes-10m,
heads of 48)."""
HOST_ELEMENTWISE = 2.5
"""Traffic of elementwise kernels that are not fused, over that of a compiled block: 20 h for norms and
residuals, 9 (a + k) d for rotary, 5 f for a gated activation."""
SCORE_BYTES = 26.0
"""Traffic of one attention score, forward and backward, where the matrix of scores is in memory (softmax,
mask, dropout)."""
LOOKUP_BYTES = 12.0
GROUPED_FLOAT8 = 0.6
"""What experts' grouped products in float8 reach of others (904 of 1,500 TFLOP/s on an H200, six layers of
qwen3-30b-a3b)."""
KEPT_WIDE = 0.15
"""Share of the blocks' products that training recipes of 4 bits leave in 16 (NVIDIA, 2025)."""
QUANTISING = 2.0
"""Values that other programs move for each value that is cast to 8 bits: read twice for its scale and its
cast, written once and once transposed. What shardwise moves is counted (cost/float8_work.py)."""


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one micro-batch in one block; forward, unless a name says otherwise."""

    matmul: Array
    attention: Array
    attention_backward: Array
    elementwise: Array
    elementwise_backward: Array
    last: Array
    """Seconds of the last product, whose output backward does not need."""

    @property
    def forward(self) -> Array:
        """Seconds of the forward pass."""
        return self.matmul + self.attention + self.elementwise

    @property
    def backward(self) -> Array:
        """Seconds of the backward pass."""
        return 2 * self.matmul + self.attention_backward + self.elementwise_backward


def value_bytes(work: Workload) -> int:
    """Return the bytes of one activation."""
    return dtypes.value_bytes(work.precision)


def weight_bytes(work: Workload, stack: Software) -> float:
    """Return the bytes of a weight in computation and in gathers; 2 if products are narrower."""
    return stack.weight_bytes * value_bytes(work) / 2


def reduce_bytes(work: Workload, stack: Software) -> float:
    """Return the bytes of one element of a gradient that is sent."""
    return stack.reduce_bytes * (2 if work.reduce_dtype == "float64" else 1)


def casts(work: Workload) -> bool:
    """Whether weights are stored in another dtype than they are computed with."""
    return BYTES[work.state_dtype] != value_bytes(work)


def product(m: Array, n: Array, k: Array, device: Device, precision: str, sharing: Array | float) -> Array:
    """Seconds of a matrix product (m x k) by (k x n) on one of `sharing` workers of a device."""
    if precision == "float4":  # some products stay in 16 bits
        wide = product(m, n, k, device, "bfloat16", sharing)
        return KEPT_WIDE * wide + (1 - KEPT_WIDE) * product(m, n, k, device, "float4 alone", sharing)
    name = precision.split()[0]
    speed = (
        device.peak[name]
        * (device.matmul_float8 if name in ("float8", "float4") else device.matmul)
        / sharing
    )
    result: Array = 2 * m * n * k / speed * (1 + device.matmul_knee * (1 / m + 1 / n + 1 / k))
    return result


def workers_sharing(space: Space, cluster: Cluster) -> Array | float:
    """Return how many workers share the speed of one device."""
    return np.minimum(space.world, cluster.devices_per_node).astype(float) if cluster.shared else 1.0


def block(work: Workload, space: Space, cluster: Cluster, stack: Software) -> BlockSeconds:
    """Return the seconds of a transformer block on one device."""
    device, sharing = cluster.device, workers_sharing(space, cluster)
    speed = _stream(device, sharing)
    products, size = products_of(work, space), value_bytes(work)
    # (candidates,) for each matrix: forward multiplies by it once
    times = [matrix.count * _seconds(matrix, work, device, sharing) for matrix in products]
    forward, backward, scores = _attention(work, space, device, stack, sharing)
    streamed = _streamed(work, space, stack)
    if work.float8 is not None:
        moved, moved_back = block_traffic(
            work, space, cluster.device_type, products, streamed, size, HOST_ELEMENTWISE
        )
    else:
        fused = stack.elementwise if device.overlap else HOST_ELEMENTWISE
        moved = tokens_here(work, space) * (streamed.total + _quantised(work, space)) * size * fused
        moved_back = 2 * moved
    elementwise, elementwise_back = (moved + scores / 3) / speed, (moved_back + 2 * scores / 3) / speed
    last = next(seconds for matrix, seconds in zip(products, times, strict=True) if matrix.is_last)
    return BlockSeconds(
        sum(times, np.zeros(len(space))), forward, backward, elementwise, elementwise_back, last
    )


def _seconds(matrix: BlockProduct, work: Workload, device: Device, sharing: Array | float) -> Array:
    """Return the seconds of a product, a share of which may be in float8."""
    sizes = matrix.m, matrix.n, matrix.k
    if work.float8 is None:
        return product(*sizes, device, work.precision, sharing)
    share, result = share_in_float8(work, matrix.kind), np.zeros_like(matrix.m)
    if share > 0:
        reached = GROUPED_FLOAT8 if matrix.kind == "experts" else 1.0
        result = result + share * product(*sizes, device, "float8", sharing) / reached
    if share < 1:
        result = result + (1 - share) * product(*sizes, device, "bfloat16", sharing)
    return result


def _streamed(work: Workload, space: Space, stack: Software) -> Streamed:
    """Values that elementwise kernels read and write for each token, forward."""
    model, tensor = work.model, space.tensor.astype(float)
    wide = 2 if model.gated else 1
    queries, keys = (
        model.heads * model.head_dim / tensor,
        np.maximum(model.kv_heads / tensor, 1) * model.head_dim,
    )
    stream = 13.0 if model.post_norms else 9.0
    sharing = tensor if stack.sequence_parallel else np.ones_like(tensor)
    half = stream / 2 * model.hidden / sharing  # of norms and residuals
    attention = half + 2 * (queries + keys)
    if not model.experts:
        return Streamed(attention, half + (1 + wide) * model.ffn / tensor)
    inner = model.experts_per_token * model.expert_width / tensor
    grouped = 3 * inner + 6 * model.experts_per_token * model.hidden / tensor
    return Streamed(attention, half + 3 * model.shared_experts * model.expert_width / tensor, grouped)


def _quantised(work: Workload, space: Space) -> Array | float:
    """Values that other programs move to scale and cast the inputs of each product of 8 or 4 bits."""
    model = work.model
    if work.precision not in ("float8", "float4"):
        return 0.0
    inner = model.experts_per_token * model.expert_width if model.experts else model.ffn
    return QUANTISING * (2 * model.hidden + (model.heads * model.head_dim + inner) / space.tensor)


def _attention(
    work: Workload, space: Space, device: Device, stack: Software, sharing: Array | float
) -> tuple[Array, Array, Array]:
    """Forward and backward seconds of the attention core, and the bytes of scores moved (none in flash
    attention)."""
    model, length = work.model, work.sequence_length
    # scores of a query with a key, (candidates,); a causal mask needs half of them, 4 FLOPs a value of a head
    # each
    pairs = space.micro_batch * float(length) ** 2 / space.context * model.heads / space.tensor
    precision = "bfloat16" if work.precision in ("float8", "float4") else work.precision
    if not stack.flash or model.attention_softcap is not None:
        heads = space.micro_batch * model.heads / space.tensor
        side, inner = np.full_like(pairs, length), np.full_like(pairs, model.head_dim)
        once = 2 * heads * product(side, side, inner, device, precision, sharing)
        return once, 2 * once, pairs * SCORE_BYTES
    windowed = (
        sum(model.visible_tokens(layer, length) < length for layer in range(model.layers)) / model.layers
    )
    # Kernels that take a mask also compute what it hides.
    flops = 4 * pairs * (1 + windowed) / 2 * model.head_dim
    knee = HEAD_DIM_KNEE[stack.native_attention] if device.overlap else HOST_HEAD_DIM_KNEE
    # Shares of the peak are measured with heads of 128.
    narrow = (model.head_dim / (model.head_dim + knee)) / (128 / (128 + knee))
    share = device.attention if stack.native_attention else device.attention_portable
    reached = device.peak[precision] * share * narrow / sharing
    # a ring attends to one device's keys at a time, which are two pieces, from both ends of the sequence
    chunk = length / np.where((space.ring == 1) & (space.context > 1), 2 * space.context, 1)
    once = flops / reached * (1 + device.attention_knee / chunk)
    backward = ATTENTION_BACKWARD / BACKWARD_SHARE if device.overlap else HOST_ATTENTION_BACKWARD
    return once, once * backward, np.zeros_like(pairs)


def head(work: Workload, space: Space, cluster: Cluster, stack: Software) -> tuple[Array, Array]:
    """Seconds of the output head's products and of the loss, forward and backward, of one micro-batch."""
    model, sharing = work.model, workers_sharing(space, cluster)
    tokens, part = tokens_here(work, space), model.vocabulary / space.tensor
    narrow = work.float8 is not None and work.float8.head
    precision = (
        "float8" if narrow else "bfloat16" if work.precision in ("float8", "float4") else work.precision
    )
    products = 3 * product(
        tokens, part, np.full_like(tokens, model.hidden), cluster.device, precision, sharing
    )
    moved = tokens * part * stack.loss_traffic
    if narrow:
        moved = head_traffic(work, space, cluster.device_type, tokens, stack.loss_traffic)
    return products, moved / _stream(cluster.device, sharing)


def embedding(work: Workload, space: Space, cluster: Cluster) -> Array:
    """Seconds of looking up the embedding and of its gradient."""
    moved = tokens_here(work, space) / space.tensor * work.model.hidden * LOOKUP_BYTES
    return moved / _stream(cluster.device, workers_sharing(space, cluster))


def _stream(device: Device, sharing: Array | float) -> Array | float:
    return device.bandwidth * device.stream / sharing


def streamed(bytes: Array, space: Space, cluster: Cluster) -> Array:
    """Return the seconds in which elementwise kernels read and write this many bytes."""
    return bytes / _stream(cluster.device, workers_sharing(space, cluster))
