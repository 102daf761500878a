"""Kernels that encode and decode on a GPU in one pass over memory, where torch's operators need a dozen.

They give the same bytes as the operators, and tests compare the two. This module is imported only if there is
a GPU, because Triton comes with torch for GPUs.

A program handles PROGRAM blocks of a row in planes (codecs/packing.py): (blocks, 8, numbers of a plane).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from shardwise.codecs.base import BLOCK, SPARSE_BLOCK
from shardwise.codecs.packing import PLANES

NEAREST, DRAWN, SIGN, FLOAT8, FLOAT16 = (tl.constexpr(kind) for kind in range(5))
"""How a scaled number becomes a code."""
KINDS = {"nearest": 0, "drawn": 1, "sign": 2, "float8": 3, "float16": 4}
"""The same by the codec's `kind`."""
INFINITE = tl.constexpr(0x7F800000)
"""Bit pattern of infinity in float32."""
PROGRAM = 8
CHUNK = 4096
"""Numbers that one program of random-k or `put_largest` handles."""


@triton.jit
def _chance(place, seed):
    """Return a random number from [0, 1), as codecs/chance.py does."""
    bits = place.to(tl.uint32) * 2654435761 + seed
    bits = (bits ^ (bits >> 16)) * 2246822507
    bits = (bits ^ (bits >> 13)) * 3266489909
    bits = bits ^ (bits >> 16)
    return (bits & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _clamped(values, MOST: tl.constexpr):
    return tl.minimum(tl.maximum(values, -MOST), MOST)


@triton.jit
def _rounded(values):
    """Return the nearest numbers of float8 e4m3, which has four significant bits and exponents from -6."""
    exponent = ((values.to(tl.int32, bitcast=True) >> 23) & 255) - 127
    step = ((tl.maximum(exponent, -6) - 3 + 127) << 23).to(tl.float32, bitcast=True)
    return libdevice.rint(values / step) * step


@triton.jit
def _places(PLANE: tl.constexpr, BLOCKS: tl.constexpr):
    """Return this program's blocks, and the indices of their numbers in the row: (blocks, 8, numbers of a
    plane)."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    within = tl.arange(0, 8)[None, :, None] * PLANE + tl.arange(0, PLANE)[None, None, :]
    return block, block[:, None, None].to(tl.int64) * (8 * PLANE) + within


@triton.jit
def _numbers(codes, KIND: tl.constexpr, MOST: tl.constexpr):
    """Return the numbers of these codes, in units of their block's scale."""
    if KIND == SIGN:
        numbers = codes.to(tl.float32) * 2 - 1
    elif KIND == FLOAT8:
        numbers = codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * (1 / MOST)
    elif KIND == FLOAT16:
        numbers = codes.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * (1 / MOST)
    else:
        numbers = (codes.to(tl.float32) - MOST) * (1 / MOST)
    return numbers


@triton.jit(do_not_specialize=["seed"])
def _encode(rows, wire, numbers, blocks, wire_bytes, scales_at, seed, KIND: tl.constexpr, MOST: tl.constexpr,
CLIP: tl.constexpr,
            BITS: tl.constexpr, PLANE: tl.constexpr, BLOCKS: tl.constexpr, TAKE: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block, at = _places(PLANE, BLOCKS)
    in_row, is_block = at < numbers, block < blocks
    values = tl.load(rows + row * numbers + at, mask=in_row, other=0.0)
    sizes = tl.abs(values)
    count = tl.minimum(numbers - block.to(tl.int64) * (8 * PLANE), 8 * PLANE).to(tl.float32)
    scale = (
        tl.math.div_rn(tl.sum(tl.sum(sizes, 2), 1), count) if KIND == SIGN else tl.max(tl.max(sizes, 2), 1)
    )
    if CLIP > 0:
        relative = sizes / tl.where(scale > 0, scale, 1.0)[:, None, None]
        deviation = tl.math.sqrt_rn(tl.math.div_rn(tl.sum(tl.sum(relative * relative, 2), 1), count))
        scale *= tl.minimum(CLIP * deviation, 1.0)
    bad = tl.max(tl.max((sizes < float("inf")).to(tl.int32) ^ 1, 2), 1)
    scale = tl.where(bad > 0, float("nan"), scale)
    step = tl.where(scale > 0, scale, 1.0)
    scaled = tl.math.div_rn(values, tl.broadcast_to(step[:, None, None], values.shape))
    if KIND == SIGN:
        codes = (scaled >= 0).to(tl.int32)
    elif KIND == FLOAT8:
        codes = _clamped(scaled * MOST, MOST).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif KIND == FLOAT16:
        codes = _clamped(scaled * MOST, MOST).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    elif KIND == DRAWN:
        draws = _chance(row * blocks * (8 * PLANE) + at, seed)
        codes = (_clamped(tl.floor(scaled * MOST + draws), MOST) + MOST).to(tl.int32)
    else:
        codes = (_clamped(libdevice.rint(scaled * MOST), MOST) + MOST).to(tl.int32)
    if TAKE:
        # A float8 code cannot be converted back here: Triton 3.6 swaps neighbours.
        sent = _rounded(scaled * MOST) * (1 / MOST) if KIND == FLOAT8 else _numbers(codes, KIND, MOST)
        left = values - sent * scale[:, None, None]
        tl.debug_barrier()  # another thread may not have read yet what this one overwrites
        tl.store(rows + row * numbers + at, tl.where(tl.abs(left) < float("inf"), left, 0.0), mask=in_row)
    base = wire + row * wire_bytes
    if BITS == 16:
        tl.store(base.to(tl.pointer_type(tl.uint16)) + at, codes.to(tl.uint16), mask=is_block[:, None, None])
    elif BITS == 8:
        tl.store(base + at, codes.to(tl.uint8), mask=is_block[:, None, None])
    else:
        shifts = BITS * tl.arange(0, 8)[None, :, None]
        target = base + block[:, None].to(tl.int64) * (PLANE * BITS) + tl.arange(0, PLANE)[None, :]
        words = tl.sum(codes << shifts, 1) if BITS <= 4 else tl.sum(codes.to(tl.int64) << shifts, 1)
        for byte in tl.static_range(BITS):
            tl.store(target + PLANE * byte, (words >> (8 * byte)).to(tl.uint8), mask=is_block[:, None])
    tl.store((base + scales_at).to(tl.pointer_type(tl.float32)) + block, scale, mask=is_block)


@triton.jit
def _decode(wire, rows, numbers, blocks, wire_bytes, scales_at, KIND: tl.constexpr, MOST: tl.constexpr,
CLIP: tl.constexpr,
            BITS: tl.constexpr, PLANE: tl.constexpr, BLOCKS: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    block, at = _places(PLANE, BLOCKS)
    in_row, is_block = at < numbers, block < blocks
    base = wire + row * wire_bytes
    scale = tl.load((base + scales_at).to(tl.pointer_type(tl.float32)) + block, mask=is_block, other=0.0)
    scale = tl.where(scale < float("inf"), scale, float("nan"))[:, None, None]
    if BITS == 16:
        codes = tl.load(base.to(tl.pointer_type(tl.uint16)) + at, mask=in_row, other=0).to(tl.int32)
    elif BITS == 8:
        codes = tl.load(base + at, mask=in_row, other=0).to(tl.int32)
    else:
        source = base + block[:, None].to(tl.int64) * (PLANE * BITS) + tl.arange(0, PLANE)[None, :]
        words = tl.zeros([BLOCKS, PLANE], dtype=tl.uint32 if BITS <= 4 else tl.uint64)
        for byte in tl.static_range(BITS):
            words |= tl.load(source + PLANE * byte, mask=is_block[:, None], other=0).to(words.dtype) << (
                8 * byte
            )
        shifts = BITS * tl.arange(0, 8)[None, :, None]
        codes = ((words[:, None, :] >> shifts.to(words.dtype)) & ((1 << BITS) - 1)).to(tl.int32)
    values = _numbers(codes, KIND, MOST) * scale
    target = rows + row * numbers + at
    if ADD:
        values += tl.load(target, mask=in_row, other=0.0)
    tl.store(target, values, mask=in_row)


@triton.jit(do_not_specialize=["seed"])
def _drawn(
    rows, wire, numbers, kept, row_stride, seed, SEND: tl.constexpr, TAKE: tl.constexpr, SIZE: tl.constexpr
):
    """Copy one random number of each stretch of a row to the wire, or add it from there."""
    row = tl.program_id(1).to(tl.int64)
    stretch = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    valid = stretch < kept
    begin, end = stretch.to(tl.int64) * numbers // kept, (stretch.to(tl.int64) + 1) * numbers // kept
    place = begin + (_chance(stretch, seed).to(tl.float64) * (end - begin).to(tl.float64)).to(tl.int64)
    target, sent = rows + row * row_stride + place, wire + row * kept + stretch
    values = tl.load(target, mask=valid)
    if SEND:
        tl.store(sent, values, mask=valid)
        if TAKE:
            tl.store(target, 0.0, mask=valid)
    else:
        tl.store(target, values + tl.load(sent, mask=valid), mask=valid)


@triton.jit
def _largest(rows, values, places, numbers, row_stride, wire_stride, KEPT: tl.constexpr, SIZE: tl.constexpr):
    """Write the KEPT largest magnitudes of one block, and their places. The bits of floats that are not
    negative have the same order as the floats. So bisection finds the smallest magnitude that is kept: at
    least KEPT magnitudes reach `low`, and fewer reach `high`."""
    row, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    within = tl.arange(0, SIZE)
    at = block.to(tl.int64) * SIZE + within
    loaded = tl.load(rows + row * row_stride + at, mask=at < numbers, other=0.0)
    keys = tl.minimum(tl.abs(loaded).to(tl.int32, bitcast=True), INFINITE)
    most = tl.max(keys, 0)
    low, high = 0, most + 1
    middle = tl.maximum(most - (4 << 23), 1)  # a 16th of the largest: most often the smallest is above it
    while high - low > 1:
        reach = tl.sum((keys >= middle).to(tl.int32), 0)
        low = tl.where(reach == KEPT, middle - 1, tl.where(reach > KEPT, middle, low))
        high = tl.where(reach <= KEPT, middle, high)
        middle = low + (high - low) // 2
    least = low
    above, equal = keys > least, keys == least
    counts = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # two sums in one
    larger, equals = counts & 0xFFFF, counts >> 16
    room = KEPT - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (equals <= room))
    entry = row * wire_stride + block * KEPT + larger + tl.minimum(equals, room) - 1
    tl.store(values + entry, loaded.to(tl.bfloat16), mask=chosen)
    tl.store(places + entry, within.to(tl.int16), mask=chosen)


@triton.jit
def _put_largest(values, places, rows, numbers, entries, row_stride, wire_stride, sign, KEPT: tl.constexpr,
BLOCK: tl.constexpr,
                 SIZE: tl.constexpr):  # fmt: skip
    """Add values in their places."""
    row = tl.program_id(1).to(tl.int64)
    entry = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    valid = entry < entries
    at = (entry // KEPT).to(tl.int64) * BLOCK + tl.load(
        places + row * wire_stride + entry, mask=valid, other=0
    ).to(tl.int64)
    valid &= at < numbers
    target = rows + row * row_stride + at
    value = tl.load(values + row * wire_stride + entry, mask=valid, other=0.0).to(tl.float32)
    tl.store(target, tl.load(target, mask=valid) + sign * value, mask=valid)


class BlockFormat(Protocol):
    """What a kernel needs to know of a codec of blocks (codecs/blocks.py)."""

    @property
    def kind(self) -> str:
        """How a scaled number becomes a code."""

    @property
    def clip(self) -> float:
        """Standard deviations of its block beyond which a number is clipped; 0: none is."""

    @property
    def bits(self) -> int:
        """Number of bits of a code."""

    @property
    def largest_code(self) -> float:
        """The magnitude that a block's scale is mapped to."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block without its scale."""

    def wire_bytes(self, numbers: int) -> int:
        """Return the bytes of one row of n numbers."""


def encode(codec: BlockFormat, rows: Tensor, seed: int, subtract: bool) -> Tensor:
    """Return (rows, n) float32 as (rows, wire bytes). With `subtract`, what was sent is subtracted from the
    rows."""
    numbers, source = rows.shape[1], rows.contiguous()
    wire = torch.empty(len(rows), codec.wire_bytes(numbers), dtype=torch.uint8, device=rows.device)
    blocks = -(-numbers // BLOCK)
    grid = triton.cdiv(blocks, PROGRAM), len(rows)
    sizes = numbers, blocks, wire.shape[1], blocks * codec.block_bytes
    _encode[grid](source, wire, *sizes, seed % 2**31, **_shape(codec), TAKE=subtract)
    if subtract and source.data_ptr() != rows.data_ptr():
        rows.copy_(source)
    return wire


def decode(codec: BlockFormat, wire: Tensor, rows: Tensor, add: bool) -> None:
    """Decode into rows (rows, n) float32, or add the decoded numbers to them."""
    numbers, target = rows.shape[1], rows.contiguous()
    blocks = -(-numbers // BLOCK)
    grid = triton.cdiv(blocks, PROGRAM), len(rows)
    sizes = numbers, blocks, wire.shape[1], blocks * codec.block_bytes
    _decode[grid](wire.contiguous(), target, *sizes, **_shape(codec), ADD=add)
    if target.data_ptr() != rows.data_ptr():
        rows.copy_(target)


def send_drawn(rows: Tensor, kept: int, seed: int, take: bool) -> Tensor:
    """Return `kept` random numbers of each row, (rows, kept); `take` replaces them by zeros in the rows."""
    wire = torch.empty(len(rows), kept, device=rows.device)
    _draw(rows, wire, seed, send=True, take=take)
    return wire


def put_drawn(wire: Tensor, rows: Tensor, seed: int) -> None:
    """Add the numbers of `send_drawn` in their places; the seed must be the same."""
    _draw(rows, wire.contiguous(), seed, send=False, take=False)


def _draw(rows: Tensor, wire: Tensor, seed: int, send: bool, take: bool) -> None:
    grid = triton.cdiv(wire.shape[1], CHUNK), len(rows)
    sizes = rows.shape[1], wire.shape[1], rows.stride(0)
    _drawn[grid](rows, wire, *sizes, seed % 2**31, SEND=send, TAKE=take, SIZE=CHUNK)


def send_largest(rows: Tensor, per_block: int, wire_bytes: int) -> Tensor:
    """Return the `per_block` numbers of largest magnitude of each block as (rows, wire bytes)."""
    wire = torch.empty(len(rows), wire_bytes, dtype=torch.uint8, device=rows.device)
    values, places = _values_and_places(wire)
    grid = -(-rows.shape[1] // SPARSE_BLOCK), len(rows)
    sizes = rows.shape[1], rows.stride(0), values.stride(0)
    _largest[grid](rows, values, places, *sizes, KEPT=per_block, SIZE=SPARSE_BLOCK, num_warps=2)
    return wire


def put_largest(wire: Tensor, rows: Tensor, sign: float) -> None:
    """Add the numbers of `send_largest` in their places, or subtract them if `sign` is -1."""
    values, places = _values_and_places(wire)
    entries = values.shape[1]
    kept = entries // -(-rows.shape[1] // SPARSE_BLOCK)
    grid = triton.cdiv(entries, CHUNK), len(rows)
    sizes = rows.shape[1], entries, rows.stride(0), values.stride(0)
    _put_largest[grid](values, places, rows, *sizes, sign, KEPT=kept, BLOCK=SPARSE_BLOCK, SIZE=CHUNK)


def _values_and_places(wire: Tensor) -> tuple[Tensor, Tensor]:
    values, places = wire.view(torch.int16).chunk(2, dim=1)
    return values.view(torch.bfloat16), places


def _shape(codec: BlockFormat) -> dict[str, Any]:
    """Return the constants of the block kernels."""
    return {
        "KIND": KINDS[codec.kind],
        "MOST": codec.largest_code,
        "CLIP": codec.clip,
        "BITS": codec.bits,
        "PLANE": BLOCK // PLANES,
        "BLOCKS": PROGRAM,
    }
