"""Time that a run loses after one of its workers is killed, against a cold start of the same job.

    python benchmarks/recovery.py [--workers 4] [--kills 5]

A real `shardwise train` on CPU workers; a worker is killed with SIGKILL at a moment chosen by a seed, and the
time is measured from the kill to the end of the next step that was not done before. The parts of this time
come from the run's `recovery` event. There are three cases: all processes are started again (the survivors
are killed too); survivors are kept, and the state is read from storage; survivors are kept, with copies in a
neighbour's memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOB = ["examples/quickstart.toml", "model.preset=bytes-400k", "observe.sample=", "train.evaluate_every=0"]
SETTINGS = ["train.steps=100000", "train.micro_batch=4", "checkpoint.every=10"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cold = statistics.median(
            cold_start(Path(scratch) / f"cold-{number}", arguments.workers) for number in range(3)
        )
        found = {
            "every process anew": kills(Path(scratch) / "anew", arguments, everyone=True),
            "survivors kept": kills(Path(scratch) / "kept", arguments),
            "survivors and copies": kills(Path(scratch) / "copies", arguments, "recovery.copies=1"),
        }
    print(f"cold start to the first step done, {arguments.workers} CPU workers: {cold:.2f} s (median of 3)")
    for way, cases in found.items():
        seconds = statistics.median(case["seconds"] for case in cases)
        parts = {
            name: round(statistics.median(case["parts"][name] for case in cases), 2)
            for name in cases[0]["parts"]
        }
        worst = max(case["seconds"] for case in cases)
        lost = statistics.median(case["lost_steps"] for case in cases)
        print(
            f"{way}: {seconds:.2f} s ({worst:.2f} at worst), {seconds / cold:.2f} x cold, {lost:g} steps "
            f"again; {parts}"
        )


class Run:
    """A training run that lasts as long as the `with` block."""

    def __init__(self, folder: Path, workers: int, *overrides: str) -> None:
        self.folder = folder
        words = [*JOB, *SETTINGS, f"layout.data={workers}", f"run.folder={folder}", *overrides]
        self.command = [sys.executable, "-m", "shardwise", "train", *words]

    def __enter__(self) -> Run:
        self.began = time.time()
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait()

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            if path.exists()
            else []
        )

    def wait_for_step(self, step: int) -> float:
        """When that step was done."""
        while True:
            assert self.process.poll() is None, "the run ended"
            for line in self.lines("metrics.jsonl"):
                if line["step"] == step:
                    return float(line["time"])
            time.sleep(0.01)

    def workers(self) -> dict[int, int]:
        """Process ids by rank."""
        known = json.loads(next(self.folder.glob("logs/workers-*.json")).read_text())
        return {one["rank"]: one["pid"] for one in known["workers"]}


def cold_start(folder: Path, workers: int) -> float:
    with Run(folder, workers) as run:
        return run.wait_for_step(1) - run.began


def kills(
    folder: Path, arguments: argparse.Namespace, *overrides: str, everyone: bool = False
) -> list[dict[str, Any]]:
    draw = random.Random(7)
    found = []
    with Run(folder, arguments.workers, *overrides) as run:
        run.wait_for_step(25)
        for number in range(arguments.kills):
            time.sleep(draw.random() * 0.3)
            ranks = run.workers()
            reached = run.lines("metrics.jsonl")[-1]["step"]
            killed = time.time()
            for pid in ranks.values() if everyone else [ranks[draw.randrange(arguments.workers)]]:
                os.kill(pid, signal.SIGKILL)
            while (
                len(recoveries := [line for line in run.lines("events.jsonl") if line["event"] == "recovery"])
                <= number
            ):
                time.sleep(0.01)
            event = recoveries[-1]
            seconds = run.wait_for_step(event["step"] + 1) - killed
            found.append({"seconds": seconds, "parts": event["parts"], "lost_steps": event["lost_steps"]})
            run.wait_for_step(reached + 15)
    return found


if __name__ == "__main__":
    main()
