"""Our transformer and Hugging Face's model families: which tensor is which, and which setting is which, as tables.

Hugging Face has a class for each family, we have one transformer with a few choices, so a family is three tables:

- `fields`: our keys of `[model]` and the keys of config.json that mean the same;
- `fixed` and `demands`: the choices that make the family, in our words and in theirs;
- `weights`: our tensors and theirs. Nearly all are the same numbers under another name. GPT-2 keeps its matrices transposed (its
  `Conv1D` has the inputs first) and queries, keys and values in one; Mixtral keeps each expert apart where we stack them.

Rotary positions need no table: both sides pair channel i with channel i + head_dim / 2 (models/rotary.py).

Whatever has no counterpart is refused by name, in both directions: a model that opens and computes something else would be worse.
Names alone do not prove the match; tests/checkpoint/test_huggingface.py compares logits with the transformers library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.config import Model
from shardwise.plan import parameter_shapes

Convert = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Conversion:
    """How the numbers of one side become those of the other."""

    to_theirs: Convert
    to_ours: Convert


SAME = Conversion(lambda tensors: tensors, lambda tensors: tensors)
TRANSPOSED = Conversion(lambda tensors: [tensors[0].t()], lambda tensors: [tensors[0].t()])
JOINED = Conversion(lambda tensors: [torch.cat(tensors).t()], lambda tensors: list(tensors[0].t().chunk(3)))
STACKED = Conversion(lambda tensors: list(tensors[0].unbind()), lambda tensors: [torch.stack(tensors)])
PAIRED = Conversion(lambda tensors: [torch.cat(tensors, 1)], lambda tensors: list(tensors[0].chunk(2, 1)))


@dataclass(frozen=True)
class TensorMatch:
    """Tensors of ours and the tensors of theirs with the same numbers; {layer} and {expert} stand for each of them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    conversion: Conversion = SAME

    def of_layer(self, layer: int, experts: int) -> TensorMatch:
        """With the layer's number, and one name for each expert."""
        ours = tuple(name.format(layer=layer) for name in self.ours)
        theirs = tuple(
            name.format(layer=layer, expert=expert)
            for name in self.theirs
            for expert in range(experts if "{expert}" in name else 1)
        )
        return TensorMatch(ours, theirs, self.conversion)


def _modules(pairs: Mapping[str, str], conversion: Conversion = SAME) -> tuple[TensorMatch, ...]:
    """Modules of the same meaning: their weights, and their biases where the model has any."""
    return tuple(
        TensorMatch((f"{ours}.{kind}",), (f"{theirs}.{kind}",), conversion)
        for ours, theirs in pairs.items()
        for kind in ("weight", "bias")
    )


_BLOCK, _THEIRS, _GPT2 = "blocks.{layer}.", "model.layers.{layer}.", "transformer.h.{layer}."
_OUTER = _modules({"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})
_ATTENTION = _modules(
    {
        f"{_BLOCK}attention_norm": f"{_THEIRS}input_layernorm",
        f"{_BLOCK}attention.query": f"{_THEIRS}self_attn.q_proj",
        f"{_BLOCK}attention.key": f"{_THEIRS}self_attn.k_proj",
        f"{_BLOCK}attention.value": f"{_THEIRS}self_attn.v_proj",
        f"{_BLOCK}attention.output": f"{_THEIRS}self_attn.o_proj",
        f"{_BLOCK}attention.query_norm": f"{_THEIRS}self_attn.q_norm",
        f"{_BLOCK}attention.key_norm": f"{_THEIRS}self_attn.k_norm",
        f"{_BLOCK}feed_forward_norm": f"{_THEIRS}post_attention_layernorm",
    }
)
_DENSE = _modules({f"{_BLOCK}feed_forward.{name}": f"{_THEIRS}mlp.{name}_proj" for name in ("gate", "up", "down")})


def _experts(layer: str, gate: str, up: str, down: str) -> tuple[TensorMatch, ...]:
    """Each expert on its own, as folders keep them."""
    named = {"gate": gate, "up": up, "down": down}
    return (
        TensorMatch((f"{_BLOCK}feed_forward.router.weight",), (f"{_THEIRS}{layer}.gate.weight",)),
        *(
            TensorMatch(
                (f"{_BLOCK}feed_forward.experts.{ours}",), (f"{_THEIRS}{layer}.experts.{{expert}}.{theirs}.weight",), STACKED
            )
            for ours, theirs in named.items()
        ),
    )


_FUSED = (  # as the transformers library keeps experts in memory, and saves them when told to
    TensorMatch((f"{_BLOCK}feed_forward.router.weight",), (f"{_THEIRS}mlp.gate.weight",)),
    TensorMatch(
        (f"{_BLOCK}feed_forward.experts.gate", f"{_BLOCK}feed_forward.experts.up"),
        (f"{_THEIRS}mlp.experts.gate_up_proj",),
        PAIRED,
    ),
    TensorMatch((f"{_BLOCK}feed_forward.experts.down",), (f"{_THEIRS}mlp.experts.down_proj",)),
)
_GPT2_WEIGHTS = (
    *_modules({"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}),
    *_modules({f"{_BLOCK}attention_norm": f"{_GPT2}ln_1", f"{_BLOCK}feed_forward_norm": f"{_GPT2}ln_2"}),
    *(
        TensorMatch(
            tuple(f"{_BLOCK}attention.{part}.{kind}" for part in ("query", "key", "value")),
            (f"{_GPT2}attn.c_attn.{kind}",),
            JOINED,
        )
        for kind in ("weight", "bias")
    ),
    *_modules(
        {
            f"{_BLOCK}attention.output": f"{_GPT2}attn.c_proj",
            f"{_BLOCK}feed_forward.up": f"{_GPT2}mlp.c_fc",
            f"{_BLOCK}feed_forward.down": f"{_GPT2}mlp.c_proj",
        },
        TRANSPOSED,
    ),
)


@dataclass(frozen=True)
class Family:
    """One class of the transformers library."""

    model_type: str
    architecture: str
    prefix: str
    """Of the names of all tensors but the head; folders of the bare model leave it out."""
    weights: tuple[TensorMatch, ...]
    fields: Mapping[str, tuple[str, ...]]
    """Our key, and their keys of the same value: every one is written, any one is read."""
    fixed: Mapping[str, Any]
    """Our keys that have this value in every model of the family."""
    demands: Mapping[str, tuple[Any, ...]]
    """Their keys and the values that we can take; the first is written, and is what a missing key means."""
    fused: tuple[TensorMatch, ...] = ()
    """The weights of folders that keep all experts in one tensor."""
    defaults: Mapping[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    """Our keys whose value follows from the rest of config.json when it is not given."""


_NO_EXPERTS = {"experts": 0, "experts_per_token": 0, "shared_experts": 0, "balance_loss": 0.0, "balance_bias": 0.0,
               "router_z_loss": 0.0}  # fmt: skip
_ROTARY = {"module": None, "norm": "rms", "positions": "rotary", "activation": "swiglu"}
_MIXTURE = {**_ROTARY, "bias": False, "shared_experts": 0, "router": "softmax", "routing_scale": 1.0, "balance_bias": 0.0}
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
_DEFAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "kv_heads": lambda config: config["num_attention_heads"],
    "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
    "tied": lambda config: False,
    "bias": lambda config: False,
}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    prefix="model.",
    weights=(*_OUTER, *_ATTENTION, *_DENSE),
    fields={**_FIELDS, "bias": ("attention_bias", "mlp_bias")},
    fixed={**_ROTARY, **_NO_EXPERTS, "qk_norm": False},
    demands={"hidden_act": ("silu", "swish")},
    defaults=_DEFAULTS,
)
QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    prefix="model.",
    weights=(*_OUTER, *_ATTENTION, *_DENSE),
    fields=_FIELDS,
    fixed={**_ROTARY, **_NO_EXPERTS, "qk_norm": True, "bias": False},
    demands={"hidden_act": ("silu", "swish"), "attention_bias": (False,), "use_sliding_window": (False,)},
    defaults={**_DEFAULTS, "head_dim": lambda config: 128},
)
GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    weights=_GPT2_WEIGHTS,
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
        "module": None,
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
    defaults={"ffn": lambda config: 4 * config["n_embd"], "tied": lambda config: True},
)
MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    prefix="model.",
    weights=(*_OUTER, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
    fused=(*_OUTER, *_ATTENTION, *_FUSED),
    fields=_EXPERT_FIELDS,
    fixed={**_MIXTURE, "qk_norm": False, "normalise_routing": True},
    demands={"hidden_act": ("silu", "swish")},
    defaults=_DEFAULTS,
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    prefix="model.",
    weights=(*_OUTER, *_ATTENTION, *_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    fused=(*_OUTER, *_ATTENTION, *_FUSED),
    fields={
        **_EXPERT_FIELDS,
        "experts": ("num_experts", "num_local_experts"),
        "expert_ffn": ("moe_intermediate_size",),
        "normalise_routing": ("norm_topk_prob",),
    },
    fixed={**_MIXTURE, "qk_norm": True},
    demands={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
    },
    defaults={**_DEFAULTS, "normalise_routing": lambda config: False},
)
FAMILIES = {family.model_type: family for family in (LLAMA, QWEN3, GPT2, MIXTRAL, QWEN3_MOE)}


def tensor_matches(family: Family, model: Model, fused: bool = False) -> list[TensorMatch]:
    """Every tensor of this model with its counterparts; the blocks in order."""
    ours, table = parameter_shapes(model), family.fused if fused else family.weights
    inside = [match for match in table if "{layer}" in match.ours[0]]
    outside = [match for match in table if match not in inside]
    matches = [*outside, *(match.of_layer(layer, model.experts) for layer in range(model.layers) for match in inside)]
    matches = [
        match for match in matches if match.ours[0] in ours
    ]  # biases, norms of queries, a head of its own: only where the model has them
    assert sorted(name for match in matches for name in match.ours) == sorted(ours), "a tensor without a counterpart"
    return matches


def their_shapes(match: TensorMatch, ours: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The shapes of a match's tensors on the other side, from ours."""
    theirs = match.conversion.to_theirs([torch.empty(ours[name], device="meta") for name in match.ours])
    return {name: tuple(tensor.shape) for name, tensor in zip(match.theirs, theirs, strict=True)}
