"""AdamW's update of bfloat16 states on a GPU as one kernel. This module is imported only if there is a GPU,
because Triton comes with torch for GPUs.

The kernel makes one pass over 14 bytes per parameter, where optim/rounding.py needs some dozens of passes.
The arithmetic is the same, and tests compare the two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Number of elements that one program updates."""


@triton.jit
def _hash(words):
    """Return the same hash as optim/rounding.py."""
    words = ((words >> 16) ^ words) * 0x45D9F3B
    words = ((words >> 16) ^ words) * 0x45D9F3B
    return (words >> 16) ^ words


@triton.jit
def _round(number, random_bits):
    """Return float32 numbers as bfloat16, rounded with 16 random bits as in optim/rounding.py."""
    bits = (number.to(tl.uint32, bitcast=True) + random_bits) & 0xFFFF0000
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
    step_key, offset, whole_row = tl.load(place), tl.load(place + 1), tl.load(place + 2)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    index = at if ONE_ROW else at // width * whole_row + at % width  # in the whole parameter, less offset
    bits = _hash((index + offset).to(tl.uint32) ^ step_key.to(tl.uint32))
    valid = at < count
    g = tl.load(gradient + at, mask=valid).to(tl.float32) / divide_by
    m = beta1 * tl.load(first + at, mask=valid).to(tl.float32) + (1 - beta1) * g
    v = beta2 * tl.load(second + at, mask=valid).to(tl.float32) + (1 - beta2) * g * g
    w = tl.load(weight + at, mask=valid).to(tl.float32)
    w = w * (1 - lr * decay) - lr * (m / unbias1 / (tl.sqrt(v / unbias2) + epsilon))
    tl.store(weight + at, _round(w, bits & 0xFFFF), mask=valid)
    tl.store(first + at, _round(m, bits >> 16), mask=valid)
    tl.store(second + at, _round(v, bits >> 16), mask=valid)


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
    """Update in place. The first four are contiguous, (rows, columns); `numbers` and `place` are those that
    optim/rounding.py gives a `RoundingKernel`."""
    (rows, columns), count = weight.shape, weight.numel()
    if count:
        with torch.cuda.device(weight.device):
            _update[triton.cdiv(count, BLOCK),](
                weight, gradient, first, second, numbers, place, count, columns, beta1, beta2, epsilon, decay,
                ONE_ROW=rows == 1, BLOCK=BLOCK,
            )  # fmt: skip
