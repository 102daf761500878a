"""Time of a start: until workers are ready, until weights have their first values, and until the first step.

    python benchmarks/start.py [repeats]
    python benchmarks/start.py draw [millions of numbers]
    python benchmarks/start.py first [path of another checkout] [setting=value …]

The first command: processor seconds from `shardwise train` until its first worker is ready, and those of
`import torch` in the same minute. A worker is forked from a server that has imported what workers need, so it
is ready about as soon as the server is. So the time is that of the host (the command) and of the server, read
when a worker opens its log, before it builds the model.

The second: seconds to draw this number of float32 weights (by default 1,000 million) on this machine's
device, a GPU if it has one. There are two baselines: filling the same memory with one number, which is the
fastest possible write; and drawing whole parameters on the CPU with torch's generator, as shardwise once did.

The third: seconds from `shardwise train` to the end of its first step, for llama3-8b with bfloat16 states on
one device, with empty caches of the compiler; with a path, for the shardwise in that checkout.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import random_tokens
import torch

from shardwise.models.draw import draw, quantiles
from shardwise.observe.records import read_metrics

ROOT = Path(__file__).parents[1]
JOB = ["examples/quickstart.toml", "layout.data=2", "train.steps=1", "checkpoint.every=0"]


def main(repeats: int) -> None:
    print(f"{'import torch':>14}{'host':>8}{'server':>8}{'both':>8}{'times torch':>13}")
    for _ in range(repeats):
        alone = _of_torch()
        host, server = _of_train()
        print(
            f"{alone:>14.2f}{host:>8.2f}{server:>8.2f}{host + server:>8.2f}{(host + server) / alone:>13.2f}"
        )


def _of_torch() -> float:
    code = "import time, torch; print(time.process_time())"
    return float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )


def _of_train() -> tuple[float, float]:
    """Seconds of the host and of the server when the first worker's log appears."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "shardwise", "train", *JOB, f"run.folder={folder}/run"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            while not list(Path(folder).glob("run/logs/rank-*.log")):
                assert process.poll() is None, "the job was refused"
                time.sleep(0.01)
            host = psutil.Process(process.pid)
            seconds = (
                _own(host),
                sum(_own(child) for child in host.children() if "forkserver" in " ".join(child.cmdline())),
            )
            process.wait()
    return seconds


def _own(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


ROWS = 8192
"""Of the matrices that weights are drawn in; as many columns, or fewer where there are not as many
numbers."""


def weights(millions: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers = millions * 10**6
    shape = ROWS, min(ROWS, numbers // ROWS)
    count = numbers / (shape[0] * shape[1])
    weight, on_cpu = torch.empty(shape, device=device), torch.empty(shape)
    held, normal = tuple(slice(0, size) for size in shape), quantiles()
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "filled with one number": (lambda: weight.fill_(1.0), 20),
        "drawn by index": (
            lambda: draw(weight, normal * 0.02, 0, "weight", shape, held),
            20 if device.type == "cuda" else 2,
        ),
        "drawn whole on the CPU": (lambda: weight.copy_(_as_before(on_cpu)), 2),
    }
    seconds = {}
    for name, (way, repeats) in ways.items():
        first = _seconds(way, 1)
        seconds[name] = _seconds(way, repeats) * count
        print(
            f"{name:>24}{seconds[name]:>12.5f} s a {millions} million on {device.type} (the first matrix: "
            f"{first:.3f} s)"
        )
    filled, drawn, before = seconds.values()
    print(
        f"drawn by index: {drawn / filled:.2f} times the seconds of filling, {before / drawn:.0f} times "
        f"quicker than before"
    )


def _as_before(full: torch.Tensor) -> torch.Tensor:
    return full.normal_(0.0, 0.02, generator=torch.Generator("cpu").manual_seed(5))


def _seconds(way: Callable[[], object], repeats: int) -> float:
    """Return the mean seconds of one call."""
    _wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        way()
    _wait()
    return (time.perf_counter() - begin) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


FIRST = """
[model]
preset = "llama3-8b"
[data]
source = "tokens"
sequence_length = 8192
held_out = 0.0
[train]
steps = 100
global_batch = 1
micro_batch = 1
precision = "bfloat16"
state_dtype = "bfloat16"
[checkpoint]
every = 0
[run]
folder = "run"
"""


def first_step(root: Path, settings: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_tokens.write(folder / "tokens", 8192 * 64, 128_256)
        (folder / "job.toml").write_text(FIRST)
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        path = f"{root.resolve()}:{os.environ.get('PYTHONPATH', '')}"
        words = [sys.executable, "-m", "shardwise", "train", "job.toml", *settings]
        records = folder / "run" / "metrics.jsonl"
        begin = time.perf_counter()
        environment = {**os.environ, **caches, "PYTHONPATH": path}
        with subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True) as process:
            while (
                not records.exists()
                or (first := next(iter(read_metrics(records.parent, ("seconds",))), None)) is None
            ):
                assert process.poll() is None, "the job ended before its first step"
                time.sleep(0.05)
            seconds = time.perf_counter() - begin
            os.killpg(process.pid, signal.SIGKILL)
    print(
        f"{seconds:.1f} s from the command to the end of the first step, which took {first['seconds']:.1f} s "
        f"({root})"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["first"]:
        paths = [Path(word) for word in sys.argv[2:] if "=" not in word]
        first_step(paths[0] if paths else ROOT, [word for word in sys.argv[2:] if "=" in word])
    elif sys.argv[1:2] == ["draw"]:
        weights(int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
