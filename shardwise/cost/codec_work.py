"""What compressed sums (comm/compressed_sums.py) cost a device beside its links: numbers encoded and decoded,
and copies around that.

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
decode them the reverse; `gpu_share` of a codec is the share of a copy's bandwidth that it reaches. On a CPU
one thread bounds it, and `host_nanoseconds` is its time. Both stand in the codec's file and are measured by
benchmarks/codec_speed.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.codecs import Codec
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.space import Array, Space, take

BESIDE_BACKWARD = 1.5
"""How many times as long a CPU's codec takes in a step: its thread shares a core, and the caches, with the
backward pass. Chosen by steps of nine codecs over 1 Gbit/s (benchmarks/slow_link.py), whose gains were
predicted 10 to 32 % too large without it."""


@dataclass(frozen=True)
class CodecWork:
    """What one device does for flows of one codec, in a step, for every candidate."""

    codec: Codec
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
        encode, decode = work.codec.host_nanoseconds
        return started + BESIDE_BACKWARD * 1e-9 * (encode * work.encoded + decode * work.decoded)
    encode, decode = work.codec.memory_traffic
    moved = encode * work.encoded + decode * work.decoded
    return started + compute.streamed(moved, space, cluster) / work.codec.gpu_share
