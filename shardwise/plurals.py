"""Numbers with their nouns in the singular or the plural."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """Return a number with its noun: 1 document, 2 documents, 1,024 micro-batches."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
