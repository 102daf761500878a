"""What the header of a run says of what it really does."""

from __future__ import annotations

import pytest
from ranks.jobs import ALONE, job, start

from shardwise.models import products
from shardwise.train.describe import describe_run

EMULATED = "bfloat16 computation (products in float32, rounded: this processor has none in bfloat16)"


@pytest.mark.parametrize(
    ("precision", "native", "says"),
    [
        ("bfloat16", False, EMULATED),
        ("bfloat16", True, "bfloat16 computation, "),
        ("float32", False, "float32 computation, "),
    ],
)
def test_products_in_another_dtype_than_asked_for_are_said(
    corpus: str, monkeypatch: pytest.MonkeyPatch, precision: str, native: bool, says: str
) -> None:
    monkeypatch.setattr(products, "CPU_MULTIPLIES_BFLOAT16", native)
    monkeypatch.setattr("shardwise.mesh.devices.local_gpus", lambda: 0)
    training = start(ALONE, job(corpus, train={"precision": precision}))
    assert describe_run(training)["precision"].startswith(says)
