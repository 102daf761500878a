"""Kernels for GPUs. The module is imported only where there is a GPU: Triton comes with torch for GPUs.

`grouped8` and `outer8` are products in 8 bits of rows that are sorted by expert, each row with the weights of
its expert. torch's own products are slower, support no e5m2, and need padded rows for the second.

`draw` writes normal numbers. The bits are those of models/draw.py, and tests compare them. A thread makes the
16 numbers of a count, which are neighbours in the array. Reading the table limits the speed.

`cross_entropy` reads each row of logits twice and writes its gradient; the compiler's kernel reads each row
three times.

`sum_segments` and `weigh_rows` sum the outputs of experts where rows have different numbers of copies
(models/sorting.py). torch's operators would write every summand in float32 first.

`transpose8` transposes a matrix of bytes. The compiler would let the kernel that makes the matrix write the
transposed copy: where that kernel goes along rows, to sum or to find a maximum, it writes single bytes a
whole column apart, and takes ten times as long.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

COUNTS = 128
"""Number of counts from which one program makes random numbers."""
TILE = 128
"""Number of rows and of columns that one program transposes."""
LOGITS_PER_READ = 4096
"""Number of logits of a row that a program reads at a time."""
VALUES = 1024
"""Number of values of a row that a program reads at a time to sum copies of rows."""
ROWS, COLUMNS, DEPTH = 128, 256, 128
"""Size of a product's tile, and how much of the summed dimension is read at a time."""
ADJACENT = 8
"""Number of row tiles whose programs run next to each other, so that they share what they read of a
weight."""


@triton.jit
def _draw(target, table, task, COUNTS: tl.constexpr):
    key = tl.load(task).to(tl.uint64, bitcast=True)
    first, outer, rows, length = tl.load(task + 1), tl.load(task + 2), tl.load(task + 3), tl.load(task + 4)
    outer_stride, row_stride, counts = tl.load(task + 5), tl.load(task + 6), tl.load(task + 7)
    place = tl.program_id(0).to(tl.int64) * COUNTS + tl.arange(0, COUNTS)
    run = place // counts
    begin = first + (run // rows) * outer_stride + (run % rows) * row_stride
    count = begin // 16 + place % counts
    zero = tl.zeros((COUNTS,), tl.uint64)
    a, b, c, d = tl.philox(key, (count + 1).to(tl.uint64), zero, zero, zero)  # numpy adds one before each use
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (COUNTS, 4, 1))  # in the order a, b, c, d
    shifts = (tl.arange(0, 4) * 16).to(tl.uint64)[None, None, :]
    places = tl.reshape((words >> shifts) & 0xFFFF, (COUNTS, 16)).to(tl.int32)
    within = (count * 16 - begin)[:, None] + tl.arange(0, 16)[None, :]
    inside = (within >= 0) & (within < length) & (run < outer * rows)[:, None]
    tl.store(target + run[:, None] * length + within, tl.load(table + places), mask=inside)


def draw(
    target: Tensor,
    table: Tensor,
    key: int,
    first: int,
    outer: int,
    rows: int,
    length: int,
    outer_stride: int,
    row_stride: int,
) -> None:
    """Fill a flat tensor from a table on its device. The last six arguments are those of `draw.Runs`."""
    counts = (length + 14) // 16 + 1  # the most that a run touches, wherever in a count it begins
    signed = key - (1 << 64) if key >> 63 else key
    # A tensor, because Triton compiles the kernel again for some integer arguments: 1, and multiples of 16.
    task = torch.tensor(
        [signed, first, outer, rows, length, outer_stride, row_stride, counts], device=target.device
    )
    with torch.cuda.device(target.device):
        _draw[triton.cdiv(outer * rows * counts, COUNTS),](target, table, task, COUNTS=COUNTS)


@triton.jit
def _transpose(source, target, rows, columns, TILE: tl.constexpr):
    across = tl.program_id(0) * TILE + tl.arange(0, TILE)
    down = tl.program_id(1) * TILE + tl.arange(0, TILE)
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    tile = tl.load(source + matrix + down[:, None].to(tl.int64) * columns + across[None, :], mask=inside)
    tl.store(
        target + matrix + across[:, None].to(tl.int64) * rows + down[None, :],
        tl.trans(tile),
        mask=tl.trans(inside),
    )


@triton_op("shardwise::transpose8", mutates_args={})
def transpose8(matrix: Tensor) -> Tensor:
    """Return (..., columns, rows) from (..., rows, columns) of any dtype of one byte, both contiguous."""
    *batch, rows, columns = matrix.shape
    result = torch.empty(*batch, columns, rows, dtype=matrix.dtype, device=matrix.device)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), math.prod(batch))
    wrap_triton(_transpose)[grid](
        matrix.view(torch.uint8), result.view(torch.uint8), rows, columns, TILE=TILE
    )
    return result


@triton.jit
def _logits(place, inside, softcap, CAPPED: tl.constexpr):
    """Return logits in float32, within ± the cap; -inf outside of the row."""
    logits = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(inside, softcap * libdevice.tanh(logits / softcap), -float("inf")) if CAPPED else logits


@triton.jit
def _cross_entropy(
    logits, targets, into, losses, columns, stride, into_stride, scale, softcap,
    IGNORED: tl.constexpr, CAPPED: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    source, goal = logits + row * stride, into + row * into_stride
    peak, total, chosen = -1e30, 0.0, 0.0
    for start in range(0, columns, COUNT):
        at = start + tl.arange(0, COUNT)
        numbers = _logits(source + at, at < columns, softcap, CAPPED)
        higher = tl.maximum(peak, tl.max(numbers, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(numbers - higher), 0)
        chosen += tl.sum(tl.where(at == target, numbers, 0.0), 0)
        peak = higher
    valid = target != IGNORED
    tl.store(losses + row, tl.where(valid, tl.log(total) + peak - chosen, 0.0))
    factor = tl.where(valid, scale, 0.0)
    for start in range(0, columns, COUNT):
        at = start + tl.arange(0, COUNT)
        numbers = _logits(source + at, at < columns, softcap, CAPPED)
        gradient = tl.exp(numbers - peak) / total - (at == target).to(tl.float32)
        if CAPPED:
            gradient *= 1 - (numbers / softcap) * (numbers / softcap)
        tl.store(goal + at, (gradient * factor).to(into.dtype.element_ty), mask=at < columns)


def cross_entropy(
    logits: Tensor, targets: Tensor, into: Tensor, scale: float, softcap: float | None, ignored: int
) -> Tensor:
    """Return the summed loss of rows of logits of at most 32 bits, and write `scale` times their gradient to
    `into`, which may be the logits."""
    losses = torch.empty(logits.shape[0], device=logits.device)
    with torch.cuda.device(logits.device):
        _cross_entropy[logits.shape[0],](
            logits, targets, into, losses, logits.shape[1], logits.stride(0), into.stride(0), scale,
            softcap or 1.0,
            IGNORED=ignored, CAPPED=softcap is not None, COUNT=LOGITS_PER_READ, num_warps=8,
        )  # fmt: skip
    return losses.sum()


@triton.jit
def _sum_segments(
    rows, inverse, ends, weights, out, columns,
    WEIGHTED: tl.constexpr, EXACT: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    total = tl.zeros((COUNT,), tl.float64 if EXACT else tl.float32)
    for copy in range(tl.load(ends + row - 1, mask=row > 0, other=0), tl.load(ends + row)):
        values = tl.load(rows + tl.load(inverse + copy) * columns + at, mask=at < columns, other=0)
        values = values.to(total.dtype)
        total += values * tl.load(weights + copy).to(total.dtype) if WEIGHTED else values
    tl.store(out + row * columns + at, total.to(out.dtype.element_ty), mask=at < columns)


def sum_segments(rows: Tensor, inverse: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Return for each i the sum of rows[inverse[j]] over all j from ends[i - 1] to ends[i], times weights[j]
    if there are any: (len(ends), columns)."""
    count, columns = ends.shape[0], rows.shape[1]
    out = rows.new_empty(count, columns)
    if count:
        with torch.cuda.device(rows.device):
            _sum_segments[count, triton.cdiv(columns, VALUES)](
                rows, inverse, ends, rows if weights is None else weights, out, columns,
                WEIGHTED=weights is not None, EXACT=rows.dtype == torch.float64, COUNT=VALUES,
            )  # fmt: skip
    return out


@triton.jit
def _weigh_rows(
    gradient, rows, weights, places, out, products, columns, EXACT: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    copy = tl.program_id(0).to(tl.int64)
    total = tl.zeros((COUNT,), tl.float64 if EXACT else tl.float32)
    source = gradient + tl.load(places + copy) * columns
    weight = tl.load(weights + copy).to(total.dtype)
    for start in range(0, columns, COUNT):
        at = start + tl.arange(0, COUNT)
        values = tl.load(source + at, mask=at < columns, other=0).to(total.dtype)
        tl.store(out + copy * columns + at, (values * weight).to(out.dtype.element_ty), mask=at < columns)
        total += values * tl.load(rows + copy * columns + at, mask=at < columns, other=0).to(total.dtype)
    tl.store(products + copy, tl.sum(total, 0))


def weigh_rows(gradient: Tensor, rows: Tensor, weights: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return gradient[places[i]] times weights[i] for each row i, and its product with rows[i]."""
    (count, columns), exact = rows.shape, rows.dtype == torch.float64
    out = torch.empty_like(rows)
    products = rows.new_empty(count, dtype=torch.float64 if exact else torch.float32)
    if count:
        with torch.cuda.device(rows.device):
            _weigh_rows[count,](
                gradient, rows, weights, places, out, products, columns, EXACT=exact, COUNT=VALUES
            )
    return out, products


@triton.jit
def _expert_of(tile, ends, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of rows, the tile's first row, and the end of that expert's rows.

    Tiles beyond the last have an expert that does not exist.
    """
    expert = tl.arange(0, PADDED)
    end = tl.load(ends + expert, mask=expert < EXPERTS, other=0)
    begin = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    tiles = tl.where(expert < EXPERTS, (end - begin + ROWS - 1) // ROWS, 0)
    after = tl.cumsum(tiles, 0)
    tile_expert = tl.sum((after <= tile).to(tl.int32), 0)
    chosen = expert == tile_expert
    before = tl.sum(tl.where(chosen, after - tiles, 0), 0)
    return (
        tile_expert,
        tl.sum(tl.where(chosen, begin, 0), 0) + (tile - before) * ROWS,
        tl.sum(tl.where(chosen, end, 0), 0),
    )


@triton.jit
def _tiles_of(expert, ends, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Return the first tile of an expert, and the number of its tiles."""
    each = tl.arange(0, PADDED)
    end = tl.load(ends + each, mask=each < EXPERTS, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < EXPERTS), other=0)
    tiles = tl.where(each < EXPERTS, (end - begin + ROWS - 1) // ROWS, 0)
    return tl.sum(tl.where(each < expert, tiles, 0), 0), tl.sum(tl.where(each == expert, tiles, 0), 0)


@triton.jit
def _grouped(
    rows, weight, out, ends, factor, outputs, inputs,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(outputs, COLUMNS)
    place, within = tl.program_id(0) // (ADJACENT * across), tl.program_id(0) % (ADJACENT * across)
    first = within // ADJACENT * COLUMNS
    expert, row, stop = _expert_of(place * ADJACENT + within % ADJACENT, ends, EXPERTS, PADDED, ROWS)
    if expert < EXPERTS:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for depth in range(0, inputs, DEPTH):
            total = tl.dot(rows.load([row, depth]), weight.load([expert * outputs + first, depth]).T, total)
        total *= tl.load(factor)
        down, right = row + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
        inside = (down < stop)[:, None] & (right < outputs)[None, :]
        tl.store(
            out + down[:, None].to(tl.int64) * outputs + right[None, :],
            total.to(out.dtype.element_ty),
            mask=inside,
        )


@custom_op("shardwise::grouped8", mutates_args=())
def grouped8(rows: Tensor, weight: Tensor, ends: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows (n, inputs) times the weights (experts, outputs, inputs) of their experts, times a factor.

    Rows of expert i end before ends[i]; the result is (n, outputs).
    """
    (count, inputs), (experts, outputs, _) = rows.shape, weight.shape
    out = torch.empty(count, outputs, dtype=dtype, device=rows.device)
    if count:
        tiles = triton.cdiv(triton.cdiv(count, ROWS) + experts, ADJACENT) * ADJACENT  # at most
        left = TensorDescriptor.from_tensor(rows, [ROWS, DEPTH])
        right = TensorDescriptor.from_tensor(weight.view(-1, inputs), [COLUMNS, DEPTH])
        with torch.cuda.device(rows.device):
            _grouped[tiles * triton.cdiv(outputs, COLUMNS),](
                left, right, out, ends, factor, outputs, inputs,
                EXPERTS=experts, PADDED=triton.next_power_of_2(experts), ROWS=ROWS, COLUMNS=COLUMNS,
                DEPTH=DEPTH, ADJACENT=ADJACENT,
                num_warps=8, num_stages=3,
            )  # fmt: skip
    return out


@grouped8.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=dtype)


@triton.jit
def _transpose_experts(
    source, target, ends, places, columns, length,
    PLACED: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    tile = tl.program_id(1)
    expert, row, stop = _expert_of(tile, ends, EXPERTS, PADDED, DEPTH)
    if expert < EXPERTS:
        across, down = tl.program_id(0) * TILE + tl.arange(0, TILE), row + tl.arange(0, DEPTH)
        inside = (down < stop)[:, None] & (across < columns)[None, :]
        rows = tl.load(places + down, mask=down < stop, other=0) if PLACED else down.to(tl.int64)
        values = tl.load(source + rows[:, None] * columns + across[None, :], mask=inside, other=0)
        place = tile * DEPTH + tl.arange(0, DEPTH)
        turned = target + across[:, None].to(tl.int64) * length + place[None, :]
        tl.store(turned, tl.trans(values), mask=(across < columns)[:, None])


@custom_op("shardwise::transpose_experts8", mutates_args=())
def transpose_experts8(matrix: Tensor, ends: Tensor, places: Tensor | None) -> Tensor:
    """Return (columns, padded rows) from (rows, columns) in 8 bits, sorted by expert.

    The rows of each expert begin at a multiple of DEPTH, and zeros fill them up to the next. `places` are the
    indices of the sorted rows in the matrix; None: the matrix is sorted.
    """
    columns, rows = matrix.shape[1], len(matrix if places is None else places)
    experts = ends.shape[0]
    tiles = triton.cdiv(rows, DEPTH) + experts  # at most
    turned = torch.empty(columns, tiles * DEPTH, dtype=matrix.dtype, device=matrix.device)
    with torch.cuda.device(matrix.device):
        _transpose_experts[triton.cdiv(columns, TILE), tiles](
            matrix.view(torch.uint8), turned.view(torch.uint8), ends, ends if places is None else places,
            columns, tiles * DEPTH,
            PLACED=places is not None, EXPERTS=experts, PADDED=triton.next_power_of_2(experts), DEPTH=DEPTH,
            TILE=TILE,
        )  # fmt: skip
    return turned


@transpose_experts8.register_fake
def _(matrix: Tensor, ends: Tensor, places: Tensor | None) -> Tensor:
    rows = (matrix if places is None else places).shape[0]
    tiles = (rows + DEPTH - 1) // DEPTH + ends.shape[0]
    return matrix.new_empty(matrix.shape[1], tiles * DEPTH)


@triton.jit
def _outer(
    left, right, out, ends, factor, height, width,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr
):  # fmt: skip
    expert, across = tl.program_id(1), tl.cdiv(width, COLUMNS)
    top, first = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS
    begin, tiles = _tiles_of(expert, ends, EXPERTS, PADDED, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for depth in range(begin * DEPTH, (begin + tiles) * DEPTH, DEPTH):
        total = tl.dot(left.load([top, depth]), right.load([first, depth]).T, total)
    total *= tl.load(factor)
    down, aside = top + tl.arange(0, ROWS), first + tl.arange(0, COLUMNS)
    inside = (down < height)[:, None] & (aside < width)[None, :]
    matrix = out + expert.to(tl.int64) * height * width
    tl.store(
        matrix + down[:, None].to(tl.int64) * width + aside[None, :],
        total.to(out.dtype.element_ty),
        mask=inside,
    )


@custom_op("shardwise::outer8", mutates_args=())
def outer8(left: Tensor, right: Tensor, ends: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return for each expert the sum over its rows of left · rightᵀ, times a factor: (experts, height,
    width).

    Both inputs come from `transpose_experts8`: (height, padded rows) and (width, padded rows).
    """
    height, width, experts = left.shape[0], right.shape[0], ends.shape[0]
    out = torch.empty(experts, height, width, dtype=dtype, device=left.device)
    with torch.cuda.device(left.device):
        _outer[triton.cdiv(height, ROWS) * triton.cdiv(width, COLUMNS), experts](
            TensorDescriptor.from_tensor(left, [ROWS, DEPTH]),
            TensorDescriptor.from_tensor(right, [COLUMNS, DEPTH]),
            out, ends, factor, height, width,
            EXPERTS=experts, PADDED=triton.next_power_of_2(experts), ROWS=ROWS, COLUMNS=COLUMNS, DEPTH=DEPTH,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


@outer8.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[0], right.shape[0], dtype=dtype)
