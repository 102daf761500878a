"""The planner against our own runs on this CPU: six layouts of one job on gloo workers, after `shardwise
probe`.

    python benchmarks/planner_cpu.py [--workers 2] [--steps 10] [--rounds 3]

Each layout is trained by `shardwise train`, and its prediction is read from plan.json. The measured time is
the median of later steps, and over several rounds the median of these. Prints the predicted and measured
seconds of each layout, the largest error, and whether the predicted order is the measured one.

Cores that are shared with other machines change their speed from minute to minute. So a matrix product is
timed on all workers at once, before and after the probe and every run (the pace). The table also has the
seconds that a run would have taken at the pace of the probe.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LAYOUTS: dict[int, dict[str, list[str]]] = {
    2: {
        "data 2": ["layout.data=2", "layout.zero=0", "train.micro_batch=8"],
        "data 2, zero 3": ["layout.data=2", "layout.zero=3", "train.micro_batch=8"],
        "tensor 2": ["layout.data=1", "layout.tensor=2", "train.micro_batch=16"],
        "data 2, zero 3, full recomputation": [
            "layout.data=2",
            "layout.zero=3",
            "train.micro_batch=8",
            "train.recompute=full",
        ],
        "tensor 2, full recomputation": [
            "layout.data=1",
            "layout.tensor=2",
            "train.micro_batch=16",
            "train.recompute=full",
        ],
        "pipeline 2, one micro-batch": ["layout.data=1", "layout.pipeline=2", "train.micro_batch=16"],
    },
    4: {
        "data 4": ["layout.data=4", "layout.zero=0", "train.micro_batch=4"],
        "data 4, zero 3": ["layout.data=4", "layout.zero=3", "train.micro_batch=4"],
        "data 2 x tensor 2": ["layout.data=2", "layout.tensor=2", "layout.zero=0", "train.micro_batch=8"],
        "tensor 4": ["layout.data=1", "layout.tensor=4", "train.micro_batch=16"],
        "pipeline 2 x data 2": ["layout.data=2", "layout.pipeline=2", "layout.zero=0", "train.micro_batch=4"],
        "pipeline 4": ["layout.data=1", "layout.pipeline=4", "train.micro_batch=8"],
    },
}
JOB = [
    "examples/quickstart.toml", "model.preset=bytes-10m", "model.heads=8", "model.kv_heads=8",
    "model.head_dim=48",
    "model.layers=8", "train.global_batch=16", "data.sequence_length=256", "observe.sample=",
    "train.evaluate_every=0",
    "data.held_out=0", "checkpoint.every=0", "train.recompute=none",
]  # fmt: skip


PACE = """
import time, torch
torch.set_num_threads(1)
x, weight = torch.randn(2048, 384), torch.randn(1024, 384)
count, until = 0, time.monotonic() + 3
while (now := time.monotonic()) < until:
    torch.nn.functional.linear(x, weight)
    count += now > until - 2
print(count)
"""


def pace(workers: int) -> float:
    """Products that one worker does in two seconds, while all do."""
    commands = [[sys.executable, "-c", PACE]] * workers
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    return statistics.mean(int(process.communicate()[0]) for process in running)


def shardwise(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "shardwise", *words], check=True, capture_output=True)


def measure(name: str, layout: list[str], cluster: Path, steps: int, folder: Path) -> dict[str, Any]:
    run = folder / name.replace(" ", "-").replace(",", "")
    shardwise("train", *JOB, *layout, f"train.steps={steps}", f"cluster.file={cluster}", f"run.folder={run}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    predicted = json.loads((run / "plan.json").read_text())["predicted"]
    return {
        "measured": statistics.median(line["seconds"] for line in lines[steps // 2 :]),
        "predicted": predicted["step_seconds"]["total"],
        "terms": predicted["step_seconds"],
        "spans": {
            key: statistics.median(line["spans"][key] or 0.0 for line in lines[steps // 2 :])
            for key in lines[-1]["spans"]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2, choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in LAYOUTS[options.workers]}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        before = pace(options.workers)
        shardwise("probe", "--workers", str(options.workers), "--output", str(folder / "cluster.toml"))
        after = pace(options.workers)
        probed = (before + after) / 2
        for index in range(options.rounds):
            for name, layout in LAYOUTS[options.workers].items():
                before = after
                row = measure(name, layout, folder / "cluster.toml", options.steps, folder / str(index))
                after = pace(options.workers)
                row["at_probed_pace"] = row["measured"] * (before + after) / 2 / probed
                print(
                    json.dumps(
                        {"round": index, "layout": name, "pace": [before / probed, after / probed], **row}
                    ),
                    file=sys.stderr,
                )
                found[name].append(row)
    rows = {
        name: {
            key: statistics.median(row[key] for row in rounds)
            for key in ("predicted", "measured", "at_probed_pace")
        }
        for name, rounds in found.items()
    }
    print(f"{'layout':<40}{'predicted':>10}{'measured':>10}{'ratio':>7}{'at probed pace':>16}{'ratio':>7}")
    for name, row in rows.items():
        raw, paced = (row["predicted"] / row[key] for key in ("measured", "at_probed_pace"))
        print(
            f"{name:<40}{row['predicted']:>10.3f}{row['measured']:>10.3f}{raw:>7.2f}{row['at_probed_pace']:>16.3f}{paced:>7.2f}"
        )
    by = {
        key: sorted(rows, key=lambda name: rows[name][key])
        for key in ("predicted", "measured", "at_probed_pace")
    }
    for key in ("measured", "at_probed_pace"):
        worst = max(abs(row["predicted"] / row[key] - 1) for row in rows.values())
        print(
            json.dumps(
                {
                    "against": key,
                    "largest_error": worst,
                    "order_right": by["predicted"] == by[key],
                    "order": by[key],
                }
            )
        )


if __name__ == "__main__":
    main()
