"""Numbers with their nouns, as people say them."""

from __future__ import annotations


def counted(number: float, noun: str) -> str:
    """So many of something: 1 document, 2 documents, 1,024 micro-batches."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
