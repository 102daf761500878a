"""How many examples a property is tried with: all of them in `make test-full`, half of them in `make
test`."""

from __future__ import annotations

from hypothesis import settings

ALL = 100
"""What the profile of all tests says; conftest.py takes another one where tests marked `full` are left
out."""


def examples(count: int) -> int:
    return max(1, count * settings().max_examples // ALL)


def at_least(count: int, quickly: int) -> int:
    """So many in `make test-full`, for what must have been tried so often; in `make test` a few of them."""
    return count if settings().max_examples >= ALL else quickly
