"""Step times of two workers over a link whose bandwidth we set, for each codec, against plain sums and against no sums at all.

    python benchmarks/slow_link.py [--rates 100mbit,1gbit,10gbit] [--codecs none,int8,…] [--steps 8]

Two network namespaces joined by a cable (veth), each direction limited by `tc tbf`, one worker in each: real training of 50 M
parameters over it. "alone" are two workers that train at the same time and never talk: what a step takes without communication
on this machine. Needs root, and `ip` and `tc` of iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
HOSTS = {"a": "10.92.0.1", "b": "10.92.0.2"}
OURS = f"slow{os.getpid()}"
JOB = """
[model]
layers = 10
hidden = 640
heads = 10
kv_heads = 10
head_dim = 64
ffn = 1728
vocabulary = 259
[data]
source = "{source}"
sequence_length = 128
[train]
steps = {steps}
global_batch = {batch}
micro_batch = 1
evaluate_every = 0
[checkpoint]
every_minutes = 0
[observe]
sample = ""
"""
CODECS = (
    "none", "bf16", "fp16", "fp8", "int8", "int4", "qsgd(8)", "qsgd(4)", "terngrad", "sign", "topk(0.01)", "randomk(0.01)",
    "powersgd(4)",
)  # fmt: skip
WARM_UP = 2
"""Steps that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit")
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        sys.exit("network namespaces need root, and ip and tc of iproute2")
    with tempfile.TemporaryDirectory() as folder, cable():
        for rate in given.rates.split(","):
            limit(rate)
            alone = measured(Path(folder), None, given.steps)
            print(f"{rate}: alone {alone:.3f} s a step", flush=True)
            plain = None
            for codec in given.codecs.split(","):
                seconds = measured(Path(folder), codec, given.steps)
                plain = plain or seconds
                print(f"  {codec:14} {seconds:8.3f} s  {plain / seconds:6.2f} x DDP  {seconds / alone:6.2f} x alone", flush=True)


@contextmanager
def cable() -> Iterator[None]:
    """Two hosts, joined by a cable."""
    try:
        for host in HOSTS:
            ip("netns", "add", f"{OURS}{host}")
        ends = ["link", "add", "wire", "netns", f"{OURS}a", "type", "veth", "peer", "name", "wire", "netns", f"{OURS}b"]
        ip(*ends)
        for host, address in HOSTS.items():
            for words in (
                ["addr", "add", f"{address}/24", "dev", "wire"],
                ["link", "set", "wire", "up"],
                ["link", "set", "lo", "up"],
            ):
                ip("-n", f"{OURS}{host}", *words)
        yield
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", f"{OURS}{host}"], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def limit(rate: str) -> None:
    """The bandwidth of the cable, in each direction."""
    for host in HOSTS:
        words = f"ip netns exec {OURS}{host} tc qdisc replace dev wire root tbf rate {rate} burst 256kb latency 50ms"
        subprocess.run(words.split(), check=True, capture_output=True)


def measured(folder: Path, codec: str | None, steps: int) -> float:
    """Median seconds of a step; `codec` None: each worker by itself, both at once."""
    for run in folder.glob("run*"):
        shutil.rmtree(run)
    workers = [start(folder, rank, host, codec, steps) for rank, host in enumerate(HOSTS)]
    if any(worker.wait() for worker in workers):
        sys.exit((folder / "a.err").read_text())
    metrics = (folder / ("run" if codec else "run-a") / "metrics.jsonl").read_text().splitlines()
    return float(statistics.median(json.loads(line)["seconds"] for line in metrics[WARM_UP:]))


def start(folder: Path, rank: int, host: str, codec: str | None, steps: int) -> subprocess.Popen[bytes]:
    together = codec is not None
    source = ROOT / "examples" / "shakespeare.txt"
    job = folder / f"job-{host}.toml"
    job.write_text(JOB.format(source=source, steps=steps + WARM_UP, batch=2 if together else 1))
    options = ["layout.zero=0", "layout.data=2" if together else "layout.data=1"]
    options += [f"run.folder={folder}/{'run' if together else f'run-{host}'}"]
    options += [f"layout.compression={codec}"] if codec not in (None, "none") else []
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    if together:
        environment |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
        environment |= {"PET_RDZV_ENDPOINT": f"{HOSTS['a']}:29400"}
    command = ["ip", "netns", "exec", f"{OURS}{host}", sys.executable, "-m", "shardwise", "train", str(job), *options]
    with (folder / f"{host}.err").open("w") as errors:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=errors, cwd=folder)


if __name__ == "__main__":
    main()
