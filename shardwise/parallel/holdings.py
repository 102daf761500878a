"""Which rank holds which slice of which parameter, as text that people read and compare.

A change of sharding changes memory, messages and checkpoints of every run, but no loss. Written as a table,
it is seen in a review. The table is short because most of it is alike: parameters of one shape that are split
in the same way share an entry, blocks that differ only in their number share a name, and ranks that hold the
same slice share a line.

    blocks.0-1.attention.key.weight (32, 64)
    blocks.0-1.attention.value.weight (32, 64)
      0:16    ranks 0-1
      16:32   ranks 2-3

A slice names the dims up to the last one that is split. tests/parallel/placements has the tables of a few
jobs and the program that writes them; in a run, gather each rank's `rank_slices` and take the shapes from
`config.parameters.parameter_shapes`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from shardwise.parallel.parallel_model import ParallelModel
from shardwise.parallel.placement import local_slices

Slices = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
"""Start and stop in each dim: slices that can be the key of a dict."""
Shape = Sequence[int]


def rank_slices(parallel: ParallelModel) -> dict[str, Slices]:
    """Return this rank's slice of each parameter that it holds a part of."""
    return {name: local_slices(parameter) for name, parameter in parallel.named_parameters()}


def describe(holdings: Mapping[int, Mapping[str, Slices]], shapes: Mapping[str, Shape]) -> list[str]:
    """Return the lines of the table, from each rank's slices and the whole shapes, in the order of the
    shapes."""
    alike: dict[tuple[tuple[int, ...], tuple[tuple[Bounds, str], ...]], list[str]] = defaultdict(list)
    for name, shape in shapes.items():
        alike[tuple(shape), tuple(_holders(name, holdings))].append(name)
    lines: list[str] = []
    for (shape, held_by), names in alike.items():
        lines += [f"{pattern} ({', '.join(map(str, shape))})" for pattern in _patterns(names)]
        rows = [(_format(bounds, shape), ranks) for bounds, ranks in held_by]
        width = max(len(slices) for slices, _ in rows)
        lines += [f"  {slices:<{width}}  ranks {ranks}" for slices, ranks in rows]
    return lines


def _holders(name: str, holdings: Mapping[int, Mapping[str, Slices]]) -> Iterator[tuple[Bounds, str]]:
    """Return every slice of a parameter that is held, and the ranks that hold it."""
    ranks: dict[Bounds, list[int]] = defaultdict(list)
    for rank, slices in sorted(holdings.items()):
        if name in slices:
            ranks[tuple((part.start, part.stop) for part in slices[name])].append(rank)
    assert ranks, f"no rank holds {name}"
    return ((bounds, _ranges(holders)) for bounds, holders in sorted(ranks.items()))


def _format(bounds: Bounds, shape: Shape) -> str:
    if any(start == stop for start, stop in bounds):
        return "nothing"
    split = [dim for dim, (start, stop) in enumerate(bounds) if (start, stop) != (0, shape[dim])]
    parts = [f"{start}:{stop}" if dim in split else ":" for dim, (start, stop) in enumerate(bounds)]
    return ", ".join(parts[: split[-1] + 1]) if split else "whole"


def _patterns(names: Iterable[str]) -> list[str]:
    """Return the names, where names that differ only in the number of their block become one."""
    blocks: dict[str, list[int]] = defaultdict(list)
    for name in names:
        number = re.search(r"\.(\d+)\.", name)
        blocks[re.sub(r"\.\d+\.", ".*.", name, count=1)] += [int(number[1])] if number else []
    return [pattern.replace("*", _ranges(numbers)) for pattern, numbers in blocks.items()]


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as ranges: 0-3,8 for 0, 1, 2, 3 and 8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
