"""Few rows of a large table that have every pair of its choices.

What goes wrong in a combination nearly always goes wrong with two of its choices, whatever the others are. A table of all triples
and quadruples took hours, and found no more.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations
from typing import Any, TypeVar

Choices = TypeVar("Choices", bound=tuple[Any, ...])


def every_pair(rows: Iterable[Choices]) -> list[Choices]:
    """Rows, in their order, that have between them every pair of choices that is in any row."""
    table = list(rows)
    order = list(range(len(table)))
    random.Random(0).shuffle(order)  # neighbours differ in little
    seen: set[tuple[int, str, int, str]] = set()
    kept = []
    for index in order:
        choices = [(place, repr(choice)) for place, choice in enumerate(table[index])]
        pairs = {(*one, *other) for one, other in combinations(choices, 2)}
        if not pairs <= seen:
            seen |= pairs
            kept.append(index)
    return [table[index] for index in sorted(kept)]
