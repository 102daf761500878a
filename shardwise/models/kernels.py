"""Kernels of GPUs. Imported where there is one alone: Triton comes with torch for GPUs.

`draw` writes normal numbers where they are needed. The bits are those of models/draw.py, and tests compare them. A thread makes
the 16 numbers of a count, which lie together in the array. What bounds the speed is the reading of the table.

`transpose8` transposes a matrix of bytes. Left to the compiler, a transposed copy is written by whatever kernel makes the matrix:
where that goes along rows, to sum or to find a maximum, it writes single bytes a whole column apart, and takes ten times as long.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

COUNTS = 128
"""That one program makes numbers from."""
TILE = 128
"""Rows and columns that one program transposes."""


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
    own = (within >= 0) & (within < length) & (run < outer * rows)[:, None]
    tl.store(target + run[:, None] * length + within, tl.load(table + places), mask=own)


def draw(
    target: Tensor, table: Tensor, key: int, first: int, outer: int, rows: int, length: int, outer_stride: int, row_stride: int
) -> None:
    """Fill a flat tensor from a table on its device. The last six say where its numbers lie in the array (draw.Runs)."""
    counts = (length + 14) // 16 + 1  # that a run touches at most, wherever in a count it begins
    signed = key - (1 << 64) if key >> 63 else key
    # These go as a tensor: as arguments, Triton would compile the kernel again for small ones, and for multiples of 16.
    task = torch.tensor([signed, first, outer, rows, length, outer_stride, row_stride, counts], device=target.device)
    with torch.cuda.device(target.device):
        _draw[triton.cdiv(outer * rows * counts, COUNTS),](target, table, task, COUNTS=COUNTS)


@triton.jit
def _transpose(source, target, rows, columns, TILE: tl.constexpr):
    across = tl.program_id(0) * TILE + tl.arange(0, TILE)
    down = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (down[:, None] < rows) & (across[None, :] < columns)
    tile = tl.load(source + down[:, None].to(tl.int64) * columns + across[None, :], mask=inside)
    tl.store(target + across[:, None].to(tl.int64) * rows + down[None, :], tl.trans(tile), mask=tl.trans(inside))


@triton_op("shardwise::transpose8", mutates_args={})
def transpose8(matrix: Tensor) -> Tensor:
    """(rows, columns) of any dtype of one byte to (columns, rows), both contiguous."""
    rows, columns = matrix.shape
    turned = torch.empty(columns, rows, dtype=matrix.dtype, device=matrix.device)
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, TILE))
    wrap_triton(_transpose)[grid](matrix.view(torch.uint8), turned.view(torch.uint8), rows, columns, TILE=TILE)
    return turned


def outer8(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Of rows (n, m) and (n, k) in e4m3, of which those of group i end before ends[i], leftᵀ · right over the rows of each group:
    (groups, m, k). All numbers of e4m3 are numbers of bfloat16."""
    wide_left, wide_right = left.to(torch.bfloat16), right.to(torch.bfloat16)
    return F.grouped_mm(wide_left.t(), wide_right, offs=ends, out_dtype=dtype)
