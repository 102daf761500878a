"""What a codec is: it turns rows of numbers into bytes and back, and declares what that costs.

The number of bytes is a formula of how many numbers there are, never of their values. So every message of a
step has a known size: devices exchange equal parts, and the ledger can be held to the plan to the byte.

Encoding has no state: it depends on the numbers and a seed. A row with a number that is not finite comes back
with at least one that is not, so every device sees an overflow, as it does without compression. Rows of zeros
come back as zeros. Numbers are float32, or float64 in a proof.

A codec is a frozen value, for example `TopK(0.01)`; jobs write it as `topk(0.01)`. Each codec has a file in
this folder; `registry.py` lists them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

BLOCK = 512
"""Numbers that share a scale in codecs of blocks."""
SPARSE_BLOCK = 1024
"""Numbers of which top-k sends the largest."""
MEASURED_NUMBERS = 1024
"""Numbers in a row when bytes per number are asked for: whole blocks of every codec."""


@dataclass(frozen=True)
class Argument:
    """The number that a codec is called with."""

    least: float
    most: float
    whole: bool
    example: str

    def accepts(self, number: float) -> bool:
        """Whether a codec may be called with this number."""
        return self.least <= number <= self.most and number > 0 and not (self.whole and number % 1)

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.least:g} to {self.most:g}"
        return "a share above 0 and at most 1"


@dataclass(frozen=True)
class Codec(ABC):
    """What every codec declares: its name, its bytes, and its cost."""

    number: float = 0.0
    """What it is called with; 0 for a codec that takes no number."""

    name: ClassVar[str]
    """What a job calls it."""
    sends: ClassVar[str]
    """What it sends of n numbers, in a few words."""
    argument: ClassVar[Argument | None] = None
    for_weights: ClassVar[bool] = False
    """Whether sharded weights may be gathered with it: the same weight must always give the same bytes."""
    whole_matrices: ClassVar[bool] = False
    """Whether it needs matrices as a whole, so that a slice of one cannot be encoded."""
    host_nanoseconds: ClassVar[tuple[float, float]]
    """Time of one CPU thread to encode one number and to decode it, as `python benchmarks/codec_speed.py
    --feedback` measures it with two codecs at work at once."""

    @property
    @abstractmethod
    def gpu_share(self) -> float:
        """Share of a copy's bandwidth that the codec reaches on a GPU, for the bytes it has to touch."""

    @property
    @abstractmethod
    def memory_traffic(self) -> tuple[float, float]:
        """Bytes of memory that have to be touched to encode one number, and to decode it."""

    @property
    def shrinks_errors(self) -> bool:
        """Whether the error is smaller than what is encoded. Error feedback requires it: else what is left
        out would grow without end."""
        return True

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}({self.number:g})"

    @classmethod
    def usage(cls) -> str:
        """Return how a job writes this codec."""
        return cls.name if cls.argument is None else cls.argument.example


@dataclass(frozen=True)
class RowCodec(Codec):
    """A codec of rows: (rows, n) numbers become (rows, bytes). One call encodes what goes to every peer."""

    same_draws_everywhere: ClassVar[bool] = False
    """Whether all devices must draw the same random numbers, because places are drawn and not sent."""

    @abstractmethod
    def wire_bytes(self, numbers: int) -> int:
        """Return the bytes of one row of n numbers."""

    @property
    def memory_traffic(self) -> tuple[float, float]:
        """A number is read and its code written, or the reverse."""
        each = 4.0 + self.wire_bytes(MEASURED_NUMBERS) / MEASURED_NUMBERS
        return each, each

    def for_sums(self) -> RowCodec:
        """Return the codec for what devices have added up, when the sums are sent to all of them."""
        return self

    def encode(self, rows: Tensor, seed: int, subtract: bool = False) -> Tensor:
        """Return (rows, n) numbers as (rows, wire bytes) uint8. Random numbers come from the seed. With
        `subtract`, what was sent is subtracted from `rows`, and what is not finite becomes zero there."""
        if not rows.numel():
            return rows.new_empty(len(rows), self.wire_bytes(rows.shape[1]), dtype=torch.uint8)
        return self.encode_rows(rows, seed, subtract)

    def decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool = False) -> None:
        """Write what `encode` sent with the same seed into `rows` (rows, n), or add it to them."""
        if wire.numel():
            self.decode_rows(wire, rows, seed, add)

    @abstractmethod
    def encode_rows(self, rows: Tensor, seed: int, subtract: bool) -> Tensor:
        """Encode rows that are not empty."""

    @abstractmethod
    def decode_rows(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        """Decode bytes that are not empty."""


@dataclass(frozen=True)
class MatrixCodec(Codec):
    """A codec of whole matrices: it sends two thin factors of each (comm/low_rank.py sums them)."""

    whole_matrices: ClassVar[bool] = True

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of columns of each factor."""


def runs_kernels(rows: Tensor) -> bool:
    """Return whether the kernels for GPUs (codecs/kernels.py) encode and decode these rows."""
    return rows.is_cuda and rows.dtype == torch.float32
