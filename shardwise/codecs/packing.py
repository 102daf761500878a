"""Whole numbers of a few bits, packed into bytes, a block at a time.

A block of n numbers is cut into eight consecutive planes of n / 8 numbers. The i-th numbers of all planes,
b bits each, are packed together into b bytes; byte j of them is the i-th byte of plane j of the result. So
packing and unpacking shift whole planes, and neighbours in memory are treated alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PLANES = 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return (…, n) codes of 1 to 7 bits, given as uint8, as (…, n bits / 8) bytes; n is a multiple of 8."""
    planes = codes.view(*codes.shape[:-1], PLANES, -1)
    packed = planes.new_zeros(*codes.shape[:-1], bits, planes.shape[-1])
    for byte, plane, shift in _places(bits):
        packed[..., byte, :] |= _shifted(planes[..., plane, :], shift)
    return packed.flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Return the codes that were packed."""
    planes = packed.view(*packed.shape[:-1], bits, -1)
    codes = planes.new_zeros(*packed.shape[:-1], PLANES, planes.shape[-1])
    for byte, plane, shift in _places(bits):
        codes[..., plane, :] |= _shifted(planes[..., byte, :], -shift)
    return codes.bitwise_and_(2**bits - 1).flatten(-2)


def _places(bits: int) -> Iterator[tuple[int, int, int]]:
    """Yield (byte, plane, shift) for each byte that has bits of a plane's numbers, which are shifted left by
    `shift` there."""
    for plane in range(PLANES):
        first = bits * plane
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield byte, plane, first - 8 * byte


def _shifted(numbers: Tensor, left: int) -> Tensor:
    return numbers << left if left >= 0 else numbers >> -left
