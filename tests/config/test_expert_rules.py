"""A mixture of experts that cannot be built is refused with what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import from_tables
from shardwise.errors import ConfigError

EIGHT = {"experts": 8, "experts_per_token": 2}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"experts": 8},
            "model.experts_per_token = 0: a token visits at least 1 and at most all model.experts = 8",
        ),
        ({"experts": 8, "experts_per_token": 9}, "model.experts_per_token = 9"),
        ({**EIGHT, "experts_per_token": 1}, "use model.normalise_routing = false"),
        (
            {**EIGHT, "experts_per_token": 1, "router": "sigmoid", "balance_loss": 0.1},
            "the router learns nothing from the loss",
        ),
        ({**EIGHT, "activation": "gelu"}, "use 'swiglu'"),
        ({**EIGHT, "bias": True}, "experts have no biases"),
        ({"shared_experts": 1}, "model.shared_experts = 1: has no effect without experts"),
        ({"balance_loss": 0.1}, "give model.experts"),
        ({"preset": "moe-tiny", "experts": 0}, "model.experts_per_token = 2: has no effect without experts"),
        ({**EIGHT, "router": "linear"}, "'softmax' or 'sigmoid'"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(model: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        from_tables({"model": model, "data": {"source": "text.txt"}})
    assert words in str(refusal.value)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_one_expert_a_token_is_taken_where_its_weight_depends_on_the_router(router: str) -> None:
    model = {**EIGHT, "experts_per_token": 1, "normalise_routing": False, "router": router}
    assert from_tables({"model": model, "data": {"source": "text.txt"}}).model.experts_per_token == 1


def test_the_width_of_an_expert_is_that_of_the_layer_unless_given() -> None:
    assert (
        from_tables({"model": {**EIGHT, "ffn": 70}, "data": {"source": "text.txt"}}).model.expert_width == 70
    )
    assert (
        from_tables({"model": {**EIGHT, "expert_ffn": 30}, "data": {"source": "text.txt"}}).model.expert_width
        == 30
    )
