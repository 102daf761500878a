"""What compression does to training: the held-out loss of four workers on the bundled text, codec by codec, seed by seed.

    python benchmarks/convergence.py [--steps 500] [--seeds 3] [--at-once 1] [--codecs "none;int8;topk(0.01);topk(0.01) lost"]

Every run is `shardwise train` of the small Llama. "lost": without error feedback. Printed are the final losses and how far their
mean is above that of uncompressed runs; `--json FILE` keeps the curves.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKERS = 4
CODECS = (
    "none", "bf16", "int8", "qsgd(8)", "topk(0.01)", "powersgd(4)", "sign", "terngrad", "topk(0.01) lost", "sign lost",
)  # fmt: skip
Curve = dict[int, float]
"""Held-out loss by step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--codecs", default=";".join(CODECS))
    parser.add_argument("--warmup", type=int, default=0, help="steps before compression begins")
    parser.add_argument("--options", default="", help="more of the job, for all runs: layout.zero=2 say")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    codecs, seeds = given.codecs.split(";"), range(1, given.seeds + 1)
    runs = [(codec, seed) for codec in codecs for seed in seeds]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:

        def one(run: tuple[str, int]) -> Curve:
            curve = trained(Path(folder), *run, given)
            print(f"  {run[0]:18} seed {run[1]}  {curve[max(curve)]:.4f}", file=sys.stderr, flush=True)
            return curve

        curves = dict(zip(runs, pool.map(one, runs), strict=True))
    finals = {codec: [curves[codec, seed][given.steps] for seed in seeds] for codec in codecs}
    base = statistics.mean(finals[codecs[0]])
    print(f"{'':18} {'held-out loss after ' + str(given.steps) + ' steps':<32} mean    above {codecs[0]}")
    for codec, losses in finals.items():
        mean = statistics.mean(losses)
        print(f"{codec:18} {'  '.join(f'{loss:.4f}' for loss in losses):<32} {mean:.4f}  {mean / base - 1:+.2%}")
    if given.json:
        given.json.write_text(
            json.dumps([{"codec": codec, "seed": seed, "curve": curve} for (codec, seed), curve in curves.items()])
        )


def trained(folder: Path, codec: str, seed: int, given: argparse.Namespace) -> Curve:
    """The curve of one run."""
    name, _, lost = codec.partition(" ")
    steps: int = given.steps
    run = folder / f"{codec}-{seed}".replace(" ", "-")
    words = [
        "model.preset=bytes-400k",
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.evaluate_every={max(1, steps // 10)}",
    ]
    words += [f"layout.data={WORKERS}", "layout.zero=0", "checkpoint.every=0", "observe.sample=", f"run.folder={run}"]
    words += given.options.split()
    words += [f"layout.compression={name}", f"layout.compression_warmup={given.warmup}"] if name != "none" else []
    words += ["layout.error_feedback=false"] if lost else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "shardwise", "train", "examples/quickstart.toml", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{codec}: {done.stderr[-3000:]}", file=sys.stderr)
        return {steps: float("nan")}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record}


if __name__ == "__main__":
    main()
