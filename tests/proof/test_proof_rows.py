"""What the rows of a proof reach, and that they are the same on every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ranks.jobs import LLAMA

from shardwise.config import from_tables
from shardwise.data import Dataset
from shardwise.data.dataset import IGNORED
from shardwise.proof.proof_job import ProofJob, prepare_proof
from shardwise.proof.proof_rows import ProofDataset, what_is_reached


def proof_of(source: str, layout: dict[str, Any], reset: bool = True, **train: Any) -> ProofJob:
    job = {
        "model": {**LLAMA, "heads": 4, "kv_heads": 2},
        "data": {"source": source, "sequence_length": 24, "reset_attention": reset},
        "train": {"global_batch": 6, "micro_batch": 1, **train},
        "layout": layout,
    }
    return prepare_proof(from_tables(job), 3, "float64")[0]


def test_three_steps_reach_every_shard_position_chunk_and_kind_of_document(corpus: str) -> None:
    proof = proof_of(corpus, {"tensor": 4, "data": 1})
    reached = what_is_reached(proof, ProofDataset.of(proof), {})
    assert (reached.vocabulary_parts, reached.positions) == ((4, 4), (24, 24))
    assert (reached.documents, reached.chunks) == ((1, 24), 3)
    assert reached.ignored > 0
    assert "4 of 4 vocabulary shards" in reached.sentence()


def test_ranks_of_any_layout_read_the_rows_of_one_device(corpus: str) -> None:
    proof = proof_of(corpus, {"tensor": 2, "data": 3})
    whole = ProofDataset.of(proof.on_one_device("float64")).sequences(6, 6)
    parts = [ProofDataset.of(proof).sequences(6 + start, 2) for start in (0, 2, 4)]
    for name in ("inputs", "targets", "documents"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def test_every_other_row_is_the_jobs_own_and_no_two_are_alike(corpus: str) -> None:
    proof = proof_of(corpus, {"tensor": 2, "data": 1})
    made, own = ProofDataset.of(proof), Dataset.open(proof.config.data, proof.config.train.seed)
    for step in range(2):
        mixed, plain = made.sequences(6 * step, 6), own.sequences(6 * step, 6)
        assert [bool((mixed.inputs[row] == plain.inputs[row]).all()) for row in range(6)] == [
            (step + row) % 2 == 1 for row in range(6)
        ]
        assert len({row.tobytes() for row in mixed.inputs}) == 6
        assert all((row != IGNORED).any() for row in mixed.targets)


@pytest.mark.parametrize("ids", [1, 5, 130])
def test_no_id_is_beyond_what_a_module_looks_up(corpus: str, ids: int) -> None:
    proof = replace(proof_of(corpus, {"tensor": 2, "data": 1}, reset=False), ids=ids)
    dataset = ProofDataset.of(proof)
    rows = dataset.sequences(0, 6)
    assert rows.documents is None
    assert (
        max(rows.inputs[::2].max(), rows.targets[::2].max(), dataset.held_out_rows(0, 1).targets.max())
        == ids - 1
    )
