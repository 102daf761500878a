"""What a proof says of a layout that compresses: exact without it, nothing lost and copies equal with it."""

from __future__ import annotations

from typing import Any

import pytest
from ranks.jobs import LLAMA, job

from shardwise.config import from_tables
from shardwise.verify import prove as proving
from shardwise.verify.prove import ProofResult, prove

MODEL = {**LLAMA, "hidden": 64, "layers": 1}


def proof(corpus: str, layout: dict[str, Any]) -> ProofResult:
    return prove(from_tables(job(corpus, model=MODEL, layout={"data": 2, **layout}, train={"micro_batch": 1})), steps=1)


@pytest.mark.parametrize("layout", [{"zero": 0, "compression": "int8"}, {"zero": 2, "compression": "topk(0.1)"}], ids=str)
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


@pytest.mark.parametrize(
    ("fault", "says"), [("residual_forgotten", "loses a part"), ("ranks_decode_differently", "different gradients")]
)
def test_a_fault_in_compression_is_found(corpus: str, monkeypatch: pytest.MonkeyPatch, fault: str, says: str) -> None:
    monkeypatch.setattr(proving, "COMPRESSED", f"compression_faults:{fault}")
    result = proof(corpus, {"zero": 0, "compression": "int8"})
    assert not result.verdict.passes
    assert says in "\n".join(result.verdict.faults)
