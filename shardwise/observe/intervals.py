"""Intervals of time as (start, end) pairs in seconds, and operations on sets of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not overlap, in order."""
    stretches: list[Interval] = []
    for start, end in sorted(intervals):
        if stretches and start <= stretches[-1][1]:
            stretches[-1] = stretches[-1][0], max(end, stretches[-1][1])
        else:
            stretches.append((start, end))
    return stretches


def without(stretches: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of some intervals that are in none of the others. Both must come from `joined`."""
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
    """Return the total seconds of intervals that do not overlap."""
    return sum(end - start for start, end in stretches)
