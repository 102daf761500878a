"""Stages are cut so that the most expensive one is as cheap as it can be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import PRESETS, Model
from shardwise.errors import ConfigError
from shardwise.plans import block_costs, cut, flops_per_token, stage_blocks, stage_costs


def every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(stop - start for start, stop in pairwise((0, *inner, blocks)))
        for inner in combinations(range(1, blocks), stages - 1)
    ]


def costs_of(counts: tuple[int, ...], costs: list[int], first: int, last: int) -> list[int]:
    remaining, sums = list(costs), []
    for blocks in counts:
        sums.append(sum(remaining[:blocks]))
        del remaining[:blocks]
    sums[0] += first
    sums[-1] += last
    return sums


@given(st.lists(st.integers(1, 9), min_size=1, max_size=9), st.data(), st.integers(0, 20), st.integers(0, 20))
def test_no_other_cut_has_a_cheaper_slowest_stage_or_is_as_good_and_more_even(
    costs: list[int], data: st.DataObject, first: int, last: int
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    counts = cut(costs, stages, first, last)

    def quality(candidate: tuple[int, ...]) -> tuple[int, int]:
        sums = costs_of(candidate, costs, first, last)
        return max(sums), sum(cost * cost for cost in sums)

    assert counts in every_cut(len(costs), stages)
    assert quality(counts) == min(map(quality, every_cut(len(costs), stages)))
    assert list(stage_costs(counts, costs, first, last)) == costs_of(counts, costs, first, last)


@pytest.mark.parametrize(
    ("blocks", "stages", "first", "last", "expected"),
    [
        (8, 4, 0, 0, (2, 2, 2, 2)),
        (5, 2, 0, 0, (2, 3)),  # a tie: fewer where more activations are kept
        (32, 4, 0, 4, (9, 9, 9, 5)),
        (10, 4, 1, 2, (2, 3, 3, 2)),
        (3, 3, 5, 5, (1, 1, 1)),
    ],
)
def test_known_cuts(blocks: int, stages: int, first: float, last: float, expected: tuple[int, ...]) -> None:
    assert cut([1.0] * blocks, stages, first, last) == expected


def test_more_stages_than_blocks_are_refused_with_the_most_that_work() -> None:
    with pytest.raises(ConfigError, match=r"5 pipeline stages for 4 blocks.*use at most 4"):
        cut([1.0] * 4, 5)


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2", "qwen3-0.6b", "bytes-400k"])
def test_costs_add_up_to_the_flops_of_the_model(preset: str) -> None:
    model = Model(**PRESETS[preset])
    costs, first, last = block_costs(model, 1024)
    assert len(costs) == model.layers
    assert sum(costs) + last == pytest.approx(flops_per_token(model, 1024))
    assert 0 < first < costs[0]


def test_the_head_takes_blocks_off_the_last_stage() -> None:
    """llama3-8b: a block has 218 million matrix weights, the head 525 million."""
    model = Model(**PRESETS["llama3-8b"])
    costs, _, last = block_costs(model, 8)
    assert last / costs[0] == pytest.approx(
        128256 * 4096 / (4096 * (4096 * 2 + 1024 * 2 + 14336 * 3)), rel=1e-3
    )
    assert stage_blocks(model, 8192, 4)[-1] == 6
    assert sum(stage_blocks(model, 8192, 4)) == 32


def test_counts_by_hand_are_kept() -> None:
    assert stage_blocks(Model(layers=6), 128, 3, (1, 4, 1)) == (1, 4, 1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("counts", "problem"),
    [
        ((3, 3), "has 2 numbers, but the pipeline has 3 stages"),
        ((2, 2, 3), "sums to 7, but the model has 6 blocks"),
        ((6, 0, 0), "at least one block"),
    ],
)
def test_counts_by_hand_that_do_not_fit_are_refused_with_ones_that_do(
    counts: tuple[int, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        stage_blocks(Model(layers=6), 128, 3, counts)  # type: ignore[call-arg]
    assert "cut by cost it would be [2, 2, 2]" in str(caught.value)
