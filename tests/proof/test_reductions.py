"""Over which devices the diagnosis of a proof takes the gradient of a weight to be summed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ranks.jobs import FAMILIES, Tables, job, start
from ranks.pool import Pool

from shardwise.mesh import Worker
from shardwise.proof.compare_layout import reductions


def of_the_embedding(worker: Worker, tables: Tables) -> dict[str, int] | None:
    training = start(worker, tables)
    named = dict(training.parallel.named_parameters())
    weight = named.get("embedding.weight")
    return None if weight is None else reductions(training, "embedding.weight", weight)


@pytest.mark.parametrize(("schedule", "stages", "sums"), [("1f1b", 4, {"pipeline": 2}), ("zbv", 2, {})])
def test_of_a_tied_weight_two_copies_are_added_however_many_stages_there_are(
    ranks: Callable[[int], Pool], corpus: str, schedule: str, stages: int, sums: dict[str, int]
) -> None:
    layout = {"pipeline": stages, "schedule": schedule}
    tables = job(corpus, model=FAMILIES["tied"], layout=layout, train={"global_batch": 8, "micro_batch": 2})
    found = ranks(stages).run(of_the_embedding, tables)
    assert [each for each in found if each is not None] == [sums] * (1 if schedule == "zbv" else 2)
