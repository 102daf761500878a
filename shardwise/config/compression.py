"""What a layout says of compression: which codec sums of gradients have, and how weights are gathered.

The codecs themselves, their bytes and their costs are in shardwise/codecs, one file each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Protocol

from shardwise.codecs import Codec, RowCodec, parse_codec, parse_row_codec

AUTO = "auto"
"""In place of a codec: the planner may choose one, or none."""
SETTINGS = ("compression", "compression_axes", "compression_warmup", "error_feedback")
"""The settings of a layout that say how gradients are compressed."""
SMALLEST = 4096
"""Numbers of a matrix from which it is compressed."""


class Asked(Protocol):
    """What a layout says of compression."""

    @property
    def compression(self) -> str | None: ...
    @property
    def compression_axes(self) -> Literal["all", "replica"]: ...
    @property
    def compression_warmup(self) -> int: ...
    @property
    def error_feedback(self) -> bool | None: ...
    @property
    def weight_compression(self) -> str | None: ...
    @property
    def backward_shards(self) -> int | None: ...


@dataclass(frozen=True)
class SumCompression:
    """How a job's sums of gradients are compressed."""

    codec: Codec
    axes: Literal["all", "replica"]
    warmup: int
    feedback: bool
    """Whether what is left out is added to the next gradient."""

    @classmethod
    def of(cls, layout: Asked) -> SumCompression | None:
        """As the layout says; None: nothing is compressed, or nothing is chosen yet."""
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
    """How a job's sharded weights are gathered, where not plainly (comm/weight_gathers.py)."""

    codec: RowCodec | None
    """None: as they are."""
    backward_shards: int | None
    """Neighbours that keep a copy of all weights among them from forward to backward; None: there is no
    copy."""

    @classmethod
    def of(cls, layout: Asked) -> WeightGathers | None:
        """As the layout says; None: plainly."""
        if layout.weight_compression is None and layout.backward_shards is None:
            return None
        codec = None if layout.weight_compression is None else parse_row_codec(layout.weight_compression)
        return cls(codec, layout.backward_shards)


def is_compressed(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is: matrices are, unless they are small. Vectors weigh little and
    matter much."""
    return len(shape) >= 2 and prod(shape) >= SMALLEST
