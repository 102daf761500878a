"""Stretches of time against a clock that ticks: each tick is in a set of them or not."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from shardwise.observe.intervals import Interval, joined, length, without

intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda pair: (float(pair[0]), float(sum(pair))))
)


def ticks(stretches: list[Interval]) -> set[int]:
    return {tick for start, end in stretches for tick in range(int(start), int(end))}


@given(intervals)
def test_joined_stretches_are_the_same_time_without_overlap(some: list[Interval]) -> None:
    found = joined(some)
    assert ticks(found) == ticks(some)
    assert length(found) == len(ticks(some))
    assert all(before[1] < after[0] for before, after in pairwise(found))


@given(intervals, intervals)
def test_what_is_left_without_others_is_what_only_the_first_have(
    some: list[Interval], others: list[Interval]
) -> None:
    left = without(joined(some), joined(others))
    assert ticks(left) == ticks(some) - ticks(others)
    assert length(left) == len(ticks(left))
