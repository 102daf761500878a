"""How a layout compresses communication: the codec of gradient sums, and how weights are gathered.

The codecs themselves, their bytes and their costs are in shardwise/codecs, one file each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from shardwise.codecs import Codec, RowCodec, parse_codec, parse_row_codec

AUTO = "auto"
"""Value in place of a codec: the planner chooses one, or none."""
SETTINGS = ("compression", "compression_axes", "compression_warmup", "error_feedback")
"""Settings of a layout that decide how gradients are compressed."""
GATHER_SETTINGS = ("weight_compression", "backward_shards")
"""Settings of a layout that decide how sharded weights are gathered."""
SMALLEST_COMPRESSED = 4096
"""Smallest number of elements of a matrix that is compressed."""


class CompressionTable(Protocol):
    """The settings of a layout that compress communication; config/layout.py describes them."""

    @property
    def compression(self) -> str | None:
        """Codec of gradient sums, "auto", or None."""

    @property
    def compression_axes(self) -> Literal["all", "replica"]:
        """Axes whose gradient sums are compressed."""

    @property
    def compression_warmup(self) -> int:
        """Number of steps before compression begins."""

    @property
    def error_feedback(self) -> bool | None:
        """Whether the error is added to the next gradient; None: the codec decides."""

    @property
    def weight_compression(self) -> str | None:
        """Codec of gathered weights, or None."""

    @property
    def backward_shards(self) -> int | None:
        """Number of neighbours that share a copy of the weights for backward, or None."""


@dataclass(frozen=True)
class SumCompression:
    """How a job compresses its gradient sums."""

    codec: Codec
    axes: Literal["all", "replica"]
    warmup: int
    feedback: bool
    """Whether the compression error is added to the next gradient."""

    @classmethod
    def of(cls, layout: CompressionTable) -> SumCompression | None:
        """Return the layout's compression of sums; None if there is none, or none is chosen yet."""
        if layout.compression is None or layout.compression == AUTO:
            return None
        codec = parse_codec(layout.compression)
        feedback = codec.shrinks_errors if layout.error_feedback is None else layout.error_feedback
        return cls(codec, layout.compression_axes, layout.compression_warmup, feedback)

    def compresses(self, axis: str) -> bool:
        """Whether sums along this axis are compressed."""
        return self.axes == "all" or axis == "replica"


@dataclass(frozen=True)
class WeightGathers:
    """How a job gathers its sharded weights, if not uncompressed (comm/weight_gathers.py)."""

    codec: RowCodec | None
    """Codec of the gathered weights; None: they are sent uncompressed."""
    backward_shards: int | None
    """Number of neighbours that share a copy of all weights from forward to backward; None: no copy."""

    @classmethod
    def of(cls, layout: CompressionTable) -> WeightGathers | None:
        """Return the layout's settings of gathers; None if weights are gathered in the usual way."""
        if layout.weight_compression is None and layout.backward_shards is None:
            return None
        codec = None if layout.weight_compression is None else parse_row_codec(layout.weight_compression)
        return cls(codec, layout.backward_shards)


def is_compressed(shape: Sequence[int]) -> bool:
    """Whether gradients of a parameter of this shape are compressed: those of all but small matrices are.

    Vectors have few elements, and errors in them matter much.
    """
    return len(shape) >= 2 and prod(shape) >= SMALLEST_COMPRESSED
