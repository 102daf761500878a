"""Each rule of a layout answers for arrays of candidates as it does for one layout."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config import AXES, SCHEDULES, Config, Layout, from_tables
from shardwise.config.layout_rules import BATCH, RULES, JobTables
from shardwise.cost.space import RECOMPUTE, space_of

FEW = st.sampled_from([1, 1, 2, 3, 4])
ROWS = st.fixed_dictionaries(
    {
        **dict.fromkeys(AXES, FEW),
        "schedule": st.integers(0, len(SCHEDULES) - 1),
        "recompute": st.integers(0, len(RECOMPUTE) - 1),
        "ring": st.integers(0, 1),
    }
)


@st.composite
def jobs(draw: st.DrawFn) -> Config:
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 3), (12, 4)]))
    model: dict[str, Any] = {"layers": draw(st.sampled_from([1, 3, 4, 8])), "heads": heads}
    model |= {"kv_heads": kv_heads, "hidden": 4 * heads, "vocabulary": draw(st.sampled_from([3, 64]))}
    model |= draw(st.sampled_from([{}, {"experts": 4, "experts_per_token": 2}, {"window": 8}]))
    train = {"global_batch": draw(st.sampled_from([6, 8])), "micro_batch": draw(st.sampled_from([1, 3]))}
    train["driver"] = draw(st.sampled_from(["synchronous", "by-speed"]))
    data = {"source": "text.txt", "sequence_length": draw(st.sampled_from([12, 16, 18]))}
    return from_tables({"model": model, "data": data, "train": train})


@settings(max_examples=60)
@given(config=jobs(), rows=st.lists(ROWS, min_size=1, max_size=12), nearby=st.sampled_from([None, 2, 3]))
def test_each_rule_refuses_the_same_layouts_one_by_one_and_all_at_once(
    config: Config, rows: list[dict[str, int]], nearby: int | None
) -> None:
    space = space_of(rows)
    asked = Layout(backward_shards=nearby)  # type: ignore[call-arg]
    together = JobTables(config.model, config.data, config.train, asked)
    for rule in (rule for rules in (*RULES, BATCH) for rule in rules):
        answers = np.broadcast_to(rule.is_broken(together, space), len(space))
        for place, row in enumerate(rows):
            layout = space.layout(place).model_copy(update={"backward_shards": nearby})
            train = config.train.model_copy(update={"recompute": RECOMPUTE[row["recompute"]]})
            alone = JobTables(config.model, config.data, train, layout)
            assert bool(rule.is_broken(alone, layout)) == answers[place], rule
