"""The planner against our own runs on one GPU: predicted and measured step time and peak memory of eight
jobs.

    python benchmarks/planner_gpu.py [--cluster FILE] [--steps 8] [--kernels]
                                     [--only 1b-2048-none,1b-2048-none-float8,…]

The eight jobs have two sizes (llama3-1b untied, llama3-3b), two sequence lengths and two modes of
recomputation, in bfloat16, with two micro-batches per step. `--only` runs jobs by name; the optional fourth
part of a name is the precision. The cluster is the preset of this machine's device, or the file that
`shardwise probe` wrote. `--kernels` adds the time of one step's kernels by kind.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import random_tokens
import torch
from torch.profiler import ProfilerActivity, profile

from shardwise.config import Config, from_tables
from shardwise.cost.cluster import Cluster
from shardwise.cost.cluster_file import read_cluster
from shardwise.cost.clusters import CLUSTERS
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.probe.device_speed import data_sheet
from shardwise.search.forecast import forecast
from shardwise.train.build import Training, build
from shardwise.train.steps import steps

MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "1b": ({"preset": "llama3-1b", "tied": False}, 32768, "float32"),
    "3b": ({"preset": "llama3-3b"}, 16384, "float32"),
    "8b": ({"preset": "llama3-8b"}, 8192, "bfloat16"),
    "gpt2": ({"preset": "gpt2", "max_positions": 8192}, 16384, "float32"),
    "qwen0.6b": ({"preset": "qwen3-0.6b"}, 16384, "float32"),
    "qwen4b": ({"preset": "qwen3-4b", "layers": 24}, 8192, "float32"),
    "experts": ({"preset": "qwen3-30b-a3b", "layers": 6}, 16384, "float32"),
}
"""The model, the tokens of a micro-batch, and the dtype of the states."""
FITTED = ("1b", "3b")
"""Those whose runs the H200 preset's constants were chosen by; the others are run by name, to see what it
does elsewhere."""
KINDS = {
    "attention": ("flash", "sdpa", "cudnn", "fmha"),
    "matmul": ("nvjet", "gemm", "cutlass", "sm90", "cublas"),
    "optimizer": ("adam", "multi_tensor", "lpnorm"),
}
JOBS = ["-".join(job) for job in product(FITTED, ("2048", "8192"), ("none", "full"))]


def job(name: str, folder: Path, step_count: int) -> Config:
    size, length, recompute, *others = name.split("-")
    precision = others[0] if others else "bfloat16"
    model, tokens, states = MODELS[size]
    random_tokens.write(folder, 8192 * 64, 50_000)
    micro_batch = tokens // int(length)
    train = {"steps": step_count, "precision": precision, "learning_rate": 1e-4, "recompute": recompute}
    train |= {"micro_batch": micro_batch, "global_batch": 2 * micro_batch, "state_dtype": states}
    data = {"source": str(folder), "sequence_length": int(length), "held_out": 0.0}
    return from_tables({"model": model, "data": data, "train": train, "run": {"folder": str(folder / "run")}})


def measure(config: Config, kernels: bool) -> dict[str, Any]:
    training = build(config, choose(config, 1), Worker(0, 1, 0, 1, "localhost", 0, "benchmark"))
    torch.cuda.reset_peak_memory_stats()
    done = []
    result: dict[str, Any] = {}
    for step in steps(training):
        done.append(step)
        if kernels and step.step == config.train.steps - 1:
            break
    timed = done[len(done) // 2 :]
    result["seconds"] = statistics.median(step.seconds for step in timed)
    result["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    free, total = torch.cuda.mem_get_info()
    result["used_gib"] = (total - free) / 2**30
    result["spans"] = {name: statistics.median(step.spans[name] for step in timed) for name in timed[0].spans}
    if kernels:
        result["kernels"] = _kernels(training)
    return result


def _kernels(training: Training) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        next(steps(training))
        torch.cuda.synchronize()
    sums = {**dict.fromkeys(KINDS, 0.0), "other": 0.0, "count": 0.0}
    for event in profiler.key_averages():
        name = event.key.lower()
        kind = next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
        sums[kind] += event.self_device_time_total / 1e6
        sums["count"] += event.count
    return sums


def predictions(config: Config, clusters: Mapping[str, Cluster]) -> dict[str, Any]:
    plan = choose(config, 1)
    return {
        name: forecast(config, plan.layout, plan.micro_batch, plan.accumulation, cluster)
        for name, cluster in clusters.items()
    }


def compared(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, float]:
    """Ratios of predicted to measured: step time, and the memory the driver says is in use."""
    return {
        "time": predicted["step_seconds"]["total"] / measured["seconds"],
        "memory": predicted["memory_gib"]["total"] / measured["used_gib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--cluster", type=Path)
    options = parser.parse_args()
    preset = data_sheet(torch.cuda.get_device_name(), float(torch.cuda.get_device_properties(0).total_memory))
    clusters = {"preset": preset.with_devices(1)} if preset else {}
    if options.cluster:
        clusters["probe"] = read_cluster(options.cluster, CLUSTERS).with_devices(1)
    worst: dict[str, dict[str, float]] = {name: {"time": 0.0, "memory": 0.0} for name in clusters}
    for name in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            config = job(name, Path(folder), options.steps)
            result = measure(config, options.kernels)
        found = predictions(config, clusters)
        result["predicted"] = found
        result["ratio"] = {basis: compared(result, predicted) for basis, predicted in found.items()}
        for basis, ratios in result["ratio"].items():
            worst[basis] = {what: max(worst[basis][what], abs(ratio - 1)) for what, ratio in ratios.items()}
        print(json.dumps({"job": name, **result}), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    print(json.dumps({"largest_error": worst}), flush=True)


if __name__ == "__main__":
    main()
