"""Effect of compression on training: the held-out loss of four workers on the bundled text, for each codec
and seed.

    python benchmarks/convergence.py [--steps 4000] [--seeds 3] [--at-once 1] [--runs "none;int8"]
                                     [--plot docs/convergence.svg]

Every run is `shardwise train` of the small Llama, compressed after a warm-up of a fifth of the steps. The
optimizer is AdamW, or 1-bit Adam for runs named "1bit-adam", which compresses momenta instead of gradients.
Runs named "lost" have no error feedback. Prints the final losses, and how far their mean is above that of
uncompressed runs.
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
JOB = [
    "model.preset=bytes-400k", "data.sequence_length=64", "train.global_batch=8", "train.learning_rate=1e-3",
    "optimizer.betas=[0.9, 0.999]", f"layout.data={WORKERS}", "checkpoint.every=0", "observe.sample=",
]  # fmt: skip
ONE_BIT, LOST = "optimizer.name=1bit-adam", "layout.error_feedback=false"
RUNS: dict[str, list[str]] = {
    "none": [],
    **{
        codec: [f"layout.compression={codec}"]
        for codec in ("bfloat16", "int8", "qsgd(8)", "powersgd(4)", "terngrad")
    },
    "topk(0.01), 1bit-adam": ["layout.compression=topk(0.01)", ONE_BIT],
    "sign, 1bit-adam": ["layout.compression=sign", ONE_BIT],
    "zero++": [
        "layout.zero=3",
        "layout.compression=int4",
        "layout.weight_compression=int8",
        "layout.backward_shards=2",
    ],
    "topk(0.01), 1bit-adam, lost": ["layout.compression=topk(0.01)", ONE_BIT, LOST],
    "sign, 1bit-adam, lost": ["layout.compression=sign", ONE_BIT, LOST],
    "topk(0.01)": ["layout.compression=topk(0.01)"],
    "sign": ["layout.compression=sign"],
}
"""What each run adds to the job."""
Curve = dict[int, float]
"""Held-out loss by step."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="runs at a time")
    parser.add_argument("--runs", default=";".join(RUNS))
    parser.add_argument("--json", type=Path, help="keep the curves here, with those that are there")
    parser.add_argument("--plot", type=Path, help="draw the curves")
    given = parser.parse_args()
    names, seeds = given.runs.split(";"), range(1, given.seeds + 1)
    curves: dict[tuple[str, int], Curve] = {}
    if given.json and given.json.exists():
        for entry in json.loads(given.json.read_text()):
            curves[entry["run"], entry["seed"]] = {int(step): loss for step, loss in entry["curve"].items()}
    wanted = [(name, seed) for seed in seeds for name in names if (name, seed) not in curves]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.at_once) as pool:

        def one(run: tuple[str, int]) -> None:
            curves[run] = trained(Path(folder), *run, given.steps)
            print(f"  {run[0]:28} seed {run[1]}  {curves[run][given.steps]:.4f}", file=sys.stderr, flush=True)
            if given.json:
                given.json.write_text(
                    json.dumps(
                        [
                            {"run": name, "seed": seed, "curve": curve}
                            for (name, seed), curve in curves.items()
                        ]
                    )
                )

        list(pool.map(one, wanted))
    show(curves, names, list(seeds), given.steps)
    if given.plot:
        draw(curves, names, list(seeds), given.plot)


def show(curves: dict[tuple[str, int], Curve], names: list[str], seeds: list[int], steps: int) -> None:
    finals = {name: [curves[name, seed][steps] for seed in seeds] for name in names}
    base = statistics.mean(finals[names[0]])
    print(f"{'':28} {'held-out loss after ' + str(steps) + ' steps':<32} mean    above {names[0]}")
    for name, losses in finals.items():
        mean = statistics.mean(losses)
        print(
            f"{name:28} {'  '.join(f'{loss:.4f}' for loss in losses):<32} {mean:.4f}  {mean / base - 1:+.2%}"
        )


COLOURS = ("#000000", "#1f77b4", "#17becf", "#2ca02c", "#9467bd", "#8c564b", "#d62728", "#ff7f0e", "#7f7f7f")


def draw(curves: dict[tuple[str, int], Curve], names: list[str], seeds: list[int], path: Path) -> None:
    """Mean curves over seeds, as a picture of lines; dashed: without error feedback."""
    means: dict[str, Curve] = {}
    for name in names:
        of_seeds = [curves[name, seed] for seed in seeds]
        means[name] = {
            step: statistics.mean(curve[step] for curve in of_seeds) for step in sorted(of_seeds[0])
        }
    last = max(max(curve) for curve in means.values())
    low, high = min(min(curve.values()) for curve in means.values()) - 0.05, 2.6
    left, top, width, height = 50, 15, 560, 380

    def place(step: float, loss: float) -> str:
        return (
            f"{left + width * step / last:.1f},{top + height * (high - min(loss, high)) / (high - low):.1f}"
        )

    ink = [f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="none" stroke="#999"/>']
    for tenth in range(int(low * 10) + 1, int(high * 10) + 1, 2):
        x, y = place(0, tenth / 10).split(",")
        ink.append(f'<text x="{float(x) - 6}" y="{float(y) + 4}" text-anchor="end">{tenth / 10:.1f}</text>')
    for quarter in range(5):
        x = place(last * quarter / 4, low).split(",")[0]
        ink.append(f'<text x="{x}" y="{top + height + 16}" text-anchor="middle">{last * quarter // 4}</text>')
    ink.append(
        f'<text x="{left + width / 2}" y="{top + height + 34}" text-anchor="middle">step (held-out loss, '
        f"mean of seeds)</text>"
    )
    for index, (name, curve) in enumerate(means.items()):
        dashes = 'stroke-dasharray="5 3"' if "lost" in name else ""
        style = f'stroke="{COLOURS[index % len(COLOURS)]}" {dashes}'
        points = " ".join(place(step, loss) for step, loss in curve.items())
        ink.append(f'<polyline fill="none" stroke-width="1.5" {style} points="{points}"/>')
        line = top + 14 + 17 * index
        ink.append(
            f'<line x1="{left + width + 12}" y1="{line - 4}" x2="{left + width + 40}" y2="{line - 4}" '
            f'stroke-width="2" {style}/>'
        )
        ink.append(f'<text x="{left + width + 46}" y="{line}">{name}  {curve[max(curve)]:.3f}</text>')
    size = f'width="{left + width + 280}" height="{top + height + 45}"'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(ink)}</svg>\n'
    )


def trained(folder: Path, name: str, seed: int, steps: int) -> Curve:
    """The curve of one run."""
    run = folder / f"{list(RUNS).index(name)}-{seed}"
    words = [
        *JOB,
        f"train.steps={steps}",
        f"train.seed={seed}",
        f"train.evaluate_every={max(1, steps // 20)}",
        f"run.folder={run}",
    ]
    words += RUNS[name] or ["layout.zero=0"]
    if RUNS[name]:
        words += [
            f"layout.compression_warmup={steps // 5}",
            *([] if "layout.zero=3" in RUNS[name] else ["layout.zero=0"]),
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "shardwise", "train", "examples/quickstart.toml", *words]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name}: {done.stderr[-3000:]}", file=sys.stderr)
        return {steps: float("nan")}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record}


if __name__ == "__main__":
    main()
