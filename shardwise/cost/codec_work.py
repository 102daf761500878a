"""The work of compressed sums (comm/compressed_sums.py) on a device: encoding, decoding and copies.

A sum of n numbers over N devices, each of which has N rows of n / N:

| hop                     | encodes       | decodes       | copies                                |
| ----------------------- | ------------- | ------------- | ------------------------------------- |
| rows to their devices   | (N - 1) n / N | (N - 1) n / N | n, to add them to the residual; a     |
|                         |               |               | reduce-scatter also n / N, its result |
| sums to all             | n / N         | n             | n, the result                         |
| both factors (PowerSGD) | n             | n, or n / N   | n, to add them to the residual        |

The work is done right before and after the collective, so the backward pass can hide it like the collective.

On a GPU the memory bandwidth limits a codec: to encode n numbers it must read 4 n bytes and write their code,
and the reverse to decode them. `gpu_share` of a codec is the share of a copy's bandwidth that it reaches. On
a CPU one thread limits it, and `host_nanoseconds` is its time. Both figures are in the codec's file;
benchmarks/codec_speed.py measures them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.codecs import Codec
from shardwise.config.schedules import Numbers
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.space import Array, Index, Space, take

BESIDE_BACKWARD = 1.5
"""How many times as long a codec takes in a step on a CPU, because its thread shares a core and the caches
with the backward pass. Fitted to steps with nine codecs over 1 Gbit/s (benchmarks/slow_link.py): without this
factor, the predicted gains were 10 to 32 % too large."""


@dataclass(frozen=True)
class CodecWork:
    """The work of one device for flows of one codec in a step, for every candidate."""

    codec: Codec
    encoded: Array
    """Number of elements that are encoded."""
    decoded: Array
    """Number of elements that are decoded."""
    copied: Array
    """Bytes read and written to bring gradients in and sums out."""
    kernels: Array
    """Number of calls of the codec, one per message."""

    def __add__(self, other: CodecWork) -> CodecWork:
        assert self.codec == other.codec, "flows of one kind, axis and time have one codec"
        return CodecWork(
            self.codec, *(mine + theirs for mine, theirs in zip(self._amounts, other._amounts, strict=True))
        )

    def times(self, often: Numbers) -> CodecWork:
        """Return this work repeated `often` times."""
        return CodecWork(
            self.codec, *(np.asarray(often * amount, dtype=np.float64) for amount in self._amounts)
        )

    def take(self, index: Index) -> CodecWork:
        """Return the work of the candidates at these indices."""
        return CodecWork(self.codec, *(take(amount, index) for amount in self._amounts))

    @property
    def _amounts(self) -> tuple[Array, ...]:
        return self.encoded, self.decoded, self.copied, self.kernels


def seconds(work: CodecWork, space: Space, cluster: Cluster) -> Array:
    """Return the seconds that the work takes if nothing hides it."""
    started = cluster.device.launch * work.kernels + compute.streamed(work.copied, space, cluster)
    if cluster.device_type == "cpu":
        encode, decode = work.codec.host_nanoseconds
        return started + BESIDE_BACKWARD * 1e-9 * (encode * work.encoded + decode * work.decoded)
    encode, decode = work.codec.memory_traffic
    moved = encode * work.encoded + decode * work.decoded
    return started + compute.streamed(moved, space, cluster) / work.codec.gpu_share
