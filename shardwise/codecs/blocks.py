"""Codecs of blocks: each block of 512 numbers has a scale, and each number a few bits.

A row is cut into blocks, and whole blocks are sent: first the packed numbers, block by block, then the
scales, 4 bytes each. Blocks do not cross rows. On a CPU a few blocks are encoded at a time, so that they stay
in its cache; on a GPU one kernel encodes and one decodes (codecs/kernels.py).

`Multiples` and `Floats` are the two ways to write a scaled number. The file of a codec gives its number of
bits and its scale.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from shardwise.codecs.base import BLOCK, RowCodec, runs_kernels
from shardwise.codecs.chance import chance
from shardwise.codecs.packing import pack, unpack
from shardwise.lazy import LazyModule

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardwise.codecs import kernels
else:
    torch, kernels = LazyModule("torch"), LazyModule("shardwise.codecs.kernels")

SCALE_BYTES = 4
CACHED_NUMBERS = 1 << 18
"""Numbers that a CPU encodes or decodes at a time."""


@dataclass(frozen=True)
class BlockCodec(RowCodec):
    """A codec of blocks with a scale each."""

    kind: ClassVar[Literal["nearest", "drawn", "sign", "float8", "float16"]]
    """How a scaled number becomes a code, for the kernel."""
    clip: ClassVar[float] = 0.0
    """Standard deviations of its block beyond which a number is clipped; 0: none is."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Number of bits of a code."""

    @property
    @abstractmethod
    def largest_code(self) -> float:
        """The magnitude that a block's scale is mapped to."""

    @abstractmethod
    def to_codes(self, scaled: Tensor, draws: Tensor | None) -> Tensor:
        """Return the codes of numbers that were divided by their scale; these may be overwritten. If the kind
        is "drawn", `draws` has a random number from [0, 1) for each."""

    @abstractmethod
    def to_numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers that codes stand for, in units of their scale."""

    def scale(self, magnitudes: Tensor, sizes: Tensor) -> Tensor:
        """Return the scale (…, blocks, 1) of magnitudes (…, blocks, BLOCK), which are padded with zeros;
        `sizes` are the numbers of magnitudes without the padding, (blocks, 1)."""
        return magnitudes.amax(-1, keepdim=True)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block without its scale, whether it is full or not."""
        return BLOCK * self.bits // 8

    def wire_bytes(self, numbers: int) -> int:
        """Return the bytes of one row of n numbers: whole blocks and their scales."""
        return -(-numbers // BLOCK) * (self.block_bytes + SCALE_BYTES)

    def pack(self, codes: Tensor) -> Tensor:
        """Return (…, BLOCK) codes as (…, bytes)."""
        return codes if self.bits == 8 else pack(codes, self.bits)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the codes that were packed."""
        return packed if self.bits == 8 else unpack(packed, self.bits)

    def encode_rows(self, rows: Tensor, seed: int, subtract: bool) -> Tensor:
        """Encode each row block by block."""
        if runs_kernels(rows):
            return kernels.encode(self, rows, seed, subtract)
        numbers, blocks = rows.shape[1], _blocks(rows)
        wire = torch.empty(len(rows), self.wire_bytes(numbers), dtype=torch.uint8, device=rows.device)
        packed, scales = self._split(wire, blocks.shape[1])
        for part in cached_parts(len(rows), blocks.shape[1], BLOCK):
            packed[:, part], scales[:, part] = self._encode_part(blocks, part, numbers, seed, subtract)
        if subtract and blocks.data_ptr() != rows.data_ptr():
            rows.copy_(blocks.flatten(1)[:, :numbers])
        return wire

    def _encode_part(
        self, blocks: Tensor, part: slice, numbers: int, seed: int, subtract: bool
    ) -> tuple[Tensor, Tensor]:
        """Return some of the blocks (rows, blocks, BLOCK) packed, and their scales."""
        values = blocks[:, part]
        scales = self.scale(values.abs(), _sizes(values, numbers, part.start)).float()
        draws = _draws(values, part.start, blocks.shape[1], seed) if self.kind == "drawn" else None
        # A block of zeros has scale 0, and is divided by 1. Codes of a block that overflowed are not used.
        codes = self.to_codes(values / torch.where(scales > 0, scales, 1.0), draws)
        if subtract:
            sent = self.to_numbers(codes).to(values.dtype)
            values.addcmul_(sent, scales.to(values.dtype), value=-1).nan_to_num_(0.0, 0.0, 0.0)
        return self.pack(codes), scales.squeeze(-1)

    def decode_rows(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        """Decode each row block by block."""
        if runs_kernels(rows):
            return kernels.decode(self, wire, rows, add)
        count = -(-rows.shape[1] // BLOCK)
        packed, scales = self._split(wire, count)
        scales = torch.where(scales.isfinite(), scales, torch.nan).unsqueeze(-1)  # (rows, blocks, 1)
        for part in cached_parts(len(rows), count, BLOCK):
            values = self.to_numbers(self.unpack(packed[:, part])).to(rows.dtype).mul_(scales[:, part])
            target = rows[:, part.start * BLOCK : part.stop * BLOCK]
            sent = values.flatten(1)[:, : target.shape[1]]
            target.add_(sent) if add else target.copy_(sent)
        return None

    def _split(self, wire: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return views of the packed numbers (rows, blocks, bytes) and of the scales (rows, blocks)."""
        packed = wire[:, : blocks * self.block_bytes].view(len(wire), blocks, -1)
        return packed, wire[:, blocks * self.block_bytes :].view(torch.float32)


@dataclass(frozen=True)
class Multiples(BlockCodec):
    """Each number as one of the multiples -m to m of a step, which is 1/m of its block's scale. They are
    stored as 0 to 2m."""

    @property
    def largest_code(self) -> float:
        """Largest multiple of the step that a code can hold."""
        return 2.0 ** (self.bits - 1) - 1

    def to_codes(self, scaled: Tensor, draws: Tensor | None) -> Tensor:
        """Round to the nearest multiple, or up or down at random."""
        most = int(self.largest_code)
        multiples = scaled.mul_(most)
        rounded = multiples.round_() if draws is None else multiples.add_(draws).floor_()
        return rounded.clamp_(-most, most).add_(most).to(torch.uint8)

    def to_numbers(self, codes: Tensor) -> Tensor:
        """Return multiples of the step."""
        most = int(self.largest_code)
        return codes.float().sub_(most).mul_(1 / most)


@dataclass(frozen=True)
class Floats(BlockCodec):
    """Each number in a short floating-point dtype. A block is scaled so that its largest number becomes the
    largest of the dtype."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype on the wire."""

    @property
    def largest_code(self) -> float:
        """The largest finite number of the dtype."""
        return torch.finfo(self.dtype).max

    def to_codes(self, scaled: Tensor, draws: Tensor | None) -> Tensor:
        """Return the scaled numbers rounded to the dtype."""
        most = self.largest_code
        return scaled.float().mul_(most).clamp_(-most, most).to(self.dtype)

    def to_numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers in units of the scale."""
        return codes.float().mul_(1 / self.largest_code)

    def pack(self, codes: Tensor) -> Tensor:
        """Return the bytes of the dtype."""
        return codes.view(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the numbers of these bytes."""
        return packed.view(self.dtype)


def cached_parts(rows: int, blocks: int, block: int) -> Iterator[slice]:
    """Return slices of the blocks of all rows, each small enough for a CPU's cache."""
    size = max(1, CACHED_NUMBERS // block // rows)
    return (slice(start, min(start + size, blocks)) for start in range(0, blocks, size))


def _blocks(rows: Tensor) -> Tensor:
    """Return (rows, n) as (rows, blocks, BLOCK), padded with zeros; a view if no padding is needed."""
    missing = -rows.shape[1] % BLOCK
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()
    return padded.view(len(rows), -1, BLOCK)


def _sizes(blocks: Tensor, numbers: int, first: int) -> Tensor:
    """Return how many numbers of a row each block holds: (blocks, 1)."""
    starts = (torch.arange(blocks.shape[1], device=blocks.device) + first) * BLOCK
    return (numbers - starts).clamp(max=BLOCK).unsqueeze(-1)


def _draws(blocks: Tensor, first: int, total: int, seed: int) -> Tensor:
    """Return a random number from [0, 1) for each number of these blocks (rows, blocks, BLOCK), which begin
    at block `first` of the `total` blocks of a row."""
    rows, index = (torch.arange(size, device=blocks.device, dtype=torch.int32) for size in blocks.shape[:2])
    within = torch.arange(BLOCK, device=blocks.device, dtype=torch.int32)
    return chance((rows[:, None] * total + first + index)[..., None] * BLOCK + within, seed)
