"""Measured runs of other programs, as the planner's harness reads them: what was run is understood, or
refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.config.parameters import count
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.space import RECOMPUTE
from shardwise.errors import UserError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import planner_accuracy as accuracy  # noqa: E402
import planner_cases as reading  # noqa: E402
import planner_cells as cells  # noqa: E402
import planner_judge as judging  # noqa: E402
import planner_programs as programs  # noqa: E402
import planner_published as published  # noqa: E402

# A published run, field by field; each test changes some.
FOUNDRY = {
    "case_id": "c1", "provenance": "primary_file", "fw": "llm-foundry FSDP1", "model": "mpt-7b",
    "params_B": "6.684",
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn": "16384", "vocab": "50368",
    "glu": "0",
    "gpu": "a100_80gb", "gpus": "8", "net": "1600Gbps/node RoCE", "precision": "amp_bf16/DEFAULT",
    "seq": "8192",
    "gbs": "16", "mbs": "1", "ga": "2", "tp": "1", "pp": "1", "dp": "8", "cp": "1", "zero_fsdp": "FULL_SHARD",
    "recompute": "full", "tok_s_gpu": "3206.0", "tflops_gpu": "169.0", "mfu_pct": "54.47",
    "flop_convention": "6N(all params)+12*L*d*s full attn", "status": "ok", "notes": "off=False",
}  # fmt: skip
BRIDGE = {
    "case_id": "c2", "provenance": "primary_file", "fw": "Megatron-Bridge", "model": "Qwen3_30B_a3B",
    "gpu": "DGX-GB200",
    "gpus": "8", "precision": "MXFP8", "seq": "4096", "gbs": "512", "mbs": "4", "tp": "1", "pp": "1",
    "dp": "8", "cp": "1",
    "ep": "8", "zero_fsdp": "dist-opt", "tok_s_gpu": "26084.0", "tflops_gpu": "600.0",
    "flop_convention": "Megatron-Bridge model flops (causal attn)", "status": "ok",
}  # fmt: skip
TITAN = {
    "case_id": "c3", "provenance": "primary_file", "fw": "torchtitan FSDP2", "model": "llama3.1-405b",
    "layers": "126",
    "hidden": "16384", "heads": "128", "kv_heads": "8", "ffn": "53248", "vocab": "128256", "glu": "1",
    "gpu": "H100-96GB-HBM2e-500W(2.4TB/s)", "gpus": "512", "net": "400Gb/s/GPU RDMA", "precision": "fp8",
    "seq": "8192",
    "gbs": "256", "mbs": "32", "tp": "8", "pp": "8", "dp": "8", "cp": "1", "zero_fsdp": "FSDP2",
    "recompute": "full",
    "schedule": "Interleaved1F1B", "step_time_s": "32.0", "tok_s_gpu": "128", "mem_gib": "72.7",
    "mem_kind": "max over ranks (peak reserved)", "status": "ok", "notes": "compile+float8+asyncTP",
}  # fmt: skip
SWEEP = (
    "model_B,layers,hidden,heads,ffn,vocab,variant,nodes,gpus,seq,gbs_seqs,mbs,grad_acc,dp,pp,tp,zero,"
    "status,mfu_pct,tok_s_gpu,tok_s,mem_gb,step_time_s\n"
    "1.34,16,2048,32,8192,131072,untied,1,8,4096,256,4,16,4,2,1,1,ok,44.324,38894.51,311156.08,41.76,3.3699\n"
    "1.34,16,2048,32,8192,131072,untied,1,8,4096,256,2,4,2,4,1,1,ok,24.672,21649.63,173197.04,29.04,6.0542\n"
    "1.34,16,2048,32,8192,131072,,1,8,4096,256,64,1,4,2,1,1,failed,,,,,\n"
    "1.34,16,2048,32,8192,131072,untied,1,8,4096,256,2,32,4,2,1,1,ok,43.646,38299.12,306392.96,26.41,3.4223\n"
)
SHORT = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor "
    "parallelism,data parallelism,"
    "pipeline parallelism,iteration time (ms),comment\n"
    "2,16,8,1024,16,24,1024,1,1,2,372.160408,anything\n"
    "8,4,1,1024,16,16,1024,1,2,2,77.2,not eight devices\n"
)


def write(folder: Path, *rows: dict[str, str]) -> Path:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([f'"{row.get(name, "")}"' for name in columns] for row in rows)]
    path = folder / "published.csv"
    path.write_text("\n".join(",".join(line) for line in lines) + "\n", encoding="utf-8")
    return path


def read_one(folder: Path, row: dict[str, str], **changes: str) -> reading.Case:
    cases, reasons = reading.read_cases(write(folder, {**row, **changes}))
    assert not reasons
    return cases[0]


def test_a_published_run_is_read_whole(tmp_path: Path) -> None:
    case = read_one(tmp_path, FOUNDRY)
    assert (case.device, case.devices, case.stack, case.family) == ("a100-80", 8, "llm-foundry", "dense")
    assert case.layout["zero"] == 3
    assert case.layout["accumulation"] == 2
    assert case.layout["micro_batch"] == 1
    assert RECOMPUTE[case.layout["recompute"]] == "full"
    assert case.network == pytest.approx(25e9)
    assert case.seconds == pytest.approx(16 * 8192 / 8 / 3206)


def test_torchtitan_cuts_its_batch_for_a_pipeline_and_keeps_weights_and_gradients_whole(
    tmp_path: Path,
) -> None:
    case = read_one(tmp_path, TITAN)
    assert (case.layout["micro_batch"], case.layout["accumulation"], case.layout["zero"]) == (4, 8, 1)
    assert SCHEDULES[case.layout["schedule"]] == "interleaved"
    assert case.layout["stages_per_rank"] == 2
    assert case.device == "h100-96"
    assert case.network == pytest.approx(50e9)
    assert {"compile", "async_tensor"} <= case.traits
    assert case.assumed
    assert case.memory == 72.7 * 2**30
    assert case.memory_kind == "reserved"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"provenance": "secondary_page+recalled"}, "recalled"),
        ({"status": "speedup_only"}, "speed-up"),
        ({"gpu": "TPUv4"}, "TPU"),
        ({"gpu": "any"}, "device not known: any"),
        ({"model": "DeepSeekV3 (w/o MTP)"}, "latent attention"),
        ({"model": "Nemotron_3_Nano"}, "state-space"),
        ({"model": "GPT OSS 120B"}, "sliding-window"),
        ({"model": "somebody's", "layers": "", "hidden": ""}, "layers or hidden size not given"),
        ({"notes": "LoRA Performance"}, "fine-tuning"),
        ({"dp": "4"}, "not the number of devices"),
        ({"gbs": "15", "ga": ""}, "batch does not divide"),
        ({"gbs": "32"}, "dp x mbs x ga is not the global batch"),
        ({"seq": ""}, "sequence length not given"),
        ({"tok_s_gpu": "", "tflops_gpu": "", "mfu_pct": ""}, "neither time, throughput nor memory"),
        ({"tok_s_gpu": "", "tflops_gpu": "", "flop_convention": "our own"}, "only MFU given"),
        ({"tok_s_gpu": "", "tflops_gpu": "", "precision": "fp8", "gpu": "H100"}, "only MFU given"),
        ({"gpus": "1e400"}, "gpus: 1e400 is not a number"),
        ({"gpus": "0"}, "gpus: 0 is not a whole number above 0"),
        ({"gpus": "-8"}, "gpus: -8 is not"),
        ({"gpus": "many"}, "gpus: many is not a number"),
        ({"gpus": "8 x 2"}, "gpus: 8 x 2 is not a number"),
        ({"gpus": "8.5"}, "gpus: 8.5 is not a whole number"),
        ({"gpus": "nan", "dp": ""}, "number of devices not given"),
        ({"layers": "thirty"}, "layers: thirty is not a number"),
        ({"layers": "1000000"}, "beyond reason"),
        ({"hidden": "4k"}, "hidden: 4k is not a number"),
        ({"hidden": "4097"}, "heads do not divide the hidden size"),
        ({"kv_heads": "3"}, "kv_heads do not divide heads"),
        ({"seq": "8k"}, "seq: 8k is not a number"),
        ({"tok_s_gpu": "10.1k"}, "tok_s_gpu: 10.1k is not a number"),
        ({"step_time_s": "12910 ms"}, "step_time_s: 12910 ms is not a number"),
        ({"step_time_s": "12,91"}, "step_time_s: 12,91 is not a number"),
        ({"step_time_s": "-3"}, "step_time_s: -3 is below 0"),
        ({"tp": "0"}, "tp: 0 is not a whole number above 0"),
        (
            {"pp": "2", "dp": "4", "vpp": "100", "gbs": "", "schedule": "interleaved"},
            "more pipeline stages than layers",
        ),
        ({"pp": "2", "dp": "4", "gbs": "", "schedule": "frob"}, "schedule: frob not known"),
        ({"cp": "3", "gpus": "24"}, "sequence does not divide by cp"),
        ({"zero_fsdp": "ZeRO++"}, "may mean several things"),
        ({"zero_fsdp": "fsdp=1"}, "may mean several things"),
        ({"zero_fsdp": "fsdp=3"}, "sharding group does not divide"),
        ({"zero_fsdp": "some"}, "zero_fsdp: some not known"),
        ({"recompute": "33 layers"}, "but there are 32 layers"),
        ({"recompute": "perhaps"}, "recompute: perhaps not known"),
        ({"precision": "int8"}, "precision: int8 not known"),
        ({"glu": "maybe"}, "neither yes nor no"),
        ({"net": "0Gb/s"}, "is no bandwidth"),
        ({"net": "1000 gpus per node"}, "beyond reason"),
        ({"gpu": "A100 and H100"}, "more than one named"),
        ({"moe": "8 experts top 16"}, "not possible"),
        ({"model": "my-8x7b"}, "experts not described"),
        ({"task": "SFT"}, "fine-tuning"),
        ({"tok_s_gpu": "", "flop_convention": "our own"}, "not how they were counted"),
    ],
)
def test_what_cannot_be_modelled_is_counted_with_its_reason(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    cases, reasons = reading.read_cases(write(tmp_path, FOUNDRY, {**FOUNDRY, **changes}))
    assert len(cases) == 1
    assert sum(reasons.values()) == 1
    assert reason in next(iter(reasons))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("DGX-H100", "h100"), ("h100_80gb", "h100"), ("H100-94/95GB-HBM2e", "h100-96"), ("NVIDIA H200 141GB",
        "h200"),
        ("A100 (one says 40GB; another 80GB)", "a100-80"), ("a100_40gb", "a100-40"), ("A100-PCIE-80GB",
        "a100-80-pcie"),
        ("A100 40G", "a100-40"), ("A100-40", "a100-40"), ("A100-SXM4-40GB", "a100-40"), ("8xA100", "a100-80"),
        ("V100-16GB", "v100-16"), ("H100 NVL 94GB", "h100-96-nvl"), ("H100-HF", "h100-hf"),
        ("V100-32GB(DGX-2)", "dgx2"), ("DGX-GB300", "gb300"), ("B200-180GB", "b200"), ("MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_devices_have_one_spelling(text: str, key: str) -> None:
    assert cells.device_key(text) == key


def test_choices_are_understood_in_the_words_of_their_programs(tmp_path: Path) -> None:
    half = read_one(
        tmp_path, FOUNDRY, recompute="selective_layer", zero_fsdp="SHARD_GRAD_OP", precision="bf16/PURE"
    )
    assert half.recompute_share == 0.5
    assert half.layout["zero"] == 2
    assert half.work.reduce_dtype == "bfloat16"
    early = read_one(
        tmp_path, FOUNDRY, fw="Megatron-LM 2020", recompute="", zero_fsdp="", mbs="", ga="", precision="fp16"
    )
    assert RECOMPUTE[early.layout["recompute"]] == "full"
    assert early.layout["micro_batch"] == 2
    assert early.layout["zero"] == 0
    assert early.work.precision == "float16"
    assert "no_sequence_parallel" in early.traits
    experts = read_one(
        tmp_path, FOUNDRY, model="own", glu="1", moe="64+2 experts top6 ffn 1408", fw="Megatron-Core", ep="8"
    )
    model = experts.work.model
    assert (model.experts, model.experts_per_token, model.shared_experts, model.expert_width) == (
        64,
        6,
        2,
        1408,
    )
    assert read_one(tmp_path, FOUNDRY, tok_s_gpu="3,206", gpu="A100-64GB").published["tokens"] == 3206


def test_weights_that_cannot_fit_whole_were_sharded(tmp_path: Path) -> None:
    case = read_one(
        tmp_path, BRIDGE, model="llama3-70b", gpus="64", dp="64", ep="", gbs="256", mbs="2", precision="NVFP4"
    )
    assert case.layout["zero"] == 3
    assert case.work.precision == "float4"
    assert any("FSDP" in rule for rule in case.assumed)


def test_a_sweep_is_read_with_its_failures_and_without_rows_that_contradict_themselves(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text(SWEEP, encoding="utf-8")
    cases, reasons = reading.read_cases(path)
    assert reasons == {"batch: dp x mbs x ga is not the global batch": 1}
    assert [case.status for case in cases] == ["ok", "failed", "ok"]
    assert cases[0].seconds == pytest.approx(3.3699, rel=1e-4)
    assert cases[0].memory == 41.76 * 2**30
    assert cases[1].seconds is None


def test_short_runs_are_read_and_unknown_columns_ignored(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text(SHORT, encoding="utf-8")
    cases, reasons = reading.read_cases(path)
    assert sum(reasons.values()) == 1
    assert cases[0].seconds == pytest.approx(0.372160408)
    assert (cases[0].layout["pipeline"], cases[0].layout["accumulation"], cases[0].work.precision) == (
        2,
        2,
        "float16",
    )


@pytest.mark.parametrize(
    ("text", "why"), [("a,b\n1,2\n", "no known format"), ("", "is empty"), ("\n\n", "is empty")]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=why):
        reading.read_cases(path)


@pytest.mark.parametrize(
    ("change", "encoding"),
    [
        (lambda text: text.replace(",", ";"), "utf-8"),
        (lambda text: text.replace(",", "\t"), "utf-8"),
        (lambda text: text.partition("\n")[0].upper() + "\n" + text.partition("\n")[2], "utf-8"),
        (lambda text: "# runs of mine\n\n" + text, "utf-8-sig"),
        (lambda text: text.replace("\n", "\r\n"), "utf-16"),
        (lambda text: text.replace("off=False", "caf\u00e9"), "latin-1"),
        (lambda text: text.replace("off=False", "x" * 200_000), "utf-8"),
        (lambda text: text.replace("case_id", "fw", 1).replace('"c1"', '"llm-foundry FSDP1"'), "utf-8"),
    ],
)  # fmt: skip
def test_a_table_is_read_however_it_was_written(
    tmp_path: Path, change: Callable[[str], str], encoding: str
) -> None:
    path = write(tmp_path, FOUNDRY)
    wanted = reading.read_cases(path)[0][0]
    path.write_bytes(change(path.read_text()).encode(encoding))
    case = reading.read_cases(path)[0][0]
    assert (case.work, case.layout, case.seconds, case.stack) == (
        wanted.work,
        wanted.layout,
        wanted.seconds,
        wanted.stack,
    )


def test_rows_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path, FOUNDRY)
    head, row = path.read_text().splitlines()
    path.write_text(
        "\n".join(
            [head, row + ",one,more", '"half" a quote,' + row, row, '"never closed,', row.replace('"', "")]
        )
    )
    cases, reasons = reading.read_cases(path)
    assert [case.name for case in cases] == ["c1"]
    assert sorted(reasons) == [
        "more cells than columns",
        "not CSV: ',' expected after '\"'",
        "not CSV: unexpected end of data",
    ]


def test_a_column_given_twice_with_two_values_is_no_number(tmp_path: Path) -> None:
    path = write(tmp_path, FOUNDRY)
    path.write_text(path.read_text().replace("case_id", "tp", 1).replace('"c1"', '"4"'))
    assert reading.read_cases(path)[1] == {"tp: 4 | 1 is not a number": 1}


def test_sizes_are_enough_without_a_program_or_a_name(tmp_path: Path) -> None:
    case = read_one(
        tmp_path, {name: text for name, text in FOUNDRY.items() if name not in ("fw", "model", "gpus")}
    )
    assert (case.stack, case.devices, case.model) == ("other", 8, "32x4096")


@pytest.mark.parametrize(
    ("program", "device", "notes", "stack"),
    [
        ("OLMo-core", "h100", "", "other"), ("shardwise", "h100", "", "shardwise"), ("DeepSpeed", "a100-80",
        "", "other"),
        ("TransformerEngine", "h100", "", "megatron-core"), ("PyTorch + Transformer Engine", "h100", "",
        "megatron-core"),
        ("NeMo 24.09", "h100", "", "nemo"), ("Megatron-Bridge", "gb200", "", "nemo"),
        ("MegaScale", "a100-80", "", "megatron-core"),
        ("Megatron-LM 2021", "a100-80", "", "megatron"), ("Megatron-LM 2023", "a100-80", "", "megatron-2023"),
        ("Megatron-LM 2024", "a100-80", "", "megatron-core"), ("Megatron-LM", "a100-80", "", "megatron"),
        ("Megatron-LM", "h100", "", "megatron-core"), ("Megatron-LM", "a100-80", "flash attention",
        "megatron-2023"),
        ("Megatron-LM core 0.12", "a100-80", "", "megatron-core"), ("Megatron-DeepSpeed", "h100", "",
        "megatron-2023"),
    ],
)  # fmt: skip
def test_programs_are_told_apart(program: str, device: str, notes: str, stack: str) -> None:
    assert cells.program_key(program, device, notes) == stack
    assert stack in programs.PROGRAMS


@pytest.mark.parametrize(
    ("text", "mode", "share", "assumed"),
    [
        *((text, "none", 1.0, False) for text in ("none", "no", "N", "0", "false", "off")),
        *((text, "none", 1.0, True) for text in ("", "?", "unknown", "not stated")),
        *((text, "selective", 1.0, False) for text in ("attn", "norm, act", "mlp,moe_act",
        "selective_op (config default)")),
        *((text, "full", 1.0, False) for text in ("full", "yes", "1", "True", "block", "all", "uniform 1",
        "every layer")),
        ("16 layers", "full", 0.5, False), ("8/32 layers", "full", 0.25, False), ("every 2nd layer", "full",
        0.5, False),
    ],
)  # fmt: skip
def test_recomputation_in_words(text: str, mode: str, share: float, assumed: bool) -> None:
    rules: list[str] = []
    assert cells.recompute({"recompute": text}, 32, rules) == (mode, share)
    assert bool(rules) == assumed


@pytest.mark.parametrize(
    ("text", "convention"),
    [
        ("causal attn 6*s^2*d*h*L, recompute excluded", "causal"), ("full attn; recompute not counted",
        "full"),
        ("no recompute, causal", "causal"), ("full attention, without recomputation", "full"),
        ("Megatron: INCLUDES recompute => this is HFU", "with_recompute"), ("incl. recompute",
        "with_recompute"),
        ("non-causal", "full"), ("causal mask ignored", "full"), ("6*(attn full+mlp+emb) dgxc v25.04",
        "full"),
        ("6N(no emb)+12*L*h*s full attn", "no_embedding"), ("embedding excluded, full attn", "no_embedding"),
        ("6N(all params)+12*L*d*s full attn", "all_parameters"), ("our own", None), ("", None),
    ],
)  # fmt: skip
def test_what_was_counted_is_understood_with_its_negations(text: str, convention: str | None) -> None:
    assert published.convention_of(text, "other") == convention


def test_flops_that_leave_recomputation_out_do_not_say_that_there_was_some() -> None:
    row = {"recompute": "", "flop_convention": "causal, recompute excluded"}
    assert cells.recompute(row, 32, []) == ("none", 1.0)
    assert cells.recompute({**row, "flop_convention": "recompute included"}, 32, []) == ("full", 1.0)


@pytest.mark.parametrize(
    ("text", "traits"),
    [
        ("norm, act", {"keeps_attention"}), ("selective layernorm moe", {"keeps_attention",
        "recomputes_mlp"}),
        ("mlp, core_attn", {"recomputes_mlp"}), ("moe_act,layernorm", {"keeps_attention"}), ("selective",
        set()),
        ("full", set()), ("none", set()), ("attn", set()), ("8 layers", set()),
    ],
)  # fmt: skip
def test_modules_that_are_recomputed_leave_the_others(text: str, traits: set[str]) -> None:
    assert cells.recomputed_modules({"recompute": text}) == traits


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch max_allocated (reserved=70.88)", "allocated"), ("max_memory_reserved worst rank", "reserved"),
        ("peak reserved; allocated 60", "reserved"), ("nvidia-smi", "device"), ("theoretical: params+opt",
        "theory"),
        ("", "allocated"),
    ],
)  # fmt: skip
def test_memory_is_what_its_words_name_first(text: str, kind: str) -> None:
    assert published.memory_of({"mem_gib": "10", "mem_kind": text}) == (10 * 2**30, kind)


def test_memory_is_compared_with_what_was_measured(tmp_path: Path) -> None:
    """Torch counts no runtime, and its tensors none of the room between them."""
    said = {}
    for kind in ("allocated", "reserved", "nvidia-smi"):
        [judged], _ = accuracy.judge([read_one(tmp_path, TITAN, mem_kind=kind)])
        said[kind] = judged.measurable
    overhead = judged.memory["overhead"]
    assert said["nvidia-smi"] == judged.peak == pytest.approx(said["reserved"] + overhead)
    assert 1.02 < said["reserved"] / said["allocated"] < programs.PROGRAMS["torchtitan"].fragmentation


def test_a_loss_that_is_never_whole_has_no_logits(tmp_path: Path) -> None:
    [whole, fused], _ = accuracy.judge(
        [read_one(tmp_path, FOUNDRY, fw="FSDP", notes=notes) for notes in ("", "Liger kernels")]
    )
    assert fused.memory["logits"] < 0.2 * whole.memory["logits"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("nemotron4-340b", 341), ("Nemotron-4 15B", 15.6), ("nemotron-4-340b-base", 341), ("grok1-314b", 316),
        ("opt-175b", 175), ("bloom-176b", 176), ("Llama-3.1 70B", 70.6), ("meta-llama3-8b-instruct", 8.03),
        ("dbrx", 132),
        ("Qwen3-235B-A22B", 235), ("qwen2.5-72b", 72.7), ("mixtral-8x22b", 141), ("mpt-30b", 30),
        ("mt-nlg-530b", 530),
    ],
)  # fmt: skip
def test_well_known_names_have_their_sizes(tmp_path: Path, name: str, billions: float) -> None:
    blank = dict.fromkeys(
        ("params_B", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "glu", "moe"), ""
    )
    case = read_one(tmp_path, {**FOUNDRY, **blank}, model=name, fw="NeMo", seq="2048")
    assert count(case.work.model) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "tensor", "expert"),
    [
        ({"fw": "Megatron-LM 0.14 + TE"}, 0.0, 0.0), ({"fw": "Megatron-Core", "notes": "overlap DP/TP on"},
        0.9, 0.0),
        ({"fw": "NeMo", "source_ref": "v25.05.01 nemotron", "gpu": "GB200"}, 0.0, 0.0),
        ({"fw": "NeMo", "source_ref": "v25.05.01 nemotron", "gpu": "H100"}, 0.9, 0.0),
        ({"fw": "Megatron-Bridge", "source_ref": "26.08 NeMo Container", "gpu": "GB200"}, 0.9, 0.9),
        ({"fw": "Megatron-Bridge", "source_ref": "26.04.01 NeMo Container", "gpu": "GB200"}, 0.9, 0.0),
    ],
)  # fmt: skip
def test_what_overlaps_is_a_fact_of_program_and_release(
    tmp_path: Path, changes: dict[str, str], tensor: float, expert: float
) -> None:
    stack = judging.stack_of(read_one(tmp_path, {**FOUNDRY, "gpu": "H100"}, **changes))
    assert (stack.overlap_tensor, stack.overlap_expert) == (tensor, expert)


@pytest.mark.parametrize(
    ("text", "program", "stage"),
    [
        ("stage3", "", 3), ("ZeRO-3", "", 3), ("deepspeed stage 2", "", 2), ("zero1", "", 1), ("1", "", 1),
        ("2.0", "", 2),
        ("FSDP=0", "", 0), ("0 (DDP)", "", 0), ("none", "FSDP", 0), ("FSDP2", "", 3), ("FSDP=64", "", 3),
        ("HSDP fsdp=8", "", 3),
        ("ZeRO-1 (fsdp=8)", "", 1), ("SHARD_GRAD_OP", "", 2), ("dist-opt(overlap grad/param)", "", 1),
        ("ZeRO-2 Pos+g", "", 2),
        ("DP baseline", "", 0), ("", "lit-gpt FSDP", 3), ("", "somebody's", 0),
    ],
)  # fmt: skip
def test_sharding_in_words(text: str, program: str, stage: int) -> None:
    rules: list[str] = []
    assert cells.zero_stage({"zero_fsdp": text, "fw": program}, "other", rules) == stage
    assert bool(rules) == (not text)


def test_a_sharding_group_leaves_replicas(tmp_path: Path) -> None:
    case = read_one(tmp_path, FOUNDRY, zero_fsdp="ZeRO-1 (fsdp=4)")
    assert (case.layout["zero"], case.layout["data"], case.layout["replica"]) == (1, 4, 2)
    assert read_one(tmp_path, FOUNDRY, zero_fsdp="ZeRO-1 within 2 GPUs").layout["replica"] == 4


@pytest.mark.parametrize(
    ("text", "gigabits", "assumed"),
    [
        ("400 Gbit/s per GPU", 400, False), ("400Gb/s/GPU RDMA", 400, False), ("8x400G", 400, False),
        ("4x HDR200", 100, False),
        ("8 x NDR", 400, False), ("1600Gbps/node RoCE", 200, False), ("8x50 GB/s InfiniBand/node", 400,
        False),
        ("8x200Gb HDR/node (Selene)", 200, False), ("400Gbps", 50, True), ("IB 400Gb/s; NVLink 900GB/s", 50,
        True),
        ("EFA 3.2 Tbps", 400, True), ("10 GbE", 1.25, True), ("InfiniBand", None, False), ("NVLink 900GB/s",
        None, False),
    ],
)  # fmt: skip
def test_networks_in_words(text: str, gigabits: float | None, assumed: bool) -> None:
    rules: list[str] = []
    assert cells.network(text, 8, rules) == (None if gigabits is None else pytest.approx(gigabits * 1e9 / 8))
    assert bool(rules) == assumed


@pytest.mark.parametrize(
    ("text", "status"),
    [
        *((text, "ok") for text in ("", "ok", "OK", "Success", "completed", "memory_theory", "measured")),
        *(
            (text, "out_of_memory")
            for text in ("OOM", "CUDA out of memory", "OutOfMemoryError", "out_of_memory")
        ),
        *((text, "failed") for text in ("failed", "timeout", "error", "killed", "hung", "skipped")),
    ],
)
def test_only_what_is_said_to_have_run_has_run(text: str, status: str) -> None:
    assert cells.status({"status": text}) == status


def test_a_status_in_unknown_words_is_not_guessed() -> None:
    with pytest.raises(cells.NotModelled, match="status: blue not known"):
        cells.status({"status": "blue"})


def test_time_follows_from_mfu_where_its_peak_is_known(tmp_path: Path) -> None:
    given = read_one(tmp_path, FOUNDRY).seconds
    derived = read_one(tmp_path, FOUNDRY, tok_s_gpu="", tflops_gpu="")
    assert derived.seconds == pytest.approx(given, rel=0.005)
    assert any("MFU" in rule for rule in derived.assumed)


def test_a_task_column_decides_over_what_notes_mention(tmp_path: Path) -> None:
    assert read_one(tmp_path, FOUNDRY, notes="for finetuning see the docs", task="pre-training").seconds


def test_megatron_reduces_gradients_once_a_step_in_a_pipeline(tmp_path: Path) -> None:
    staged = {"fw": "MegaScale", "zero_fsdp": "ZeRO-2", "pp": "2", "dp": "4", "gbs": "8"}
    assert read_one(tmp_path, FOUNDRY, **staged).layout["zero"] == 1
    assert read_one(tmp_path, FOUNDRY, **{**staged, "fw": "other"}).layout["zero"] == 2


def test_layers_that_do_not_divide_are_cut_by_cost(tmp_path: Path) -> None:
    staged = {"fw": "Megatron-LM 2023", "pp": "8", "dp": "1", "gbs": "16", "ga": "16"}
    assert not judging.stack_of(read_one(tmp_path, FOUNDRY, **staged)).balanced
    assert judging.stack_of(read_one(tmp_path, FOUNDRY, **staged, layers="30")).balanced


def test_a_sweep_may_name_its_program_and_device(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    head, *rows = SWEEP.splitlines()
    path.write_text("\n".join([head + ",gpu,fw", *(row + ",A100-80GB,torchtitan" for row in rows)]))
    cases, _ = reading.read_cases(path)
    assert {(case.device, case.stack, case.sweep) for case in cases} == {("a100-80", "torchtitan", True)}


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (FOUNDRY, {}),
        (BRIDGE, {}),
        # NeMo 24.07: attention counted whole
        (BRIDGE, {"fw": "NeMo/Megatron", "model": "Nemotron-340B", "gpu": "DGX-H100", "gpus": "128",
        "precision": "fp8", "ep": "",
                  "gbs": "32", "mbs": "1", "tp": "8", "pp": "8", "vpp": "12", "dp": "2", "tok_s_gpu": "326",
                  "tflops_gpu": "686",
                  "flop_convention": "full attn"}),
        # Megatron-Turing: recomputation counted
        (BRIDGE, {"fw": "Megatron-DeepSpeed", "model": "mt-nlg-530b", "layers": "105", "hidden": "20480",
        "heads": "128",
                  "ffn": "81920", "vocab": "50272", "glu": "0", "gpu": "A100-80GB", "gpus": "2240",
                  "precision": "bf16",
                  "seq": "2048", "gbs": "1920", "mbs": "", "tp": "8", "pp": "35", "dp": "8", "ep": "",
                  "tok_s_gpu": "29.21",
                  "tflops_gpu": "126", "flop_convention": "includes full recompute (4/3) => HFU"}),
        # torchtitan: the embedding left out
        (TITAN, {"gpus": "128", "pp": "1", "dp": "16", "gbs": "32", "mbs": "2", "tok_s_gpu": "177",
        "mfu_pct": "23.46",
                 "flop_convention": "6N(no emb)+12*L*h*s full attn", "schedule": ""}),
    ],
)  # fmt: skip
def test_published_flops_follow_from_tokens(
    tmp_path: Path, row: dict[str, str], changes: dict[str, str]
) -> None:
    found = accuracy.conservation([read_one(tmp_path, row, **changes)])["flops"]
    assert len(found) == 1
    assert all(figures["largest_difference"] < 0.005 for figures in found.values())


def test_published_parameters_follow_from_shapes(tmp_path: Path) -> None:
    assert accuracy.conservation([read_one(tmp_path, FOUNDRY)])["parameters"] == {
        "llm-foundry FSDP1": {"rows": 1, "exact": 1}
    }
    wrong = accuracy.conservation([read_one(tmp_path, FOUNDRY, params_B="6.75")])
    assert wrong["parameters"]["llm-foundry FSDP1"]["exact"] == 0
    assert len(wrong["parameters_that_differ"]) == 1


def test_the_best_constant_has_the_smallest_mean_error(tmp_path: Path) -> None:
    cases = [read_one(tmp_path, FOUNDRY, tok_s_gpu=str(tokens)) for tokens in (1000, 2500, 3000, 3100, 9000)]
    judged, _ = accuracy.judge(cases)
    constant, error = accuracy.best_constant(judged, [one.flops for one in judged])
    rates = [one.flops / (one.case.seconds or 1) for one in judged]
    tried = [
        sum(abs(rate / (constant * factor) - 1) for rate in rates) / len(rates)
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2)
    ]
    assert error <= min(tried)


def test_regret_is_what_the_first_choice_loses(tmp_path: Path) -> None:
    case = read_one(tmp_path, FOUNDRY)
    said = [1.0, 2.0, 3.0, 0.5]
    cases = [case_with(case, seconds) for seconds in (4.0, 3.0, 5.0, None)]
    group = [
        accuracy.Judged(one, predicted, 0.0, {}, {}, True) for one, predicted in zip(cases, said, strict=True)
    ]
    regret = accuracy._regret(group)
    assert regret["first"] == pytest.approx(1 - 3 / 4)
    assert regret["best_of_five"] == 0
    assert regret["first_choice_failed"]
    assert regret["failed"] == 1


def case_with(case: reading.Case, seconds: float | None) -> reading.Case:
    return replace(case, seconds=seconds, status="failed" if seconds is None else "ok")


def test_the_command_prints_json_and_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py")]
    path, rows = write(tmp_path, FOUNDRY, TITAN, {**FOUNDRY, "gpu": "TPU"}), tmp_path / "rows.csv"
    done = subprocess.run(
        [*command, str(path), "--rows", str(rows)], capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(done.stdout)
    assert (result["files"]["published.csv"]["rows"], result["files"]["published.csv"]["modelled"]) == (3, 2)
    assert result["sets"]["llm-foundry a100"]["timed"] == 1
    assert len(rows.read_text().splitlines()) == 3
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    bad = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1
    assert not bad.stdout
    nowhere = subprocess.run([*command, str(path), "--rows", str(tmp_path / "no" / "rows.csv")],
    capture_output=True, text=True,
                             timeout=120, check=False)  # fmt: skip
    assert nowhere.returncode == 2
    assert "cannot be written" in nowhere.stderr


def test_one_bad_file_leaves_the_others_and_files_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first, second, bad = (
        write(tmp_path, FOUNDRY),
        write(tmp_path / "other", FOUNDRY, FOUNDRY),
        tmp_path / "none.csv",
    )
    result, judged = accuracy.report([first, second, bad])
    assert {name: figures.get("rows") for name, figures in result["files"].items()} == {
        str(first): 1,
        str(second): 2,
        "none.csv": None,
    }
    assert "cannot be read" in result["files"]["none.csv"]["error"]
    assert len(judged) == 3
    assert len(result["groups"]) == 2
