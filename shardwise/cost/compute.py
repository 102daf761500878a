"""Seconds that one device computes: matrix products, attention, and kernels that only move memory.

The seconds are those of one micro-batch in one block, in the embedding, or in the head. A device has its part
of the sequence, and matrices that the tensor axis has split.

- Backward has twice the products of forward, with the same three lengths in another order. So by the formula
  of `cost/cluster.py` it takes exactly twice as long.
- Flash attention computes the scores again in backward: five products instead of two (Dao, 2023).
- Memory bandwidth limits elementwise kernels. For each token a compiled block moves, in values of the
  computing dtype: 9 h for norms and residuals (13 h with norms after attention and feed-forward too),
  2 (a + k) d for rotary embeddings, 3 f for a gated activation (2 f without a gate). Here h is the hidden
  width, a and k are the numbers of query and key heads, d is their width, and f is the width of the
  feed-forward layer. Blocks that are not compiled move more (NOT_FUSED).

`cost/float8_work.py` has what shardwise's products in float8 add.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.config.dtype_names import BYTES
from shardwise.cost.cluster import Cluster, Device
from shardwise.cost.float8_work import Streamed, block_traffic, head_chunk, head_traffic
from shardwise.cost.matmuls import BlockProduct, products_of, share_in_float8, tokens_here
from shardwise.cost.software import Software
from shardwise.cost.space import Array, Space, Workload, is_compiled
from shardwise.plans.cut_stages import BYTES_OF_A_LOOKUP
from shardwise.plans.dtypes import value_dtype
from shardwise.plans.float8_choice import fits

ATTENTION_BACKWARD = 2.5
"""FLOPs of attention's backward over those of its forward."""
BACKWARD_SHARE = 0.9
"""FLOP/s of attention's backward over those of its forward."""
HEAD_DIM_KNEE = {True: 50.0, False: 30.0}
"""Width of a head at which attention reaches half the speed that it has with wide heads: for kernels written
for the device (True), and for portable ones."""
HOST_HEAD_DIM_KNEE = 10.0
"""The same for torch's attention on a CPU (profiles of bytes-10m, heads of 48)."""
HOST_ATTENTION_BACKWARD = 1.9
"""Seconds of backward over those of forward for torch's attention on a CPU (the same profiles)."""
NOT_FUSED = 2.5
"""Traffic of elementwise kernels of a block that is not compiled, over that of a compiled block: 20 h for
norms and residuals, 9 (a + k) d for rotary embeddings, 5 f for a gated activation."""
SCORE_BYTES = 26.0
"""Bytes moved for one attention score, forward and backward, if the matrix of scores is in memory (softmax,
mask, dropout)."""
GROUPED_FLOAT8 = 0.6
"""Speed of the grouped products of experts in float8, relative to other products in float8 (904 of 1,500
TFLOP/s on an H200, six layers of qwen3-30b-a3b)."""
KEPT_WIDE = 0.15
"""Share of the blocks' products that 4-bit training recipes keep in 16 bits (NVIDIA, 2025)."""
QUANTISING = 2.0
"""Values of 16 bits that other programs move for each value that they cast to 8 bits: it is read once, and
written in 8 bits as it is and transposed. Their kernels find the scale on the way (Transformer Engine: of the
next step, or of a small block). The traffic of shardwise is counted in cost/float8_work.py."""


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of one micro-batch in one block, in forward unless the name says otherwise."""

    matmul: Array
    attention: Array
    attention_backward: Array
    elementwise: Array
    elementwise_backward: Array
    last: Array
    """Seconds of the last product, which recomputation can leave out: backward does not need its output."""

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
    return BYTES[value_dtype(work.precision)]


def weight_bytes(work: Workload, stack: Software) -> float:
    """Return the bytes of a weight in computation and in gathers; 2 if products have fewer bits."""
    return stack.weight_bytes * value_bytes(work) / 2


def reduce_bytes(work: Workload, stack: Software) -> float:
    """Return the bytes of one element of a gradient that is sent."""
    return stack.reduce_bytes * (2 if work.reduce_dtype == "float64" else 1)


def casts(work: Workload) -> bool:
    """Return whether weights are stored in another dtype than they are computed with."""
    return BYTES[work.state_dtype] != value_bytes(work)


def product(m: Array, n: Array, k: Array, device: Device, precision: str, sharing: Array | float) -> Array:
    """Return the seconds of a matrix product (m x k) by (k x n) on one of `sharing` workers of a device."""
    flops, small = 2 * m * n * k, 1 + device.matmul_knee * (1 / m + 1 / n + 1 / k)

    def seconds(precision: str) -> Array:
        speed = device.peak[precision] * device.matmul_share(precision) / sharing
        return flops / speed * small

    if precision == "float4":  # some products stay in 16 bits
        return KEPT_WIDE * seconds("bfloat16") + (1 - KEPT_WIDE) * seconds(precision)
    return seconds(precision)


def workers_sharing(space: Space, cluster: Cluster) -> Array | float:
    """Return the number of workers that share the speed of one device."""
    return np.minimum(space.world, cluster.devices_per_node).astype(float) if cluster.shared else 1.0


def block(work: Workload, space: Space, cluster: Cluster, stack: Software) -> BlockSeconds:
    """Return the seconds of a transformer block on one device."""
    device, sharing = cluster.device, workers_sharing(space, cluster)
    speed = _stream(device, sharing)
    products, size = products_of(work, space), value_bytes(work)
    times = [matrix.count * _seconds(matrix, work, device, sharing) for matrix in products]  # of forward
    forward, backward, scores = _attention(work, space, cluster, stack, sharing)
    streamed = _streamed(work, space, stack)
    if work.float8 is not None:
        moved, moved_back = block_traffic(
            work, space, cluster.device_type, products, streamed, size, NOT_FUSED
        )
    else:
        compiled = is_compiled(work, space, cluster.device_type)
        traffic = np.where(compiled, stack.elementwise, NOT_FUSED)
        moved = tokens_here(work, space) * (streamed.total + _quantised(work, space)) * size * traffic
        moved_back = 2 * moved
    elementwise, elementwise_back = (moved + scores / 3) / speed, (moved_back + 2 * scores / 3) / speed
    last = next(seconds for matrix, seconds in zip(products, times, strict=True) if matrix.is_last)
    return BlockSeconds(
        sum(times, np.zeros(len(space))), forward, backward, elementwise, elementwise_back, last
    )


def _seconds(matrix: BlockProduct, work: Workload, device: Device, sharing: Array | float) -> Array:
    """Return the seconds of a product. In a share of the blocks it may be in float8."""
    sizes = matrix.m, matrix.n, matrix.k
    if work.float8 is None:
        return product(*sizes, device, work.precision, sharing)
    share, result = share_in_float8(work, matrix.kind), np.zeros_like(matrix.m)
    if share > 0:
        result = result + share * _in_float8(matrix, device, sharing)
    if share < 1:
        result = result + (1 - share) * product(*sizes, device, "bfloat16", sharing)
    return result


def _in_float8(matrix: BlockProduct, device: Device, sharing: Array | float) -> Array:
    """Return the seconds of a product of 8-bit numbers. Experts have kernels for any number of tokens; other
    products of sizes that do not fit are in float32."""
    sizes = matrix.m, matrix.n, matrix.k
    narrow = product(*sizes, device, "float8", sharing)
    if matrix.kind == "experts":
        return narrow / GROUPED_FLOAT8
    return np.where(fits(sizes), narrow, product(*sizes, device, _precision_if_unfit(device), sharing))


def _precision_if_unfit(device: Device) -> str:
    """Return the precision in which a device multiplies 8-bit numbers that do not fit: float32, if its speed
    is known."""
    return "float32" if "float32" in device.peak else "bfloat16"


def _streamed(work: Workload, space: Space, stack: Software) -> Streamed:
    """Return the values that elementwise kernels read and write for each token in forward."""
    model, tensor = work.model, space.tensor.astype(float)
    inputs = 2 if model.gated else 1
    queries = model.heads * model.head_dim / tensor
    keys = np.maximum(model.kv_heads / tensor, 1) * model.head_dim
    sharing = tensor if stack.sequence_parallel else np.ones_like(tensor)
    half = (13.0 if model.post_norms else 9.0) / 2 * model.hidden / sharing  # of norms and residuals
    attention = half + 2 * (queries + keys)
    if not model.experts:
        return Streamed(attention, half + (1 + inputs) * model.ffn / tensor)
    inner = model.experts_per_token * model.expert_width / tensor
    grouped = 3 * inner + 6 * model.experts_per_token * model.hidden / tensor
    return Streamed(attention, half + 3 * model.shared_experts * model.expert_width / tensor, grouped)


def _quantised(work: Workload, space: Space) -> Array | float:
    """Return the values per token that other programs move to scale and cast the inputs of products in 8 or 4
    bits."""
    model = work.model
    if work.precision == value_dtype(work.precision):
        return 0.0
    inner = model.experts_per_token * model.expert_width if model.experts else model.ffn
    return QUANTISING * (2 * model.hidden + (model.heads * model.head_dim + inner) / space.tensor)


def _attention(
    work: Workload, space: Space, cluster: Cluster, stack: Software, sharing: Array | float
) -> tuple[Array, Array, Array]:
    """Return the seconds of attention in forward and in backward, and the bytes of scores moved (0 for flash
    attention)."""
    model, length = work.model, work.sequence_length
    device, on_gpu = cluster.device, cluster.device_type == "cuda"
    pairs = space.micro_batch * float(length) ** 2 / space.context * model.heads / space.tensor
    precision = value_dtype(work.precision)
    if not stack.flash or model.attention_softcap is not None:
        heads = space.micro_batch * model.heads / space.tensor
        side, inner = np.full_like(pairs, length), np.full_like(pairs, model.head_dim)
        once = 2 * heads * product(side, side, inner, device, precision, sharing)
        return once, 2 * once, pairs * SCORE_BYTES
    windowed = sum(model.visible_tokens(layer, length) < length for layer in range(model.layers))
    # Each pair of tokens costs 4 FLOPs per value of a head. Of a causal mask only half are computed; kernels
    # that take the mask of a window compute all.
    flops = 4 * pairs * (1 + windowed / model.layers) / 2 * model.head_dim
    knee = HEAD_DIM_KNEE[stack.native_attention] if on_gpu else HOST_HEAD_DIM_KNEE
    # Shares of the peak are measured with heads of 128.
    narrow = (model.head_dim / (model.head_dim + knee)) / (128 / (128 + knee))
    share = device.attention if stack.native_attention else device.attention_portable
    speed = device.peak[precision] * share * narrow / sharing
    # A ring attends to the keys of one device at a time: two pieces, from both ends of the sequence.
    chunk = length / np.where((space.ring == 1) & (space.context > 1), 2 * space.context, 1)
    once = flops / speed * (1 + device.attention_knee / chunk)
    backward = ATTENTION_BACKWARD / BACKWARD_SHARE if on_gpu else HOST_ATTENTION_BACKWARD
    return once, once * backward, np.zeros_like(pairs)


def head(work: Workload, space: Space, cluster: Cluster, stack: Software) -> tuple[Array, Array]:
    """Return the seconds of the output head's products, and of the loss: both passes of one micro-batch."""
    model, sharing = work.model, workers_sharing(space, cluster)
    tokens, rows = tokens_here(work, space), model.vocabulary / space.tensor
    precision = value_dtype(work.precision)
    moved = tokens * rows * stack.loss_traffic
    if work.float8 is not None and work.float8.head:
        precision = "float8"
        moved = head_traffic(work, space, cluster.device_type, tokens, stack.loss_traffic)
    hidden = np.full_like(tokens, model.hidden)
    products = 3 * product(tokens, rows, hidden, cluster.device, precision, sharing)
    if precision == "float8":  # the last chunk may have a number of tokens that does not fit
        chunk = head_chunk(work, space, cluster.device_type, tokens)
        rest = np.where(fits((tokens,)), 0.0, tokens - chunk * (np.ceil(tokens / chunk) - 1)) / tokens
        in_float32 = 3 * product(
            tokens, rows, hidden, cluster.device, _precision_if_unfit(cluster.device), sharing
        )
        products = products + rest * (in_float32 - products)
    return products, moved / _stream(cluster.device, sharing)


def embedding(work: Workload, space: Space, cluster: Cluster) -> Array:
    """Return the seconds of looking up the embedding, and of its gradient."""
    moved = tokens_here(work, space) / space.tensor * work.model.hidden * BYTES_OF_A_LOOKUP
    return streamed(moved, space, cluster)


def _stream(device: Device, sharing: Array | float) -> Array | float:
    return device.bandwidth * device.stream / sharing


def streamed(bytes: Array, space: Space, cluster: Cluster) -> Array:
    """Return the seconds in which elementwise kernels move this many bytes."""
    return bytes / _stream(cluster.device, workers_sharing(space, cluster))
