"""Small drawings made of text: a sparkline, a bar, and a line plot with axes.

A braille character is a grid of 2 x 4 dots, so a plot of 60 x 12 characters has 120 x 48 points. That is
enough to see the shape of a loss curve in any terminal, over any ssh connection. If the output cannot
represent such characters, plain ASCII is used instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_LEVELS = {False: "▁▂▃▄▅▆▇█", True: "_.-~=*#@"}
_EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of each dot of a braille character, by row and column."""

Point = tuple[float, float]


class Series:
    """A growing series that is kept at a few hundred values.

    When it is full, neighbours are averaged, and each value then covers twice as many steps. Its shape stays
    the same, and its cost does not grow with the run.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.values: list[float] = []
        self._capacity, self._stride = capacity, 1
        self._waiting: list[float] = []

    def add(self, value: float) -> None:
        """Add the next value of the series."""
        self._waiting.append(value)
        if len(self._waiting) == self._stride:
            self.values.append(sum(self._waiting) / self._stride)
            self._waiting = []
        if len(self.values) == self._capacity:
            self.values = [(a + b) / 2 for a, b in zip(self.values[::2], self.values[1::2], strict=True)]
            self._stride *= 2


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Return the shape of a series as one line of at most `width` characters. A non-finite value is a gap."""
    means = _binned(values, width)
    finite = [value for value in means if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    levels = _LEVELS[ascii_only]
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(levels[round((value - low) * scale)] if math.isfinite(value) else " " for value in means)


def bar(fraction: float, width: int, ascii_only: bool = False) -> str:
    """Return a horizontal bar, exact to an eighth of a character."""
    eighths = 0 if math.isnan(fraction) else round(min(max(fraction, 0.0), 1.0) * width * 8)
    if ascii_only:
        return "#" * round(eighths / 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8]


def line_plot(
    points: Sequence[Point],
    marks: Sequence[Point] = (),
    width: int = 60,
    height: int = 12,
    ascii_only: bool = False,
) -> list[str]:
    """Return a curve through the points (ascending in x) with axes. Marks are drawn over it as single
    characters.
    """
    points, marks = _finite(points), _finite(marks)
    if not points:
        return []
    heights = [y for _, y in (*points, *marks)]
    low, high = _padded(min(heights), max(heights))
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1)
    columns, rows = (width, height) if ascii_only else (2 * width, 4 * height)
    xs = np.linspace(left, right, columns)
    curve = np.interp(xs, [x for x, _ in points], [y for _, y in points])
    # Clipping is needed because tiny numbers may be interpolated beyond their ends.
    dots = _connected(np.clip((high - curve) / (high - low), 0, 1) * (rows - 1))
    cells = _ascii_cells(dots, width, height) if ascii_only else _braille_cells(dots, width, height)
    for x, y in marks:
        column = round(min(max((x - left) / (right - left), 0), 1) * (width - 1))
        cells[round((high - y) / (high - low) * (height - 1))][column] = "o" if ascii_only else "●"
    return _framed(cells, (low, high), (left, right), ascii_only)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point[1])]


def _binned(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def _padded(low: float, high: float) -> Point:
    """Return a range that is not empty, even for a flat series."""
    return (low, high) if high > low else (low - max(abs(low), 1e-9) * 0.5, high + max(abs(high), 1e-9) * 0.5)


def _connected(rows: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> list[range]:
    """Return, for each column of dots, the rows to fill, up to the column before, so that a curve has no
    gaps.
    """
    spans, before = [], round(float(rows[0]))
    for value in rows:
        row = round(float(value))
        low, high = (row, row) if row == before else (row, before - 1) if row < before else (before + 1, row)
        spans.append(range(low, high + 1))
        before = row
    return spans


def _braille_cells(dots: list[range], width: int, height: int) -> list[list[str]]:
    bits = [[0] * width for _ in range(height)]
    for x, span in enumerate(dots):
        for y in span:
            bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return [[chr(0x2800 + cell) if cell else " " for cell in row] for row in bits]


def _ascii_cells(dots: list[range], width: int, height: int) -> list[list[str]]:
    return [["*" if y in dots[x] else " " for x in range(width)] for y in range(height)]


def _framed(cells: list[list[str]], vertical: Point, horizontal: Point, ascii_only: bool) -> list[str]:
    tick, side, corner, floor = ("+", "|", "+", "-") if ascii_only else ("┤", "│", "└", "─")
    low, high = vertical
    height, width = len(cells), len(cells[0])
    label = {
        row: f"{high - (high - low) * row / (height - 1):.4g}" for row in (0, (height - 1) // 2, height - 1)
    }
    margin = max(map(len, label.values()))
    lines = [
        f"{label.get(row, ''):>{margin}} {tick if row in label else side}{''.join(line)}"
        for row, line in enumerate(cells)
    ]
    start, middle, end = (
        f"{horizontal[0] + (horizontal[1] - horizontal[0]) * part:.0f}" for part in (0, 0.5, 1)
    )
    under = f"{start}{middle:^{max(width - len(start) - len(end), len(middle))}}{end}"
    return [*lines, f"{'':>{margin}} {corner}{floor * width}", f"{'':>{margin}}  {under}"]
