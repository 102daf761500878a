"""int8: each number as a multiple of 1/127 of its block's largest."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.codecs.blocks import Multiples


@dataclass(frozen=True)
class Int8(Multiples):
    """Rounds each number to the nearest of 255 multiples: n bytes and the scales."""

    name = "int8"
    kind = "nearest"
    for_weights = True
    host_nanoseconds = (9.0, 2.6)
    gpu_share = 0.90
    bits = 8
