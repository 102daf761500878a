"""Codecs of blocks: each block of 512 numbers has a scale, and each number a few bits.

A row is cut into blocks, and whole blocks are sent: the packed numbers lie first, block by block, and the
scales after them, 4 bytes each. Blocks do not cross rows. On a CPU a few blocks are worked on at a time, so
that they stay in its cache; on a GPU each direction is one kernel (codecs/kernels.py).

`Multiples` and `Floats` are the two ways to write a scaled number; a codec's own file says which bits it has
and what its scale is.
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
"""Numbers that are worked on at a time on a CPU."""


@dataclass(frozen=True)
class BlockCodec(RowCodec):
    """A codec of blocks with a scale each."""

    kind: ClassVar[Literal["nearest", "drawn", "sign", "float8", "float16"]]
    """How a scaled number becomes a code, for the kernel."""
    clip: ClassVar[float] = 0.0
    """Deviations of its block beyond which a number is cut off; 0: none is."""

    @property
    @abstractmethod
    def bits(self) -> int:
        """Bits of a number on the wire."""

    @property
    @abstractmethod
    def largest_code(self) -> float:
        """What the block's scale is written as."""

    @abstractmethod
    def to_codes(self, scaled: Tensor, draws: Tensor | None) -> Tensor:
        """Return codes of numbers divided by their scale, which may be overwritten. `draws` has a random
        number from [0, 1) for each where the kind is "drawn"."""

    @abstractmethod
    def to_numbers(self, codes: Tensor) -> Tensor:
        """Return the numbers that codes stand for, in units of their scale."""

    def scale(self, magnitudes: Tensor, sizes: Tensor) -> Tensor:
        """Return the scale (…, blocks, 1) of magnitudes (…, blocks, BLOCK), which are padded with zeros;
        `sizes` has how many numbers each block holds."""
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
        own = blocks[:, part]
        scales = self.scale(own.abs(), _sizes(own, numbers, part.start)).float()
        draws = _draws(own, part.start, blocks.shape[1], seed) if self.kind == "drawn" else None
        # A block of zeros has scale 0: its numbers are 0 / 1. Codes of a block that overflows do not matter.
        codes = self.to_codes(own / torch.where(scales > 0, scales, 1.0), draws)
        if subtract:
            sent = self.to_numbers(codes).to(own.dtype)
            own.addcmul_(sent, scales.to(own.dtype), value=-1).nan_to_num_(0.0, 0.0, 0.0)
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
            own = rows[:, part.start * BLOCK : part.stop * BLOCK]
            sent = values.flatten(1)[:, : own.shape[1]]
            own.add_(sent) if add else own.copy_(sent)
        return None

    def _split(self, wire: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Return views of the packed numbers (rows, blocks, bytes) and of the scales (rows, blocks)."""
        packed = wire[:, : blocks * self.block_bytes].view(len(wire), blocks, -1)
        return packed, wire[:, blocks * self.block_bytes :].view(torch.float32)


@dataclass(frozen=True)
class Multiples(BlockCodec):
    """Each number as a whole multiple of a step, a fraction of its block's scale: from -m to m, stored as 0
    to 2m."""

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
    """Each number in a short floating-point dtype, scaled so that the block's largest is the dtype's."""

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
    """Yield slices of the blocks of each row, so many at a time that they stay in a CPU's cache."""
    size = max(1, CACHED_NUMBERS // block // rows)
    return (slice(start, min(start + size, blocks)) for start in range(0, blocks, size))


def _blocks(rows: Tensor) -> Tensor:
    """Return (rows, n) as (rows, blocks, BLOCK), padded with zeros; a view where nothing is missing."""
    missing = -rows.shape[1] % BLOCK
    padded = torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()
    return padded.view(len(rows), -1, BLOCK)


def _sizes(blocks: Tensor, numbers: int, first: int) -> Tensor:
    """Return how many numbers of a row each block holds: (blocks, 1)."""
    starts = (torch.arange(blocks.shape[1], device=blocks.device) + first) * BLOCK
    return (numbers - starts).clamp(max=BLOCK).unsqueeze(-1)


def _draws(blocks: Tensor, first: int, of: int, seed: int) -> Tensor:
    """Return a random number from [0, 1) for each number of `blocks` (rows, some, BLOCK), which begin at
    block `first` of `of`."""
    rows, some = (torch.arange(size, device=blocks.device, dtype=torch.int32) for size in blocks.shape[:2])
    within = torch.arange(BLOCK, device=blocks.device, dtype=torch.int32)
    return chance((rows[:, None] * of + first + some)[..., None] * BLOCK + within, seed)
