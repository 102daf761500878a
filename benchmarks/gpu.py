"""Training speed and memory on one GPU, against Hugging Face's Llama in the same run.

    python benchmarks/gpu.py [1b] [8b] [--steps 20] [--baseline] [--trace FOLDER]

Shapes: `1b` is llama3-1b untied at micro-batch 4, with float32 weights and optimizer state; `8b` is llama3-8b
at micro-batch 1 with bfloat16 states. Both at sequence 8192, bfloat16, no recomputation, clipping and AdamW
included. `experts`: six layers of qwen3-30b-a3b, 4 sequences of 4,096. `gpt2`: 32 of 1,024. `long`: `1b` on
one sequence of 131,072, recomputed. The baseline is transformers' LlamaForCausalLM of the same shape under
bfloat16 autocast with fused AdamW and clipping, one sequence at a time (four at once run out of 139 GiB).
gpu_peer.py measures torchtitan on the same jobs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import random_tokens
import torch
from torch import Tensor

from shardwise.config import Config, from_tables
from shardwise.cost.device_peaks import peak_flops
from shardwise.mesh import Worker
from shardwise.observe import mfu
from shardwise.plans import choose
from shardwise.train.build import build
from shardwise.train.describe import describe_run
from shardwise.train.steps import steps

TORCHTITAN = {"1b": 54_906, "8b": 10_498, "experts": 58_162}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"model": {"preset": "llama3-1b", "tied": False}, "train": {"global_batch": 4, "micro_batch": 4}},
    "8b": {
        "model": {"preset": "llama3-8b"},
        "train": {"global_batch": 1, "micro_batch": 1, "state_dtype": "bfloat16"},
    },
    "experts": {
        "model": {"preset": "qwen3-30b-a3b", "layers": 6},
        "train": {"global_batch": 4, "micro_batch": 4},
        "sequence": 4096,
    },
    "gpt2": {
        "model": {"preset": "gpt2"},
        "train": {"global_batch": 32, "micro_batch": 32},
        "sequence": 1024,
        "vocabulary": 50_257,
    },
    "long": {
        "model": {"preset": "llama3-1b", "tied": False},
        "train": {"global_batch": 1, "micro_batch": 1, "recompute": "full"},
        "sequence": 131_072,
    },
}


def job(shape: str, folder: Path, step_count: int, precision: str, more: dict[str, Any]) -> Config:
    tables = SHAPES[shape]
    random_tokens.write(folder, 8192 * 64, tables.get("vocabulary", 128_256))
    train = {"steps": step_count, "precision": precision, "learning_rate": 1e-4, **tables["train"], **more}
    data = {"source": str(folder), "sequence_length": tables.get("sequence", 8192), "held_out": 0.0}
    return from_tables(
        {"model": tables["model"], "data": data, "train": train, "run": {"folder": str(folder / "run")}}
    )


def ours(
    shape: str, step_count: int, trace: Path | None, precision: str, more: dict[str, Any]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = job(shape, Path(folder), step_count, precision, more)
        training = build(config, choose(config, 1), Worker(0, 1, 0, 1, "localhost", 0, "benchmark"))
        print(json.dumps(describe_run(training), indent=1), flush=True)
        torch.cuda.reset_peak_memory_stats()
        done = []
        for step in steps(training):
            done.append(step)
            if trace and step.step == step_count - 2:
                break
        if trace:
            _trace(training, trace)
    timed = done[len(done) // 2 :]
    speed = statistics.median(step.tokens / step.seconds for step in timed)
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16")
    spans = {name: statistics.median(step.spans[name] for step in timed) for name in timed[0].spans}
    return {
        "tokens_per_second": speed,
        "milliseconds": 1e3 * statistics.median(step.seconds for step in timed),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "mfu": mfu(speed, training.plan.flops_per_token, 1, peak),
        "spans": spans,
        "first_loss": done[0].loss,
        "last_loss": done[-1].loss,
        "losses": [round(step.loss, 4) for step in done],
    }


def _trace(training: Any, folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        next(steps(training))
        torch.cuda.synchronize()
    table = profiler.key_averages().table(
        sort_by="self_device_time_total", row_limit=45, max_name_column_width=90
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernels.txt").write_text(table)


def baseline(shape: str, step_count: int) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = from_tables({"model": SHAPES[shape]["model"], "data": {"source": "unused"}}).model
    theirs = LlamaConfig(
        vocab_size=config.vocabulary, hidden_size=config.hidden, intermediate_size=config.ffn,
        tie_word_embeddings=False,
        num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim, max_position_embeddings=8192, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    dtype = torch.bfloat16 if SHAPES[shape]["train"].get("state_dtype") else torch.float32
    with torch.device("cuda"):
        model = LlamaForCausalLM(theirs).to(dtype)
    batch = SHAPES[shape]["train"]["global_batch"]
    tokens = torch.randint(
        0, config.vocabulary, (batch, 1, 8192), device="cuda"
    )  # full logits: more than 1 does not fit
    return shortest_loop(
        model, tokens, lambda rows: model(input_ids=rows, labels=rows).loss / batch, 8192 * batch, step_count
    )


def shortest_loop(
    model: torch.nn.Module,
    micro_batches: Tensor,
    loss_of: Callable[[Tensor], Tensor],
    tokens: int,
    step_count: int,
) -> dict[str, Any]:
    """Of steps of so many tokens as one would write them around another's model: autocast where weights are
    in float32, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    casts = next(model.parameters()).dtype == torch.float32
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(step_count):
        started = time.perf_counter()
        for micro_batch in micro_batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=casts):
                loss = loss_of(micro_batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times[len(times) // 2 :])
    return {"tokens_per_second": tokens / seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=["1b"], choices=[*SHAPES, []])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--baseline", action="store_true")
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--train", type=json.loads, default={}, help="more settings of [train]")
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    for shape in options.shapes or ["1b"]:
        result: dict[str, Any] = {
            "shape": shape,
            "gpu": torch.cuda.get_device_name(),
            "torch": str(torch.__version__),
        }
        result["shardwise"] = ours(shape, options.steps, options.trace, options.precision, options.train)
        if shape in TORCHTITAN:
            result["ratio_to_torchtitan"] = result["shardwise"]["tokens_per_second"] / TORCHTITAN[shape]
        gc.collect()
        torch.cuda.empty_cache()
        if options.baseline:
            result["transformers"] = baseline(shape, max(6, options.steps // 2))
            result["ratio"] = (
                result["shardwise"]["tokens_per_second"] / result["transformers"]["tokens_per_second"]
            )
            gc.collect()
            torch.cuda.empty_cache()
        print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
