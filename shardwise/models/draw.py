"""Normal numbers by their index: any part of an array is drawn by itself, with the same bits on a CPU and on
a GPU.

Numbers come from counters, not from a state that is carried along (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", 2011): Philox 4x64 with ten rounds turns a key and a count into 256 bits. The key is a
hash of the run's seed and an array's name; 16 numbers of the array, by their places in it, share a count. So
whoever holds a slice draws that slice, and nobody the rest. On CPUs it is numpy's generator that counts, on
GPUs one kernel (models/kernels.py).

A number takes 16 bits: its place in a table of 65,536 quantiles, each of which stands for an equal share of
the distribution. The usual ways from bits to normal numbers need logarithms and cosines, whose last bits
differ from device to device; a table is read alike everywhere. Its mean and variance are those of the
distribution. What it costs: nothing is drawn further out than 4.325 deviations, where one in 65,000 numbers
would be, and large arrays have equal numbers in them. For first values of weights that is plenty: most
products round them to fewer bits, and they are often cut off at two or three deviations on purpose. It is no
source of numbers for statistics of tails.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

SHARED = 16
"""Numbers that are made from one count."""
QUANTILES = 1 << 16
PART = 1 << 18
"""Numbers that a CPU makes at once, so that what is between bits and numbers stays in its cache."""
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""Dtypes that are drawn into directly, and integers of their size: numbers are copied from the table, and
never computed with."""


@dataclass(frozen=True)
class Runs:
    """Where a slice of an array lies in it: in `outer` groups of `rows` runs of `length` numbers that follow
    each other. Places count in the order of the array, whose last dim runs fastest."""

    first: int
    """The place of the first number."""
    outer: int
    rows: int
    length: int
    outer_stride: int
    """How far apart groups begin."""
    row_stride: int
    """How far apart runs of a group begin."""


def quantiles() -> Tensor:
    """In the middle of each of 65,536 equal shares of the normal distribution, scaled to a variance of one:
    float32. Whoever draws makes it once, and lets it go."""
    half = QUANTILES // 2
    upper = torch.special.ndtri((torch.arange(half, dtype=torch.float64) + half + 0.5) / QUANTILES)
    upper /= math.sqrt(math.fsum(upper.square().tolist()) / half)  # which adds alike on any processor
    return torch.cat([-upper.flip(0), upper]).float()


def draw(
    part: Tensor,
    table: Tensor,
    seed: int,
    name: str,
    whole: Sequence[int],
    held: Sequence[slice],
    gpu: torch.device | None = None,
) -> None:
    """Fill `part`, which is the slice `held` of an array of the shape `whole`, with the numbers of that array
    under this seed and name: each is one of the 65,536 in `table`, which is on the CPU, rounded to the part's
    dtype.

    A `gpu` has room for the part, and draws it for a CPU that keeps it.
    """
    assert tuple(part.shape) == tuple(own.stop - own.start for own in held), (
        "the part is the slice that is held"
    )
    if not part.numel():
        return
    device = _drawing_device(gpu or part.device)
    if part.dtype not in BITS or not part.is_contiguous() or part.device.type != device.type:
        plain = torch.empty(
            part.shape, dtype=part.dtype if part.dtype in BITS else torch.float32, device=device
        )
        draw(plain, table, seed, name, whole, held)
        part.copy_(plain)
        return
    bits, key = BITS[part.dtype], _key(seed, name)
    table = table.to(part.dtype).view(bits).to(part.device)
    flat, begin = part.view(bits).view(-1), 0
    for runs in _runs(whole, held):
        own = flat[begin : begin + runs.outer * runs.rows * runs.length]
        begin += len(own)
        if part.is_cuda:
            from shardwise.models import kernels

            kernels.draw(own, table, key, *astuple(runs))
        else:
            _draw(own, table, key, runs)


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little")


@cache
def _drawing_device(device: torch.device) -> torch.device:
    """A GPU if kernels can be made for it, else the CPU. Triton wants a C compiler to start them, which not
    every machine has."""
    found = find_spec("triton") is not None and (shutil.which("gcc") or shutil.which("clang")) is not None
    able = device.type == "cuda" and found and torch.cuda.get_device_capability(device) >= (7, 0)
    return device if able else torch.device("cpu")


def _runs(whole: Sequence[int], held: Sequence[slice], first: int = 0) -> Iterator[Runs]:
    """The numbers of a slice in their order. One dim that is held whole makes one dim with that before it, so
    that most slices are a single run; more than three dims are left only where a slice cuts through more than
    three."""
    sizes: list[int] = []
    slices: list[slice] = []
    for size, own in zip(whole, held, strict=True):
        if sizes and own == slice(0, size):
            before = slices[-1]
            sizes[-1], slices[-1] = sizes[-1] * size, slice(before.start * size, before.stop * size)
        else:
            sizes.append(size)
            slices.append(own)
    while len(sizes) < 3:
        sizes.insert(0, 1)
        slices.insert(0, slice(0, 1))
    if len(sizes) > 3:
        inner = math.prod(sizes[1:])
        for index in range(slices[0].start, slices[0].stop):
            yield from _runs(sizes[1:], slices[1:], first + index * inner)
        return
    (outer, rows, columns), row_stride = slices, sizes[2]
    outer_stride = sizes[1] * row_stride
    first += outer.start * outer_stride + rows.start * row_stride + columns.start
    groups, runs, length = (own.stop - own.start for own in slices)
    yield Runs(first, groups, runs, length, outer_stride, row_stride)


def _draw(target: Tensor, table: Tensor, key: int, runs: Runs) -> None:
    """Fill a flat tensor on a CPU. Of short runs several are made at once, with the numbers between them,
    which are dropped before the table is looked at: that is quicker than setting the counter for each."""
    numbers = target.view(runs.outer, runs.rows, runs.length)
    at_once = max(1, PART // runs.row_stride)
    for group in range(runs.outer):
        for row in range(0, runs.rows, at_once):
            count = min(at_once, runs.rows - row)
            size = runs.length if count > 1 else PART
            for column in range(0, runs.length, size):
                own = numbers[group, row : row + count, column : column + size]
                width = runs.row_stride if count > 1 else own.shape[1]
                first = runs.first + group * runs.outer_stride + row * runs.row_stride + column
                places = _places(key, first, count * width).reshape(count, width)[:, : own.shape[1]]
                np.take(
                    table.numpy(), places, out=own.numpy(), mode="clip"
                )  # quicker than to raise, and none is out of bounds


def _places(key: int, first: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Of so many numbers of the array from `first` on, each one's place in the table."""
    skipped = first % SHARED
    counts = -(-(skipped + size) // SHARED)
    generator = np.random.Philox(
        key=key, counter=first // SHARED
    )  # which adds one to the counter before each use
    words = generator.random_raw(4 * counts)
    return words.astype("<u8", copy=False).view("<u2")[skipped : skipped + size]
