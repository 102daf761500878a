"""Which codec compresses gradients on the wire, and how many bytes it makes of n numbers.

A codec is written as it is called: `int8`, `topk(0.01)`, `qsgd(4)`. Its bytes are a formula of n alone, never
of the values, so every message of a step has a known size: devices exchange equal parts, and the ledger can
be held to the plan to the byte.

| codec          | what is sent of n numbers                                         | bytes                |
| -------------- | ----------------------------------------------------------------- | -------------------- |
| `bf16`         | each number, rounded to bfloat16                                  | 2 n                  |
| `fp16`, `fp8`  | each number as a float of 16 or 8 bits (e4m3), scaled so that the | 2 n, n; and scales   |
|                | largest magnitude of its block is the largest of the dtype        |                      |
| `int8`, `int4` | each number as a multiple of a step, which is 1/127 or 1/7 of its | n, n / 2; and scales |
|                | block's largest magnitude                                         |                      |
| `qsgd(b)`      | the same in b = 2 to 8 bits, rounded up or down at random so that | n b / 8; and scales  |
|                | the expected value is exact (Alistarh et al. 2017)                |                      |
| `terngrad`     | -1, 0 or 1, at random, times its block's largest magnitude or 2.5 | n / 4; and scales    |
|                | standard deviations, whichever is less (Wen et al. 2017)          |                      |
| `sign`         | each number's sign, and the mean magnitude of its block           | n / 8; and scales    |
|                | (Karimireddy et al. 2019)                                         |                      |
| `topk(r)`      | the share r of largest magnitude in every 1,024 numbers: bfloat16 | 4 k                  |
|                | values with 16-bit indices; the share is 3 r where sums are sent  |                      |
| `randomk(r)`   | a random share r, drawn anew in each step and the same on all     | 4 k                  |
|                | devices, so no indices are sent                                   |                      |
| `powersgd(r)`  | two factors of rank r of each matrix (Vogels et al. 2019)         | 4 r (rows + columns) |

Here k is how many numbers are sent. A block has 512 numbers, and whole blocks are sent. A scale takes 4 bytes
per block. QSGD's scale is the block's largest magnitude, as in the paper's experiments, not its norm: with
few bits the error would otherwise exceed the gradient. What a codec leaves out is added to the next gradient
(comm/compressed.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal, Protocol

BLOCK = 512
"""Numbers that share a scale."""
SPARSE_BLOCK = 1024
"""Numbers of which the largest are sent."""
SCALE_BYTES = 4
CLIP = 2.5
"""Deviations of its block beyond which TernGrad cuts a number off."""
BITS = {"fp16": 16, "fp8": 8, "int8": 8, "int4": 4, "terngrad": 2, "sign": 1}
NEEDS_NUMBER = {"topk": (0.0, 1.0), "randomk": (0.0, 1.0), "qsgd": (2, 8), "powersgd": (1, 1024)}
"""Codecs that are called with a number, and its range."""
CODECS = ("bf16", *BITS, *NEEDS_NUMBER)
WEIGHT_CODECS = ("fp8", "int8", "int4")
"""Codecs that weights may be gathered in: of blocks, by nearest."""
AUTO = "auto"
"""In place of a codec: the planner may choose one, or none."""
SETTINGS = ("compression", "compression_axes", "compression_warmup", "error_feedback")
"""Of a layout, those that say how gradients are compressed."""
SMALLEST = 4096
"""Numbers of a matrix from which it is compressed."""


@dataclass(frozen=True)
class Compression:
    """A codec and its number."""

    name: str
    number: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Compression:
        """From how it is written in a job; a ValueError says what is wrong."""
        found = re.fullmatch(r"(\w+)(?:\(([^()]*)\))?", text.strip())
        if found is None or found[1] not in CODECS:
            raise ValueError(f"no codec {text!r}; one of {', '.join(_how(name) for name in CODECS)}")
        name, given = found[1], found[2]
        if name not in NEEDS_NUMBER:
            if given is not None:
                raise ValueError(f"{name} takes no number: write {name}")
            return cls(name)
        low, high = NEEDS_NUMBER[name]
        try:
            number = float(given) if given is not None else float("nan")
        except ValueError:
            number = float("nan")
        if not low <= number <= high or number == 0.0 or (isinstance(low, int) and number % 1):
            what = (
                f"a whole number from {low} to {high}"
                if isinstance(low, int)
                else "a share above 0 and at most 1"
            )
            raise ValueError(f"{name} takes {what}: write {_how(name)}")
        return cls(name, number)

    def __str__(self) -> str:
        return f"{self.name}({self.number:g})" if self.name in NEEDS_NUMBER else self.name

    @property
    def shrinks(self) -> bool:
        """Whether its error is smaller than what it encodes, which feeding the error back requires."""
        return self.name != "terngrad" and (self.name != "qsgd" or self.number > 2)

    @property
    def bits(self) -> int:
        """Of a number on the wire, in codecs of blocks."""
        return int(self.number) if self.name == "qsgd" else BITS[self.name]

    @property
    def block_bytes(self) -> int:
        """Of a block on the wire, without its scale: all of it, also where it is not full."""
        return BLOCK * self.bits // 8

    @property
    def of_sums(self) -> Compression:
        """How what devices have added up is sent to all: of the largest, which are others on each device,
        three times as many."""
        return Compression(self.name, min(1.0, 3 * self.number)) if self.name == "topk" else self

    def kept(self, numbers: int) -> int:
        """Of so many numbers, how many are sent by codecs that send a share."""
        if self.name == "topk":
            return ceil(self.number * SPARSE_BLOCK) * -(-numbers // SPARSE_BLOCK)
        return min(numbers, max(1, ceil(self.number * numbers))) if numbers else 0

    def wire_bytes(self, numbers: int) -> int:
        """Bytes on the wire of one row of so many numbers."""
        match self.name:
            case "bf16":
                return 2 * numbers
            case "topk" | "randomk":
                return 4 * self.kept(numbers)
            case "powersgd":
                raise AssertionError("a matrix has factors, a row of numbers has none")
        return -(-numbers // BLOCK) * (self.block_bytes + SCALE_BYTES)


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

    codec: Compression
    axes: Literal["all", "replica"]
    warmup: int
    feedback: bool
    """Whether what is left out is added to the next gradient."""

    @classmethod
    def of(cls, layout: Asked) -> SumCompression | None:
        """As the layout says; None: nothing is compressed, or nothing is chosen yet."""
        if layout.compression is None or layout.compression == AUTO:
            return None
        codec = Compression.parse(layout.compression)
        feedback = codec.shrinks if layout.error_feedback is None else layout.error_feedback
        return cls(codec, layout.compression_axes, layout.compression_warmup, feedback)

    def compresses(self, axis: str) -> bool:
        """Whether sums along this axis are compressed."""
        return self.axes == "all" or axis == "replica"


@dataclass(frozen=True)
class WeightGathers:
    """How a job's sharded weights are gathered, where not plainly (comm/gathers.py)."""

    codec: Compression | None
    """None: as they are."""
    backward_shards: int | None
    """Neighbours that keep a copy of all weights among them from forward to backward; None: there is no
    copy."""

    @classmethod
    def of(cls, layout: Asked) -> WeightGathers | None:
        """As the layout says; None: plainly."""
        if layout.weight_compression is None and layout.backward_shards is None:
            return None
        codec = None if layout.weight_compression is None else Compression.parse(layout.weight_compression)
        return cls(codec, layout.backward_shards)


def is_compressed(shape: Sequence[int]) -> bool:
    """Whether a parameter of this shape is: matrices are, unless they are small. Vectors weigh little and
    matter much."""
    return len(shape) >= 2 and prod(shape) >= SMALLEST


def _how(name: str) -> str:
    examples = {
        "topk": "topk(0.01)",
        "randomk": "randomk(0.01)",
        "qsgd": "qsgd(4)",
        "powersgd": "powersgd(4)",
    }
    return examples.get(name, name)
