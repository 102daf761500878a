"""Shapes of the models of measured runs: from the figures of a row, and what is missing there from the
model's name.

Shapes by name are those of the model's publication or configuration file. The figures of a row take
precedence, because truncated models often have the name of the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import planner_cells as cells
from planner_cells import NotModelled, Row, needed, whole

from shardwise.config import Model
from shardwise.config.presets import PRESETS

_GPT = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": True}
_NEMOTRON = {"norm": "layer", "positions": "rotary", "activation": "gelu", "vocabulary": 256000}
_OPT = {**_GPT, "vocabulary": 50272}
_MPT = {**_GPT, "vocabulary": 50368}
_QWEN2 = {"bias": "qkv", "vocabulary": 152064}


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "ffn": ffn,
    }
    return {**shape, **more}


def _key(name: str) -> str:
    """One spelling for a name: `Nemotron-4 340B`, `nemotron4-340b` and `nemotron-340b-base` are one model."""
    plain = re.sub(r"\(.*?\)|^meta-|[-_ ](base|hf|instruct|chat|v0\.\d)\b", "", name.lower())
    plain = re.sub(r"nemotron[-_ ]?4[-_ ]", "nemotron", plain)
    plain = re.sub(r"llama[-_ ]?3\.\d[-_ ]", "llama3", plain)
    return re.sub(r"[^a-z0-9]", "", plain)


SHAPES: dict[str, dict[str, Any]] = {
    _key(name): shape
    for name, shape in {
        **PRESETS,
        "llama-7b": _shape(32, 4096, 32, 32, 11008, vocabulary=32000),
        "llama-13b": _shape(40, 5120, 40, 40, 13824, vocabulary=32000),
        "llama-33b": _shape(60, 6656, 52, 52, 17920, vocabulary=32000),
        "llama-65b": _shape(80, 8192, 64, 64, 22016, vocabulary=32000),
        "llama2-7b": _shape(32, 4096, 32, 32, 11008, vocabulary=32000),
        "llama2-13b": _shape(40, 5120, 40, 40, 13824, vocabulary=32000),
        "llama2-70b": _shape(80, 8192, 64, 8, 28672, vocabulary=32000),
        "mistral-large-123b": _shape(88, 12288, 96, 8, 28672, vocabulary=32768),
        "qwen2.5-7b": _shape(28, 3584, 28, 4, 18944, **_QWEN2),
        "qwen2.5-14b": _shape(48, 5120, 40, 8, 13824, **_QWEN2),
        "qwen2.5-32b": _shape(64, 5120, 40, 8, 27648, **_QWEN2),
        "qwen2.5-72b": _shape(80, 8192, 64, 8, 29568, **_QWEN2),
        "gpt3-5b": _shape(24, 4096, 32, 32, 16384, vocabulary=51200, **_GPT),
        "gpt3-20b": _shape(44, 6144, 48, 48, 24576, vocabulary=51200, **_GPT),
        "gpt3-175b": _shape(96, 12288, 96, 96, 49152, vocabulary=51200, **_GPT),
        "mt-nlg-530b": _shape(105, 20480, 128, 128, 81920, vocabulary=51200, **_GPT),
        "opt-6.7b": _shape(32, 4096, 32, 32, 16384, **_OPT),
        "opt-13b": _shape(40, 5120, 40, 40, 20480, **_OPT),
        "opt-30b": _shape(48, 7168, 56, 56, 28672, **_OPT),
        "opt-66b": _shape(64, 9216, 72, 72, 36864, **_OPT),
        "opt-175b": _shape(96, 12288, 96, 96, 49152, **_OPT),
        "bloom-176b": _shape(70, 14336, 112, 112, 57344, **{**_GPT, "vocabulary": 250880}),
        "mpt-7b": _shape(32, 4096, 32, 32, 16384, **_MPT),
        "mpt-30b": _shape(48, 7168, 56, 56, 28672, **_MPT),
        "mpt-70b": _shape(80, 8192, 64, 64, 32768, **_MPT),
        "nemotron-8b": _shape(32, 4096, 32, 32, 16384, **_NEMOTRON),
        "nemotron-15b": _shape(32, 6144, 48, 8, 24576, **_NEMOTRON),
        "nemotron-22b": _shape(40, 6144, 48, 48, 24576, **_NEMOTRON),
        "nemotron-340b": _shape(96, 18432, 96, 8, 73728, **_NEMOTRON),
        "mixtral-8x22b": _shape(56, 6144, 48, 8, 16384, vocabulary=32768, experts=8, experts_per_token=2),
        "grok1-314b": _shape(
            64, 6144, 48, 8, 32768, vocabulary=131072, experts=8, experts_per_token=2, activation="geglu",
            tied=True
        ),
        "dbrx": _shape(40, 6144, 48, 8, 10752, vocabulary=100352, experts=16, experts_per_token=4),
        "qwen3-235b-a22b": {
            **PRESETS["qwen3-30b-a3b"], "layers": 94, "hidden": 4096, "heads": 64, "ffn": 12288,
            "expert_ffn": 1536,
        },
    }.items()
}  # fmt: skip
SHAPES |= {"grok1": SHAPES["grok1314b"], "dbrx132b": SHAPES["dbrx"], "bloom": SHAPES["bloom176b"]}
SHAPES |= {name.rpartition("a")[0]: SHAPES[name] for name in ("qwen330ba3b", "qwen3235ba22b")}


def shape_of(name: str) -> dict[str, Any]:
    """Return the shape of a well-known model."""
    return dict(SHAPES[_key(name)])


_OTHER_ARCHITECTURES = (
    (r"deepseek|kimi|moonlight", "latent attention (MLA)"),
    (r"nemotron[ _-]?(h|3[ _-](\d[ _-])?(nano|super|ultra|lightning))|mamba|jamba|zamba|falcon[ _-]?h",
    "state-space layers"),
    (r"gpt[ _-]?oss|gemma", "sliding-window attention"),
    (r"qwen3[ _-]?next|qwen3[._]5|llama[ _-]?4|minimax", "linear or chunked attention"),
    (r"\bt5|bert|\bvit|vlm|[ _-]vl\b|llava|clip|flux|diffusion|amoebanet|resnet|whisper",
    "not a decoder of text"),
)  # fmt: skip


_WITH_EXPERTS = r"\d+x\d+(\.\d+)?b|[-_ ]a\d+(\.\d+)?b|moe\b|mixtral|grok|dbrx"


def model_of(row: Row, stack: str, assumed: list[str]) -> Model:
    """The model of a row, or why it cannot be modelled."""
    name = row.get("model", "")
    for pattern, reason in _OTHER_ARCHITECTURES:
        if re.search(pattern, name.lower()):
            raise NotModelled(reason)
    shape = dict(SHAPES.get(_key(name), {}))
    layers, hidden = whole(row, "layers") or shape.get("layers"), whole(row, "hidden") or shape.get("hidden")
    if not layers or not hidden:
        raise NotModelled("layers or hidden size not given")
    shape = _activation(row, shape, stack)
    heads = whole(row, "heads") or shape.get("heads") or _usual_heads(hidden, assumed)
    same_heads = (heads, hidden) == (shape.get("heads"), shape.get("hidden"))
    shape["kv_heads"] = whole(row, "kv_heads") or (shape["kv_heads"] if same_heads else heads)
    if heads % shape["kv_heads"]:
        raise NotModelled("shape: kv_heads do not divide heads")
    shape["head_dim"] = whole(row, "head_dim") or (
        shape["head_dim"] if same_heads else _usual_head(hidden, heads)
    )
    shape["ffn"] = whole(row, "ffn") or (shape["ffn"] if same_heads else _usual_ffn(hidden, shape, assumed))
    shape["vocabulary"] = whole(row, "vocab") or shape.get("vocabulary") or _usual_vocabulary(stack, assumed)
    shape["max_positions"] = needed(row, "seq", "sequence length")
    if row.get("tied"):
        shape["tied"] = bool(cells.yes_or_no(row, "tied"))
    if not shape.get("experts"):
        shape.update(_experts(row))
        if not shape.get("experts") and re.search(_WITH_EXPERTS, name.lower()):
            raise NotModelled("experts not described in words known here")
    return Model(**{**shape, "layers": layers, "hidden": hidden, "heads": heads})


def _activation(row: Row, shape: dict[str, Any], stack: str) -> dict[str, Any]:
    """With it come the norm, positions and biases of the GPT or of the Llama family."""
    gated = cells.yes_or_no(row, "glu")
    if shape and not (gated is False and shape.get("activation", "swiglu") == "swiglu"):
        return shape
    if gated is None:
        gated = stack not in ("megatron", "megatron-2023", "llm-foundry", "vtrain")
    return {**shape, **({"activation": "swiglu"} if gated else _GPT)}


def _usual_heads(hidden: int, assumed: list[str]) -> int:
    if hidden % 128:
        raise NotModelled("heads not given")
    assumed.append("heads of width 128")
    return hidden // 128


def _usual_head(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise NotModelled("shape: heads do not divide the hidden size")
    return hidden // heads


def _usual_ffn(hidden: int, shape: Mapping[str, Any], assumed: list[str]) -> int:
    assumed.append("feed-forward width: 4 x hidden, or 8/3 of it where gated")
    return 4 * hidden if shape.get("activation") == "gelu" else -(-8 * hidden // 3 // 256) * 256


def _usual_vocabulary(stack: str, assumed: list[str]) -> int:
    size = 51200 if stack in ("megatron", "megatron-2023", "vtrain") else 32000
    assumed.append(f"vocabulary of {size}")
    return size


def _experts(row: Row) -> dict[str, Any]:
    """From words such as `8 experts top2`, `256+1 experts top8` or `64E top6 shared 2`."""
    text = row.get("moe", "").lower()
    if text in (*cells.NOT_GIVEN, "0", "no", "false", "dense"):
        return {}
    number = re.search(r"(\d+)\s*(?:\+\s*(\d+)\s*)?(?:shared\s*)?(?:routed\s*)?(?:x|e\b|experts?)", text)
    visited = re.search(r"(?:top|k)\s*[-_=]?\s*(\d+)", text)
    if not number or not visited:
        raise NotModelled("experts not described in words known here")
    experts, chosen = int(number.group(1)), int(visited.group(1))
    if not 0 < chosen <= experts <= 10_000:
        raise NotModelled(f"moe: {chosen} of {experts} experts is not possible")
    shared = re.search(r"shared\s*(?:experts?)?\s*[-_=:]?\s*(\d+)|(\d+)\s*shared", text)
    beside = number.group(2) or (shared.group(1) or shared.group(2) if shared else 0)
    width = re.search(r"(?:ffn|width|inter\w*)\s*[-_=]?\s*(\d+)", text)
    return {"experts": experts, "experts_per_token": chosen, "shared_experts": int(beside),
    "activation": "swiglu",
            "bias": False, "expert_ffn": int(width.group(1)) if width else whole(row,
            "expert_ffn")}  # fmt: skip
