"""The update of bfloat16 states on a GPU as one kernel. Imported where there is one alone: Triton comes with
torch for GPUs.

What optim/rounding.py does in some dozens of passes over memory is one pass over 14 bytes a parameter here,
by the same arithmetic; tests compare them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements that one program updates."""


@triton.jit
def _hash(words):
    """Return the same hash as optim/rounding.py."""
    words = ((words >> 16) ^ words) * 0x45D9F3B
    words = ((words >> 16) ^ words) * 0x45D9F3B
    return (words >> 16) ^ words


@triton.jit
def _round(number, chance):
    """As in optim/rounding.py: float32 to bfloat16, up or down by a chance from 0 to 65535."""
    bits = (number.to(tl.uint32, bitcast=True) + chance) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _update(
    weight, gradient, first, second, numbers, place, count, width, beta1, beta2, epsilon, decay,
    ONE_ROW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    skip = tl.load(numbers + 2)
    if skip > 0:
        return
    lr, divide_by, unbias1, unbias2 = (
        tl.load(numbers),
        tl.load(numbers + 1),
        tl.load(numbers + 3),
        tl.load(numbers + 4),
    )
    drawn, offset, whole_row = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at if ONE_ROW else at // width * whole_row + at % width
    bits = _hash((there + offset).to(tl.uint32) ^ drawn.to(tl.uint32))
    own = at < count
    g = tl.load(gradient + at, mask=own).to(tl.float32) / divide_by
    m = beta1 * tl.load(first + at, mask=own).to(tl.float32) + (1 - beta1) * g
    v = beta2 * tl.load(second + at, mask=own).to(tl.float32) + (1 - beta2) * g * g
    w = tl.load(weight + at, mask=own).to(tl.float32)
    w = w * (1 - lr * decay) - lr * (m / unbias1 / (tl.sqrt(v / unbias2) + epsilon))
    tl.store(weight + at, _round(w, bits & 0xFFFF), mask=own)
    tl.store(first + at, _round(m, bits >> 16), mask=own)
    tl.store(second + at, _round(v, bits >> 16), mask=own)


def update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    numbers: Tensor,
    place: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    decay: float,
) -> None:
    """All four of shape (rows, columns) and contiguous; the rest as in optim/rounding.py."""
    (rows, columns), count = weight.shape, weight.numel()
    if count:
        with torch.cuda.device(weight.device):
            _update[triton.cdiv(count, BLOCK),](
                weight, gradient, first, second, numbers, place, count, columns, beta1, beta2, epsilon, decay,
                ONE_ROW=rows == 1, BLOCK=BLOCK,
            )  # fmt: skip
