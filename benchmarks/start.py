"""Processor seconds from `shardwise train` to its first worker being ready, beside those of `import torch` in the same minute.

    python benchmarks/start.py [repeats]

A worker is forked from a server that has imported what workers need, so it is ready about as soon as the server is. What
counts is therefore the time of the host (the command) and of the server, read when a worker opens its log, before it builds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
JOB = ["examples/quickstart.toml", "layout.data=2", "train.steps=1", "checkpoint.every=0"]


def main(repeats: int) -> None:
    print(f"{'import torch':>14}{'host':>8}{'server':>8}{'both':>8}{'times torch':>13}")
    for _ in range(repeats):
        torch = _of_torch()
        host, server = _of_train()
        print(f"{torch:>14.2f}{host:>8.2f}{server:>8.2f}{host + server:>8.2f}{(host + server) / torch:>13.2f}")


def _of_torch() -> float:
    code = "import time, torch; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _of_train() -> tuple[float, float]:
    """Seconds of the host and of the server when the first worker's log appears."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "shardwise", "train", *JOB, f"run.folder={folder}/run"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            while not list(Path(folder).glob("run/logs/rank-*.log")):
                assert process.poll() is None, "the job was refused"
                time.sleep(0.01)
            host = psutil.Process(process.pid)
            seconds = _own(host), sum(_own(child) for child in host.children() if "forkserver" in " ".join(child.cmdline()))
            process.wait()
    return seconds


def _own(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
