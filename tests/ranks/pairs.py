"""Few rows of a large table that have every pair of its choices.

What goes wrong in a combination mostly goes wrong with two of its choices, whatever the others are. All
combinations took hours, so that nobody saw them through; a fault that needs three choices at once is not
looked for here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any, TypeVar

Choices = TypeVar("Choices", bound=tuple[Any, ...])


def every_pair(rows: Iterable[Choices]) -> list[Choices]:
    """Rows, in their order, that have between them every pair of choices that is in any row."""
    table = list(rows)
    missing = [{(*one, *other) for one, other in combinations(_choices(row), 2)} for row in table]
    kept = []
    while any(missing):
        best = max(range(len(table)), key=lambda index: len(missing[index]))
        found = set(missing[best])
        missing = [pairs - found for pairs in missing]
        kept.append(best)
    return [table[index] for index in sorted(kept)]


def _choices(row: tuple[Any, ...]) -> list[tuple[int, str]]:
    return [(place, repr(choice)) for place, choice in enumerate(row)]
