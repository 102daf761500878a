"""The examples of `make test` do not depend on chance; those of `make test-full` do, so that new ones are
tried every time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st


def drawn_with(profile: str) -> list[int]:
    """The examples that a property is tried with."""
    examples: list[int] = []

    @settings(settings.get_profile(profile), database=None)
    @given(st.integers(0, 2**60))
    def record(number: int) -> None:
        examples.append(number)

    record()
    return examples


def test_the_quick_examples_are_the_same_every_time() -> None:
    assert drawn_with("quick") == drawn_with("quick")


def test_the_full_examples_are_others_every_time() -> None:
    assert drawn_with("patient") != drawn_with("patient")
