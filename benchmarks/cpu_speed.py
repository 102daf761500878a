"""Training speed on CPU workers, against hand-written torch loops in the same run.

    python benchmarks/cpu_speed.py [--workers 2] [--steps 30] [--rounds 4] [--program] [--tree FOLDER]

`shardwise train` is timed as a user runs it: data, metrics and progress included, from the fifth step on.
The baselines are minimal loops around DistributedDataParallel and `fully_shard` for the same model, batch and
data, with fused AdamW and clipping. With `--program`, a program (`program` below) trains the same model
through the engine: its module, its loss and its dataset are what a user writes. With `--tree`, the baseline
is `shardwise train` of another checkout, for example of the commit before a change.

Both run at the same time, each on its own half of the cores, and the halves change with every round. So a
slow period of the machine and a slow core act on both. What is compared is the number of steps that each made
while both were training.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
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
LOOPS = {0: "DDP loop", 3: "fully_shard loop"}
WARM_UP = 5
OF_PROGRAM = ("train.", "layout.", "checkpoint.")
"""Tables of the job that a program does not replace."""


def overrides(workers: int, steps: int, zero: int) -> list[str]:
    return [
        f"train.steps={steps}", f"layout.data={workers}", f"layout.zero={zero}", "data.held_out=0.0",
        "train.evaluate_every=0",
        "checkpoint.every=0", "observe.sample=", "model.preset=bytes-10m", "data.sequence_length=256",
        "train.global_batch=4",
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


def ours(settings: list[str], by_program: bool, folder: str) -> list[str]:
    """The command that trains with shardwise."""
    words = ["train", JOB, *settings]
    if by_program:
        words = ["run", f"{__file__}:program", *(each for each in settings if each.startswith(OF_PROGRAM))]
    return [sys.executable, "-m", "shardwise", *words, f"run.folder={folder}"]


def theirs(workers: int, steps: int, zero: int, folder: str) -> list[str]:
    """The command that runs the hand-written loop."""
    options = ["--baseline", str(zero), "--steps", str(steps), "--folder", folder]
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={workers}", __file__, *options]


def ratio(mine: list[str], other: list[str], tree: Path, folder: Path, first_half: bool) -> float:
    """Run both commands at the same time, on half of the cores each, and return how many steps the first one
    made for each step of the other."""
    cores = sorted(os.sched_getaffinity(0))
    halves = [cores[: len(cores) // 2], cores[len(cores) // 2 :]]
    trees = [Path.cwd(), tree]
    running = [
        _start(command, where, half)
        for command, where, half in zip([mine, other], trees, halves[:: 1 if first_half else -1], strict=True)
    ]
    for process in running:
        output = process.communicate()[0]
        if process.returncode:
            for each in running:
                each.kill()
            sys.exit(f"{' '.join(map(str, process.args))} failed:\n{output}")  # type: ignore[arg-type]
    times = [_times(folder / name) for name in ("mine", "other")]
    first = max(each[WARM_UP - 1] for each in times)
    last = min(each[-1] for each in times)
    steps, of_other = (_steps_at(last, each) - _steps_at(first, each) for each in times)
    return steps / of_other


def _start(command: list[str], tree: Path, cores: list[int]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _times(folder: Path) -> list[float]:
    """The time at the end of each step."""
    return [json.loads(line)["time"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _steps_at(time: float, times: list[float]) -> float:
    """The number of steps made by that time, in which the last one counts by its share."""
    index = min(bisect.bisect_right(times, time), len(times) - 1)
    before, after = times[index - 1], times[index]
    return index + (time - before) / (after - before)


def baseline(zero: int, steps: int, folder: Path) -> None:
    """One worker of the hand-written loop; the first writes down when its steps end."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = read(JOB, overrides(world, steps, zero))
    dataset = Dataset.open(config.data, config.train.seed)
    model = _wrapped(config, zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    rows = config.train.global_batch // world
    times = []
    for step in range(steps):
        batch = dataset.sequences(step * config.train.global_batch + rank * rows, rows)
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        loss = model(inputs, targets) / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        times.append({"time": time.time()})
    if rank == 0:
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in times))
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
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--program", action="store_true", help="train through the engine of the library")
    parser.add_argument("--tree", type=Path, help="another checkout of shardwise to compare with")
    parser.add_argument("--baseline", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline is not None:
        baseline(options.baseline, options.steps, options.folder)
        return
    for zero, name in LOOPS.items():
        settings = overrides(options.workers, options.steps, zero)
        ratios = []
        for round_number in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                mine = ours(settings, options.program, f"{folder}/mine")
                other = theirs(options.workers, options.steps, zero, f"{folder}/other")
                if options.tree is not None:
                    other = ours(settings, options.program, f"{folder}/other")
                tree = options.tree or Path.cwd()
                ratios.append(ratio(mine, other, tree, Path(folder), round_number % 2 == 0))
            print(f"zero {zero}, round {round_number + 1}: {ratios[-1]:.3f}", file=sys.stderr)
        result = {"zero": zero, "workers": options.workers, "program": options.program}
        baseline_name = name if options.tree is None else str(options.tree)
        print(json.dumps({**result, "baseline": baseline_name, "ratio": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
