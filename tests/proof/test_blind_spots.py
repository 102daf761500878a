"""Faults that only some of what a layout may meet can show: rare ids, later chunks, documents, evaluation,
loads, dtypes of sums.

The text is one document of small letters, as a user's may be: none of this occurs in it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from ranks.jobs import LLAMA

from shardwise.config import Config, from_tables
from shardwise.proof import prove as proving
from shardwise.proof.prove import prove

MODEL = {**LLAMA, "heads": 4, "kv_heads": 2, "hidden": 24, "layers": 1}
EXPERTS = {**MODEL, "experts": 4, "experts_per_token": 2, "expert_ffn": 20}
RING = {"context": 2, "attention": "ring"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(random.Random(0).choices("abcdefgh ijkl mnop", k=6000)))
    return str(path)


def job(source: str, layout: dict[str, Any], model: dict[str, Any] = MODEL, reset: bool = False) -> Config:
    cache = str(Path(source).parent)
    return from_tables(
        {
            "model": model,
            "data": {"source": source, "cache": cache, "sequence_length": 24, "reset_attention": reset},
            "train": {"global_batch": 4, "micro_batch": 2, "learning_rate": 0.01, "clip": 0.5},
            "layout": layout,
        }
    )


@pytest.mark.parametrize(
    ("fault", "layout", "model", "reset", "says"),
    [
        ("upper_embeddings_one_row_off", {"tensor": 2}, MODEL, False,
        "first output that differs is that of embedding on"),
        ("first_row_of_upper_shards_lost", {"tensor": 2}, MODEL, False,
        "first output that differs is that of embedding on"),
        ("upper_one_hot_off_by_one", {"tensor": 2}, MODEL, False, "that of the output of norm on"),
        ("later_chunks_replace_the_gradient", {"data": 2}, MODEL, False, "head.weight"),
        ("held_out_loss_of_half_the_context", RING, MODEL, False,
        "the held-out loss: missing reduction over context"),
        ("loads_not_summed_over_data", {"data": 2}, EXPERTS, False,
        "load: missing reduction over data: blocks.0.feed_forward"),
        ("ring_sums_outputs_in_their_own_dtype", RING, MODEL, False,
        "addcmul_ in shardwise/parallel/blockwise.py merge_"),
        ("ring_sums_gradients_in_their_own_dtype", RING, MODEL, False,
        "add_ in shardwise/parallel/ring.py _add"),
        ("masked_blocks_sum_gradients_in_their_own_dtype", RING, MODEL, True,
        "add_ in shardwise/parallel/blockwise.py attend"),
        ("blocks_skipped_where_one_row_has_nothing_in_common", RING, MODEL, True,
        "that of blocks.0.attention.mixing"),
        ("documents_shifted_by_one", RING, MODEL, True, "that of blocks.0.attention.mixing"),
        ("ignored_targets_count_in_a_part", {"tensor": 2}, MODEL, True, "that of the output of norm on"),
    ],
)  # fmt: skip
def test_a_fault_is_found_where_it_is(
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    layout: dict[str, Any],
    model: dict[str, Any],
    reset: bool,
    says: str,
) -> None:
    monkeypatch.setattr(proving, "COMPARE", f"layout_faults:measured_{fault}")
    monkeypatch.setattr(proving, "COMPARE_TRACE", f"layout_faults:traced_{fault}")
    monkeypatch.setattr(proving, "COMPARE_SUMS", f"layout_faults:summed_{fault}")
    result = prove(job(text, layout, model, reset), steps=1)
    assert not result.verdict.passes
    said = "\n".join((*result.verdict.faults, *(result.diagnosis.sentences() if result.diagnosis else ())))
    assert says in said
