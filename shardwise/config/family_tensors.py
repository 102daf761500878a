"""Names of tensors in the folders of Hugging Face's model families, and our names of the same tensors.

Nearly all tensors differ in their names only. GPT-2 stores its matrices transposed (its `Conv1D` has the
inputs first) and queries, keys and values in one; Mixtral stores each expert separately, and we stack them.
The conversion of values needs torch and is in checkpoint/conversions.py. Shapes are known here, so that the
headers of files are compared before torch is imported.

Rotary positions need no table: both sides pair channel i with channel i + head_dim / 2 (models/rotary.py).

A tensor without a counterpart is refused by name, in both directions, because a model that loads and computes
something else would be worse. Names alone do not prove the match; tests/checkpoint/test_huggingface.py
compares logits with the transformers library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from shardwise.config.model import Model
from shardwise.config.parameters import Shape, parameter_shapes

Conversion = Literal["same", "transposed", "joined", "stacked", "paired"]
"""How our tensors become theirs: unchanged, transposed, three joined into one that is transposed, one split
along its first dimension, or two joined along their second."""

_THEIR_SHAPES: dict[Conversion, Callable[[list[Shape]], list[Shape]]] = {
    "same": lambda shapes: shapes,
    "transposed": lambda shapes: [shapes[0][::-1]],
    "joined": lambda shapes: [(*shapes[0][:0:-1], sum(shape[0] for shape in shapes))],
    "stacked": lambda shapes: [shapes[0][1:]] * shapes[0][0],
    "paired": lambda shapes: [(shapes[0][0], sum(shape[1] for shape in shapes), *shapes[0][2:])],
}


@dataclass(frozen=True)
class TensorMatch:
    """Our tensors and the tensors of a folder with the same values; {layer} and {expert} are placeholders."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    conversion: Conversion = "same"

    def of_layer(self, layer: int, experts: int) -> TensorMatch:
        """Return the match with the layer's number filled in, and one name for each expert."""
        ours = tuple(name.format(layer=layer) for name in self.ours)
        theirs = tuple(
            name.format(layer=layer, expert=expert)
            for name in self.theirs
            for expert in range(experts if "{expert}" in name else 1)
        )
        return TensorMatch(ours, theirs, self.conversion)


def _modules(pairs: Mapping[str, str], conversion: Conversion = "same") -> tuple[TensorMatch, ...]:
    """Return the matches of weights and biases of modules that compute the same."""
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
_GEMMA2_NORMS = _modules(
    {
        f"{_BLOCK}attention_post_norm": f"{_THEIRS}post_attention_layernorm",
        f"{_BLOCK}feed_forward_norm": f"{_THEIRS}pre_feedforward_layernorm",
        f"{_BLOCK}feed_forward_post_norm": f"{_THEIRS}post_feedforward_layernorm",
    }
)
_DENSE = _modules(
    {f"{_BLOCK}feed_forward.{name}": f"{_THEIRS}mlp.{name}_proj" for name in ("gate", "up", "down")}
)


def _experts(layer: str, gate: str, up: str, down: str) -> tuple[TensorMatch, ...]:
    """Return the matches of expert tensors in folders that have one tensor per expert."""
    named = {"gate": gate, "up": up, "down": down}
    return (
        TensorMatch((f"{_BLOCK}feed_forward.router.weight",), (f"{_THEIRS}{layer}.gate.weight",)),
        *(
            TensorMatch(
                (f"{_BLOCK}feed_forward.experts.{ours}",),
                (f"{_THEIRS}{layer}.experts.{{expert}}.{theirs}.weight",),
                "stacked",
            )
            for ours, theirs in named.items()
        ),
    )


_FUSED = (  # as the transformers library keeps experts in memory, and saves them when told to
    TensorMatch((f"{_BLOCK}feed_forward.router.weight",), (f"{_THEIRS}mlp.gate.weight",)),
    TensorMatch(
        (f"{_BLOCK}feed_forward.experts.gate", f"{_BLOCK}feed_forward.experts.up"),
        (f"{_THEIRS}mlp.experts.gate_up_proj",),
        "paired",
    ),
    TensorMatch((f"{_BLOCK}feed_forward.experts.down",), (f"{_THEIRS}mlp.experts.down_proj",)),
)
_GPT2_WEIGHTS = (
    *_modules(
        {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        }
    ),
    *_modules({f"{_BLOCK}attention_norm": f"{_GPT2}ln_1", f"{_BLOCK}feed_forward_norm": f"{_GPT2}ln_2"}),
    *(
        TensorMatch(
            tuple(f"{_BLOCK}attention.{part}.{kind}" for part in ("query", "key", "value")),
            (f"{_GPT2}attn.c_attn.{kind}",),
            "joined",
        )
        for kind in ("weight", "bias")
    ),
    *_modules(
        {
            f"{_BLOCK}attention.output": f"{_GPT2}attn.c_proj",
            f"{_BLOCK}feed_forward.up": f"{_GPT2}mlp.c_fc",
            f"{_BLOCK}feed_forward.down": f"{_GPT2}mlp.c_proj",
        },
        "transposed",
    ),
)


@dataclass(frozen=True)
class FamilyTensors:
    """How folders of a family name and store their tensors."""

    table: tuple[TensorMatch, ...]
    prefix: str = "model."
    """Prefix of the names of all tensors but the head; folders of the bare model leave it out."""
    fused: tuple[TensorMatch, ...] = ()
    """The table of folders that keep all experts in one tensor."""


LLAMA_TENSORS = FamilyTensors((*_OUTER, *_ATTENTION, *_DENSE))
GEMMA2_TENSORS = FamilyTensors(
    (
        *_OUTER,
        *(match for match in _ATTENTION if ".feed_forward" not in match.ours[0]),
        *_GEMMA2_NORMS,
        *_DENSE,
    )
)
GPT2_TENSORS = FamilyTensors(_GPT2_WEIGHTS, prefix="transformer.")
MIXTRAL_TENSORS = FamilyTensors(
    (*_OUTER, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
    fused=(*_OUTER, *_ATTENTION, *_FUSED),
)
QWEN3_MOE_TENSORS = FamilyTensors(
    (*_OUTER, *_ATTENTION, *_experts("mlp", "gate_proj", "up_proj", "down_proj")),
    fused=(*_OUTER, *_ATTENTION, *_FUSED),
)


def tensor_matches(tensors: FamilyTensors, model: Model, fused: bool = False) -> list[TensorMatch]:
    """Return every tensor of this model with its counterparts, the blocks in order."""
    ours, table = parameter_shapes(model), tensors.fused if fused else tensors.table
    inside = [match for match in table if "{layer}" in match.ours[0]]
    outside = [match for match in table if match not in inside]
    blocks = (match.of_layer(layer, model.experts) for layer in range(model.layers) for match in inside)
    # Not every model has biases, norms of queries, or a head that is not tied.
    matches = [match for match in (*outside, *blocks) if match.ours[0] in ours]
    matched = chain.from_iterable(match.ours for match in matches)
    assert sorted(matched) == sorted(ours), "every tensor has a counterpart"
    return matches


def their_shapes(match: TensorMatch, ours: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a match's tensors in the folder, computed from our shapes."""
    shapes = _THEIR_SHAPES[match.conversion]([ours[name] for name in match.ours])
    return dict(zip(match.theirs, shapes, strict=True))
