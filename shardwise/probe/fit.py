"""Compute the few constants of the planner's model from measured times. This needs NumPy only.

Every model here is a sum of known columns with unknown factors that cannot be negative:

    matrix product   t = a F + b F (1/M + 1/N + 1/K) + c   F = 2 M N K, speed = 1/a, knee = b/a
    attention        t = a F + b F / s                     F = 4 s (s/2) heads dim, speed = 1/a, knee = b/a
    collective       t = a + b w S                         latency = a, bandwidth = 1/b, w the ring's factor

(the last is Hockney's, 1994). The *relative* error is minimised: a product of a microsecond counts as much as
one of a second, because the planner adds up many of the short ones. A time that is far off, because something
else ran at that moment, gets less weight the farther it is off (iteratively reweighted least squares, with
the weights of Huber, 1964).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.collectives import wire_factor

Array = NDArray[np.float64]
Shape = tuple[int, int, int]
"""M, N and K of a product (M x K) by (K x N)."""

ROUNDS = 30
"""Maximum number of times the weights are computed again. With a handful of rows they converge earlier."""
USUAL_ERRORS = 1.5
"""Multiple of the median error above which a row gets less weight."""


@dataclass(frozen=True)
class Speed:
    """Speed of products as a function of their sides."""

    flops: float
    """FLOP/s that products approach when all their sides are long."""
    knee: float
    """Length of a side at which a product takes twice as long as at `flops`."""


@dataclass(frozen=True)
class Cost:
    """Cost of a collective as a function of its bytes."""

    latency: float
    """Seconds before the first byte."""
    bandwidth: float
    """Bytes per second after that."""


def product_flops(shapes: Sequence[Shape]) -> Array:
    """Return the FLOPs of each matrix product."""
    return np.array([2.0 * m * n * k for m, n, k in shapes])


def attention_flops(length: int, heads: int, dim: int, batch: int) -> float:
    """Return the FLOPs of the forward of causal attention. On average a token attends to half of the
    tokens.
    """
    return 4.0 * batch * heads * dim * length * length / 2


def fit_products(shapes: Sequence[Shape], times: Sequence[float], launch: float | None = None) -> Speed:
    """Return speed and knee of matrix products.

    `launch` is the number of seconds that each time contains for starting the kernel. If it is None, it is
    fitted too and not returned.
    """
    flops = product_flops(shapes)
    columns = [flops, flops * np.array([1 / m + 1 / n + 1 / k for m, n, k in shapes])]
    return _speed(columns, flops, np.array(times), launch)


def fit_attention(
    lengths: Sequence[int], flops: Sequence[float], times: Sequence[float], launch: float = 0.0
) -> Speed:
    """Return speed and knee of attention as a function of the sequence length."""
    work = np.array(flops)
    return _speed([work, work / np.array(lengths)], work, np.array(times), launch)


UNSEEN = 0.02
"""Fraction of the largest call's time that is attributed to its size if the times do not grow with the
size.
"""


def fit_collective(kind: str, members: int, sizes: Sequence[int], times: Sequence[float]) -> Cost:
    """Return latency and bus bandwidth of one kind of collective. `sizes` are the bytes of the full
    tensors.
    """
    wire = wire_factor(kind, np.array(float(members))) * np.array(sizes, dtype=float)
    seconds = np.array(times)
    latency, inverse = relative_least_squares([np.ones_like(wire), wire], seconds)
    # The times do not grow with the size: the transfer is too fast to be visible beside the latency.
    if inverse == 0.0:
        inverse = UNSEEN * float((seconds / wire).min())
    return Cost(latency, 1 / inverse)


def speed_with_knee(shapes: Sequence[Shape], times: Sequence[float], knee: float, launch: float) -> float:
    """Return FLOP/s, given the knee of another precision: the median over the shapes."""
    slowed = product_flops(shapes) * (1 + knee * np.array([1 / m + 1 / n + 1 / k for m, n, k in shapes]))
    return float(np.median(slowed / _without(np.array(times), launch)))


def _speed(columns: list[Array], flops: Array, times: Array, launch: float | None) -> Speed:
    if launch is None:
        inverse, slope, _ = relative_least_squares([*columns, np.ones_like(flops)], times)
    else:
        inverse, slope = relative_least_squares(columns, _without(times, launch))
    if inverse == 0.0:  # no side was long enough to separate the speed from the knee
        best = float((flops / times).max())
        return Speed(best, slope * best)
    return Speed(1 / inverse, slope / inverse)


def _without(times: Array, launch: float) -> Array:
    """Return the times without the launch. At least a tenth of each time counts as work."""
    return np.maximum(times - launch, times / 10)


def relative_least_squares(columns: Sequence[Array], times: Array) -> list[float]:
    """Return factors, none negative, for which the sum of the columns is nearest to the times.

    The error is relative to each time, and outliers count less.
    """
    scaled = np.stack([column / times for column in columns], axis=1)
    weights = np.ones_like(times)
    factors = np.zeros(len(columns))
    for _ in range(ROUNDS):
        before, factors = factors, _non_negative(scaled, weights)
        if np.allclose(before, factors, rtol=1e-9, atol=0.0):
            break
        weights = _huber(scaled @ factors - 1)
    return [float(factor) for factor in factors]


def _huber(errors: Array) -> Array:
    usual = USUAL_ERRORS * float(np.median(np.abs(errors)))
    size = np.abs(errors)
    return (
        np.where(size <= usual, 1.0, usual / np.maximum(size, 1e-300)) if usual > 0 else np.ones_like(errors)
    )


def _non_negative(scaled: Array, weights: Array) -> Array:
    """Return the weighted least-squares solution of `scaled @ x = 1` with x >= 0.

    There are few columns, so every subset of them is tried.
    """
    count = scaled.shape[1]
    root = np.sqrt(weights)
    best, least = np.zeros(count), float((weights).sum())
    subsets = (subset for size in range(1, count + 1) for subset in combinations(range(count), size))
    for used in map(list, subsets):
        part = scaled[:, used] * root[:, None]
        scale = np.linalg.norm(part, axis=0)  # columns differ by many orders of magnitude
        if not scale.all():
            continue
        factors = np.linalg.lstsq(part / scale, root, rcond=None)[0] / scale
        error = float(((part @ factors - root) ** 2).sum())
        if (factors >= 0).all() and error < least:
            best, least = np.zeros(count), error
            best[used] = factors
    return best
