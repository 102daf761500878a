"""The interface of a codec: it turns rows of numbers into bytes and back, and declares what that costs.

The number of bytes depends on how many numbers there are, never on their values. So the size of every message
is known in advance: devices exchange equal parts, and the bytes in the ledger must equal those of the plan.

Encoding has no state: it depends on the numbers and a seed. If a row has a number that is not finite, the
decoded row has one too, so every device sees an overflow, as it does without compression. Rows of zeros are
decoded as zeros. Numbers are float32, or float64 in a proof.

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
"""Numbers of a block, which share a scale (codecs/blocks.py)."""
SPARSE_BLOCK = 1024
"""Numbers of a block of top-k, which sends the largest of each block."""
MEASURED_NUMBERS = 1024
"""Length of the row from which the bytes per number are computed: a multiple of every codec's block."""


@dataclass(frozen=True)
class Argument:
    """Which numbers a codec accepts in parentheses, as in `topk(0.01)`."""

    least: float
    most: float
    whole: bool
    example: str

    def accepts(self, number: float) -> bool:
        """Return whether the codec accepts this number."""
        return self.least <= number <= self.most and number > 0 and not (self.whole and number % 1)

    def __str__(self) -> str:
        if self.whole:
            return f"a whole number from {self.least:g} to {self.most:g}"
        return "a share above 0 and at most 1"


@dataclass(frozen=True)
class Codec(ABC):
    """What every codec declares: its name, its bytes, and its cost."""

    argument_value: float = 0.0
    """The number in parentheses, as in `topk(0.01)`; 0 for a codec that takes none."""

    name: ClassVar[str]
    """The codec's name in a job."""
    argument: ClassVar[Argument | None] = None
    for_weights: ClassVar[bool] = False
    """Whether sharded weights may be gathered with it: it must encode equal weights as equal bytes."""
    whole_matrices: ClassVar[bool] = False
    """Whether it encodes whole matrices only, not slices of them."""
    host_nanoseconds: ClassVar[tuple[float, float]]
    """Nanoseconds that one CPU thread needs to encode a number, and to decode one, measured by `python
    benchmarks/codec_speed.py --feedback` with two codecs running at once."""

    @property
    @abstractmethod
    def gpu_share(self) -> float:
        """Bandwidth of the codec on a GPU, as a share of the bandwidth of a copy. For the codecs of this
        folder it was measured on an H200 with 268 M numbers."""

    @property
    @abstractmethod
    def memory_traffic(self) -> tuple[float, float]:
        """Bytes of memory that are read and written to encode one number, and to decode it."""

    @property
    def shrinks_errors(self) -> bool:
        """Whether the error is smaller than what is encoded. Error feedback requires this: otherwise the
        residual would grow without bound."""
        return True

    def __str__(self) -> str:
        return self.name if self.argument is None else f"{self.name}({self.argument_value:g})"

    @classmethod
    def usage(cls) -> str:
        """Return how a job writes this codec."""
        return cls.name if cls.argument is None else cls.argument.example


@dataclass(frozen=True)
class RowCodec(Codec):
    """A codec of rows: it encodes (rows, n) numbers as (rows, bytes), in one call for all peers."""

    same_draws_everywhere: ClassVar[bool] = False
    """Whether all devices must use the same seed, because places are drawn at random and not sent."""

    @abstractmethod
    def wire_bytes(self, numbers: int) -> int:
        """Return the bytes of one row of n numbers."""

    @property
    def memory_traffic(self) -> tuple[float, float]:
        """Return the bytes of a float32 and its code: one is read, and the other written."""
        each = 4.0 + self.wire_bytes(MEASURED_NUMBERS) / MEASURED_NUMBERS
        return each, each

    def for_sums(self) -> RowCodec:
        """Return the codec for sending sums of decoded gradients to all devices."""
        return self

    def encode(self, rows: Tensor, seed: int, subtract: bool = False) -> Tensor:
        """Return (rows, n) numbers as (rows, wire bytes) uint8. The seed decides all random numbers. With
        `subtract`, the decoded numbers are subtracted from `rows`, and numbers there that are not finite
        become zero."""
        if not rows.numel():
            return rows.new_empty(len(rows), self.wire_bytes(rows.shape[1]), dtype=torch.uint8)
        return self.encode_rows(rows, seed, subtract)

    def decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool = False) -> None:
        """Decode into `rows` (rows, n), or add the decoded numbers to them. `seed` is that of `encode`."""
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
    """A codec of whole matrices, which sends two thin factors of each. comm/low_rank.py computes the factors,
    as PowerSGD does; the codec only gives their rank."""

    whole_matrices: ClassVar[bool] = True

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of columns of each factor."""


def runs_kernels(rows: Tensor) -> bool:
    """Return whether the kernels for GPUs (codecs/kernels.py) encode and decode these rows."""
    return rows.is_cuda and rows.dtype == torch.float32
