"""Candidates that share a layout or a grid are found again, in whatever order they are listed."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import AXES
from shardwise.cost.space import Space, concatenate, distinct, space_of

NAMES = [field.name for field in fields(Space)]
ROWS = st.lists(st.fixed_dictionaries({name: st.integers(0, 2) for name in NAMES}), max_size=40)


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2**40)), max_size=60))
def test_distinct_rows_are_numpys_and_lead_back_to_every_row(rows: list[tuple[int, int]]) -> None:
    columns = list(np.asarray(rows, dtype=np.int64).reshape(-1, 2).T)
    first, index = distinct(columns)
    assert len(first) == len(np.unique(np.asarray(rows).reshape(-1, 2), axis=0))
    for column in columns:
        assert np.array_equal(column[first][index], column)


@given(ROWS)
def test_layouts_and_grids_lead_back_to_every_candidate(rows: list[dict[str, int]]) -> None:
    space = space_of(rows)
    layouts, layout_of = space.layouts
    grids, grid_of = space.grids
    for name in set(NAMES) - {"micro_batch", "accumulation", "recompute"}:
        assert np.array_equal(getattr(layouts, name)[layout_of], getattr(space, name))
    for name in AXES:
        assert np.array_equal(getattr(grids, name)[grid_of], getattr(space, name))
    assert {*layouts.micro_batch, *layouts.accumulation} <= {1}
    assert not layouts.recompute.any()


def test_a_space_taken_apart_is_put_together_again() -> None:
    space = space_of([{"data": degree, "zero": degree % 4} for degree in range(1, 9)])
    parts = [space.take(slice(0, 3)), space.take(np.arange(3, 5)), space.take([5, 6, 7])]
    together = concatenate(parts)
    assert [together.row(index) for index in range(8)] == [space.row(index) for index in range(8)]
