"""Measured runs of other programs, as the planner's harness reads them: what was run is understood, or refused with a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.plan.schedule import SCHEDULES
from shardwise.plan.space import RECOMPUTE

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import planner_accuracy as accuracy  # noqa: E402
import planner_cases as reading  # noqa: E402

# A published run, field by field; each test changes some.
FOUNDRY = {
    "case_id": "c1", "provenance": "primary_file", "fw": "llm-foundry FSDP1", "model": "mpt-7b", "params_B": "6.684",
    "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "32", "ffn": "16384", "vocab": "50368", "glu": "0",
    "gpu": "a100_80gb", "gpus": "8", "net": "1600Gbps/node RoCE", "precision": "amp_bf16/DEFAULT", "seq": "8192",
    "gbs": "16", "mbs": "1", "ga": "2", "tp": "1", "pp": "1", "dp": "8", "cp": "1", "zero_fsdp": "FULL_SHARD",
    "recompute": "full", "tok_s_gpu": "3206.0", "tflops_gpu": "169.0", "mfu_pct": "54.47",
    "flop_convention": "6N(all params)+12*L*d*s full attn", "status": "ok", "notes": "off=False",
}  # fmt: skip
BRIDGE = {
    "case_id": "c2", "provenance": "primary_file", "fw": "Megatron-Bridge", "model": "Qwen3_30B_a3B", "gpu": "DGX-GB200",
    "gpus": "8", "precision": "MXFP8", "seq": "4096", "gbs": "512", "mbs": "4", "tp": "1", "pp": "1", "dp": "8", "cp": "1",
    "ep": "8", "zero_fsdp": "dist-opt", "tok_s_gpu": "26084.0", "tflops_gpu": "600.0",
    "flop_convention": "Megatron-Bridge model flops (causal attn)", "status": "ok",
}  # fmt: skip
TITAN = {
    "case_id": "c3", "provenance": "primary_file", "fw": "torchtitan FSDP2", "model": "llama3.1-405b", "layers": "126",
    "hidden": "16384", "heads": "128", "kv_heads": "8", "ffn": "53248", "vocab": "128256", "glu": "1",
    "gpu": "H100-96GB-HBM2e-500W(2.4TB/s)", "gpus": "512", "net": "400Gb/s/GPU RDMA", "precision": "fp8", "seq": "8192",
    "gbs": "256", "mbs": "32", "tp": "8", "pp": "8", "dp": "8", "cp": "1", "zero_fsdp": "FSDP2", "recompute": "full",
    "schedule": "Interleaved1F1B", "step_time_s": "32.0", "tok_s_gpu": "128", "mem_gib": "72.7",
    "mem_kind": "max over ranks (peak reserved)", "status": "ok", "notes": "compile+float8+asyncTP",
}  # fmt: skip
SWEEP = (
    "model_B,layers,hidden,heads,ffn,vocab,variant,nodes,gpus,seq,gbs_seqs,mbs,grad_acc,dp,pp,tp,zero,status,mfu_pct,tok_s_gpu,"
    "tok_s,mem_gb,step_time_s\n"
    "1.34,16,2048,32,8192,131072,untied,1,8,4096,256,4,16,4,2,1,1,ok,44.324,38894.51,311156.08,41.76,3.3699\n"
    "1.34,16,2048,32,8192,131072,untied,1,8,4096,256,2,4,2,4,1,1,ok,24.672,21649.63,173197.04,29.04,6.0542\n"
    "1.34,16,2048,32,8192,131072,,1,8,4096,256,64,1,4,2,1,1,failed,,,,,\n"
    "1.34,16,2048,32,8192,131072,untied,1,8,4096,256,2,32,4,2,1,1,ok,43.646,38299.12,306392.96,26.41,3.4223\n"
)
SHORT = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,data parallelism,"
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


def test_torchtitan_cuts_its_batch_for_a_pipeline_and_keeps_weights_and_gradients_whole(tmp_path: Path) -> None:
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
        ({"gbs": "15"}, "batch does not divide"),
        ({"seq": ""}, "sequence length not given"),
        ({"tok_s_gpu": "", "tflops_gpu": ""}, "neither time, throughput nor memory"),
        ({"tok_s_gpu": "", "flop_convention": "our own"}, "not how they were counted"),
    ],
)
def test_what_cannot_be_modelled_is_counted_with_its_reason(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    cases, reasons = reading.read_cases(write(tmp_path, FOUNDRY, {**FOUNDRY, **changes}))
    assert len(cases) == 1
    assert sum(reasons.values()) == 1
    assert reason in next(iter(reasons))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("DGX-H100", "h100"), ("h100_80gb", "h100"), ("H100-94/95GB-HBM2e", "h100-96"), ("NVIDIA H200 141GB", "h200"),
        ("A100 (one says 40GB; another 80GB)", "a100-80"), ("a100_40gb", "a100-40"), ("A100-PCIE-80GB", "a100-80-pcie"),
        ("V100-32GB(DGX-2)", "dgx2"), ("DGX-GB300", "gb300"), ("B200-180GB", "b200"), ("MI300X", "mi300x"),
    ],
)  # fmt: skip
def test_devices_have_one_spelling(text: str, key: str) -> None:
    assert reading.device_key(text) == key


def test_choices_are_understood_in_the_words_of_their_programs(tmp_path: Path) -> None:
    half = read_one(tmp_path, FOUNDRY, recompute="selective_layer", zero_fsdp="SHARD_GRAD_OP", precision="bf16/PURE")
    assert half.recompute_share == 0.5
    assert half.layout["zero"] == 2
    assert half.work.reduce_dtype == "bfloat16"
    early = read_one(tmp_path, FOUNDRY, fw="Megatron-LM 2020", recompute="", zero_fsdp="", mbs="", ga="", precision="fp16")
    assert RECOMPUTE[early.layout["recompute"]] == "full"
    assert early.layout["micro_batch"] == 2
    assert early.layout["zero"] == 0
    assert early.work.precision == "float16"
    assert "no_sequence_parallel" in early.traits
    experts = read_one(tmp_path, FOUNDRY, model="own", glu="1", moe="64+2 experts top6 ffn 1408", fw="Megatron-Core", ep="8")
    model = experts.work.model
    assert (model.experts, model.experts_per_token, model.shared_experts, model.expert_width) == (64, 6, 2, 1408)
    assert read_one(tmp_path, FOUNDRY, tok_s_gpu="3,206", gpu="A100-64GB").published["tokens"] == 3206


def test_weights_that_cannot_fit_whole_were_sharded(tmp_path: Path) -> None:
    case = read_one(tmp_path, BRIDGE, model="llama3-70b", gpus="64", dp="64", ep="", gbs="256", mbs="2", precision="NVFP4")
    assert case.layout["zero"] == 3
    assert case.work.precision == "float4"
    assert "FSDP" in case.assumed[0]


def test_a_sweep_is_read_with_its_failures_and_without_rows_that_contradict_themselves(tmp_path: Path) -> None:
    path = tmp_path / "sweep.csv"
    path.write_text(SWEEP, encoding="utf-8")
    cases, reasons = reading.read_cases(path)
    assert reasons == {"batch: dp x mbs x grad_acc is not the global batch": 1}
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
    assert (cases[0].layout["pipeline"], cases[0].layout["accumulation"], cases[0].work.precision) == (2, 2, "float16")


@pytest.mark.parametrize("text", ["a,b\n1,2\n", ""])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="no known format"):
        reading.read_cases(path)


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        (FOUNDRY, {}),
        (BRIDGE, {}),
        # NeMo 24.07: attention counted whole
        (BRIDGE, {"fw": "NeMo/Megatron", "model": "Nemotron-340B", "gpu": "DGX-H100", "gpus": "128", "precision": "fp8", "ep": "",
                  "gbs": "32", "mbs": "1", "tp": "8", "pp": "8", "vpp": "12", "dp": "2", "tok_s_gpu": "326", "tflops_gpu": "686",
                  "flop_convention": "full attn"}),
        # Megatron-Turing: recomputation counted
        (BRIDGE, {"fw": "Megatron-DeepSpeed", "model": "mt-nlg-530b", "layers": "105", "hidden": "20480", "heads": "128",
                  "ffn": "81920", "vocab": "50272", "glu": "0", "gpu": "A100-80GB", "gpus": "2240", "precision": "bf16",
                  "seq": "2048", "gbs": "1920", "mbs": "", "tp": "8", "pp": "35", "dp": "8", "ep": "", "tok_s_gpu": "29.21",
                  "tflops_gpu": "126", "flop_convention": "includes full recompute (4/3) => HFU"}),
        # torchtitan: the embedding left out
        (TITAN, {"gpus": "128", "pp": "1", "dp": "16", "gbs": "32", "mbs": "2", "tok_s_gpu": "177", "mfu_pct": "23.46",
                 "flop_convention": "6N(no emb)+12*L*h*s full attn", "schedule": ""}),
    ],
)  # fmt: skip
def test_published_flops_follow_from_tokens(tmp_path: Path, row: dict[str, str], changes: dict[str, str]) -> None:
    found = accuracy.conservation([read_one(tmp_path, row, **changes)])["flops"]
    assert len(found) == 1
    assert all(figures["largest_difference"] < 0.005 for figures in found.values())


def test_published_parameters_follow_from_shapes(tmp_path: Path) -> None:
    assert accuracy.conservation([read_one(tmp_path, FOUNDRY)])["parameters"] == {"llm-foundry FSDP1": {"rows": 1, "exact": 1}}
    wrong = accuracy.conservation([read_one(tmp_path, FOUNDRY, params_B="6.75")])
    assert wrong["parameters"]["llm-foundry FSDP1"]["exact"] == 0
    assert len(wrong["parameters_that_differ"]) == 1


def test_the_best_constant_has_the_smallest_mean_error(tmp_path: Path) -> None:
    cases = [read_one(tmp_path, FOUNDRY, tok_s_gpu=str(tokens)) for tokens in (1000, 2500, 3000, 3100, 9000)]
    judged, _ = accuracy.judge(cases)
    constant, error = accuracy.best_constant(judged, [one.flops for one in judged])
    rates = [one.flops / (one.case.seconds or 1) for one in judged]
    tried = [sum(abs(rate / (constant * factor) - 1) for rate in rates) / len(rates) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2)]
    assert error <= min(tried)


def test_regret_is_what_the_first_choice_loses(tmp_path: Path) -> None:
    case = read_one(tmp_path, FOUNDRY)
    said = [1.0, 2.0, 3.0, 0.5]
    cases = [case_with(case, seconds) for seconds in (4.0, 3.0, 5.0, None)]
    group = [accuracy.Judged(one, predicted, 0.0, {}, {}, True) for one, predicted in zip(cases, said, strict=True)]
    regret = accuracy._regret(group)
    assert regret["first"] == pytest.approx(1 - 3 / 4)
    assert regret["best_of_five"] == 0
    assert regret["first_choice_failed"]
    assert regret["failed"] == 1


def case_with(case: reading.Case, seconds: float | None) -> reading.Case:
    return accuracy.replace(case, seconds=seconds, status="failed" if seconds is None else "ok")


def test_the_command_prints_json_and_refuses_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "planner_accuracy.py")]
    path, rows = write(tmp_path, FOUNDRY, TITAN, {**FOUNDRY, "gpu": "TPU"}), tmp_path / "rows.csv"
    done = subprocess.run([*command, str(path), "--rows", str(rows)], capture_output=True, text=True, timeout=120, check=True)
    result = json.loads(done.stdout)
    assert (result["files"]["published.csv"]["rows"], result["files"]["published.csv"]["modelled"]) == (3, 2)
    assert result["sets"]["llm-foundry a100"]["timed"] == 1
    assert len(rows.read_text().splitlines()) == 3
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    bad = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 1
    assert not bad.stdout
