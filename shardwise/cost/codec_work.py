"""What compressed sums (comm/compressed.py) cost a device beside its links: numbers encoded and decoded, and
copies around that.

A sum of n numbers over N devices, each of which has N rows of n / N:

| hop                     | encodes       | decodes       | copies                                |
| ----------------------- | ------------- | ------------- | ------------------------------------- |
| rows to their devices   | (N - 1) n / N | (N - 1) n / N | n, to add them to the residual; a     |
|                         |               |               | reduce-scatter also n / N, its result |
| sums to all             | n / N         | n             | n, the result                         |
| both factors (PowerSGD) | n             | n, or n / N   | n, to add them to the residual        |

The work is done where the collective is made, before and behind it, so it is part of what the backward pass
may hide.

On a GPU a codec is bounded by memory: to encode n numbers it must read 4 n bytes and write its code, to
decode them the reverse. `GPU_SHARE` is what it reaches of the bandwidth of a copy. On a CPU it is bounded by
one thread, and `HOST_NANOSECONDS` is its time. Both are measured by benchmarks/codec_speed.py, the latter
with --feedback and two of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.config.compression import SPARSE_BLOCK, Compression
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.space import Array, Space, take

GPU_SHARE: Mapping[str, float] = {
    "bf16": 0.67, "fp16": 0.90, "fp8": 0.91, "int8": 0.90, "int4": 0.82, "terngrad": 0.64, "sign": 0.84,
    "topk": 0.25,
    "randomk": 0.60, "powersgd": 0.50,
}  # fmt: skip
"""Of the bandwidth of a copy, for the bytes that must be touched: an H200, 268 M numbers. PowerSGD's is not
measured, but taken to be half: its products are thin."""
GPU_SHARE_OF_QSGD = ((2, 3, 4, 8), (0.65, 0.67, 0.69, 0.75))
"""The same by the number of bits."""

HOST_NANOSECONDS: Mapping[str, tuple[float, float]] = {
    "bf16": (2.9, 0.7), "fp16": (6.9, 2.5), "fp8": (14.3, 8.2), "int8": (9.0, 2.6), "int4": (11.4, 5.7),
    "qsgd": (23.5, 4.2),
    "terngrad": (22.6, 5.3), "sign": (10.0, 5.0), "topk": (13.2, 1.1), "randomk": (2.3, 1.9),
    "powersgd": (2.6, 0.8),
}  # fmt: skip
"""Of one thread to encode a number, taking out of it what is sent where errors are fed back, and to decode
it, while the cores beside it do the same. Two are otherwise: of TernGrad without feedback, as it has none; of
PowerSGD from its products alone, timed by hand on matrices of 50 M parameters: no benchmark here repeats
it."""

BESIDE_BACKWARD = 1.5
"""How many times as long a CPU's codec takes in a step: its thread shares a core, and the caches, with the
backward pass. Chosen by steps of nine codecs over 1 Gbit/s (benchmarks/slow_link.py), whose gains were
predicted 10 to 32 % too large without it."""

LOW_RANK_TRAFFIC = (16.0, 4.0)
"""Bytes a number that PowerSGD moves: two products read the matrix and taking out what was sent reads and
writes it; putting the sum together writes it. The factors are small beside it."""


@dataclass(frozen=True)
class CodecWork:
    """What one device does for flows of one codec, in a step, for every candidate."""

    codec: Compression
    encoded: Array
    """Numbers."""
    decoded: Array
    copied: Array
    """Bytes read and written to bring gradients in and sums out."""
    kernels: Array
    """Times that a codec is called: each message by itself."""

    def __add__(self, other: CodecWork) -> CodecWork:
        assert self.codec == other.codec, "flows of one kind, axis and time have one codec"
        return CodecWork(
            self.codec, *(own + others for own, others in zip(self._amounts, other._amounts, strict=True))
        )

    def times(self, often: Any) -> CodecWork:
        """So often."""
        return CodecWork(
            self.codec, *(np.asarray(often * amount, dtype=np.float64) for amount in self._amounts)
        )

    def take(self, index: Any) -> CodecWork:
        """Of the candidates at these indices."""
        return CodecWork(self.codec, *(take(amount, index) for amount in self._amounts))

    @property
    def _amounts(self) -> tuple[Array, ...]:
        return self.encoded, self.decoded, self.copied, self.kernels


def seconds(work: CodecWork, space: Space, cluster: Cluster) -> Array:
    """That the work takes by itself."""
    started = cluster.device.launch * work.kernels + compute.streamed(work.copied, space, cluster)
    if cluster.device_type == "cpu":
        encode, decode = HOST_NANOSECONDS[work.codec.name]
        return started + BESIDE_BACKWARD * 1e-9 * (encode * work.encoded + decode * work.decoded)
    encode, decode = _traffic(work.codec)
    moved = encode * work.encoded + decode * work.decoded
    return started + compute.streamed(moved, space, cluster) / _gpu_share(work.codec)


def _traffic(codec: Compression) -> tuple[float, float]:
    """Bytes of memory that must be touched for each number, to encode it and to decode it."""
    if codec.name == "powersgd":
        return LOW_RANK_TRAFFIC
    each = 4.0 + codec.wire_bytes(SPARSE_BLOCK) / SPARSE_BLOCK
    return each, each


def _gpu_share(codec: Compression) -> float:
    return (
        float(np.interp(codec.number, *GPU_SHARE_OF_QSGD)) if codec.name == "qsgd" else GPU_SHARE[codec.name]
    )
