"""Every schedule is correct for any size: the same work as any other, in an order that cannot hang."""

from __future__ import annotations

from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from shardwise.config import Layout
from shardwise.config.schedules import SCHEDULES
from shardwise.errors import ConfigError
from shardwise.plans import Action, Schedule, make_schedule
from shardwise.plans.schedule import check, problems_of

names = st.sampled_from(SCHEDULES)
ranks_ = st.integers(1, 8)
micro_batches_ = st.integers(1, 24)
per_rank_ = st.integers(1, 4)


def make(name: str, ranks: int, micro_batches: int, per_rank: int = 2) -> Schedule:
    return make_schedule(name, ranks, micro_batches, per_rank if name == "interleaved" else None)


def halves(schedule: Schedule) -> list[tuple[int, str, int]]:
    """The work as F, I and W, a whole backward being both halves."""
    actions = [action for row in schedule.actions for action in row]
    split = [(action, kind) for action in actions for kind in ("IW" if action.kind == "B" else action.kind)]
    return sorted((action.stage, kind, action.micro_batch) for action, kind in split)


def graph(schedule: Schedule) -> TopologicalSorter[tuple[int, str, int]]:
    """What must come before what, written down from the definition of a pipeline: the chain of a micro-batch
    through the stages and back, its weights after its gradient, and each rank's own order."""
    sorter: TopologicalSorter[tuple[int, str, int]] = TopologicalSorter()
    last = schedule.stages - 1
    for index in range(schedule.micro_batches):
        chain = [(stage, "F", index) for stage in range(last + 1)] + [
            (stage, "I", index) for stage in range(last, -1, -1)
        ]
        for before, after in pairwise(chain):
            sorter.add(after, before)
        for stage in range(last + 1):
            sorter.add((stage, "W", index), (stage, "I", index))
    for row in schedule.actions:
        order = [
            (action.stage, kind, action.micro_batch)
            for action in row
            for kind in ("IW" if action.kind == "B" else action.kind)
        ]
        for before, after in pairwise(order):
            sorter.add(after, before)
    return sorter


@settings(max_examples=150)
@given(names, ranks_, micro_batches_, per_rank_)
def test_every_schedule_does_the_same_work_and_cannot_hang(
    name: str, ranks: int, micro_batches: int, per_rank: int
) -> None:
    schedule = make(name, ranks, micro_batches, per_rank)
    assert halves(schedule) == sorted(
        (stage, kind, index)
        for stage in range(schedule.stages)
        for kind in "FIW"
        for index in range(micro_batches)
    )
    graph(schedule).prepare()  # raises CycleError for an order that hangs
    assert problems_of(schedule) == []


@settings(max_examples=40)
@given(names, st.integers(2, 8), st.integers(1, 20), st.integers(1, 3))
def test_torch_reads_every_action_and_can_place_the_messages(
    name: str, ranks: int, micro_batches: int, per_rank: int
) -> None:
    schedule = make(name, ranks, micro_batches, per_rank)
    rows = {
        rank: [torch_schedules._Action.from_str(str(action)) for action in row]
        for rank, row in enumerate(schedule.actions)
    }
    assert [str(action) for action in rows[0]] == [str(action) for action in schedule.actions[0]]
    with_messages = torch_schedules._add_send_recv(
        rows, lambda stage: schedule.rank_of_stage[stage], schedule.stages
    )
    crossings = sum(a != b for a, b in pairwise(schedule.rank_of_stage))
    kinds = [action.computation_type.value for row in with_messages.values() for action in row]
    for message in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
        assert kinds.count(message) == crossings * micro_batches


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_placed_in_a_loop_or_in_a_v(name: str) -> None:
    placed = make(name, 3, 4, 3).rank_of_stage
    assert placed == {
        "interleaved": (0, 1, 2) * 3,
        "zbv": (0, 1, 2, 2, 1, 0),
        "dualpipev": (0, 1, 2, 2, 1, 0),
    }.get(name, (0, 1, 2))


def test_an_action_is_written_as_torch_reads_it() -> None:
    assert [str(Action(3, kind, 0)) for kind in "FBIW"] == ["3F0", "3B0", "3I0", "3W0"]  # type: ignore[arg-type]


def test_1f1b_is_the_list_of_the_paper() -> None:
    rows = [" ".join(map(str, row)) for row in make("1f1b", 2, 3).actions]
    assert rows == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_the_first_stage_is_not_split_where_nothing_comes_between() -> None:
    assert {action.kind for action in make("zb1p", 4, 8).actions[0]} == {"F", "B"}


def test_the_job_file_accepts_exactly_these_schedules() -> None:
    assert [Layout(schedule=name).schedule for name in SCHEDULES] == list(SCHEDULES)  # type: ignore[call-arg, arg-type]


def with_rows(schedule: Schedule, *rows: tuple[Action, ...]) -> Schedule:
    return replace(schedule, actions=rows)


def test_a_missing_a_doubled_and_a_misplaced_action_are_found() -> None:
    good = make("1f1b", 2, 2)
    first, second = good.actions
    assert "stage 0, micro-batch 1" in problems_of(with_rows(good, first[:-1], second))[0]
    assert "needs F and B" in problems_of(with_rows(good, (*first, first[-1]), second))[0]
    assert "does not hold its stage" in problems_of(with_rows(good, (*first, second[-1]), second[:-1]))[0]


def test_a_deadlock_is_found_and_named() -> None:
    good = make("1f1b", 2, 2)
    first, second = good.actions
    turned = with_rows(good, (first[0], first[2], first[1], first[3]), (*second[2:], *second[:2]))
    assert problems_of(turned) == ["deadlock: rank 0 waits at 0B0, rank 1 waits at 1F1"]
    with pytest.raises(ValueError, match="deadlock"):
        check(with_rows(good, (first[2], *first[:2], first[3]), second))


def test_weights_before_inputs_are_refused() -> None:
    good = make("zb1p", 2, 1)
    swapped = tuple(sorted(good.actions[1], key=lambda action: "FWI".index(action.kind)))
    assert "rank 1 waits at 1W0" in problems_of(with_rows(good, good.actions[0], swapped))[0]


@pytest.mark.parametrize(
    ("name", "per_rank", "advice"),
    [
        ("zbv", 3, "exactly 2 a rank"),
        ("1f1b", 2, "'interleaved' for 2 stages"),
        ("interleaved", 0, "give 1 or more"),
    ],
)
def test_a_number_of_stages_that_a_schedule_cannot_have_is_refused(
    name: str, per_rank: int, advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        make_schedule(name, 2, 4, per_rank)


def test_an_unknown_schedule_and_an_empty_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="use one of gpipe, 1f1b"):
        make_schedule("pipedream", 2, 4)
    with pytest.raises(ConfigError, match="at least one rank and one micro-batch"):
        make_schedule("gpipe", 2, 0)
