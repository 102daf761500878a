"""Effect of float8 on training: the held-out loss on the bundled text in bfloat16 and in float8, for each
seed, on one GPU.

    python benchmarks/precision.py [--steps 2000] [--seeds 3] [--at-once 3] [--json FILE]
                                   [--plot docs/precision.svg]

Every run is `shardwise train` of a Llama of 10.8 M parameters, with the same data and first weights for all
precisions of a seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convergence import Curve, draw, show

ROOT = Path(__file__).parents[1]
JOB = [
    "examples/quickstart.toml", "model.preset=bytes-10m", "data.sequence_length=256", "train.global_batch=8",
    "train.learning_rate=1e-3", "train.warmup=100", "train.final_learning_rate=0", "layout.data=1",
    "checkpoint.every=0",
    "observe.sample=",
]  # fmt: skip
RUNS = {
    "bfloat16": ["train.precision=bfloat16"],
    "float8": ["train.precision=float8"],
    "float8, head in bfloat16": ["train.precision=float8", "train.float8_head=false"],
    "float8, dynamic": ["train.precision=float8", "train.float8_scaling=dynamic"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3, help="runs at a time")
    parser.add_argument("--runs", default=";".join(RUNS))
    parser.add_argument("--json", type=Path, help="keep the curves here")
    parser.add_argument("--plot", type=Path, help="draw the curves")
    given = parser.parse_args()
    names, seeds = given.runs.split(";"), list(range(1, given.seeds + 1))
    curves: dict[tuple[str, int], Curve] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:

        def one(run: tuple[str, int]) -> None:
            curves[run] = trained(Path(folder), *run, given.steps)
            print(f"  {run[0]:28} seed {run[1]}  {curves[run][given.steps]:.4f}", file=sys.stderr, flush=True)
            if given.json:
                kept = [{"run": name, "seed": seed, "curve": curve} for (name, seed), curve in curves.items()]
                given.json.write_text(json.dumps(kept))

        list(pool.map(one, [(name, seed) for seed in seeds for name in names]))
    show(curves, names, seeds, given.steps)
    if given.plot:
        draw(curves, names, seeds, given.plot)


def trained(folder: Path, name: str, seed: int, steps: int) -> Curve:
    """The held-out loss of one run, by step."""
    run = folder / f"{list(RUNS).index(name)}-{seed}"
    settings = [
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.evaluate_every={max(1, steps // 20)}",
        f"run.folder={run}",
    ]
    command = [sys.executable, "-m", "shardwise", "train", *JOB, *RUNS[name], *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-3000:]}")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record}


if __name__ == "__main__":
    main()
