"""Hugging Face's model families as tables: keys of `[model]`, and the keys of config.json that mean the same.

Hugging Face has a class for each family, and shardwise has one transformer with a few choices. A family is

- `fields`: keys of ours and of config.json that have the same value;
- `fixed` and `demands`: the choices that define the family, in our keys and in those of config.json;
- `tensors`: the names of the tensors in its folders, and our names of the same tensors.

Nothing here needs torch, because a job is read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.config.family_tensors import (
    GEMMA2_TENSORS,
    GPT2_TENSORS,
    LLAMA_TENSORS,
    MIXTRAL_TENSORS,
    QWEN3_MOE_TENSORS,
    FamilyTensors,
)
from shardwise.files import Json


@dataclass(frozen=True)
class Family:
    """One class of models in the transformers library."""

    model_type: str
    architecture: str
    fields: Mapping[str, tuple[str, ...]]
    """For each key of ours, the keys of config.json with the same value. All are written; any one is read."""
    fixed: Mapping[str, object]
    """Keys of ours that have the same value in every model of the family."""
    demands: Mapping[str, tuple[object, ...]]
    """For keys of config.json, the values that we support. The first is written, and is the default."""
    defaults: Mapping[str, Callable[[Json], object]] = field(default_factory=dict)
    """For keys of ours that may be missing, functions of config.json that return the value."""
    caps: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """For keys of ours that may be None, the key of config.json and its default."""
    layer_types: Callable[[Json, int], list[str]] | None = None
    """Returns the attention type of each layer if config.json does not list them, from config.json and the
    number of layers. None: no layer may have a sliding window."""
    rope_theta: float = 10000.0
    """Default of `rope_theta` in config.json."""
    tensors: FamilyTensors = LLAMA_TENSORS


def _without(table: Json, *keys: str) -> Json:
    return {key: value for key, value in table.items() if key not in keys}


WINDOW = 4096
"""Default of `sliding_window` in config.json."""
FULL, SLIDING = "full_attention", "sliding_attention"
_NO_EXPERTS = {
    **dict.fromkeys(("experts", "experts_per_token", "shared_experts"), 0),
    **dict.fromkeys(("balance_loss", "balance_bias", "router_z_loss"), 0.0),
}
_SILU = {"hidden_act": ("silu", "swish")}
_PLAIN: Json = {
    **dict.fromkeys(("module", "window", "query_scalar", "attention_softcap", "logit_softcap")),
    "window_layers": "all",
    "post_norms": False,
    "scaled_embedding": False,
}
_ROTARY: Json = {**_PLAIN, "norm": "rms", "positions": "rotary", "activation": "swiglu"}
_MIXTURE = {
    **_ROTARY,
    "bias": False,
    "shared_experts": 0,
    "router": "softmax",
    "routing_scale": 1.0,
    "balance_bias": 0.0,
}
_FIELDS = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size",),
    "ffn": ("intermediate_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "max_positions": ("max_position_embeddings",),
    "norm_epsilon": ("rms_norm_eps",),
    "tied": ("tie_word_embeddings",),
}
_EXPERT_FIELDS = {**_FIELDS, "experts": ("num_local_experts",), "experts_per_token": ("num_experts_per_tok",)}


def to_number(values: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return a number that model_config.py has checked; `default` if it is missing or null."""
    value = default if values.get(key) is None else values[key]
    assert isinstance(value, int | float), key
    return value


_DEFAULTS: dict[str, Callable[[Json], object]] = {
    "kv_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: to_number(config, "hidden_size") // to_number(config, "num_attention_heads"),
    "tied": lambda config: False,
    "bias": lambda config: False,
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields={**_FIELDS, "bias": ("attention_bias", "mlp_bias")},
    fixed={**_ROTARY, **_NO_EXPERTS, "qk_norm": False},
    demands=_SILU,
    defaults=_DEFAULTS,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fields=_FIELDS,
    fixed={**_ROTARY, **_NO_EXPERTS, "qk_norm": True, "bias": False},
    demands={**_SILU, "attention_bias": (False,), "use_sliding_window": (False,)},
    defaults={**_DEFAULTS, "head_dim": lambda config: 128},
)
QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=_FIELDS,
    fixed={**_without(_ROTARY, "window"), **_NO_EXPERTS, "qk_norm": False, "bias": "qkv"},
    demands=_SILU,
    defaults=_DEFAULTS,
    layer_types=lambda config, layers: [
        SLIDING
        if config.get("use_sliding_window") and layer >= to_number(config, "max_window_layers", 28)
        else FULL
        for layer in range(layers)
    ],
)
MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=_FIELDS,
    fixed={**_without(_ROTARY, "window"), **_NO_EXPERTS, "qk_norm": False, "bias": False},
    demands=_SILU,
    defaults=_DEFAULTS,
    layer_types=lambda config, layers: [SLIDING] * layers,
)
GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    fields={**_FIELDS, "query_scalar": ("query_pre_attn_scalar",)},
    fixed={
        **_NO_EXPERTS,
        "module": None,
        "norm": "rms+1",
        "positions": "rotary",
        "activation": "geglu",
        "bias": False,
        "qk_norm": False,
        "post_norms": True,
        "scaled_embedding": True,
        "window_layers": "even",
    },
    demands={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    defaults={
        **_DEFAULTS,
        "head_dim": lambda config: 256,
        "tied": lambda config: True,
        "query_scalar": lambda config: 256,
    },
    caps={
        "attention_softcap": ("attn_logit_softcapping", 50.0),
        "logit_softcap": ("final_logit_softcapping", 30.0),
    },
    layer_types=lambda config, layers: [FULL if layer % 2 else SLIDING for layer in range(layers)],
    tensors=GEMMA2_TENSORS,
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    fields={
        "vocabulary": ("vocab_size",),
        "hidden": ("n_embd",),
        "ffn": ("n_inner",),
        "layers": ("n_layer",),
        "heads": ("n_head",),
        "max_positions": ("n_positions",),
        "norm_epsilon": ("layer_norm_epsilon",),
        "tied": ("tie_word_embeddings",),
    },
    fixed={
        **_PLAIN,
        "norm": "layer",
        "positions": "learned",
        "activation": "gelu",
        "bias": True,
        "qk_norm": False,
        **_NO_EXPERTS,
    },
    demands={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    defaults={"ffn": lambda config: 4 * to_number(config, "n_embd"), "tied": lambda config: True},
    tensors=GPT2_TENSORS,
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=_EXPERT_FIELDS,
    fixed={**_MIXTURE, "qk_norm": False, "normalise_routing": True},
    demands=_SILU,
    defaults=_DEFAULTS,
    rope_theta=1e6,
    tensors=MIXTRAL_TENSORS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields={
        **_EXPERT_FIELDS,
        "experts": ("num_experts", "num_local_experts"),
        "expert_ffn": ("moe_intermediate_size",),
        "normalise_routing": ("norm_topk_prob",),
    },
    fixed={**_MIXTURE, "qk_norm": True},
    demands={
        **_SILU,
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    defaults={**_DEFAULTS, "normalise_routing": lambda config: False},
    tensors=QWEN3_MOE_TENSORS,
)
FAMILIES = {
    family.model_type: family for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA2, GPT2, MIXTRAL, QWEN3_MOE)
}
