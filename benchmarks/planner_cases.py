"""Measured training runs as cases for the planner: what was run, on what, by which program, and what was
measured.

Three kinds of CSV files are read, and recognised by their columns: published runs of many programs, a sweep
of layouts on one cluster (nanotron), and a table of short GPT runs on one machine (vTrain). The rows of the
latter two are converted to those of the first. A row becomes a `Case`, or a reason why the planner cannot
model it; no row is dropped silently. A missing value that the planner needs is filled in by one rule for all
rows of a program, and `Case.assumed` names the rule. planner_cells.py reads cells, planner_models.py the
names of models, and planner_published.py the published figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import planner_cells as cells
from planner_cells import NotModelled, Row, device_key, measured, needed, switched, whole
from planner_models import model_of
from planner_published import convention_of, figures_of, memory_of, seconds_of, with_rate_of_mfu

from shardwise.config import Model
from shardwise.config.parameters import count
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.space import RECOMPUTE, Workload
from shardwise.errors import UserError


@dataclass(frozen=True)
class Case:
    """One measured run."""

    file: str
    name: str
    program: str
    stack: str
    """Key of the program's facts in benchmarks/planner_programs.py."""
    traits: frozenset[str]
    """Options of the program: eager, compile, async_tensor, overlaps_tensor, native_attention, fused_loss,
    keeps_attention, recomputes_mlp, no_sequence_parallel, float8_gather, uneven_stages."""
    model: str
    work: Workload
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
    """What was measured: a key of `planner_published.MEMORY_KINDS`."""
    published: Mapping[str, float] = field(default_factory=dict)
    """As printed: tokens and flops (a second and device), mfu (a share), parameters."""
    printed: Mapping[str, str] = field(default_factory=dict)
    """The same figures as text: their last digit is how far they can be trusted."""
    convention: str | None = None
    """How the published FLOP/s were counted."""
    assumed: tuple[str, ...] = ()
    sweep: bool = False
    """One of many layouts tried for a job."""
    release: tuple[int, int] | None = None
    """Year and month of the program's, where the row says so."""

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


# -- layouts and batches -------------------------------------------------------------------------------------


_SAID = {
    "fused_loss": r"liger|cut.?cross.?entropy|(fused|chunked) (linear )?(ce\b|cross.?entropy|loss)|fused "
    r"linear",
    "overlaps_tensor": r"overlap.*\btp\b|\btp\b.*overlap|megascale",
    "native_attention": r"\bfa-?[34]\b|flash-?attention-?[34]|cudnn.*attention",
}
"""Traits in the words of a row's program and notes."""


def _traits(row: Row, stack: str, layout: Mapping[str, int], layers: int) -> frozenset[str]:
    notes, split = row.get("notes", "").lower().replace(" ", ""), cells.yes_or_no(row, "sp")
    options = {"eager": "eager", "compile": "compile", "asynctp": "async_tensor", "float8ag": "float8_gather"}
    found = {trait for word, trait in options.items() if word in notes}
    words = f"{row.get('fw', '')}; {row.get('notes', '')}"
    found |= {trait for trait, said in _SAID.items() if cells.says(words, said)}
    found |= cells.recomputed_modules(row)
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
        assumed.append(
            "torchtitan's default: as many micro-batches of its local batch as there are pipeline ranks"
        )
        return max(1, given // pipeline)
    return given


def _axes(row: Row, model: Model) -> dict[str, int]:
    """Degrees; `data` here counts replicas too."""
    axes = {
        axis: whole(row, key) or 1 for axis, key in (("pipeline", "pp"), ("tensor", "tp"), ("data", "dp"))
    }
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
    if axes["expert"] > 1 and (
        not model.experts or model.experts % axes["expert"] or lenders % axes["expert"]
    ):
        raise NotModelled("layout: experts do not divide so")
    if model.heads % axes["tensor"] or axes["pipeline"] > model.layers:
        raise NotModelled("layout: heads or layers do not divide so")
    return axes


def _layout(
    row: Row, model: Model, stack: str, per_node: int, assumed: list[str]
) -> tuple[dict[str, int], int, int]:
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
    axes.update(replica=replica, data=data // replica, zero=_zero(row, stack, pipeline, assumed),
    micro_batch=micro,
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
"""Stages that are 1 in a pipeline: torchtitan keeps weights gathered, and gradients whole, between its
micro-batches; Megatron's kind sums gradients once a step whatever the stage is called."""


def _zero(row: Row, stack: str, pipeline: int, assumed: list[str]) -> int:
    stage = cells.zero_stage(row, stack, assumed)
    return 1 if pipeline > 1 and stage == _WHOLE_IN_A_PIPELINE.get(stack) else stage


def _batch(row: Row, data: int, devices: int) -> int:
    given, micro, accumulation = whole(row, "gbs"), whole(row, "mbs"), whole(row, "ga")
    if given:
        if (
            micro and accumulation and given != data * micro * accumulation
        ):  # which column is wrong cannot be told
            raise NotModelled("batch: dp x mbs x ga is not the global batch")
        return given
    if micro and accumulation:
        return data * micro * accumulation
    seconds, tokens, length = measured(row, "step_time_s"), measured(row, "tok_s_gpu"), whole(row, "seq")
    if seconds and tokens and length:
        return max(1, round(seconds * tokens * devices / length))
    raise NotModelled("global batch not given")


def _must_shard(model: Model, layout: Mapping[str, int], stack: str, device: str) -> bool:
    """Whether weights and gradients whole could not fit any device: the program's own FSDP must have been
    on."""
    largest = {"gb300": 288, "b300": 288, "gb200": 192, "b200": 192, "h200": 141}.get(device, 80) * 1e9
    held = (count(model) / layout["tensor"] / layout["pipeline"]) * 6
    return (
        stack in ("megatron-core", "nemo")
        and not model.experts
        and layout["zero"] < 3
        and layout["pipeline"] == 1
        and held > largest
    )


# -- a row ---------------------------------------------------------------------------------------------------


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
    model = model_of(row, stack, assumed)
    node = switched(row, "gpus_per_node") or cells.node_size(row.get("gpu", "") + " " + row.get("net", ""))
    layout, batch, devices = _layout(row, model, stack, node or 8, assumed)
    mode, share = cells.recompute(row, model.layers, assumed)
    layout["recompute"] = RECOMPUTE.index(mode)
    if _must_shard(model, layout, stack, device):
        layout["zero"] = 3
        assumed.append("FSDP, for the weights would not fit otherwise")
    pure = "/pure" in row.get("precision", "").lower()
    work = Workload(model, needed(row, "seq", "sequence length"), batch, cells.precision(row, assumed),
                reduce_dtype="bfloat16" if pure else "float32")  # fmt: skip
    values, printed = figures_of(row)
    convention = convention_of(row.get("flop_convention", ""), stack)
    if stack == "torchtitan" and device.startswith("a100"):
        convention = (
            "all_parameters"  # its A100 table is older than its leaving the embedding out, and shows it
        )
    status, (memory, kind) = cells.status(row), memory_of(row)
    seconds = seconds_of(row, work, devices, values, convention)
    if seconds is None and memory is None and status == "ok":
        if "flops" in values:
            raise NotModelled("FLOP/s given, but not how they were counted")
        if "mfu" not in values:
            raise NotModelled("neither time, throughput nor memory given")
        seconds = seconds_of(
            row, work, devices, with_rate_of_mfu(values, convention, device, work.precision), convention
        )
        assumed.append("time from MFU and the device's data sheet")
    return Case(
        file=file, name=row.get("case_id") or place, program=program or "program not given", stack=stack,
        traits=_traits(row, stack, layout, model.layers),
        model=row.get("model") or f"{model.layers}x{model.hidden}", work=work,
        layout=layout, device=device, devices=devices, seconds=seconds if status == "ok" else None,
        status=status,
        recompute_share=share, devices_per_node=node, network=cells.network(row.get("net", ""), node or 8,
        assumed),
        memory=memory, memory_kind=kind, published=values, printed=printed, convention=convention,
        assumed=tuple(dict.fromkeys(assumed)), sweep=sweep, release=cells.release(row),
    )  # fmt: skip


# -- the three formats ---------------------------------------------------------------------------------------


def _sweep(row: Row) -> Row:
    """A sweep's row as a published one. The Ultra-Scale Playbook's own does not name its program and
    cluster."""
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
    names = {"gpus": "gpus", "gbs": "global batch", "mbs": "micro batch", "hidden": "hidden size",
    "heads": "attention heads",
             "layers": "layers", "seq": "sequence length", "tp": "tensor parallelism",
             "dp": "data parallelism",
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
