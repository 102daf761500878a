"""Codecs: rows of numbers to rows of bytes and back. config/compression.py says what each sends and how many
bytes that is.

Functions of (numbers, seed): no state, no peer. All take rows (rows, n) and give (rows, bytes), so that one
call encodes what goes to every peer. Blocks do not cross rows. Numbers are float32, or float64 in a proof.

A row with a number that is not finite comes back with some that are not, so an overflow is seen on every
device, as it is without compression. Numbers that are all zero come back as zeros.

Of a row in blocks, what is packed lies first, block by block, and their scales after it, 4 bytes each. On a
CPU blocks are worked on in parts that stay in its cache; on a GPU each direction is one kernel
(comm/kernels.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.comm.packing import pack, unpack
from shardwise.config.compression import BLOCK, CLIP, SPARSE_BLOCK, Compression

PART = 1 << 18
"""Numbers that are worked on at a time on a CPU."""


class Codec(ABC):
    """Rows of numbers to bytes and back."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression

    def encode(self, rows: Tensor, seed: int, take: bool = False) -> Tensor:
        """(rows, n) numbers as (rows, wire bytes) uint8; what is drawn at random comes from the seed. To
        `take` leaves in the rows what was left out, and zero where it is not finite."""
        if not rows.numel():
            return rows.new_empty(len(rows), self.compression.wire_bytes(rows.shape[1]), dtype=torch.uint8)
        return self._encode(rows, seed, take)

    def decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool = False) -> None:
        """Write into rows (rows, n), or add to them, what `encode` with the same seed has kept."""
        if wire.numel():
            self._decode(wire, rows, seed, add)

    @abstractmethod
    def _encode(self, rows: Tensor, seed: int, take: bool) -> Tensor: ...

    @abstractmethod
    def _decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None: ...


def codec(compression: Compression) -> Codec:
    """The codec of this name; PowerSGD, which works on matrices, is comm/powersgd.py."""
    match compression.name:
        case "bfloat16":
            return Rounded(compression)
        case "topk":
            return Largest(compression)
        case "randomk":
            return Drawn(compression)
    return Blockwise(compression, _LEVELS[compression.name](compression))


class Rounded(Codec):
    """Each number in bfloat16, which has the range of float32: no scale."""

    def _encode(self, rows: Tensor, seed: int, take: bool) -> Tensor:
        rounded = rows.to(torch.bfloat16)
        if take:
            rows.sub_(rounded).nan_to_num_(0.0, 0.0, 0.0)
        return rounded.view(torch.uint8)

    def _decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        rounded = wire.view(torch.bfloat16)
        rows.add_(rounded) if add else rows.copy_(rounded)


# -- blocks with a scale -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Levels:
    """How a block is written: divided by its scale, each number becomes a whole number of a few bits."""

    scale: Callable[[Tensor, Tensor], Tensor]
    """Of blocks (…, blocks, BLOCK) of magnitudes, padded with zeros, and how many numbers each has: (…,
    blocks, 1)."""
    to_levels: Callable[[Tensor, Tensor | None], Tensor]
    """Scaled numbers, which it may use up, and as many draws from [0, 1) where it draws: uint8, or int16 for
    16 bits."""
    to_numbers: Callable[[Tensor], Tensor]
    pack: Callable[[Tensor], Tensor]
    """(…, BLOCK) levels as (…, bytes)."""
    unpack: Callable[[Tensor], Tensor]
    draws: bool = False


class Blockwise(Codec):
    """A scale for each block, and a few bits for each number."""

    def __init__(self, compression: Compression, levels: Levels) -> None:
        super().__init__(compression)
        self.levels = levels

    def _encode(self, rows: Tensor, seed: int, take: bool) -> Tensor:
        if _in_a_kernel(rows):
            from shardwise.comm import kernels

            return kernels.encode(self.compression, rows, seed, take)
        numbers, blocks = rows.shape[1], _blocks(rows)
        wire = torch.empty(
            len(rows), self.compression.wire_bytes(numbers), dtype=torch.uint8, device=rows.device
        )
        packed, scales = self._split(wire, blocks.shape[1])
        for part in _parts(len(rows), blocks.shape[1]):
            packed[:, part], scales[:, part] = self._encode_part(blocks, part, numbers, seed, take)
        if take and blocks.data_ptr() != rows.data_ptr():
            rows.copy_(blocks.flatten(1)[:, :numbers])
        return wire

    def _encode_part(
        self, blocks: Tensor, part: slice, numbers: int, seed: int, take: bool
    ) -> tuple[Tensor, Tensor]:
        """Some of the blocks (rows, blocks, BLOCK) packed, and their scales."""
        levels, own = self.levels, blocks[:, part]
        scales = levels.scale(own.abs(), _sizes(own, numbers, part.start)).float()
        draws = _draws(own, part.start, blocks.shape[1], seed) if levels.draws else None
        # A block of zeros has scale 0: its numbers are 0 / 1. Of one that overflows the levels do not matter.
        codes = levels.to_levels(own / torch.where(scales > 0, scales, 1.0), draws)
        if take:
            kept = levels.to_numbers(codes).to(own.dtype)
            own.addcmul_(kept, scales.to(own.dtype), value=-1).nan_to_num_(0.0, 0.0, 0.0)
        return levels.pack(codes), scales.squeeze(-1)

    def _decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        if _in_a_kernel(rows):
            from shardwise.comm import kernels

            return kernels.decode(self.compression, wire, rows, add)
        count = -(-rows.shape[1] // BLOCK)
        packed, scales = self._split(wire, count)
        scales = torch.where(scales.isfinite(), scales, torch.nan).unsqueeze(-1)  # (rows, blocks, 1)
        for part in _parts(len(rows), count):
            values = (
                self.levels.to_numbers(self.levels.unpack(packed[:, part]))
                .to(rows.dtype)
                .mul_(scales[:, part])
            )
            own = rows[:, part.start * BLOCK : part.stop * BLOCK]
            kept = values.flatten(1)[:, : own.shape[1]]
            own.add_(kept) if add else own.copy_(kept)
        return None

    def _split(self, wire: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Of rows of bytes, what is packed (rows, blocks, bytes), and the scales (rows, blocks): views."""
        packed = wire[:, : blocks * self.compression.block_bytes].view(len(wire), blocks, -1)
        return packed, wire[:, blocks * self.compression.block_bytes :].view(torch.float32)


def _in_a_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype == torch.float32


def _parts(rows: int, blocks: int, block: int = BLOCK) -> Iterator[slice]:
    """Of so many blocks in each of so many rows, a few at a time that stay in a cache."""
    size = max(1, PART // block // rows)
    return (slice(start, min(start + size, blocks)) for start in range(0, blocks, size))


def _blocks(rows: Tensor) -> Tensor:
    """(rows, n) as (rows, blocks, BLOCK), padded with zeros: a view where nothing is missing."""
    missing = -rows.shape[1] % BLOCK
    return (torch.nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous()).view(
        len(rows), -1, BLOCK
    )


def _sizes(blocks: Tensor, numbers: int, first: int) -> Tensor:
    """How many of a row's numbers are in each block: (blocks, 1)."""
    starts = (torch.arange(blocks.shape[1], device=blocks.device) + first) * BLOCK
    return (numbers - starts).clamp(max=BLOCK).unsqueeze(-1)


def _draws(blocks: Tensor, first: int, of: int, seed: int) -> Tensor:
    """A number from [0, 1) for each of blocks (rows, some, BLOCK), from this one on, of so many."""
    rows, some = (torch.arange(size, device=blocks.device, dtype=torch.int32) for size in blocks.shape[:2])
    within = torch.arange(BLOCK, device=blocks.device, dtype=torch.int32)
    return _chance((rows[:, None] * of + first + some)[..., None] * BLOCK + within, seed)


def _chance(places: Tensor, seed: int) -> Tensor:
    """A number from [0, 1) for each place: a hash of the place and the seed, the same on any device, and
    nothing that a kernel would have to read. It is MurmurHash3's last step, in whole numbers of 32 bits that
    wrap around."""
    bits = places * -1640531535 + seed % 2**31
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, 1)):
        bits ^= bits >> shift & (1 << 32 - shift) - 1
        bits *= factor
    return (bits & (1 << 24) - 1) * 2.0**-24


def _largest(magnitudes: Tensor, sizes: Tensor) -> Tensor:
    return magnitudes.amax(-1, keepdim=True)


def _clipped(magnitudes: Tensor, sizes: Tensor) -> Tensor:
    """The largest, or TernGrad's 2.5 deviations if that is less: else one large number makes noise of all
    others."""
    largest = _largest(magnitudes, sizes)
    relative = (
        magnitudes / torch.where(largest > 0, largest, 1.0)
    ).float()  # the square of a small number would be zero
    deviation = (relative.square().sum(-1, keepdim=True) / sizes).sqrt()
    return largest * (CLIP * deviation).clamp(max=1.0)


def _mean(magnitudes: Tensor, sizes: Tensor) -> Tensor:
    return magnitudes.sum(-1, keepdim=True) / sizes


def _multiples(most: int) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Callable[[Tensor], Tensor]]:
    """Of a block's largest: whole numbers from -most to most, by nearest or by chance, kept as 0 to 2
    most."""

    def to_levels(scaled: Tensor, draws: Tensor | None) -> Tensor:
        multiples = scaled.mul_(most)
        rounded = multiples.round_() if draws is None else multiples.add_(draws).floor_()
        return rounded.clamp_(-most, most).add_(most).to(torch.uint8)

    def to_numbers(codes: Tensor) -> Tensor:
        return codes.float().sub_(most).mul_(1 / most)

    return to_levels, to_numbers


def _integers(compression: Compression) -> Levels:
    most = 2 ** (compression.bits - 1) - 1
    return Levels(_largest, *_multiples(most), *_packed(compression.bits), draws=compression.name == "qsgd")


def _ternary(compression: Compression) -> Levels:
    return Levels(_clipped, *_multiples(1), *_packed(compression.bits), draws=True)


def _signs(compression: Compression) -> Levels:
    def to_numbers(codes: Tensor) -> Tensor:
        return codes.float().mul_(2).sub_(1)

    return Levels(_mean, lambda scaled, _: (scaled >= 0).to(torch.uint8), to_numbers, *_packed(1))


def _floats(compression: Compression) -> Levels:
    """Scaled so that the block's largest is the dtype's largest."""
    dtype = torch.float16 if compression.name == "float16" else torch.float8_e4m3fn
    most = torch.finfo(dtype).max

    def to_levels(scaled: Tensor, draws: Tensor | None) -> Tensor:
        return scaled.float().mul_(most).clamp_(-most, most).to(dtype)

    def to_numbers(codes: Tensor) -> Tensor:
        return codes.float().mul_(1 / most)

    return Levels(
        _largest,
        to_levels,
        to_numbers,
        lambda codes: codes.view(torch.uint8),
        lambda packed: packed.view(dtype),
    )


def _packed(bits: int) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    if bits == 8:
        return lambda codes: codes, lambda packed: packed
    return lambda codes: pack(codes, bits), lambda packed: unpack(packed, bits)


_LEVELS: dict[str, Callable[[Compression], Levels]] = {
    "float16": _floats,
    "float8": _floats,
    "int8": _integers,
    "int4": _integers,
    "qsgd": _integers,
    "terngrad": _ternary,
    "sign": _signs,
}


# -- few of the numbers --------------------------------------------------------------------------------------


class Largest(Codec):
    """Of each block the share with the largest magnitudes: their values, and after them their places in the
    block.

    Were they the largest of all numbers, weights with large gradients would be told of every change, and
    others of none: but how large a gradient is says little of how far AdamW moves its weight."""

    def _encode(self, rows: Tensor, seed: int, take: bool) -> Tensor:
        if _in_a_kernel(rows):
            from shardwise.comm import kernels

            wire = kernels.send_largest(self.compression, rows)
            if take:
                kernels.put_largest(wire, rows, -1.0)
                rows.nan_to_num_(0.0, 0.0, 0.0)
            return wire
        wire = torch.empty(
            len(rows), self.compression.wire_bytes(rows.shape[1]), dtype=torch.uint8, device=rows.device
        )
        values, places = self._split(wire)
        blocks = torch.nn.functional.pad(rows, (0, -rows.shape[1] % SPARSE_BLOCK)).view(
            len(rows), -1, SPARSE_BLOCK
        )
        for part in _parts(len(rows), blocks.shape[1], SPARSE_BLOCK):
            magnitudes = blocks[:, part].abs().nan_to_num_(torch.inf, torch.inf)
            chosen = magnitudes.topk(places.shape[2], sorted=False).indices.sort().values
            places[:, part] = chosen.to(torch.int16)
            values[:, part] = blocks[:, part].gather(2, chosen).to(torch.bfloat16)
        if take:
            self._put(values, places, rows, -1)
            if not values.isfinite().all():
                rows.nan_to_num_(0.0, 0.0, 0.0)
        return wire

    def _decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        if not add:
            rows.zero_()
        if _in_a_kernel(rows):
            from shardwise.comm import kernels

            return kernels.put_largest(wire, rows, 1.0)
        return self._put(*self._split(wire), rows, 1)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows of bytes, values and places (rows, blocks, kept): views."""
        values, places = wire.view(torch.int16).chunk(2, dim=1)
        shape = len(wire), -1, self.compression.kept(SPARSE_BLOCK)
        return values.view(torch.bfloat16).view(shape), places.view(shape)

    def _put(self, values: Tensor, places: Tensor, rows: Tensor, sign: int) -> None:
        """Add values in their places, or take them away. What fills up the last block is zero, and belongs
        nowhere."""
        starts = torch.arange(places.shape[1], device=rows.device).unsqueeze(1) * SPARSE_BLOCK
        for row, value, place in zip(rows, values, places, strict=True):
            where = (place + starts).flatten()
            row.index_add_(
                0, torch.where(where < len(row), where, 0), value.flatten().to(row.dtype), alpha=sign
            )


class Drawn(Codec):
    """A share drawn at random: one number out of each of k equal stretches of the row. All devices draw the
    same places."""

    def _encode(self, rows: Tensor, seed: int, take: bool) -> Tensor:
        total = rows.sum(1)
        if _in_a_kernel(rows):
            from shardwise.comm import kernels

            kept = kernels.send_drawn(rows, self.compression.kept(rows.shape[1]), seed, take)
        else:
            places = self._places(rows, seed)
            kept = rows[:, places].float()
            if take:
                rows[:, places] -= kept.to(rows.dtype)
        if take and not total.isfinite().all():
            rows.nan_to_num_(0.0, 0.0, 0.0)
        kept[:, 0] += total * 0  # an overflow is to be seen, wherever it is
        return kept.view(torch.uint8)

    def _decode(self, wire: Tensor, rows: Tensor, seed: int, add: bool) -> None:
        if _in_a_kernel(rows):
            from shardwise.comm import kernels

            if not add:
                rows.zero_()
            return kernels.put_drawn(wire.view(torch.float32), rows, seed)
        kept, places = wire.view(torch.float32).to(rows.dtype), self._places(rows, seed)
        if not add:
            rows.zero_()
        rows[:, places] += kept
        return None

    def _places(self, rows: Tensor, seed: int) -> Tensor:
        numbers = rows.shape[1]
        kept = self.compression.kept(numbers)
        ends = torch.arange(kept + 1, device=rows.device) * numbers // kept
        chance = _chance(torch.arange(kept, device=rows.device, dtype=torch.int32), seed)
        return ends[:-1] + (chance.double() * (ends[1:] - ends[:-1])).long()
