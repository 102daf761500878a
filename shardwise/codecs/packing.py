"""Whole numbers of a few bits, packed into bytes, a block at a time.

A block is looked at in planes, stretches of it that lie one after the other: of eight planes, the i-th
numbers of b bits each make b bytes, which are the i-th of b planes of bytes. So packing and unpacking move
planes against each other, and neighbours in memory are treated alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PLANES = 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """(…, n) uint8 of so many bits, 1 to 7, as (…, n bits / 8) bytes; n is a multiple of eight."""
    planes = codes.view(*codes.shape[:-1], PLANES, -1)
    packed = planes.new_zeros(*codes.shape[:-1], bits, planes.shape[-1])
    for byte, plane, shift in _places(bits):
        packed[..., byte, :] |= _moved(planes[..., plane, :], shift)
    return packed.flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The numbers that were packed."""
    planes = packed.view(*packed.shape[:-1], bits, -1)
    codes = planes.new_zeros(*packed.shape[:-1], PLANES, planes.shape[-1])
    for byte, plane, shift in _places(bits):
        codes[..., plane, :] |= _moved(planes[..., byte, :], -shift)
    return codes.bitwise_and_(2**bits - 1).flatten(-2)


def _places(bits: int) -> Iterator[tuple[int, int, int]]:
    """Where numbers lie in bytes: which byte has bits of which plane's number, and by how much they are moved
    up in it."""
    for plane in range(PLANES):
        first = bits * plane
        for byte in range(first // 8, (first + bits - 1) // 8 + 1):
            yield byte, plane, first - 8 * byte


def _moved(numbers: Tensor, up: int) -> Tensor:
    return numbers << up if up >= 0 else numbers >> -up
