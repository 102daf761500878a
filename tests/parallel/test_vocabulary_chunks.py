"""Tensor devices with unequal parts of the vocabulary cut the loss into the same chunks: else one would wait
for sums of a chunk that the other does not have, forever.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
from ranks.jobs import FAMILIES, Tables, job, on_one_device, start
from ranks.pool import Pool
from ranks.truth import EXACT

from shardwise.mesh import Worker
from shardwise.plans.chunks import CHUNK_BYTES
from shardwise.train.steps import StepRecord, steps

VOCABULARY, VALUE_BYTES = 259, 8
BUDGET = {"cpu": 2 * (VOCABULARY // 2) * VALUE_BYTES}
"""The logits of two tokens of the smaller part, or of one token of the larger."""


@pytest.fixture
def tables(corpus: str) -> Tables:
    return job(
        corpus, model={**FAMILIES["llama"], "layers": 1}, train={"steps": 1}, layout={"data": 1, "tensor": 2}
    )


def test_a_step_ends_where_the_parts_would_fit_different_numbers_of_tokens(
    ranks: Callable[[int], Pool], tables: Tables
) -> None:
    larger, smaller = (
        BUDGET["cpu"] // (rows * VALUE_BYTES) for rows in (VOCABULARY - VOCABULARY // 2, VOCABULARY // 2)
    )
    assert larger < smaller, "by its own rows, each device would cut otherwise"
    truth = on_one_device(tables)
    for step in ranks(2).run(first_step_in_small_chunks, tables, seconds=60):
        assert step.loss == pytest.approx(truth.losses[0], rel=EXACT)
        assert step.gradient_norm == pytest.approx(truth.norms[0], rel=EXACT)


def first_step_in_small_chunks(worker: Worker, tables: Tables) -> StepRecord:
    with mock.patch.dict(CHUNK_BYTES, BUDGET):
        return next(steps(start(worker, tables)))
