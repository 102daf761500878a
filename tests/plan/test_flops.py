from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise.config import Model
from shardwise.models import Transformer, initialise
from shardwise.plan.flops import flops_per_token

SHAPES = {
    "llama": {"kv_heads": 2, "tied": True},
    "qwen": {"head_dim": 16, "qk_norm": True},  # head_dim is not hidden / heads
    "mixture": {"experts": 5, "experts_per_token": 2, "expert_ffn": 24, "shared_experts": 1, "balance_loss": 0.1},
    "gpt": {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True},
}


@pytest.mark.parametrize("family", SHAPES)
def test_the_formula_equals_what_torch_counts_once_the_causal_half_is_put_back(family: str) -> None:
    shape = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 48, "vocabulary": 50}
    model = Model(**{**shape, **SHAPES[family]})
    rows, length = 2, 16
    module = Transformer(model)
    initialise(module, seed=0)
    tokens = torch.randint(0, 50, (rows, length))
    # The math kernel computes the whole square of scores, by matmuls that the counter sees.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        module(tokens, tokens).backward()
    causal_half = 12 * model.layers * model.heads * model.head_dim * length / 2
    assert counter.get_total_flops() == rows * length * (flops_per_token(model, length) + causal_half)
