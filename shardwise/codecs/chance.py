"""Random numbers that are equal on all devices: a hash of a place and a seed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def chance(places: Tensor, seed: int) -> Tensor:
    """Return a random number from [0, 1) for each place (int32). It depends only on the place and the seed,
    so it is the same on any device, and a kernel computes it instead of reading it from memory. The hash is
    the last step of MurmurHash3, in 32-bit integers that wrap around."""
    bits = places * -1640531535 + seed % 2**31
    for shift, factor in ((16, -2048144789), (13, -1028477387), (16, 1)):
        bits ^= bits >> shift & (1 << 32 - shift) - 1
        bits *= factor
    return (bits & (1 << 24) - 1) * 2.0**-24
