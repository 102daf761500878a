"""Stretches of time, as (start, end) pairs in seconds, and how long sets of them last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in stretches that do not overlap, in order."""
    stretches: list[Interval] = []
    for start, end in sorted(intervals):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
        else:
            stretches.append((start, end))
    return stretches


def without(stretches: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of some stretches lies in none of the others. Both come as `joined` gives them."""
    left, first = [], 0
    for start, end in stretches:
        while first < len(others) and others[first][1] <= start:
            first += 1
        for other_start, other_end in others[first:]:
            if other_start >= end:
                break
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            left.append((start, end))
    return left


def length(stretches: Iterable[Interval]) -> float:
    """Seconds of stretches that do not overlap."""
    return sum(end - start for start, end in stretches)
