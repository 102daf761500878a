"""The table of facts about schedules is what their lists of actions do."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.config import Layout, splits_backward, stages_per_rank
from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES, is_in_a_v, is_interleaved
from shardwise.cost.space import space_of
from shardwise.plans import Schedule, make_schedule, peak_in_flight

SIZES = [(ranks, micro_batches) for ranks in (2, 3, 4, 6) for micro_batches in (1, 2, 5, 24)]


def made(name: str, ranks: int, micro_batches: int, stages: int | None = None) -> Schedule:
    return make_schedule(name, ranks, micro_batches, stages)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_the_schedules_that_split_backward_are_those_with_actions_for_weights_alone(
    name: str, ranks: int, micro_batches: int
) -> None:
    kinds = {action.kind for row in made(name, ranks, micro_batches).actions for action in row}
    assert ("W" in kinds) == SCHEDULE_FACTS[name].splits_backward


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_no_rank_keeps_more_activations_than_the_table_says_and_the_first_keeps_so_many(
    name: str, ranks: int, micro_batches: int, stages: int
) -> None:
    """The table takes the rounds of an interleaved schedule for as long as there are ranks."""
    micro_batches = max(1, micro_batches // ranks) * ranks
    facts = SCHEDULE_FACTS[name]
    chosen = stages if facts.is_interleaved else facts.stages_per_rank
    first, *_, last = peak_in_flight(made(name, ranks, micro_batches, chosen))
    sizes = micro_batches, ranks, chosen
    allowed = [
        min(micro_batches, held(*sizes)) * chosen for held in (facts.held_by_first, facts.held_by_last)
    ]
    assert first <= allowed[0]
    assert last <= allowed[1]
    if micro_batches >= 4 * ranks:
        assert first == pytest.approx(allowed[0])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_micro_batches_whose_backward_is_halved_in_the_last_stage_of_the_first_rank(
    name: str, ranks: int, micro_batches: int
) -> None:
    schedule, facts = made(name, ranks, micro_batches), SCHEDULE_FACTS[name]
    halved = [row for row in schedule.actions[0] if (row.stage, row.kind) == (schedule.stages - 1, "W")]
    most = facts.halved_on_first(micro_batches, ranks, facts.stages_per_rank)
    assert len(halved) == min(micro_batches, most)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_layout_and_a_candidate_have_the_same_facts(name: str) -> None:
    for ranks in (1, 2):
        for asked in (1, 2, 3):
            layout = Layout(pipeline=ranks, data=1, schedule=name, stages_per_rank=asked)  # type: ignore[arg-type]
            row = {"pipeline": ranks, "schedule": SCHEDULES.index(name), "stages_per_rank": asked}
            for fact in (splits_backward, is_in_a_v, is_interleaved, stages_per_rank):
                assert np.array_equal(fact(space_of([row])), [fact(layout)])
            stages = made(name, 2, 4, asked if SCHEDULE_FACTS[name].is_interleaved else None).stages
            assert stages_per_rank(layout) == (stages // 2 if ranks > 1 else 1)
