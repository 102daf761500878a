"""Step times of two workers over a link whose bandwidth we set, against plain sums, no sums at all, and the
planner's prediction.

    python benchmarks/slow_link.py [--rates 100mbit,1gbit,10gbit] [--codecs none,int8,…] [--sequence 320]
                                   [--steps 8]
    python benchmarks/slow_link.py --overlap [--rates 1gbit] [--sequence 768]

Two network namespaces joined by a cable (veth), each direction limited by `tc tbf`, one worker in each, with
its own half of the cores: real training of 50 M parameters over it. "alone" are two workers that train at the
same time without communication: the time of a step without sums. `shardwise probe` measures the link between
the two, and the planner predicts each run from this.

If other virtual machines used much of the cores during a measurement (Linux reports this as "stolen" time),
the measurement is repeated, and the one with the least stolen time counts.

With --overlap, DDP and ZeRO-2 run without a codec. Each step is compared with the longer of two times: that
of its bytes on the link, and that of the slower worker's computing in the traces (which includes the copies
of sharding). It is also compared with "alone".

Needs root, `ip` and `tc` of iproute2, and `taskset` of util-linux.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

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
sequence_length = {sequence}
held_out = 0.0
[train]
steps = {steps}
global_batch = {batch}
micro_batch = 1
evaluate_every = 0
[checkpoint]
every_minutes = 0
[observe]
sample = ""
trace = {steps}
"""
CODECS = (
    "none", "bfloat16", "float16", "float8",
    "int8", "int4", "qsgd(8)", "qsgd(4)", "terngrad", "sign", "topk(0.01)",
    "randomk(0.01)",
    "powersgd(4)",
)  # fmt: skip
WARM_UP = 2
"""Steps that are not counted."""
UNITS = {"mbit": 1e6, "gbit": 1e9}
QUIET, ATTEMPTS = 0.03, 2
"""Share of the cores' time that others may take, and how often to try for that."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Measured:
    """One run."""

    seconds: float
    """Median of a step; of two by themselves, the slower in each step: in lockstep it would be waited for."""
    predicted: float
    wire_bytes: float
    """Bytes that each worker sends in a step."""
    hidden: float
    """Share of the collectives' time that passed beside computing."""
    steps: list[tuple[float, float]]
    """Seconds of each step, and seconds that the slower worker computed in it."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default=None)
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--sequence", type=int, default=None, help="tokens of a worker in a step")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--keep", type=Path, help="copy runs and traces here; of a repeated run, the last")
    given = parser.parse_args()
    if os.geteuid() != 0 or not all(shutil.which(command) for command in ("ip", "tc", "taskset")):
        sys.exit(
            "network namespaces need root, and ip and tc of iproute2; cores of their own need taskset of "
            "util-linux"
        )
    rates = (given.rates or ("1gbit" if given.overlap else "100mbit,1gbit,10gbit")).split(",")
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # disks are not what is measured
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, cable():
        bench = Bench(
            Path(folder), given.sequence or (768 if given.overlap else 320), given.steps, given.keep
        )
        for rate in rates:
            limit(rate)
            bench.probe()
            if given.overlap:
                show_overlap(bench, rate)
            else:
                show_codecs(bench, rate, given.codecs.split(","))


def show_codecs(bench: Bench, rate: str, codecs: Sequence[str]) -> None:
    alone = bench.run(f"{rate}-alone", None).seconds
    print(f"{rate}: alone {alone:.3f} s a step", flush=True)
    plain = None
    for codec in codecs:
        run = bench.run(
            f"{rate}-{codec}",
            ["layout.zero=0", *([] if codec == "none" else [f"layout.compression={codec}"])],
        )
        plain = plain or run
        quicker, said = plain.seconds / run.seconds, plain.predicted / run.predicted
        print(
            f"  {codec:14} {run.seconds:7.3f} s  {run.seconds / alone:6.2f} x alone  {quicker:6.2f} x DDP, "
            f"predicted {said:6.2f} "
            f"({said / quicker - 1:+4.0%}; {run.predicted:7.3f} s)",
            flush=True,
        )


def show_overlap(bench: Bench, rate: str) -> None:
    number, unit = re.fullmatch(r"([\d.]+)([mg]bit)", rate).groups()  # type: ignore[union-attr]
    alone = bench.run(f"{rate}-alone", None).seconds
    for zero, name in ((0, "DDP"), (2, "ZeRO-2")):
        run = bench.run(f"{rate}-zero{zero}", [f"layout.zero={zero}"])
        wire = 8 * run.wire_bytes / (float(number) * UNITS[unit])
        longer = statistics.median(seconds / max(computing, wire) for seconds, computing in run.steps)
        computing = statistics.median(computing for _, computing in run.steps)
        print(
            f"{rate} {name:7} step {run.seconds:.3f} s, computing {computing:.3f} s, wire {wire:.3f} s: "
            f"{longer:.3f} x the longer; {run.hidden:.0%} of communication hidden; "
            f"{run.seconds / max(alone, wire):.3f} x with {alone:.3f} s of computing alone",
            flush=True,
        )


class Bench:
    """Runs of two workers, one on each host."""

    def __init__(self, folder: Path, sequence: int, steps: int, keep: Path | None) -> None:
        self.folder, self.steps, self.keep = folder, steps, keep
        job = {
            "source": ROOT / "examples" / "shakespeare.txt",
            "sequence": sequence,
            "steps": steps + WARM_UP,
        }
        for batch in (1, 2):
            (folder / f"job-{batch}.toml").write_text(JOB.format(batch=batch, **job))

    def probe(self) -> None:
        """Measure the two hosts, and the cable between them."""
        (self.folder / "cluster.toml").write_text(quietest(self._probe))

    def _probe(self) -> str:
        self._on_both(["probe", "--workers", "1", "--output", "cluster.toml"], together=True)
        return (self.folder / "cluster.toml").read_text()

    def run(self, name: str, options: list[str] | None) -> Measured:
        """Train under these options; None: each worker by itself, both at once."""
        return quietest(lambda: self._run(name, options))

    def _run(self, name: str, options: list[str] | None) -> Measured:
        for run in self.folder.glob("run*"):
            shutil.rmtree(run)
        if options is None:
            self._on_both(["train", "job-1.toml", "layout.data=1", "run.folder=run-{host}"], together=False)
        else:
            words = ["layout.data=2", "cluster.file=cluster.toml", "run.folder=run", *options]
            self._on_both(["train", "job-2.toml", *words], together=True)
        runs = [self.folder / f"run-{host}" for host in HOSTS] if options is None else [self.folder / "run"]
        seconds = [
            max(record["seconds"] for record in records) for records in zip(*map(_records, runs), strict=True)
        ]
        records = _records(run := runs[0])
        if self.keep:
            shutil.copytree(run, self.keep / name, dirs_exist_ok=True)
        times = [entry for record in records for entry in record.get("communication", {}).values()]
        busy = sum(entry["seconds"] for entry in times)
        plan = json.loads((run / "plan.json").read_text())
        return Measured(
            seconds=float(statistics.median(seconds)),
            predicted=plan["predicted"]["step_seconds"]["total"] if options is not None else 0.0,
            wire_bytes=sum(_wire_bytes(*entry) for entry in records[-1].get("collectives", {}).items()),
            hidden=sum(entry["hidden"] for entry in times) / busy if busy else 0.0,
            steps=_steps(run),
        )

    def _on_both(self, words: list[str], together: bool) -> None:
        workers = [self._start(rank, host, words, together) for rank, host in enumerate(HOSTS)]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            sys.exit("\n".join((self.folder / f"{host}.err").read_text() for host in HOSTS))

    def _start(self, rank: int, host: str, words: list[str], together: bool) -> subprocess.Popen[bytes]:
        environment = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
        }
        environment["CUDA_VISIBLE_DEVICES"] = ""  # two workers on one GPU are not two machines
        if together:
            environment |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank)}
            environment |= {"PET_RDZV_ENDPOINT": f"{HOSTS['a']}:29400"}
        command = ["ip", "netns", "exec", f"{OURS}{host}", sys.executable, "-m", "shardwise"]
        command += [word.format(host=host) for word in words]
        cores = sorted(os.sched_getaffinity(0))
        each = len(cores) // len(HOSTS)
        own = (
            cores[rank * each : (rank + 1) * each] or cores
        )  # what two machines would not share: neighbours may be one core
        with (self.folder / f"{host}.err").open("w") as errors:
            return subprocess.Popen(
                ["taskset", "--cpu-list", ",".join(map(str, own)), *command],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=self.folder,
            )


def quietest(measure: Callable[[], Result]) -> Result:
    """What was measured while others took least of this machine."""
    found: list[tuple[float, Result]] = []
    while len(found) < ATTEMPTS and (not found or found[-1][0] > QUIET):
        before = psutil.cpu_times()
        result = measure()
        taken = [now - then for now, then in zip(psutil.cpu_times(), before, strict=True)]
        found.append((taken[before._fields.index("steal")] / sum(taken), result))
    return min(found, key=lambda pair: pair[0])[1]


def _records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]


def _steps(run: Path) -> list[tuple[float, float]]:
    """From the traces of all ranks."""
    computing: dict[int, list[float]] = {}
    for trace in run.glob("trace-rank*.json"):
        own: dict[int, float] = {}
        for event in json.loads(trace.read_text())["traceEvents"]:
            if event["ph"] == "X" and event["tid"] == 0 and event["name"] != "exposed_communication":
                own[event["args"]["step"]] = own.get(event["args"]["step"], 0.0) + event["dur"] / 1e6
        for step, seconds in own.items():
            computing.setdefault(step, []).append(seconds)
    return [
        (record["seconds"], max(computing[record["step"]]))
        for record in _records(run)
        if record["step"] in computing
    ]


def _wire_bytes(key: str, entry: dict[str, int]) -> float:
    """Return the bytes that each of two devices sends for these collectives of a ledger."""
    return entry["bytes"] * (1.0 if key.startswith("all_reduce") else 0.5)


@contextmanager
def cable() -> Iterator[None]:
    """Two hosts, joined by a cable."""
    try:
        for host in HOSTS:
            ip("netns", "add", f"{OURS}{host}")
        ends = [
            "link",
            "add",
            "wire",
            "netns",
            f"{OURS}a",
            "type",
            "veth",
            "peer",
            "name",
            "wire",
            "netns",
            f"{OURS}b",
        ]
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
        words = (
            f"ip netns exec {OURS}{host} tc qdisc replace dev wire root tbf rate {rate} burst 256kb "
            f"latency 50ms"
        )
        subprocess.run(words.split(), check=True, capture_output=True)


if __name__ == "__main__":
    main()
