from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from shardwise.config import Model
from shardwise.models import Transformer, initialise
from shardwise.plans.flops import flops_per_token, matmul_weights

SHAPES = {
    "llama": {"kv_heads": 2, "tied": True},
    "qwen": {"head_dim": 16, "qk_norm": True},  # head_dim is not hidden / heads
    "mixture": {"experts": 5, "experts_per_token": 2, "expert_ffn": 24, "shared_experts": 1,
    "balance_loss": 0.1},
    "mistral": {"window": 16},  # as long as the sequence
    "gemma": {"norm": "rms+1", "post_norms": True, "activation": "geglu", "attention_softcap": 5.0,
    "logit_softcap": 5.0,
              "window": 16, "window_layers": "even", "query_scalar": 4.0, "scaled_embedding": True,
              "tied": True},
    "gpt": {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True},
}  # fmt: skip


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


def test_a_window_counts_the_tokens_that_are_seen() -> None:
    """Against a sum over every token of a long sequence; the formula is the limit for long ones, as the
    causal half is."""
    length, window = 4096, 512
    shape = {
        "layers": 3,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "ffn": 48,
        "vocabulary": 50,
        "max_positions": length,
    }
    for layers, windowed in (("all", 3), ("even", 2)):
        model = Model(**shape, window=window, window_layers=layers)
        seen = windowed * sum(min(token, window) for token in range(length)) / length
        seen += (3 - windowed) * sum(range(length)) / length
        attention = flops_per_token(model, length) - 6 * matmul_weights(model)
        assert attention == pytest.approx(12 * 4 * 8 * seen, rel=2e-3)
