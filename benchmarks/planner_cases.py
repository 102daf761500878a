"""Measured training runs as cases for the planner: what was run, on what, by which program, and what was measured.

Three kinds of CSV file are read, told apart by their columns: published runs of many programs, a sweep of layouts on one
cluster (nanotron), and a table of short GPT runs on one machine (vTrain). A row becomes a `Case`, or a reason why the planner
cannot model it; no row is dropped in silence. What a row leaves out and the planner needs is filled in by one rule for all rows
of a program, and the rule is named in `Case.assumed`.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.config import Model
from shardwise.config.presets import PRESETS
from shardwise.errors import UserError
from shardwise.plan.flops import flops_per_token, matmul_weights
from shardwise.plan.parameters import count
from shardwise.plan.schedule import SCHEDULES
from shardwise.plan.space import RECOMPUTE, Work

Row = Mapping[str, str]
GIB = 2.0**30


class NotModelled(Exception):
    """Why a row has no place in the planner's model."""


@dataclass(frozen=True)
class Case:
    """One measured run."""

    file: str
    name: str
    program: str
    stack: str
    """Key of the program's facts in benchmarks/planner_programs.py."""
    traits: frozenset[str]
    """Options of the program: eager, compile, async_tensor, no_sequence_parallel, float8_gather."""
    model: str
    work: Work
    layout: Mapping[str, int]
    """One row of a `Space`."""
    device: str
    """Key of a cluster preset, as far as there is one."""
    devices: int
    seconds: float | None
    status: str = "ok"
    """ok, out_of_memory, or failed (no reason known)."""
    recompute_share: float = 1.0
    """Of the layers, where `layout` says that activations are recomputed."""
    devices_per_node: int | None = None
    """Where the row says so."""
    network: float | None = None
    """Bytes/s between nodes for each device, where the row says so."""
    memory: float | None = None
    """Bytes of the fullest device."""
    memory_kind: str = ""
    """reserved, allocated, or theory (states and activations alone)."""
    published: Mapping[str, float] = field(default_factory=dict)
    """As printed: tokens and flops (a second and device), mfu (a share), parameters."""
    printed: Mapping[str, str] = field(default_factory=dict)
    """The same figures as text: their last digit is how far they can be trusted."""
    convention: str | None = None
    """How the published FLOP/s were counted."""
    assumed: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """Dense or with experts."""
        return "moe" if self.work.model.experts else "dense"


def read_cases(path: Path) -> tuple[list[Case], dict[str, int]]:
    """The cases of a file, and how many rows cannot be modelled for which reason."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    table = csv.DictReader(io.StringIO(text, newline=""))
    columns = {(name or "").strip() for name in table.fieldnames or ()}
    read = next((reader for needed, reader in _FORMATS if needed <= columns), None)
    if read is None:
        known = "; ".join(", ".join(sorted(needed)) for needed, _ in _FORMATS)
        raise UserError(f"{path}: columns of no known format; a file needs these columns: {known}")
    cases, reasons = [], Counter[str]()
    for place, raw in enumerate(table, 2):
        row = {(key or "").strip(): (value or "").strip() for key, value in raw.items() if isinstance(value, str)}
        try:
            cases.append(read(row, path.name, f"line {place}"))
        except NotModelled as reason:
            reasons[str(reason)] += 1
    return cases, dict(reasons)


# -- numbers and words ---------------------------------------------------------------------------------------------------


def _digits(row: Row, key: str) -> str:
    """The number that a field begins with, as it is written; nothing where it is none, or not above 0."""
    found = re.match(r"\d+(\.\d*)?([eE][-+]?\d+)?", row.get(key, "").replace(",", "").lstrip("~≈<>+ "))
    return found.group() if found and float(found.group()) > 0 else ""


def _number(row: Row, key: str) -> float | None:
    text = _digits(row, key)
    return float(text) if text else None


def _whole(row: Row, key: str) -> int | None:
    value = _number(row, key)
    return None if value is None else round(value)


def _needed(row: Row, key: str, what: str) -> int:
    value = _whole(row, key)
    if not value:
        raise NotModelled(f"{what} not given")
    return value


def _key(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# -- models --------------------------------------------------------------------------------------------------------------

_GPT = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "tied": True}
_NEMOTRON = {"norm": "layer", "positions": "rotary", "activation": "gelu", "vocabulary": 256000}


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": hidden // heads, "ffn": ffn}
    return {**shape, **more}


SHAPES: dict[str, dict[str, Any]] = {
    # For rows that name a model without its shape: figures of the model's own publication or configuration file.
    **{_key(name): shape for name, shape in PRESETS.items()},
    "llama318b": PRESETS["llama3-8b"],
    "llama3170b": PRESETS["llama3-70b"],
    "llama31405b": PRESETS["llama3-405b"],
    "llama27b": _shape(32, 4096, 32, 32, 11008, vocabulary=32000),
    "llama213b": _shape(40, 5120, 40, 40, 13824, vocabulary=32000),
    "llama270b": _shape(80, 8192, 64, 8, 28672, vocabulary=32000),
    "gpt35b": _shape(24, 4096, 32, 32, 16384, vocabulary=51200, **_GPT),
    "gpt320b": _shape(44, 6144, 48, 48, 24576, vocabulary=51200, **_GPT),
    "gpt3175b": _shape(96, 12288, 96, 96, 49152, vocabulary=51200, **_GPT),
    "nemotron8b": _shape(32, 4096, 32, 32, 16384, **_NEMOTRON),
    "nemotron15b": _shape(32, 6144, 48, 8, 24576, **_NEMOTRON),
    "nemotron22b": _shape(40, 6144, 48, 48, 24576, **_NEMOTRON),
    "nemotron340b": _shape(96, 18432, 96, 8, 73728, **_NEMOTRON),
    "mixtral8x22b": _shape(56, 6144, 48, 8, 16384, vocabulary=32768, experts=8, experts_per_token=2),
    "qwen3235ba22b": {**PRESETS["qwen3-30b-a3b"], "layers": 94, "hidden": 4096, "heads": 64, "ffn": 12288, "expert_ffn": 1536},
}

_OTHER_ARCHITECTURES = (
    (r"deepseek|kimi|moonlight", "latent attention (MLA)"),
    (r"nemotron[ _-]?(h|3[ _-](\d[ _-])?(nano|super|ultra|lightning))|mamba|jamba|zamba|falcon[ _-]?h", "state-space layers"),
    (r"gpt[ _-]?oss|gemma", "sliding-window attention"),
    (r"qwen3[ _-]?next|qwen3[._]5|llama[ _-]?4|minimax", "linear or chunked attention"),
    (r"\bt5|bert|\bvit|vlm|[ _-]vl\b|llava|clip|flux|diffusion|amoebanet|resnet|whisper", "not a decoder of text"),
)  # fmt: skip


def _model(row: Row, stack: str, assumed: list[str]) -> Model:
    name = row.get("model", "")
    for pattern, reason in _OTHER_ARCHITECTURES:
        if re.search(pattern, name.lower()):
            raise NotModelled(reason)
    plain = re.sub(r"\(.*?\)", "", name)
    shape = dict(SHAPES.get(_key(plain), {}))
    known = bool(shape)
    layers, hidden = _whole(row, "layers") or shape.get("layers"), _whole(row, "hidden") or shape.get("hidden")
    if not layers or not hidden:
        raise NotModelled("layers or hidden size not given")
    if not known or (row.get("glu") == "0" and shape.get("activation", "swiglu") == "swiglu"):
        said = row.get("glu", "").lower() or ("0" if stack in ("megatron", "llm-foundry") else "1")
        gated = said not in ("0", "0.0", "false", "no")
        shape = {**shape, **({"activation": "swiglu"} if gated else _GPT)}
    heads = _whole(row, "heads") or shape.get("heads") or max(1, hidden // 128)
    same_heads = (heads, hidden) == (shape.get("heads"), shape.get("hidden"))
    shape["kv_heads"] = _whole(row, "kv_heads") or (shape["kv_heads"] if same_heads else heads)
    shape["head_dim"] = _whole(row, "head_dim") or (shape["head_dim"] if same_heads else max(1, hidden // heads))
    shape["ffn"] = _whole(row, "ffn") or (shape["ffn"] if same_heads else _usual_ffn(hidden, shape, assumed))
    shape["vocabulary"] = _whole(row, "vocab") or shape.get("vocabulary") or _usual_vocabulary(stack, assumed)
    shape["max_positions"] = _needed(row, "seq", "sequence length")
    if not shape.get("experts"):
        shape.update(_experts(row))
    return Model(**{**shape, "layers": layers, "hidden": hidden, "heads": heads})


def _usual_ffn(hidden: int, shape: Mapping[str, Any], assumed: list[str]) -> int:
    assumed.append("feed-forward width: 4 x hidden, or 8/3 of it where gated")
    return 4 * hidden if shape.get("activation") == "gelu" else -(-8 * hidden // 3 // 256) * 256


def _usual_vocabulary(stack: str, assumed: list[str]) -> int:
    size = 51200 if stack in ("megatron", "vtrain") else 32000
    assumed.append(f"vocabulary of {size}")
    return size


def _experts(row: Row) -> dict[str, Any]:
    """From words such as `8 experts top2` or `256+1 experts top8`."""
    text = row.get("moe", "").lower()
    if text in ("", "0", "no", "none", "false", "dense"):
        return {}
    number = re.search(r"(\d+)\s*(?:\+\s*(\d+)\s*)?(?:shared\s*)?(?:routed\s*)?(?:x|e\b|experts?)", text)
    visited = re.search(r"(?:top|k)\s*[-_=]?\s*(\d+)", text)
    if not number or not visited:
        raise NotModelled("experts not described in words known here")
    width = re.search(r"(?:ffn|width|inter\w*)\s*[-_=]?\s*(\d+)", text)
    return {"experts": int(number.group(1)), "experts_per_token": int(visited.group(1)),
            "shared_experts": int(number.group(2) or 0), "activation": "swiglu", "bias": False,
            "expert_ffn": int(width.group(1)) if width else _whole(row, "expert_ffn")}  # fmt: skip


# -- devices, programs, choices ------------------------------------------------------------------------------------------


def device_key(text: str, program: str = "") -> str:
    """One spelling for a device, for instance `DGX-H100`, `h100_80gb` and `H100-SXM5` are all `h100`."""
    lower = text.lower()
    if "tpu" in lower or "trainium" in lower or "gaudi" in lower:
        raise NotModelled("device: no preset for TPU, Trainium or Gaudi")
    found = re.search(r"g?b300|g?b200|gh200|h200|h100|h800|h20\b|a100|a800|v100|mi\d{3}x?|l40s?|rtx\w*|p100|t4\b", lower)
    if not found:
        raise NotModelled(f"device not known: {text or 'none given'}")
    name = found.group()
    sizes = [int(size) for size in re.findall(r"(\d+)\s*gi?b(?!/s|ps|it)", lower[found.end() :])]
    if name in ("a100", "a800"):
        name += f"-{max(sizes) if sizes else 40 if '2020' in program else 80}"
    elif name in ("h100", "h800") and sizes and max(sizes) != 80:
        name += f"-{96 if 90 < max(sizes) < 100 else max(sizes)}"
    elif name == "v100" and "dgx-2" in lower:
        name = "dgx2"
    return name + ("-pcie" if "pcie" in lower else "")


def _node(text: str) -> int | None:
    if "dgx-2" in text.lower():
        return 16
    found = re.search(r"(\d+)\s*gpus?\s*(?:/|per|a)\s*node", text.lower())
    return int(found.group(1)) if found else None


def _network(text: str, per_node: int) -> float | None:
    """Bytes/s for a device from words such as `400Gb/s/GPU` or `8x200Gb HDR/node`."""
    between = " ".join(part for part in re.split(r"[;,+]", text) if "nvl" not in part.lower())
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GT])(b|B)", between)
    if not found:
        return None
    total = float(found.group(1) or 1) * float(found.group(2)) * (1e9 if found.group(3) == "G" else 1e12)
    each = 1 if re.search(r"/\s*gpu", between.lower()) else per_node
    return total / each / (8 if found.group(4) == "b" else 1)


def _stack(program: str) -> str:
    lower = program.lower()
    for word, key in (("foundry", "llm-foundry"), ("composer", "llm-foundry"), ("titan", "torchtitan"), ("fsdp2", "torchtitan"),
                      ("nanotron", "nanotron"), ("vtrain", "vtrain"), ("bridge", "megatron-core"), ("nemo", "megatron-core"),
                      ("core", "megatron-core"), ("transformer engine", "megatron-core"), ("megatron", "megatron"),
                      ("deepspeed", "megatron")):  # fmt: skip
        if word in lower:
            year = re.search(r"20(1\d|2\d)", lower)  # Megatron-LM since 2023 is built on Megatron-Core
            return "megatron-core" if key == "megatron" and year and int(year.group(1)) >= 23 else key
    return "other"


def _traits(row: Row, stack: str) -> frozenset[str]:
    notes, split = row.get("notes", "").lower().replace(" ", ""), row.get("sp", "").lower()
    words = {"eager": "eager", "compile": "compile", "asynctp": "async_tensor", "float8ag": "float8_gather"}
    found = {trait for word, trait in words.items() if word in notes}
    # Megatron-LM had no sequence parallelism before 2022, and has a switch for it since
    if split in ("0", "0.0", "false", "no") or (stack == "megatron" and not split):
        found.add("no_sequence_parallel")
    return frozenset(found)


def _precision(text: str, assumed: list[str]) -> str:
    lower = text.lower()
    for word, name in (("fp4", "float4"), ("fp8", "float8"), ("float8", "float8"), ("bf16", "bfloat16"), ("bfloat16", "bfloat16"),
                       ("fp16", "float16"), ("float16", "float16"), ("fp32", "float32"), ("tf32", "float32")):  # fmt: skip
        if word in lower:
            return name
    assumed.append("precision bfloat16")
    return "bfloat16"


_ZERO_WORDS = (
    (r"shard_grad_op|zero[ -]?2|no reshard", 2),
    (r"no_shard|ddp|baseline|^none$|^no$", 0),
    (r"zero[ -]?3|full_shard|fsdp|hsdp|hybrid", 3),
    (r"zero[ -]?1|dist|optimizer|^os$", 1),
)
_USUAL_ZERO = {"llm-foundry": 3, "torchtitan": 3, "megatron-core": 1}


def _zero(row: Row, stack: str, pipeline: int) -> int:
    text = row.get("zero_fsdp", row.get("zero", "")).lower()
    if re.fullmatch(r"[0-3](\.0)?", text):
        stage = int(float(text))
    else:
        stage = next((stage for words, stage in _ZERO_WORDS if re.search(words, text)), _USUAL_ZERO.get(stack, 0))
    # torchtitan keeps gathered weights, and gradients whole, between the micro-batches of a pipeline
    return 1 if stage == 3 and stack == "torchtitan" and pipeline > 1 else stage


def _recompute(row: Row, layers: int) -> tuple[str, float]:
    text = row.get("recompute", "").lower()
    if not text:  # the Megatron-LM of 2020 and 2021 checkpointed every layer in its published runs, and counts the FLOPs
        counted = "2020" in row.get("fw", "") or "recompute" in row.get("flop_convention", "").lower()
        return ("full", 1.0) if counted else ("none", 1.0)
    if "selective_layer" in text or "every" in text:
        return "full", 0.5
    some = re.search(r"(\d+)\s*(?:/\s*\d+\s*)?layers?", text)
    if some and 0 < int(some.group(1)) < layers:
        return "full", int(some.group(1)) / layers
    if "select" in text or "core_attn" in text or "core attention" in text:
        return "selective", 1.0
    return ("none", 1.0) if re.search(r"none|no\b|off|false|^0$", text) else ("full", 1.0)


def _schedule(row: Row, pipeline: int) -> tuple[str, int]:
    text, virtual = _key(row.get("schedule", "")), _whole(row, "vpp") or 1
    if pipeline == 1:
        return "1f1b", 1
    for word, name in (("gpipe", "gpipe"), ("dualpipe", "dualpipev"), ("zbv", "zbv"), ("zb", "zb1p"), ("zerobubble", "zb1p")):
        if word in text:
            return name, 2 if name in ("zbv", "dualpipev") else 1
    if virtual > 1 or "interleaved" in text:
        return "interleaved", max(2, virtual)
    return "1f1b", 1


# -- layouts and batches -------------------------------------------------------------------------------------------------


def _micro_batch(row: Row, stack: str, share: int, pipeline: int, assumed: list[str]) -> int:
    """Sequences of one forward pass; `share` is what one pipeline sees in a step."""
    given = _whole(row, "mbs")
    if given is None:
        accumulation = _whole(row, "ga")
        if accumulation and share % accumulation == 0:
            return share // accumulation
        if "2020" in row.get("fw", ""):
            return share  # Megatron-LM accumulated nothing before it had pipelines
        assumed.append("micro-batch: 1 in a pipeline, up to 4 without")
        return 1 if pipeline > 1 else next(size for size in (4, 3, 2, 1) if share % size == 0)
    if stack == "torchtitan" and pipeline > 1:
        assumed.append("torchtitan's default: as many micro-batches of its local batch as there are pipeline ranks")
        return max(1, given // pipeline)
    return given


def _axes(row: Row, model: Model) -> dict[str, int]:
    """Degrees; `data` here counts replicas too."""
    keys = {"pipeline": "pp", "context": "cp", "tensor": "tp", "expert": "ep", "data": "dp"}
    axes = {axis: _whole(row, key) or 1 for axis, key in keys.items()}
    fixed = axes["pipeline"] * axes["context"] * axes["tensor"]
    devices = _whole(row, "gpus") or fixed * axes["data"]
    if _whole(row, "dp") is None:
        axes["data"] = max(1, devices // fixed)
    if fixed * axes["data"] != devices:
        raise NotModelled("layout: tp x pp x dp x cp is not the number of devices")
    lenders = axes["data"] * axes["context"] * axes["tensor"]
    if axes["expert"] > 1 and (not model.experts or model.experts % axes["expert"] or lenders % axes["expert"]):
        raise NotModelled("layout: experts do not divide so")
    if model.heads % axes["tensor"] or axes["pipeline"] > model.layers:
        raise NotModelled("layout: heads or layers do not divide so")
    return axes


def _layout(row: Row, model: Model, stack: str, assumed: list[str]) -> tuple[dict[str, int], int, int]:
    """One row of a `Space`, the sequences of a step, and the devices."""
    axes = _axes(row, model)
    data, pipeline = axes["data"], axes["pipeline"]
    devices = data * pipeline * axes["context"] * axes["tensor"]
    batch = _batch(row, data, devices)
    share, rest = divmod(batch, data)
    micro = _micro_batch(row, stack, share, pipeline, assumed) if not rest else 1
    if rest or share % micro:
        raise NotModelled("batch does not divide by data-parallel devices and micro-batch")
    sharded = re.search(r"fsdp\s*=\s*(\d+)", row.get("zero_fsdp", "").lower())
    shards = int(sharded.group(1)) // axes["context"] if sharded else data
    replica = data // shards if 0 < shards < data and data % shards == 0 else 1
    schedule, stages = _schedule(row, pipeline)
    offload = "off=true" in row.get("notes", "").lower() or "offload" in row.get("zero_fsdp", "").lower()
    axes.update(replica=replica, data=data // replica, zero=_zero(row, stack, pipeline), micro_batch=micro,
                accumulation=share // micro, schedule=SCHEDULES.index(schedule), stages_per_rank=stages,
                ring=int(axes["context"] > 1), offload=int(offload))  # fmt: skip
    return axes, batch, devices


def _batch(row: Row, data: int, devices: int) -> int:
    given, micro, accumulation = _whole(row, "gbs"), _whole(row, "mbs"), _whole(row, "ga")
    if given:
        return given
    if micro and accumulation:
        return data * micro * accumulation
    seconds, tokens, length = _number(row, "step_time_s"), _number(row, "tok_s_gpu"), _number(row, "seq")
    if seconds and tokens and length:
        return max(1, round(seconds * tokens * devices / length))
    raise NotModelled("global batch not given")


def _must_shard(model: Model, layout: Mapping[str, int], stack: str, device: str) -> bool:
    """Whether weights and gradients whole could not fit any device: the program's own FSDP must have been on."""
    largest = {"gb300": 288, "b300": 288, "gb200": 192, "b200": 192, "h200": 141}.get(device, 80) * 1e9
    held = (count(model) / layout["tensor"] / layout["pipeline"]) * 6
    return stack == "megatron-core" and not model.experts and layout["zero"] < 3 and layout["pipeline"] == 1 and held > largest


# -- what was published --------------------------------------------------------------------------------------------------


def convention_of(text: str, stack: str) -> str | None:
    """A short name for how a source counts FLOPs."""
    lower = text.lower()
    for words, name in ((r"all params", "all_parameters"), (r"no emb", "no_embedding"), (r"recompute", "with_recompute"),
                        (r"causal", "causal"), (r"full attn|full attention|num_floating_point", "full")):  # fmt: skip
        if re.search(words, lower):
            return name
    usual = {"llm-foundry": "all_parameters", "torchtitan": "no_embedding", "nanotron": "all_parameters"}
    return None if lower else usual.get(stack)


def published_flops(model: Model, length: int, convention: str) -> float:
    """FLOPs of a token as a source counts them. Ours, by which runs are compared, is in shardwise/plan/flops.py."""
    attention = 12.0 * model.layers * model.heads * model.head_dim * length
    if convention == "causal":  # Megatron leaves the router out
        return flops_per_token(model, length) - 6.0 * model.layers * model.experts * model.hidden
    if convention == "all_parameters":
        return 6.0 * count(model) + attention
    if convention == "no_embedding":
        return 6.0 * (count(model) - model.vocabulary * model.hidden) + attention
    head = 6.0 * model.vocabulary * model.hidden
    layers = 6.0 * matmul_weights(model) - head + attention
    return head + layers * (4 / 3 if convention == "with_recompute" else 1)


_FIGURES = {
    "tokens": ("tok_s_gpu", 1.0),
    "flops": ("tflops_gpu", 1e12),
    "mfu": ("mfu_pct", 0.01),
    "parameters": ("params_B", 1e9),
}


def _published(row: Row) -> tuple[dict[str, float], dict[str, str]]:
    printed = {name: _digits(row, key) for name, (key, _) in _FIGURES.items() if _digits(row, key)}
    return {name: float(text) * _FIGURES[name][1] for name, text in printed.items()}, printed


def _seconds(row: Row, work: Work, devices: int, published: Mapping[str, float], convention: str | None) -> float | None:
    given = _number(row, "step_time_s")
    if given:
        return given
    if "tokens" in published:
        return work.tokens / devices / published["tokens"]
    if "flops" in published and convention:
        return work.tokens / devices * published_flops(work.model, work.sequence_length, convention) / published["flops"]
    return None


def _memory(row: Row) -> tuple[float | None, str]:
    value, kind = _number(row, "mem_gib"), row.get("mem_kind", "").lower()
    if not value:
        return None, ""
    if "theor" in kind or "model states" in kind or row.get("status") == "memory_theory":
        return value * GIB, "theory"
    unit = 1e9 if re.search(r"\bgb\b", kind) and "gib" not in kind else GIB
    return value * unit, "reserved" if "reserved" in kind or "nvidia-smi" in kind else "allocated"


def _status(row: Row) -> str:
    text = row.get("status", "ok").lower()
    if "oom" in text or "out of memory" in text or "out_of_memory" in text:
        return "out_of_memory"
    return "failed" if "fail" in text or "hang" in text or "crash" in text else "ok"


# -- the three formats ---------------------------------------------------------------------------------------------------


def _published_case(row: Row, file: str, place: str) -> Case:
    if "recalled" in row.get("provenance", "").lower():
        raise NotModelled("figures recalled, not read from their source")
    if "speedup" in row.get("status", "").lower():
        raise NotModelled("only a speed-up given")
    about = " ".join(row.get(key, "") for key in ("source_ref", "model", "notes")).lower()
    if re.search(r"\b(lora|sft|peft|dpo|rlhf|fine-?tun\w*)\b", about):
        raise NotModelled("fine-tuning, not pre-training")
    program, assumed = row.get("fw", ""), list[str]()
    stack, device = _stack(program), device_key(row.get("gpu", ""), program)
    model = _model(row, stack, assumed)
    layout, batch, devices = _layout(row, model, stack, assumed)
    mode, share = _recompute(row, model.layers)
    layout["recompute"] = RECOMPUTE.index(mode)
    if _must_shard(model, layout, stack, device):
        layout["zero"] = 3
        assumed.append("FSDP, for the weights would not fit otherwise")
    pure = "/pure" in row.get("precision", "").lower()
    work = Work(
        model,
        _needed(row, "seq", "sequence length"),
        batch,
        _precision(row.get("precision", ""), assumed),
        reduce_dtype="bfloat16" if pure else "float32",
    )
    values, printed = _published(row)
    convention = convention_of(row.get("flop_convention", ""), stack)
    if stack == "torchtitan" and device.startswith("a100"):
        convention = "all_parameters"  # its A100 table is older than its leaving the embedding out, and shows it
    seconds = _seconds(row, work, devices, values, convention)
    memory, kind = _memory(row)
    status = _status(row)
    if seconds is None and memory is None and status == "ok":
        if "flops" in values:
            raise NotModelled("FLOP/s given, but not how they were counted")
        raise NotModelled("neither time, throughput nor memory given")
    node = _node(row.get("gpu", "") + " " + row.get("net", ""))
    return Case(
        file=file, name=row.get("case_id") or place, program=program, stack=stack, traits=_traits(row, stack),
        model=row.get("model", ""), work=work, layout=layout, device=device, devices=devices,
        seconds=seconds if status == "ok" else None, status=status, recompute_share=share, devices_per_node=node,
        network=_network(row.get("net", ""), node or 8), memory=memory, memory_kind=kind, published=values, printed=printed,
        convention=convention, assumed=tuple(dict.fromkeys(assumed)),
    )  # fmt: skip


def _sweep_case(row: Row, file: str, place: str) -> Case:
    assumed: list[str] = []
    plain = {**row, "gbs": row.get("gbs_seqs", ""), "ga": row.get("grad_acc", ""), "glu": "1", "fw": "nanotron"}
    model = _model(plain, "nanotron", assumed)
    model = model.model_copy(update={"tied": row.get("variant") == "tied"})
    run = (_whole(row, "dp") or 1) * (_whole(row, "mbs") or 1) * (_whole(row, "grad_acc") or 1)
    if _whole(row, "grad_acc") and run != _whole(row, "gbs_seqs"):  # which of the columns is wrong cannot be told
        raise NotModelled("batch: dp x mbs x grad_acc is not the global batch")
    layout, batch, devices = _layout(plain, model, "nanotron", assumed)
    layout["recompute"] = 0
    work, status = Work(model, _needed(row, "seq", "sequence length"), batch), _status(row)
    values, printed = _published({**row, "params_B": row.get("model_B", "")})
    seconds = work.tokens / devices / values["tokens"] if "tokens" in values else _number(row, "step_time_s")
    if seconds is None and status == "ok":
        raise NotModelled("neither time, throughput nor memory given")
    memory = _number(row, "mem_gb")  # torch.cuda.max_memory_allocated() / 1024**3, whatever the column's name
    return Case(
        file=file, name=place, program="nanotron", stack="nanotron", traits=frozenset({"eager"}),
        model=row.get("model_B", "") + "B", work=work, layout=layout, device="h100-hf", devices=devices,
        seconds=seconds if status == "ok" else None, status=status, memory=memory * GIB if memory else None,
        memory_kind="allocated" if memory else "", published=values, printed=printed, convention="all_parameters",
        assumed=tuple(assumed),
    )  # fmt: skip


def _vtrain_case(row: Row, file: str, place: str) -> Case:
    names = {"gpus": "# GPUs", "gbs": "global batch", "mbs": "micro batch", "hidden": "hidden size", "heads": "attention heads",
             "layers": "# layers", "seq": "sequence length", "tp": "tensor parallelism", "dp": "data parallelism",
             "pp": "pipeline parallelism"}  # fmt: skip
    plain = {key: row.get(name, "") for key, name in names.items()} | {"glu": "0", "vocab": row.get("vocab", "") or "51200"}
    plain["ffn"] = row.get("ffn", "") or str(4 * (_whole(plain, "hidden") or 0))
    milliseconds = _number(row, "iteration time (ms)")
    if milliseconds is None:
        raise NotModelled("neither time, throughput nor memory given")
    model = _model(plain, "vtrain", [])
    layout, batch, devices = _layout(plain, model, "vtrain", [])
    layout["recompute"] = 0
    work = Work(model, _needed(plain, "seq", "sequence length"), batch, "float16")
    return Case(
        file=file, name=place, program="vTrain", stack="vtrain", traits=frozenset({"no_sequence_parallel"}),
        model=f"gpt {model.layers}x{model.hidden}", work=work, layout=layout, device="a100-80", devices=devices,
        seconds=milliseconds / 1e3,
    )  # fmt: skip


_FORMATS: tuple[tuple[set[str], Callable[[Row, str, str], Case]], ...] = (
    ({"# GPUs", "hidden size", "# layers", "iteration time (ms)"}, _vtrain_case),
    ({"gbs_seqs", "grad_acc", "status", "layers", "hidden"}, _sweep_case),
    ({"fw", "model", "gpu", "gpus"}, _published_case),
)
