"""From measured times to the few constants of the planner's model. NumPy only.

Every model here is a sum of known columns with unknown factors that cannot be negative:

    matrix product   t = a F + b F (1/M + 1/N + 1/K) + c   F = 2 M N K, speed = 1/a, knee = b/a
    attention        t = a F + b F / s                     F = 4 s (s/2) heads dim, speed = 1/a, knee = b/a
    collective       t = a + b w S                         latency = a, bandwidth = 1/b, w the ring's factor

(the last is Hockney's, 1994). What is made small is the *relative* error: a product of a microsecond counts
as much as one of a second, since a planner adds up many of the former. A time that lies far off, because
something else ran just then, is given less weight the farther it is off (iteratively reweighted least
squares, with the weights of Huber, 1964).
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
"""Of weighing anew; the weights of a handful of rows settle in fewer."""
USUAL_ERRORS = 1.5
"""So many usual (median) errors off, a row begins to lose weight."""


@dataclass(frozen=True)
class Speed:
    """FLOP/s that long enough sides approach, and the length at which a short side costs as much as the work
    itself."""

    flops: float
    knee: float


@dataclass(frozen=True)
class Cost:
    """Seconds of a call before the first byte, and bytes a second from there on."""

    latency: float
    bandwidth: float


def product_flops(shapes: Sequence[Shape]) -> Array:
    """FLOPs of matrix products."""
    return np.array([2.0 * m * n * k for m, n, k in shapes])


def attention_flops(length: int, heads: int, dim: int, batch: int) -> float:
    """FLOPs of causal attention, forward: each token looks at half of them, on average."""
    return 4.0 * batch * heads * dim * length * length / 2


def fit_products(shapes: Sequence[Shape], times: Sequence[float], launch: float | None = None) -> Speed:
    """Speed and knee of matrix products. `launch`: seconds known to be in each time; left out: found too, and
    let go."""
    flops = product_flops(shapes)
    columns = [flops, flops * np.array([1 / m + 1 / n + 1 / k for m, n, k in shapes])]
    return _speed(columns, flops, np.array(times), launch)


def fit_attention(
    lengths: Sequence[int], flops: Sequence[float], times: Sequence[float], launch: float = 0.0
) -> Speed:
    """Speed and knee of attention over the length of a sequence."""
    work = np.array(flops)
    return _speed([work, work / np.array(lengths)], work, np.array(times), launch)


UNSEEN = 0.02
"""Share of the largest call's time that may be due to its size without being seen."""


def fit_collective(kind: str, members: int, sizes: Sequence[int], times: Sequence[float]) -> Cost:
    """Latency and bus bandwidth of one kind of collective, from full tensors of so many bytes."""
    wire = wire_factor(kind, np.array(float(members))) * np.array(sizes, dtype=float)
    seconds = np.array(times)
    latency, inverse = relative_least_squares([np.ones_like(wire), wire], seconds)
    if (
        inverse == 0.0
    ):  # times that do not grow with the size: so quick that it does not show beside the latency
        inverse = UNSEEN * float((seconds / wire).min())
    return Cost(latency, 1 / inverse)


def speed_with_knee(shapes: Sequence[Shape], times: Sequence[float], knee: float, launch: float) -> float:
    """FLOP/s where the knee is known, from another precision: the median over the shapes."""
    slowed = product_flops(shapes) * (1 + knee * np.array([1 / m + 1 / n + 1 / k for m, n, k in shapes]))
    return float(np.median(slowed / _without(np.array(times), launch)))


def _speed(columns: list[Array], flops: Array, times: Array, launch: float | None) -> Speed:
    if launch is None:
        inverse, slope, _ = relative_least_squares([*columns, np.ones_like(flops)], times)
    else:
        inverse, slope = relative_least_squares(columns, _without(times, launch))
    if inverse == 0.0:  # all of it went to the knee: no side was long enough to see the speed itself
        best = float((flops / times).max())
        return Speed(best, slope * best)
    return Speed(1 / inverse, slope / inverse)


def _without(times: Array, launch: float) -> Array:
    """What the work itself took. Where starting it is most of the time, at least a tenth is the work's."""
    return np.maximum(times - launch, times / 10)


def relative_least_squares(columns: Sequence[Array], times: Array) -> list[float]:
    """Factors, none negative, for which the sum of the columns is nearest to the times in proportion to them;
    robust."""
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
    """Weighted least squares of `scaled @ x = 1` with x >= 0: of the few sets of columns that may be used,
    the best that may."""
    count = scaled.shape[1]
    root = np.sqrt(weights)
    best, least = np.zeros(count), float((weights).sum())
    for used in (list(some) for size in range(1, count + 1) for some in combinations(range(count), size)):
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
