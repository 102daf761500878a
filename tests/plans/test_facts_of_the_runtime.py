"""What is said once of the runtime holds for one layout as for arrays of them: the same functions, asked both
ways."""

from __future__ import annotations

import math
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import RANK_AXES, Layout, borrowed_devices, can_borrow
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.space import Space, space_of
from shardwise.plans.chunks import CHUNK_BYTES, chunk_tokens, largest_part
from shardwise.plans.engine import engine_of, shares_weights
from shardwise.plans.grid import JOINED_AXES, devices, grid_dims, members

FEW = st.sampled_from([1, 1, 2, 3, 4])
ROWS = st.fixed_dictionaries(
    {
        **dict.fromkeys(RANK_AXES, FEW),
        "expert": st.sampled_from([1, 2, 4, 6, 8]),
        "zero": st.integers(0, 3),
        "schedule": st.integers(0, len(SCHEDULES) - 1),
        "offload": st.integers(0, 1),
        "accumulation": st.integers(1, 3),
    }
).filter(lambda row: can_borrow(layout_of(row)))


def layout_of(row: dict[str, int]) -> Layout:
    axes: Any = {axis: row[axis] for axis in (*RANK_AXES, "expert", "zero")}
    return Layout(**axes, schedule=SCHEDULES[row["schedule"]], offload=bool(row["offload"]))  # type: ignore[arg-type]


def both(rows: list[dict[str, int]]) -> tuple[list[Layout], Space]:
    return [layout_of(row) for row in rows], space_of(rows)


@settings(max_examples=50)
@given(rows=st.lists(ROWS, min_size=1, max_size=20), experts=st.sampled_from([0, 24]))
def test_the_engine_of_each_layout_is_that_of_the_array(rows: list[dict[str, int]], experts: int) -> None:
    layouts, space = both(rows)
    together = engine_of(space, experts)
    for place, (row, layout) in enumerate(zip(rows, layouts, strict=True)):
        engine = engine_of(layout, experts)
        for name in (
            "zero",
            "single",
            "replicated",
            "sharded",
            "splits_backward",
            "keeps_gathered",
            "reduces_each",
        ):
            assert getattr(engine, name) == getattr(together, name)[place], name
        whole = together.keeps_whole_gradients(space.accumulation)[place]
        assert engine.keeps_whole_gradients(row["accumulation"]) == whole
        assert engine.single + engine.replicated + engine.sharded == 1
        assert shares_weights(layout, experts) == shares_weights(space, experts)[place]


@settings(max_examples=50)
@given(rows=st.lists(ROWS, min_size=1, max_size=20))
def test_the_grid_of_each_layout_is_that_of_the_array(rows: list[dict[str, int]]) -> None:
    layouts, space = both(rows)
    for axis in (*RANK_AXES, *JOINED_AXES):
        assert [devices(axis, layout) for layout in layouts] == devices(axis, space).tolist()
        assert [prod(members(layout, axis).values()) for layout in layouts] == devices(axis, space).tolist()
    for axis, taken in borrowed_devices(space).items():
        assert [borrowed_devices(layout)[axis] for layout in layouts] == taken.tolist()
    for layout in layouts:
        assert prod(grid_dims(layout).values()) == layout.world
        assert (
            devices("expert", layout) * devices("expert_data", layout)
            == layout.data * layout.context * layout.tensor
        )


@pytest.mark.parametrize(
    ("layout", "experts", "engine"),
    [
        (Layout(data=1), 0, "single"),
        (Layout(data=1, tensor=2, pipeline=2), 0, "single"),
        (Layout(data=1, tensor=2, expert=2), 4, "single"),
        (Layout(data=1, tensor=2), 4, "sharded"),  # both devices have all experts
        (Layout(data=1, zero=3), 0, "single"),
        (Layout(data=1, zero=3, offload=True), 0, "sharded"),
        (Layout(data=2), 0, "replicated"),
        (Layout(data=1, context=2, zero=0), 0, "replicated"),
        (Layout(data=1, replica=2, zero=3), 0, "replicated"),  # nobody to shard with
        (Layout(data=2, tensor=2), 0, "sharded"),
        (Layout(data=2), 4, "sharded"),
        (Layout(data=2, zero=1), 0, "sharded"),
    ],
)
def test_known_layouts_have_the_engine_that_the_table_gives_them(
    layout: Layout, experts: int, engine: str
) -> None:
    found = engine_of(layout, experts)
    assert [name for name in ("single", "replicated", "sharded") if getattr(found, name)] == [engine]


@given(tokens=st.integers(1, 10**5), vocabulary=st.integers(1, 10**6), width=st.sampled_from([2, 4, 8]))
def test_chunks_of_the_loss_are_the_same_for_numbers_and_arrays(
    tokens: int, vocabulary: int, width: int
) -> None:
    alone = chunk_tokens(tokens, vocabulary, width, "cpu")
    assert chunk_tokens(np.array([tokens]), np.array([vocabulary]), width, "cpu").tolist() == [alone]
    assert alone == 1 or alone * vocabulary * width <= CHUNK_BYTES["cpu"]


@given(tokens=st.integers(1, 10**5), vocabulary=st.integers(1, 10**6), devices=st.integers(1, 64))
def test_tensor_devices_cut_the_loss_by_the_largest_of_their_parts_so_that_all_have_as_many_chunks(
    tokens: int, vocabulary: int, devices: int
) -> None:
    share = math.ceil(vocabulary / devices)
    parts = [min(vocabulary, share * (rank + 1)) - min(vocabulary, share * rank) for rank in range(devices)]
    assert (sum(parts), max(parts)) == (vocabulary, largest_part(vocabulary, devices))
    chunk = chunk_tokens(tokens, largest_part(vocabulary, devices), 2, "cpu")
    assert all(chunk == 1 or chunk * part * 2 <= CHUNK_BYTES["cpu"] for part in parts)


def test_parts_that_cut_by_their_own_rows_would_have_different_numbers_of_chunks() -> None:
    """259 ids on two devices: the case that once waited forever."""
    tokens, budget = 48, CHUNK_BYTES["cpu"]
    width = budget // (2 * 129)  # the budget is the logits of two tokens of the smaller part
    chunks = {math.ceil(tokens / chunk_tokens(tokens, rows, width, "cpu")) for rows in (130, 129)}
    assert len(chunks) == 2
