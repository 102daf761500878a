"""Training speed on CPU workers, against hand-written torch loops in the same run.

    python benchmarks/cpu_speed.py [--workers 2] [--steps 40] [--rounds 3] [--program]

`shardwise train` is timed as a user runs it: data, metrics and progress included, from the fifth step to the
last. The baselines are minimal loops around DistributedDataParallel and `fully_shard` for the same model,
batch and data, with fused AdamW and clipping. Both are run in turn, so that a slow period of the machine
affects both. With `--program`, a program (`program` below) trains the same model through the engine: its
module, its loss and its dataset are what a user writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.config import Config, read
from shardwise.data import Dataset
from shardwise.models import Transformer, initialise

JOB = "examples/quickstart.toml"
WARM_UP = 5
OF_PROGRAM = ("train.", "layout.", "checkpoint.")
"""Tables of the job that a program does not replace."""


def overrides(workers: int, steps: int, zero: int) -> list[str]:
    return [
        f"train.steps={steps}", f"layout.data={workers}", f"layout.zero={zero}", "data.held_out=0.0",
        "train.evaluate_every=0",
        "checkpoint.every=0", "observe.sample=", "model.preset=bytes-10m", "data.sequence_length=256",
        "train.global_batch=16",
    ]  # fmt: skip


class Windows:
    """The training sequences of the job as a map-style dataset."""

    def __init__(self, config: Config) -> None:
        self.dataset = Dataset.open(config.data, config.train.seed)
        self.count = self.dataset.describe().samples

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = self.dataset.sequences(index, 1)
        return {"inputs": torch.from_numpy(rows.inputs[0]), "targets": torch.from_numpy(rows.targets[0])}


def program(engine: sw.Engine) -> None:
    """The same training through the engine."""
    config = read(JOB, overrides(2, 40, 0))
    engine.prepare(lambda: Transformer(config.model))
    engine.optimizer("adamw", lr=1e-3)
    for batch in engine.batches(Windows(config), global_batch=config.train.global_batch):
        engine.forward_backward(sw.next_token_loss, batch)
        engine.clip_grad_norm(1.0)
        engine.optim_step()


def ours(workers: int, steps: int, zero: int, by_program: bool) -> float:
    """Tokens a second of `shardwise train`, or of the program."""
    settings = overrides(workers, steps, zero)
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", JOB, *settings]
        if by_program:
            words = [
                "run",
                f"{__file__}:program",
                *(each for each in settings if each.startswith(OF_PROGRAM)),
            ]
        _run([sys.executable, "-m", "shardwise", *words, f"run.folder={folder}"])
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    tokens = read(JOB, settings).train.global_batch * read(JOB, settings).data.sequence_length
    return float((steps - WARM_UP) * tokens / (lines[-1]["time"] - lines[WARM_UP - 1]["time"]))


def theirs(workers: int, steps: int, zero: int) -> float:
    """Tokens a second of the hand-written loop."""
    arguments = [f"--nproc-per-node={workers}", __file__, "--baseline", str(zero), "--steps", str(steps)]
    launcher = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return float(_run(launcher).split()[-1])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    return done.stdout


def baseline(zero: int, steps: int) -> None:
    """One worker of the hand-written loop; the first prints its tokens a second."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = read(JOB, overrides(world, steps, zero))
    dataset = Dataset.open(config.data, config.train.seed)
    model = _wrapped(config, zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    rows = config.train.global_batch // world
    started = 0.0
    for step in range(steps):
        if step == WARM_UP:
            started = time.perf_counter()
        batch = dataset.sequences(step * config.train.global_batch + rank * rows, rows)
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    seconds = time.perf_counter() - started
    if rank == 0:
        print((steps - WARM_UP) * config.train.global_batch * config.data.sequence_length / seconds)
    dist.destroy_process_group()


def _wrapped(config: Config, zero: int) -> torch.nn.Module:
    model = Transformer(config.model)
    initialise(model, config.train.seed)
    if zero == 0:
        return DistributedDataParallel(model)
    for block in model.blocks.children():
        fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", action="store_true", help="train through the engine of the library")
    parser.add_argument("--baseline", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline is not None:
        baseline(options.baseline, options.steps)
        return
    for name, zero in (("DDP loop", 0), ("fully_shard loop", 3)):
        pairs = []
        for _ in range(options.rounds):
            mine = ours(options.workers, options.steps, zero, options.program)
            pairs.append((mine, theirs(options.workers, options.steps, zero)))
            print(
                f"zero {zero}: shardwise {pairs[-1][0]:,.0f} tokens/s, {name} {pairs[-1][1]:,.0f}",
                file=sys.stderr,
            )
        mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
        result = {
            "zero": zero,
            "workers": options.workers,
            "program": options.program,
            "shardwise": mine,
            "baseline": name,
            "baseline_speed": other,
        }
        print(json.dumps({**result, "ratio": statistics.median(a / b for a, b in pairs)}))


if __name__ == "__main__":
    main()
