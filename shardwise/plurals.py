"""Numbers with their nouns in the singular or the plural, and lists that are cut after a few items."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: 1 document, 2 documents, 1,024 micro-batches."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listed(items: Sequence[object], most: int = 3) -> str:
    """Return the first items of a list, and how many more there are: a, b, c and 2 more."""
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + rest
