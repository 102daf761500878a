"""Ranks that another launcher started compare what each has planned, before the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from ranks.jobs import Tables, job, start
from ranks.pool import Pool

from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.train.run import _check_same_job


@pytest.mark.parametrize(
    ("other_micro_batch", "says"), [(False, None), (True, "was started with another job than rank 0")]
)
def test_ranks_go_on_if_they_decided_the_same_for_whatever_reasons(
    ranks: Callable[[int], Pool], corpus: str, other_micro_batch: bool, says: str | None
) -> None:
    """Nodes whose memory differs by a little give other figures in their reasons."""
    tables = job(corpus, layout={"data": 2}, train={"micro_batch": 2})
    first, second = ranks(2).run(compare, tables, other_micro_batch)
    assert first is None
    assert second == says or says in second


def compare(worker: Worker, tables: Tables, other_micro_batch: bool) -> str | None:
    training = start(worker, tables)
    if worker.rank == 1:
        reasons = {
            name: replace(decision, why="of the 9.6 GiB here")
            for name, decision in training.plan.decisions.items()
        }
        training.plan = replace(training.plan, decisions=reasons, micro_batch=1 if other_micro_batch else 2)
    try:
        _check_same_job(training)
    except UserError as error:
        return str(error)
    return None
