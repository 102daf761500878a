"""What the header of a run says of what it really does."""

from __future__ import annotations

import pytest
from ranks.jobs import ALONE, LLAMA, job, start

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


@pytest.mark.parametrize(
    ("window", "softcap", "says"), [(8, None, True), (4096, None, False), (None, 30.0, False)]
)
def test_windows_are_named_only_where_they_hide_tokens(
    corpus: str, window: int | None, softcap: float | None, says: bool
) -> None:
    model = {**LLAMA, "window": window, "attention_softcap": softcap}
    training = start(
        ALONE, job(corpus, model={key: value for key, value in model.items() if value is not None})
    )
    assert ("windows of 8" in describe_run(training)["attention"]) == says
    assert ("windows of" in describe_run(training)["attention"]) == says
