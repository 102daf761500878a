"""Processor seconds and peak memory of a report and of a resume, for a run with a million steps.

    python benchmarks/long_run.py [steps]

The run folder is generated: steps with four spans and four collectives, a save and an evaluation every
thousand steps, a fault and its recovery every hundred thousand. A resume is what the main rank does with the
records before its first step: it cuts off the last 500 steps. A report of a single step, which mostly imports
the program, is measured for comparison.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGAN = 1_700_000_000.0
MEASURE = "import resource, sys, time; {work}; use = resource.getrusage(resource.RUSAGE_SELF)\n"
MEASURE += "print(use.ru_utime + use.ru_stime, use.ru_maxrss / 1024, file=sys.stderr)"
REPORT = (
    "from shardwise.cli.app import app; sys.argv = ['shardwise', 'report', sys.argv[1]]; "
    "app(standalone_mode=False)"
)
RESUME = (
    "from shardwise.observe import MetricsFile; MetricsFile(sys.argv[1] + '/metrics.jsonl', "
    "int(sys.argv[2])).close()"
)


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("one step", 1), (f"{steps:,} steps", steps)):
            run = Path(folder) / str(count)
            size = write(run, count)
            print(f"{name}, metrics.jsonl of {size / 2**20:,.0f} MiB", flush=True)
            for what, work in (("report", REPORT), ("resume", RESUME)):
                seconds, memory = measured(work, str(run), str(max(0, count - 500)))
                print(f"  {what}: {seconds:.2f} s, {memory:.0f} MiB", flush=True)


def write(run: Path, steps: int) -> int:
    """Make up the records of a run; the bytes of its metrics."""
    run.mkdir()
    with (run / "metrics.jsonl").open("w") as metrics, (run / "events.jsonl").open("w") as events:
        events.write(event(0.0, "start", world=8, layout={"data": 8}))
        for number in range(1, steps + 1):
            metrics.write(json.dumps(step(number)) + "\n")
            events.writelines(happened(number))
        events.write(event(steps + 1.0, "end", step=steps))
    return (run / "metrics.jsonl").stat().st_size


def step(number: int) -> dict[str, Any]:
    """Return the record of a step as the reporter writes it."""
    spans = {
        "data": 0.00123,
        "forward_backward": 0.7 + number % 97 / 1e3,
        "exposed_communication": 0.0412,
        "optimizer": 0.0123,
    }
    kinds = ("all_gather/data", "all_reduce/tensor", "reduce_scatter/data", "send/pipeline")
    return {
        "step": number,
        "time": BEGAN + number,
        "loss": 2.0 + 9.0 / number,
        "gradient_norm": 1.0 + 1.0 / number,
        "learning_rate": 3e-4 / (1 + number / 1e5),
        "tokens": 524288,
        "tokens_per_second": 524288 / 0.9,
        "sequences_per_second": 128 / 0.9,
        "seconds": 0.9,
        "mfu": 0.41 + number % 89 / 1e4,
        "memory_bytes": 71234567890,
        "spans": spans,
        "data": f"{number * 7919:014x}",
        "collectives": {kind: {"count": 64, "bytes": 16060522496} for kind in kinds},
        "communication_efficiency": 0.954,
        "latest": {"rank": number % 8, "behind": 0.0023},
    }


def happened(number: int) -> Iterator[str]:
    at = float(number)
    if number % 1000 == 0:
        yield event(at + 0.02, "evaluate", step=number, held_out_loss=2.5, seconds=0.02)
        yield event(
            at + 0.9,
            "save",
            step=number,
            checkpoint=f"step-{number}",
            seconds=0.8,
            stall_seconds=0.05,
            bytes=10**9,
        )
    if number % 100_000 == 0:
        yield event(
            at + 0.03,
            "fault",
            kind="died",
            rank=1,
            step=number,
            cause="ended by SIGKILL",
            generation=number // 100_000,
        )
        yield event(at + 0.05, "resume", step=number, world=8, layout={"data": 8})
        yield event(at + 1.0, "recovery", step=number, lost_steps=0, lost_seconds=0.0, seconds=0.97, world=8)


def event(at: float, name: str, **facts: Any) -> str:
    time = datetime.fromtimestamp(BEGAN + at, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": time, "event": name, **facts}) + "\n"


def measured(work: str, *arguments: str) -> tuple[float, float]:
    """Processor seconds and MiB of a process that does this."""
    words = [sys.executable, "-c", MEASURE.format(work=work), *arguments]
    done = subprocess.run(
        words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True
    )
    seconds, memory = map(float, done.stderr.split()[-2:])
    return seconds, memory


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
