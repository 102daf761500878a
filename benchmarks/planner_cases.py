"""Measured training runs as cases for the planner: what was run, on what, by which program, and what was measured.

Three kinds of CSV file are read, told apart by their columns: published runs of many programs, a sweep of layouts on one
cluster (nanotron), and a table of short GPT runs on one machine (vTrain); the latter two are published runs in other words. A row
becomes a `Case`, or a reason why the planner cannot model it; no row is dropped in silence. What a row leaves out and the planner
needs is filled in by one rule for all rows of a program, and the rule is named in `Case.assumed`. How cells are read is in
planner_cells.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planner_cells as cells
from planner_cells import NotModelled, Row, device_key, measured, needed, switched, whole

from shardwise.config import Model
from shardwise.config.presets import PRESETS
from shardwise.cost.clusters import CLUSTERS
from shardwise.cost.space import RECOMPUTE, Work
from shardwise.errors import UserError
from shardwise.plan.flops import flops_per_token, matmul_weights
from shardwise.plan.parameters import count
from shardwise.plan.schedule import SCHEDULES

GIB = 2.0**30


@dataclass(frozen=True)
class Case:
    """One measured run."""

    file: str
    name: str
    program: str
    stack: str
    """Key of the program's facts in benchmarks/planner_programs.py."""
    traits: frozenset[str]
    """Options of the program: eager, compile, async_tensor, no_sequence_parallel, float8_gather, uneven_stages."""
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
    sweep: bool = False
    """One of many layouts tried for a job."""

    @property
    def family(self) -> str:
        """Dense or with experts."""
        return "moe" if self.work.model.experts else "dense"


def read_cases(path: Path, label: str = "") -> tuple[list[Case], dict[str, int]]:
    """The cases of a file, and how many rows cannot be modelled for which reason."""
    columns, rows = cells.read_table(path)
    plain = next((in_words for has, in_words in _FORMATS if has <= columns), None)
    if plain is None:
        known = "; or ".join(", ".join(sorted(has)) for has, _ in _FORMATS)
        raise UserError(f"{path}: columns of no known format; a file needs these columns: {known}")
    cases, reasons = list[Case](), Counter[str]()
    for place, row in rows:
        try:
            if isinstance(row, NotModelled):
                raise row
            cases.append(_case(plain(row), label or path.name, f"line {place}", plain is _sweep))
        except NotModelled as reason:
            reasons[str(reason)] += 1
    return cases, dict(reasons)


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


_WITH_EXPERTS = r"\d+x\d+(\.\d+)?b|[-_ ]a\d+(\.\d+)?b|moe\b|mixtral|grok|dbrx"


def _model(row: Row, stack: str, assumed: list[str]) -> Model:
    name = row.get("model", "")
    for pattern, reason in _OTHER_ARCHITECTURES:
        if re.search(pattern, name.lower()):
            raise NotModelled(reason)
    plain = re.sub(r"\(.*?\)", "", name)
    shape = dict(SHAPES.get(_key(plain), {}))
    layers, hidden = whole(row, "layers") or shape.get("layers"), whole(row, "hidden") or shape.get("hidden")
    if not layers or not hidden:
        raise NotModelled("layers or hidden size not given")
    shape = _activation(row, shape, stack)
    heads = whole(row, "heads") or shape.get("heads") or _usual_heads(hidden, assumed)
    same_heads = (heads, hidden) == (shape.get("heads"), shape.get("hidden"))
    shape["kv_heads"] = whole(row, "kv_heads") or (shape["kv_heads"] if same_heads else heads)
    if heads % shape["kv_heads"]:
        raise NotModelled("shape: kv_heads do not divide heads")
    shape["head_dim"] = whole(row, "head_dim") or (shape["head_dim"] if same_heads else _usual_head(hidden, heads))
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
    return {"experts": experts, "experts_per_token": chosen, "shared_experts": int(beside), "activation": "swiglu",
            "bias": False, "expert_ffn": int(width.group(1)) if width else whole(row, "expert_ffn")}  # fmt: skip


# -- layouts and batches -------------------------------------------------------------------------------------------------


def _traits(row: Row, stack: str, layout: Mapping[str, int], layers: int) -> frozenset[str]:
    notes, split = row.get("notes", "").lower().replace(" ", ""), cells.yes_or_no(row, "sp")
    words = {"eager": "eager", "compile": "compile", "asynctp": "async_tensor", "float8ag": "float8_gather"}
    found = {trait for word, trait in words.items() if word in notes}
    # Megatron-LM had no sequence parallelism before 2022, and has a switch for it since
    if split is False or (stack == "megatron" and split is None):
        found.add("no_sequence_parallel")
    if layers % (layout["pipeline"] * layout["stages_per_rank"]):
        found.add("uneven_stages")
    return frozenset(found)


def _micro_batch(row: Row, stack: str, share: int, pipeline: int, assumed: list[str]) -> int:
    """Sequences of one forward pass; `share` is what one pipeline sees in a step."""
    given = whole(row, "mbs")
    if given is None:
        accumulation = whole(row, "ga")
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
    axes = {axis: whole(row, key) or 1 for axis, key in (("pipeline", "pp"), ("tensor", "tp"), ("data", "dp"))}
    axes |= {"context": switched(row, "cp") or 1, "expert": switched(row, "ep") or 1}
    fixed = axes["pipeline"] * axes["context"] * axes["tensor"]
    devices, data = whole(row, "gpus"), whole(row, "dp")
    if devices is None and data is None:
        raise NotModelled("number of devices not given")
    devices = devices or fixed * axes["data"]
    if data is None:
        axes["data"] = max(1, devices // fixed)
    if fixed * axes["data"] != devices:
        raise NotModelled("layout: tp x pp x dp x cp is not the number of devices")
    lenders = axes["data"] * axes["context"] * axes["tensor"]
    if axes["expert"] > 1 and (not model.experts or model.experts % axes["expert"] or lenders % axes["expert"]):
        raise NotModelled("layout: experts do not divide so")
    if model.heads % axes["tensor"] or axes["pipeline"] > model.layers:
        raise NotModelled("layout: heads or layers do not divide so")
    return axes


def _layout(row: Row, model: Model, stack: str, per_node: int, assumed: list[str]) -> tuple[dict[str, int], int, int]:
    """One row of a `Space`, the sequences of a step, and the devices."""
    axes = _axes(row, model)
    data, pipeline = axes["data"], axes["pipeline"]
    devices = data * pipeline * axes["context"] * axes["tensor"]
    batch = _batch(row, data, devices)
    share, rest = divmod(batch, data)
    micro = _micro_batch(row, stack, share, pipeline, assumed) if not rest else 1
    if rest or share % micro:
        raise NotModelled("batch does not divide by data-parallel devices and micro-batch")
    if needed(row, "seq", "sequence length") % axes["context"]:
        raise NotModelled("layout: the sequence does not divide by cp")
    name, stages = cells.schedule(row, pipeline)
    if stages * pipeline > model.layers + 2:  # a stage may have nothing but the embedding, or the head
        raise NotModelled("layout: more pipeline stages than layers")
    replica = _replicas(row, data, axes["context"], per_node, assumed)
    offload = "off=true" in row.get("notes", "").lower() or "offload" in row.get("zero_fsdp", "").lower()
    axes.update(replica=replica, data=data // replica, zero=_zero(row, stack, pipeline, assumed), micro_batch=micro,
                accumulation=share // micro, schedule=SCHEDULES.index(name), stages_per_rank=stages,
                ring=int(axes["context"] > 1), offload=int(offload))  # fmt: skip
    return axes, batch, devices


def _replicas(row: Row, data: int, context: int, per_node: int, assumed: list[str]) -> int:
    """Groups of devices that each share what is sharded."""
    group = cells.sharding_group(row, min(per_node, data * context), assumed)
    if group is None:
        return 1
    shards = max(1, group // context)
    if data % shards:
        raise NotModelled("layout: the sharding group does not divide the data-parallel devices")
    return data // shards


_WHOLE_IN_A_PIPELINE = {"torchtitan": 3, **dict.fromkeys(cells.MEGATRON_LIKE, 2)}
"""Stages that are 1 in a pipeline: torchtitan keeps weights gathered, and gradients whole, between its micro-batches; Megatron's
kind sums gradients once a step whatever the stage is called."""


def _zero(row: Row, stack: str, pipeline: int, assumed: list[str]) -> int:
    stage = cells.zero_stage(row, stack, assumed)
    return 1 if pipeline > 1 and stage == _WHOLE_IN_A_PIPELINE.get(stack) else stage


def _batch(row: Row, data: int, devices: int) -> int:
    given, micro, accumulation = whole(row, "gbs"), whole(row, "mbs"), whole(row, "ga")
    if given:
        if micro and accumulation and given != data * micro * accumulation:  # which column is wrong cannot be told
            raise NotModelled("batch: dp x mbs x ga is not the global batch")
        return given
    if micro and accumulation:
        return data * micro * accumulation
    seconds, tokens, length = measured(row, "step_time_s"), measured(row, "tok_s_gpu"), whole(row, "seq")
    if seconds and tokens and length:
        return max(1, round(seconds * tokens * devices / length))
    raise NotModelled("global batch not given")


def _must_shard(model: Model, layout: Mapping[str, int], stack: str, device: str) -> bool:
    """Whether weights and gradients whole could not fit any device: the program's own FSDP must have been on."""
    largest = {"gb300": 288, "b300": 288, "gb200": 192, "b200": 192, "h200": 141}.get(device, 80) * 1e9
    held = (count(model) / layout["tensor"] / layout["pipeline"]) * 6
    return (
        stack in ("megatron-core", "nemo")
        and not model.experts
        and layout["zero"] < 3
        and layout["pipeline"] == 1
        and held > largest
    )


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
    "parameters": ("params_b", 1e9),
}


def _published(row: Row) -> tuple[dict[str, float], dict[str, str]]:
    printed = {name: cells.digits(row, key) for name, (key, _) in _FIGURES.items() if measured(row, key)}
    return {name: float(text) * _FIGURES[name][1] for name, text in printed.items()}, printed


def _seconds(row: Row, work: Work, devices: int, published: Mapping[str, float], convention: str | None) -> float | None:
    given = measured(row, "step_time_s")
    if given:
        return given
    if "tokens" in published:
        return work.tokens / devices / published["tokens"]
    if "flops" in published and convention:
        return work.tokens / devices * published_flops(work.model, work.sequence_length, convention) / published["flops"]
    return None


def _with_rate_of_mfu(published: dict[str, float], convention: str | None, device: str, precision: str) -> dict[str, float]:
    """MFU is of the data sheet's peak, unless products are in 8 or 4 bits: then some mean that of 16."""
    peak = CLUSTERS[device].device.peak.get(precision) if device in CLUSTERS else None
    if peak is None or convention is None or precision not in ("bfloat16", "float16") or published["mfu"] < 0.01:
        raise NotModelled("only MFU given, and not of what")
    return {**published, "flops": published["mfu"] * peak}


def _memory(row: Row) -> tuple[float | None, str]:
    value, kind = measured(row, "mem_gib"), row.get("mem_kind", "").lower()
    if not value:
        return None, ""
    if "theor" in kind or "model states" in kind or row.get("status") == "memory_theory":
        return value * GIB, "theory"
    unit = 1e9 if re.search(r"\bgb\b", kind) and "gib" not in kind else GIB
    return value * unit, "reserved" if "reserved" in kind or "nvidia-smi" in kind else "allocated"


# -- a row ---------------------------------------------------------------------------------------------------------------


def _refuse(row: Row) -> None:
    """Rows that are not measurements of pre-training."""
    if "recalled" in row.get("provenance", "").lower():
        raise NotModelled("figures recalled, not read from their source")
    if "speedup" in row.get("status", "").lower():
        raise NotModelled("only a speed-up given")
    about = row.get("task", "") or " ".join(row.get(key, "") for key in ("source_ref", "model", "notes"))
    tuned = re.search(r"\b(lora|sft|peft|dpo|rlhf|fine-?tun\w*)\b", about.lower())
    if tuned and not re.search(r"pre-?train", about.lower()):
        raise NotModelled("fine-tuning, not pre-training")


def _case(row: Row, file: str, place: str, sweep: bool) -> Case:
    _refuse(row)
    program, assumed = row.get("fw", ""), list[str]()
    device = device_key(row.get("gpu", ""), program)
    stack = cells.program_key(program, device, row.get("notes", ""))
    model = _model(row, stack, assumed)
    node = switched(row, "gpus_per_node") or cells.node_size(row.get("gpu", "") + " " + row.get("net", ""))
    layout, batch, devices = _layout(row, model, stack, node or 8, assumed)
    mode, share = cells.recompute(row, model.layers, assumed)
    layout["recompute"] = RECOMPUTE.index(mode)
    if _must_shard(model, layout, stack, device):
        layout["zero"] = 3
        assumed.append("FSDP, for the weights would not fit otherwise")
    pure = "/pure" in row.get("precision", "").lower()
    work = Work(model, needed(row, "seq", "sequence length"), batch, cells.precision(row, assumed),
                reduce_dtype="bfloat16" if pure else "float32")  # fmt: skip
    values, printed = _published(row)
    convention = convention_of(row.get("flop_convention", ""), stack)
    if stack == "torchtitan" and device.startswith("a100"):
        convention = "all_parameters"  # its A100 table is older than its leaving the embedding out, and shows it
    status, (memory, kind) = cells.status(row), _memory(row)
    seconds = _seconds(row, work, devices, values, convention)
    if seconds is None and memory is None and status == "ok":
        if "flops" in values:
            raise NotModelled("FLOP/s given, but not how they were counted")
        if "mfu" not in values:
            raise NotModelled("neither time, throughput nor memory given")
        seconds = _seconds(row, work, devices, _with_rate_of_mfu(values, convention, device, work.precision), convention)
        assumed.append("time from MFU and the device's data sheet")
    return Case(
        file=file, name=row.get("case_id") or place, program=program or "program not given", stack=stack,
        traits=_traits(row, stack, layout, model.layers), model=row.get("model") or f"{model.layers}x{model.hidden}", work=work,
        layout=layout, device=device, devices=devices, seconds=seconds if status == "ok" else None, status=status,
        recompute_share=share, devices_per_node=node, network=cells.network(row.get("net", ""), node or 8, assumed),
        memory=memory, memory_kind=kind, published=values, printed=printed, convention=convention,
        assumed=tuple(dict.fromkeys(assumed)), sweep=sweep,
    )  # fmt: skip


# -- the three formats ---------------------------------------------------------------------------------------------------


def _sweep(row: Row) -> Row:
    """A sweep's row as a published one. The Ultra-Scale Playbook's own does not name its program and cluster."""
    usual = {"fw": "nanotron", "gpu": "h100-hf", "glu": "1", "recompute": "none", "precision": "bf16"}
    names = {"gbs": "gbs_seqs", "ga": "grad_acc", "params_b": "model_b", "zero_fsdp": "zero"}
    plain = {**usual, **row, **{key: row[name] for key, name in names.items() if name in row}}
    plain["model"] = row["model_b"] + "B" if "model_b" in row else row.get("model", "")
    plain["tied"] = "yes" if row.get("variant") == "tied" else "no"
    if "mem_gb" in row:  # torch.cuda.max_memory_allocated() / 1024**3, whatever the column's name
        plain |= {"mem_gib": row["mem_gb"], "mem_kind": "allocated"}
    if measured(row, "tok_s_gpu"):  # printed with more digits
        plain["step_time_s"] = ""
    nodes, devices = whole(row, "nodes"), whole(row, "gpus")
    if nodes and devices:
        if devices % nodes:
            raise NotModelled("layout: nodes do not divide the devices")
        plain["gpus_per_node"] = str(devices // nodes)
    return plain


def _vtrain(row: Row) -> Row:
    """vTrain's table as published runs: GPT in float16 on one machine."""
    names = {"gpus": "gpus", "gbs": "global batch", "mbs": "micro batch", "hidden": "hidden size", "heads": "attention heads",
             "layers": "layers", "seq": "sequence length", "tp": "tensor parallelism", "dp": "data parallelism",
             "pp": "pipeline parallelism", "vocab": "vocab", "ffn": "ffn", "status": "status"}  # fmt: skip
    usual = {
        "fw": "vTrain",
        "gpu": "A100-80GB",
        "glu": "0",
        "sp": "0",
        "vocab": "51200",
        "precision": "fp16",
        "recompute": "none",
    }
    plain = {**usual, **{key: row[name] for key, name in names.items() if name in row}}
    plain.setdefault("ffn", str(4 * (whole(plain, "hidden") or 0)))
    plain["model"] = f"gpt {plain.get('layers')}x{plain.get('hidden')}"
    plain["step_time_s"] = str((measured(row, "iteration time (ms)") or 0.0) / 1e3)
    return plain


_FORMATS: tuple[tuple[set[str], Callable[[Row], Row]], ...] = (
    ({"gpus", "hidden size", "layers", "iteration time (ms)"}, _vtrain),
    ({"gbs_seqs", "grad_acc", "layers", "hidden"}, _sweep),
    ({"gpu", "model"}, lambda row: row),
    ({"gpu", "layers", "hidden"}, lambda row: row),
)
