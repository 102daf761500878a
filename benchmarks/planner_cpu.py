"""The planner against our own runs on this CPU: six layouts of one job on gloo workers, after `shardwise probe`.

    python benchmarks/planner_cpu.py [--workers 2] [--steps 24] [--cluster FILE] [--rounds 2]

Each layout is trained as a user would (`shardwise train`), its prediction is read from plan.json, and the median of later steps
is what was measured; of several rounds, the quickest. Printed: predicted and measured seconds of each, the largest error, and
whether the predicted order is the measured one. Measure on a quiet machine: workers share its cores with everything else.
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
        "data 2, zero 3, full recomputation": ["layout.data=2", "layout.zero=3", "train.micro_batch=8", "train.recompute=full"],
        "tensor 2, full recomputation": ["layout.data=1", "layout.tensor=2", "train.micro_batch=16", "train.recompute=full"],
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
"""Six each, far enough apart that the machine's own drift does not decide their order."""
JOB = [
    "examples/quickstart.toml", "model.preset=bytes-10m", "model.heads=8", "model.kv_heads=8", "model.head_dim=48",
    "model.layers=8", "train.global_batch=16", "data.sequence_length=256", "observe.sample=", "train.evaluate_every=0",
    "data.held_out=0", "checkpoint.every=0", "train.recompute=none",
]  # fmt: skip


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
            key: statistics.median(line["spans"][key] or 0.0 for line in lines[steps // 2 :]) for key in lines[-1]["spans"]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, choices=LAYOUTS)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cluster", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        cluster = options.cluster or folder / "cluster.toml"
        if options.cluster is None:
            shardwise("probe", "--workers", str(options.workers), "--output", str(cluster))
        rows: dict[str, dict[str, Any]] = {}
        for index in range(options.rounds):
            for name, layout in LAYOUTS[options.workers].items():
                found = measure(name, layout, cluster, options.steps, folder / str(index))
                rows[name] = min(rows.get(name, found), found, key=lambda row: float(row["measured"]))
                print(json.dumps({"round": index, "layout": name, **found}), file=sys.stderr, flush=True)
    for name, row in rows.items():
        print(f"{name:<40}{row['predicted']:>10.3f}{row['measured']:>10.3f}{row['predicted'] / row['measured']:>8.2f}")
    by = {key: sorted(rows, key=lambda name: float(rows[name][key])) for key in ("predicted", "measured")}
    worst = max(abs(row["predicted"] / row["measured"] - 1) for row in rows.values())
    print(json.dumps({"largest_error": worst, "order_right": by["predicted"] == by["measured"], "order": by}))


if __name__ == "__main__":
    main()
