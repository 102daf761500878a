"""What a proof says of a layout that compresses: exact without it, nothing lost and copies equal with it."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.jobs import LLAMA, job

from shardwise.config import from_tables
from shardwise.proof import prove as proving
from shardwise.proof.prove import ProofResult, prove

MODEL = {**LLAMA, "hidden": 64, "layers": 1}


def proof(corpus: str, layout: dict[str, Any]) -> ProofResult:
    return prove(
        from_tables(job(corpus, model=MODEL, layout={"data": 2, **layout}, train={"micro_batch": 1})), steps=1
    )


@pytest.mark.parametrize(
    "layout", [{"zero": 0, "compression": "int8"}, {"zero": 2, "compression": "topk(0.1)"}], ids=str
)
def test_what_is_sent_and_what_is_kept_is_the_gradient(corpus: str, layout: dict[str, Any]) -> None:
    result = proof(corpus, layout)
    assert result.verdict.passes
    (found,) = result.compressed
    assert found.lost is not None
    assert found.lost < 1e-9 < found.relative_error < 1
    assert f"gradients in {layout['compression']}" in found.sentence()


def test_weights_and_gradients_are_looked_at_one_at_a_time(corpus: str) -> None:
    layout = {"zero": 3, "weight_compression": "int8", "backward_shards": 1, "compression": "terngrad"}
    result = proof(corpus, layout)
    assert result.verdict.passes
    gradients, weights = result.compressed
    assert gradients.lost is weights.lost is None, "neither makes up for what it leaves out"
    assert 0 < weights.relative_error < 0.05 < gradients.relative_error
    assert "all devices computed with the same weights" in weights.sentence()
    assert "weights" not in gradients.sentence(), "they are sent as they are"


GRADIENTS = {"zero": 0, "compression": "int8"}
WEIGHTS = {"zero": 3, "weight_compression": "int8", "backward_shards": 1}


@pytest.mark.parametrize(
    ("fault", "layout", "says"),
    [
        ("residual_forgotten", GRADIENTS, "loses a part"),
        ("ranks_decode_differently", GRADIENTS, "ranks 0, 1 were given different gradients"),
        (
            "shards_stay_exact",
            WEIGHTS,
            "embedding.weight[(0, 259), (0, 64)]: ranks 0, 1 computed with different weights",
        ),
        ("backward_has_exact_weights", WEIGHTS, "ranks 0, 1 computed with different weights within one step"),
    ],
)
def test_a_fault_in_compression_is_found(
    corpus: str, monkeypatch: pytest.MonkeyPatch, fault: str, layout: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(proving, "COMPRESSED", f"compression_faults:{fault}")
    result = proof(corpus, layout)
    assert not result.verdict.passes
    assert says in "\n".join(result.verdict.faults)
    assert "the same" not in result.compressed[-1].sentence(), "nothing is claimed that does not hold"
