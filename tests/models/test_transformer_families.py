"""Logits against Hugging Face's implementations, in float64, with the same weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.config import PRESETS, Model
from shardwise.models import Transformer
from shardwise.models.rotary import rotary_frequencies

transformers = pytest.importorskip("transformers")

TINY = {
    "layers": 2,
    "hidden": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 80,
    "vocabulary": 101,
    "max_positions": 64,
}
LLAMA = {**TINY, "rope_theta": 10000.0, "rope_scale": 8.0, "rope_original": 32}
QWEN = {**TINY, "qk_norm": True, "norm_epsilon": 1e-6, "rope_theta": 1e6, "tied": True}
GEMMA2 = {**TINY, "hidden": 64, "layers": 3, "norm": "rms+1", "post_norms": True, "activation": "geglu",
"scaled_embedding": True,
          "tied": True, "query_scalar": 7.0, "attention_softcap": 3.0, "logit_softcap": 5.0, "window": 7,
          "window_layers": "even"}  # fmt: skip
QWEN2 = {**TINY, "bias": "qkv", "norm_epsilon": 1e-6, "rope_theta": 1e6}
GPT = {**TINY, "kv_heads": 4, "head_dim": 12, "ffn": 192, "norm": "layer", "positions": "learned",
"activation": "gelu",
       "bias": True, "tied": True}  # fmt: skip

LLAMA_NAMES = [
    (r"embedding\.", "model.embed_tokens."),
    (r"blocks\.", "model.layers."),
    (r"feed_forward_norm", "post_attention_layernorm"),
    (r"attention_norm", "input_layernorm"),
    (r"attention\.(query|key)_norm", lambda match: f"self_attn.{match[1][0]}_norm"),
    (r"attention\.(query|key|value|output)", lambda match: f"self_attn.{match[1][0]}_proj"),
    (r"feed_forward\.(\w+)", r"mlp.\1_proj"),
    (r"^norm", "model.norm"),
    (r"^head", "lm_head"),
]


def shared(model: Model) -> dict[str, Any]:
    return {
        "vocab_size": model.vocabulary,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "attn_implementation": "sdpa",
    }


def hugging_llama(model: Model) -> nn.Module:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": model.rope_theta,
        "factor": model.rope_scale,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": model.rope_original,
    }
    config = transformers.LlamaConfig(**shared(model), rope_scaling=scaling)
    return transformers.LlamaForCausalLM(config).double().eval()


def hugging_qwen(model: Model) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shared(model))).double().eval()


def hugging_qwen2(model: Model) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shared(model))).double().eval()


def hugging_mistral(model: Model) -> nn.Module:
    config = transformers.MistralConfig(**shared(model), sliding_window=model.window)
    return transformers.MistralForCausalLM(config).double().eval()


def hugging_gemma2(model: Model) -> nn.Module:
    more = {
        "attn_implementation": "eager",
        "sliding_window": model.window,
        "query_pre_attn_scalar": int(model.query_scalar or 0),
    }
    caps = {"attn_logit_softcapping": model.attention_softcap, "final_logit_softcapping": model.logit_softcap}
    config = transformers.Gemma2Config(
        **{**shared(model), **more, **caps}, pad_token_id=None
    )  # a padding row gets no gradient
    return transformers.Gemma2ForCausalLM(config).double().eval()


def hugging_gpt(model: Model) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=model.vocabulary,
        n_positions=model.max_positions,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.ffn,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config).double().eval()


def random_model(model: Model) -> Transformer:
    torch.manual_seed(1)
    module = Transformer(model).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def their_name(name: str) -> str:
    for pattern, replacement in LLAMA_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def copy_llama(ours: Transformer, theirs: nn.Module) -> None:
    state = {their_name(name): value for name, value in ours.state_dict().items()}
    if ours.config.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    theirs.load_state_dict(state, strict=True)


def copy_gpt(ours: Transformer, theirs: nn.Module) -> None:
    state = ours.state_dict()
    names = {
        "embedding.weight": "wte.weight",
        "positions.weight": "wpe.weight",
        "norm.weight": "ln_f.weight",
        "norm.bias": "ln_f.bias",
    }
    copied = {f"transformer.{new}": state[old] for old, new in names.items()}
    for layer in range(ours.config.layers):
        old, new = f"blocks.{layer}.", f"transformer.h.{layer}."
        for kind in ("weight", "bias"):
            copied[f"{new}ln_1.{kind}"] = state[f"{old}attention_norm.{kind}"]
            copied[f"{new}ln_2.{kind}"] = state[f"{old}feed_forward_norm.{kind}"]
            joined = torch.cat([state[f"{old}attention.{part}.{kind}"] for part in ("query", "key", "value")])
            copied[f"{new}attn.c_attn.{kind}"] = (
                joined.t()
            )  # Conv1D keeps (inputs, outputs); a vector is its own transpose
            copied[f"{new}attn.c_proj.{kind}"] = state[f"{old}attention.output.{kind}"].t()
            copied[f"{new}mlp.c_fc.{kind}"] = state[f"{old}feed_forward.up.{kind}"].t()
            copied[f"{new}mlp.c_proj.{kind}"] = state[f"{old}feed_forward.down.{kind}"].t()
    copied["lm_head.weight"] = state["embedding.weight"]
    theirs.load_state_dict(copied, strict=True)


class ExactRotary(nn.Module):
    """Hugging Face fixes rotary angles to float32; the comparison needs them in float64."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.frequencies = frequencies

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def exact_rms_norm(self: Any, x: Tensor) -> Tensor:
    """Hugging Face fixes RMSNorm to float32 as well."""
    return self.weight * (x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt())


def exact_offset_norm(self: Any, x: Tensor) -> Tensor:
    """And Gemma's."""
    return (1 + self.weight) * (x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt())


def compare(ours: Transformer, theirs: nn.Module) -> None:
    tokens = torch.randint(0, ours.config.vocabulary, (3, 40))
    with torch.no_grad():
        expected = theirs(tokens).logits
        actual = ours(tokens)
        last = ours(tokens, logits_at=-1)
    assert expected.std() > 0.5  # the comparison is not of noise
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(last, expected[:, -1], rtol=1e-10, atol=1e-10)


def compare_gradients(ours: Transformer, theirs: nn.Module) -> None:
    """Of the loss, for every weight; a tied one has one gradient on both sides."""
    tokens = torch.randint(0, ours.config.vocabulary, (3, 40))
    targets = torch.randint(0, ours.config.vocabulary, (3, 40))
    ours(tokens, targets).backward()
    nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        gradient, wanted = parameter.grad, expected.pop(their_name(name))
        assert gradient is not None
        assert wanted is not None
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-9 or name.endswith("key.bias"), name
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=1e-9 * float(wanted.abs().max()) + 1e-12)
    assert not expected, "each of their weights has one of ours"


HUGGING = {"llama": (LLAMA, hugging_llama), "qwen2": (QWEN2, hugging_qwen2), "qwen3": (QWEN, hugging_qwen),
           "mistral": ({**TINY, "window": 7}, hugging_mistral)}  # fmt: skip


@pytest.mark.parametrize("family", HUGGING)
def test_logits_and_gradients_equal_hugging_faces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, hugging = HUGGING[family]
    model = Model(**shape)
    theirs, ours = hugging(model), random_model(model)
    copy_llama(ours, theirs)
    theirs.model.rotary_emb = ExactRotary(rotary_frequencies(model))
    monkeypatch.setattr(type(theirs.model.norm), "forward", exact_rms_norm)
    compare(ours, theirs)
    compare_gradients(ours, theirs)


def exact_capped_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **more: Any
) -> tuple[Tensor, None]:
    """As Hugging Face's, but for the softmax, which there is in float32."""
    key, value = (part.repeat_interleave(module.num_key_value_groups, 1) for part in (key, value))
    scores = torch.tanh(query @ key.mT * more["scaling"] / more["softcap"]) * more["softcap"]
    return ((scores + mask).softmax(-1) @ value).transpose(1, 2), None


def test_logits_and_gradients_equal_hugging_faces_gemma2(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(**GEMMA2)
    theirs, ours = hugging_gemma2(model), random_model(model)
    norms = [("feed_forward_norm", "pre_feedforward_layernorm"), ("attention_post_norm",
    "post_attention_layernorm"),
             ("feed_forward_post_norm", "post_feedforward_layernorm")]  # fmt: skip
    monkeypatch.setattr(f"{__name__}.LLAMA_NAMES", [*norms, *LLAMA_NAMES])
    copy_llama(ours, theirs)
    theirs.model.rotary_emb = ExactRotary(rotary_frequencies(model))
    monkeypatch.setattr(type(theirs.model.norm), "forward", exact_offset_norm)
    monkeypatch.setattr(
        "transformers.models.gemma2.modeling_gemma2.eager_attention_forward", exact_capped_attention
    )
    compare(ours, theirs)
    compare_gradients(ours, theirs)


def test_logits_equal_hugging_faces_gpt2() -> None:
    model = Model(**GPT)
    theirs, ours = hugging_gpt(model), random_model(model)
    copy_gpt(ours, theirs)
    compare(ours, theirs)


@pytest.mark.parametrize("preset", ["llama3-1b", "llama3-8b", "qwen3-8b"])
def test_rotary_frequencies_equal_hugging_faces(preset: str) -> None:
    model = Model(**{**PRESETS[preset], "layers": 1, "hidden": 64, "ffn": 8, "vocabulary": 8})
    theirs = hugging_llama(model) if preset.startswith("llama") else hugging_qwen(model)
    expected = type(theirs.model.rotary_emb)(theirs.config).inv_freq.double()  # float32 numbers
    torch.testing.assert_close(rotary_frequencies(model), expected, rtol=1e-6, atol=0)
