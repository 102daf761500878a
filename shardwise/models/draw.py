"""Normal random numbers as a function of their index in an array, with the same bits on a CPU and on a GPU.

Numbers come from counters instead of the state of a generator (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011): Philox 4x64 with ten rounds turns a key and a count into 256 bits. The key is a hash
of the run's seed and an array's name; 16 neighbouring numbers of the array share a count. So a process that
holds a slice draws that slice alone. CPUs use numpy's generator, GPUs a kernel (models/kernels.py).

A number takes 16 bits, which are its index in a table of 65,536 quantiles of equal probability. The usual
ways from bits to normal numbers need logarithms and cosines, whose last bits differ from device to device; a
table gives the same numbers everywhere, with the mean and the variance of the distribution. The cost: no
number is further out than 4.325 deviations, where one in 65,000 numbers would be, and large arrays contain
equal numbers. That is enough for initial weights: most products round them to fewer bits, and they are often
cut off at two or three deviations on purpose. It is not enough for statistics of tails.
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

NUMBERS_PER_COUNT = 16
"""Number of random numbers that are made from one count."""
QUANTILES = 1 << 16
CPU_CHUNK = 1 << 18
"""Number of random numbers that a CPU makes at once, so that intermediate results stay in its cache."""
INTEGER_DTYPES = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
"""Dtypes that are filled directly, and integer dtypes of their size: numbers are copied from the table as
bits."""


@dataclass(frozen=True)
class Runs:
    """Where a slice of an array lies in it: `outer` groups of `rows` runs of `length` contiguous numbers.

    Indices are those of the flattened array, whose last dim runs fastest.
    """

    first: int
    """Index of the first number."""
    outer: int
    rows: int
    length: int
    outer_stride: int
    """Distance between the first numbers of neighbouring groups."""
    row_stride: int
    """Distance between the first numbers of neighbouring runs in a group."""


def quantiles() -> Tensor:
    """Return the table: the middle of each of 65,536 equal shares of the normal distribution, in float32.

    It is scaled to a variance of one.
    """
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
    """Fill `part`, which is the slice `held` of an array of shape `whole`, with numbers of that array.

    The numbers follow from the seed and the array's name. Each is one of the 65,536 numbers in `table`, which
    is on the CPU, rounded to the part's dtype. A `gpu` draws for a part that is in the CPU's memory.
    """
    assert tuple(part.shape) == tuple(dim.stop - dim.start for dim in held), (
        "the part has the shape of the slice"
    )
    if not part.numel():
        return
    device = _drawing_device(gpu or part.device)
    if part.dtype not in INTEGER_DTYPES or not part.is_contiguous() or part.device.type != device.type:
        dtype = part.dtype if part.dtype in INTEGER_DTYPES else torch.float32
        contiguous = torch.empty(part.shape, dtype=dtype, device=device)
        draw(contiguous, table, seed, name, whole, held)
        part.copy_(contiguous)
        return
    bits, key = INTEGER_DTYPES[part.dtype], hashed(f"{seed}:{name}")
    table = table.to(part.dtype).view(bits).to(part.device)
    flat, begin = part.view(bits).view(-1), 0
    for runs in _runs(whole, held):
        target = flat[begin : begin + runs.outer * runs.rows * runs.length]
        begin += len(target)
        if part.is_cuda:
            from shardwise.models import kernels

            kernels.draw(target, table, key, *astuple(runs))
        else:
            _draw(target, table, key, runs)


def hashed(text: str) -> int:
    """Return 64 bits that depend on the text only."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@cache
def _drawing_device(device: torch.device) -> torch.device:
    """Return the GPU if kernels can be compiled for it, else the CPU. Triton needs a C compiler."""
    has_triton = find_spec("triton") is not None and bool(shutil.which("gcc") or shutil.which("clang"))
    supported = device.type == "cuda" and has_triton and torch.cuda.get_device_capability(device) >= (7, 0)
    return device if supported else torch.device("cpu")


def _runs(whole: Sequence[int], held: Sequence[slice], first: int = 0) -> Iterator[Runs]:
    """Yield the runs of a slice in order.

    A dim that is held whole is merged with the dim before it, so that most slices are a single run. More than
    three dims are left only where a slice cuts through more than three.
    """
    sizes: list[int] = []
    slices: list[slice] = []
    for size, dim in zip(whole, held, strict=True):
        if sizes and dim == slice(0, size):
            before = slices[-1]
            sizes[-1], slices[-1] = sizes[-1] * size, slice(before.start * size, before.stop * size)
        else:
            sizes.append(size)
            slices.append(dim)
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
    groups, runs, length = (dim.stop - dim.start for dim in slices)
    yield Runs(first, groups, runs, length, outer_stride, row_stride)


def _draw(target: Tensor, table: Tensor, key: int, runs: Runs) -> None:
    """Fill a flat tensor on a CPU.

    Several short runs are made at once, together with the numbers between them, which are dropped before the
    table is read. That is faster than setting the counter for each run.
    """
    numbers = target.view(runs.outer, runs.rows, runs.length)
    rows_at_once = max(1, CPU_CHUNK // runs.row_stride)
    for group in range(runs.outer):
        for row in range(0, runs.rows, rows_at_once):
            count = min(rows_at_once, runs.rows - row)
            size = runs.length if count > 1 else CPU_CHUNK
            for column in range(0, runs.length, size):
                chunk = numbers[group, row : row + count, column : column + size]
                width = runs.row_stride if count > 1 else chunk.shape[1]
                first = runs.first + group * runs.outer_stride + row * runs.row_stride + column
                indices = _table_indices(key, first, count * width).reshape(count, width)[:, : chunk.shape[1]]
                # "clip" is faster than "raise", and no index is out of bounds.
                np.take(table.numpy(), indices, out=chunk.numpy(), mode="clip")


def _table_indices(key: int, first: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """Return indices into the table for `size` numbers of the array from `first` on."""
    skipped = first % NUMBERS_PER_COUNT
    counts = -(-(skipped + size) // NUMBERS_PER_COUNT)
    # numpy adds one to the counter before each use.
    generator = np.random.Philox(key=key, counter=first // NUMBERS_PER_COUNT)
    words = generator.random_raw(4 * counts)
    return words.astype("<u8", copy=False).view("<u2")[skipped : skipped + size]
