from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.config import Model
from shardwise.models import (
    Transformer,
    attention_backends,
    describe_attention,
    initialise,
    weights_without_memory,
)
from shardwise.models.rotary import rotary_frequencies

SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48,
"vocabulary": 61,
                         "max_positions": 48}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "rope_scale": 8.0, "rope_original": 16},
    "qwen": {**SHAPE, "head_dim": 16, "qk_norm": True, "tied": True},
    "gemma": {
        **SHAPE,
        "norm": "rms+1",
        "post_norms": True,
        "activation": "geglu",
        "scaled_embedding": True,
        "query_scalar": 5.0,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "window": 7,
        "window_layers": "even",
        "tied": True,
    },
    "gpt": {
        **SHAPE,
        "kv_heads": 4,
        "norm": "layer",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "tied": True,
    },
}


def make(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    module = Transformer(Model(**{**FAMILIES[family], **changes})).to(dtype)
    initialise(module, seed=5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(
                4.0 if parameter.ndim == 2 else 1.0
            )  # far from uniform predictions; exact in every dtype
    return module


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_summed_cross_entropy_of_the_logits_with_the_same_gradients(family: str) -> None:
    module, inputs, targets = make(family), tokens(2, 24), tokens(2, 24, seed=1)
    targets[0, :5] = -100
    loss = module(inputs, targets)
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    logits = module(inputs)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for actual, truth in zip(
        gradients, torch.autograd.grad(expected, list(module.parameters())), strict=True
    ):
        torch.testing.assert_close(actual, truth, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_built_on_meta_and_materialised_equals_one_built_directly(family: str) -> None:
    with weights_without_memory():
        late = Transformer(Model(**FAMILIES[family]))
    assert all(parameter.is_meta for parameter in late.parameters())
    late.to_empty(device="cpu")
    initialise(late, seed=5)
    direct = Transformer(Model(**FAMILIES[family]))
    initialise(direct, seed=5)
    assert torch.equal(late(tokens(1, 24)), direct(tokens(1, 24)))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_a_later_one(family: str) -> None:
    module, inputs = make(family), tokens(1, 24)
    changed = inputs.clone()
    changed[0, 15:] = (changed[0, 15:] + 1) % 61
    before, after = module(inputs), module(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


def test_documents_in_one_row_give_what_each_gives_alone_with_rotary_positions() -> None:
    module, inputs = make("llama"), tokens(2, 24)
    documents = torch.tensor([[0] * 9 + [1] * 15, [3] * 20 + [4] * 4])
    packed = module(inputs, documents=documents)
    for row, split in (
        (0, 9),
        (1, 20),
    ):  # rotary attention sees distances only, so a document may begin anywhere
        torch.testing.assert_close(
            packed[row, :split], module(inputs[row : row + 1, :split])[0], rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(
            packed[row, split:], module(inputs[row : row + 1, split:])[0], rtol=1e-9, atol=1e-9
        )


def test_learned_positions_begin_anew_with_each_document() -> None:
    module, inputs = make("gpt"), tokens(1, 24)
    packed = module(inputs, documents=torch.tensor([[0] * 9 + [9] * 15]))
    torch.testing.assert_close(packed[:, :9], module(inputs[:, :9]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(packed[:, 9:], module(inputs[:, 9:]), rtol=1e-9, atol=1e-9)


def test_one_document_a_row_is_the_same_as_no_documents() -> None:
    module, inputs = make("qwen"), tokens(2, 24)
    masked = module(inputs, documents=torch.zeros(2, 24, dtype=torch.int64))
    torch.testing.assert_close(masked, module(inputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("compute", "tolerance"),
    [(torch.float32, 3e-6), (torch.bfloat16, 0.04), (torch.float16, 5e-3), (torch.float64, 2e-7)],
)
def test_float32_weights_train_in_any_compute_dtype_close_to_float64(
    family: str, compute: torch.dtype, tolerance: float
) -> None:
    inputs, targets = tokens(2, 24), tokens(2, 24, seed=1)
    module, exact = make(family, torch.float32), make(family)
    for embedding in (module.embedding, module.positions):
        if embedding is not None:
            embedding.compute_dtype = compute
    loss, expected = module(inputs, targets), exact(inputs, targets)
    (loss / 48).backward()
    (expected / 48).backward()
    assert module(inputs).dtype == compute
    assert loss.dtype == (torch.float64 if compute == torch.float64 else torch.float32)
    assert abs(loss.item() - expected.item()) <= tolerance * expected.item()
    for (name, parameter), truth in zip(module.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert truth.grad is not None
        assert parameter.grad.dtype == torch.float32, name
        error = (parameter.grad.double() - truth.grad).norm()
        # A key's bias shifts all scores of a query alike: its true gradient is zero, and only rounding is
        # left of it.
        assert error <= tolerance * truth.grad.norm() or name.endswith("key.bias"), name


def test_weights_kept_in_bfloat16_compute_in_bfloat16() -> None:
    module = make("llama", torch.bfloat16)
    loss = module(tokens(1, 24), tokens(1, 24, seed=1))
    loss.backward()
    assert module(tokens(1, 24)).dtype == torch.bfloat16
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.bfloat16
        for parameter in module.parameters()
    )


def test_a_cast_of_the_model_leaves_the_rotary_table_exact() -> None:
    module = make("llama", torch.float32).to(torch.bfloat16)
    assert module.rotary is not None
    assert torch.equal(module.rotary.frequencies, rotary_frequencies(module.config))
    assert module(tokens(1, 8)).dtype == torch.bfloat16


@pytest.mark.parametrize(("family", "masked"), [("llama", True), ("qwen", False), ("gpt", False)])
def test_a_block_is_one_graph_to_the_compiler(family: str, masked: bool) -> None:
    module, inputs = make(family), tokens(1, 24)
    documents = torch.tensor([[0] * 9 + [1] * 15]) if masked else None
    expected = module(inputs, documents=documents)
    for block in module.blocks:
        block.compile(fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(module(inputs, documents=documents), expected, rtol=1e-12, atol=1e-12)


def test_on_cpu_the_preferred_attention_is_the_fused_one_and_is_named_so() -> None:
    config = Model(**FAMILIES["llama"])
    query = torch.randn(1, 4, 8, 8, requires_grad=True)
    with attention_backends("cpu"):
        mixed = F.scaled_dot_product_attention(
            query, query[:, :2], query[:, :2], is_causal=True, enable_gqa=True
        )
    assert "FlashAttentionForCpu" in type(mixed.grad_fn).__name__
    assert describe_attention(config, "cpu", torch.float32, 8) == "flash (CPU)"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_the_gpu_uses_the_attention_that_it_names(masked: bool) -> None:
    config = Model(**{**FAMILIES["llama"], "heads": 8, "kv_heads": 2, "head_dim": 64})
    named = describe_attention(config, "cuda", torch.bfloat16, 128, masked=masked)
    query = torch.randn(1, 128, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True).transpose(
        1, 2
    )
    mask = torch.ones(1, 1, 128, 128, device="cuda", dtype=torch.bool).tril() if masked else None
    with attention_backends("cuda"):
        mixed = F.scaled_dot_product_attention(
            query, query[:, :2], query[:, :2], attn_mask=mask, is_causal=not masked, enable_gqa=True
        )
    word = {"cuDNN": "Cudnn", "flash": "Flash", "memory-efficient": "Efficient"}[named]
    assert word.lower() in type(mixed.grad_fn).__name__.lower()
