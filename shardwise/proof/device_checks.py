"""Check the devices of this machine by using them as training does: links, proofs, a drill, low precision.

Each check ends in one row: whether it passed, and one number. The checks use the functions of the commands:
links are measured by workers of a proof (probe/pair_speed.py), layouts are proven by `prove`, and the drill
is a `shardwise drill` of its own, which runs beside the proofs if there are enough cores. The jobs have a
small model and a text of the package, so no data of the user is read.

Without a GPU two workers compute on CPU cores and send over gloo. With one GPU four workers share it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardwise.config import Config, from_tables, to_toml
from shardwise.files import Json
from shardwise.mesh import cores, local_gpus, nccl
from shardwise.plurals import counted
from shardwise.probe.pair_speed import LinkReport
from shardwise.proof.proof_job import Dtype
from shardwise.proof.proof_workers import Workers
from shardwise.proof.prove import prove

State = Literal["pass", "fail", "skipped"]
SHARING, CPU_WORKERS, MOST = 4, 2, 8
"""Number of workers that share a single GPU, number on a machine without GPUs, and the most of a proof."""
DRILL_STEPS = 12
SLOW_PAIR = 0.25
"""A pair fails if it is slower than this share of the median pair."""
LINK_SECONDS, PROOF_SECONDS, DRILL_SECONDS = 90.0, 90.0, 240.0
"""Seconds after which a check is taken to be stuck."""
FLOAT8_SINCE = (8, 9)
"""First compute capability of GPUs with products in float8."""
MEASURE = "shardwise.probe.pair_speed:measure_pairs"
DENSE: Json = {"preset": "bytes-400k", "layers": 4, "kv_heads": 4}
EXPERTS: Json = {"preset": "moe-tiny"}
_GB = 1e9


@dataclass(frozen=True)
class Row:
    """The result of one check."""

    name: str
    state: State
    number: str
    """The number that was measured, with its unit; empty if the check did not get so far."""
    words: str
    """What the number is; if the check failed, what went wrong."""
    seconds: float = 0.0

    def to_json(self) -> Json:
        """Return the row as the command prints it."""
        return asdict(self)


@dataclass(frozen=True)
class Devices:
    """The devices that are checked."""

    kind: Literal["cuda", "cpu"]
    gpus: int

    @classmethod
    def of_this_machine(cls) -> Devices:
        """Return the GPUs of this machine, or its CPU cores if it has none."""
        gpus = local_gpus()
        return cls("cuda" if gpus else "cpu", gpus)

    @property
    def workers(self) -> int:
        """Number of workers whose links are measured: one for each GPU."""
        return {0: CPU_WORKERS, 1: SHARING}.get(self.gpus, self.gpus)

    @property
    def proof_workers(self) -> int:
        """Number of workers of a layout: the largest power of two, up to eight."""
        return min(MOST, 1 << (self.workers.bit_length() - 1))

    @property
    def drill_workers(self) -> int:
        """Number of workers of the drill. A shared GPU runs them in turns, beside those of the proofs."""
        return 2 if self.share else self.proof_workers

    @property
    def share(self) -> bool:
        """Whether several workers share a GPU."""
        return 0 < self.gpus < self.workers

    def describe(self) -> str:
        """Return the workers and their devices in words."""
        if not self.gpus:
            return f"{self.workers} workers on {counted(cores(), 'CPU core')}, no GPU"
        return f"{self.workers} workers share 1 GPU" if self.share else f"{self.gpus} GPUs, a worker each"


@dataclass(frozen=True)
class DeviceReport:
    """The rows of all checks, and the speed of each pair."""

    devices: Devices
    rows: tuple[Row, ...]
    links: LinkReport | None
    seconds: float

    @property
    def failed(self) -> list[Row]:
        """Return the rows of the checks that failed."""
        return [row for row in self.rows if row.state == "fail"]

    def to_json(self) -> Json:
        """Return the report as the command prints it."""
        return {
            "pass": not self.failed,
            "devices": {**asdict(self.devices), "workers": self.devices.workers},
            "rows": [row.to_json() for row in self.rows],
            "links": None if self.links is None else asdict(self.links),
            "seconds": round(self.seconds, 1),
        }


def check_devices(devices: Devices, text: Path, folder: Path, say: Callable[[str], None]) -> DeviceReport:
    """Run all checks, and return their rows. `text` is what the jobs train on. Logs go to `folder`, and `say`
    is called with what comes next."""
    began, checks = time.monotonic(), _Checks(devices, text, folder, say)
    with ExitStack() as stack:
        rows = list(checks.links())
        drill = stack.enter_context(_Drill(checks))
        if cores() >= 2 * devices.proof_workers:
            drill.start()
        rows += checks.proofs()
        drill.start()
        say("a drill with one kill")
        rows.append(checks.row("drill, one kill", drill.result))
    return DeviceReport(devices, tuple(rows), checks.measured, time.monotonic() - began)


def layouts(workers: int) -> dict[str, Json]:
    """Return four layouts of this many workers (2, 4 or 8), which together use every axis."""
    half = workers // 2
    return {
        "zero 3": {"data": workers, "zero": 3},
        "tensor": {"data": half, "tensor": 2, "zero": 0},
        "pipeline": {"data": half, "pipeline": 2, "zero": 1},
        "context and experts": {"data": half, "context": 2, "expert": workers, "zero": 1},
    }


class _Checks:
    """Runs the checks, and turns each into a row."""

    def __init__(self, devices: Devices, text: Path, folder: Path, say: Callable[[str], None]) -> None:
        self.devices, self.folder, self.say, self._text = devices, folder, say, text
        self.measured: LinkReport | None = None

    def row(self, name: str, check: Callable[[], Row]) -> Row:
        """Run a check, and return its row. An exception is a failure; its traceback goes to the folder."""
        began = time.monotonic()
        try:
            row = check()
        except Exception as error:
            file = self.folder / f"{name.replace(',', '').replace(' ', '-')}.txt"
            file.write_text("".join(traceback.format_exception(error)))
            lines = str(error).strip().splitlines() or [""]
            row = Row(name, "fail", "", f"{type(error).__name__}: {lines[0]}")
        return replace(row, seconds=round(time.monotonic() - began, 1))

    # Links

    def links(self) -> Iterator[Row]:
        """Yield the rows of the links: transport, pairs, and all devices together."""
        self.say("links of each pair")
        yield self.row("transport", self._transport)
        if (links := self.measured) is not None:
            yield self.row("each pair", lambda: judge_pairs(links))
            yield self.row("all together", lambda: judge_together(links))

    def _transport(self) -> Row:
        logs = self.folder if self.devices.kind == "cuda" else None
        with Workers(self.devices.workers, LINK_SECONDS) as workers:
            self.measured = workers.run(MEASURE, self.devices.kind, logs)[0]
        text = "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("nccl-*.log")))
        return judge_transport(self.measured, text, self.devices)

    # Proofs

    def proofs(self) -> Iterator[Row]:
        """Yield the rows of the proofs. A set of workers serves all of them, until a proof ends it."""
        with ExitStack() as stack:
            shared: Workers | None = stack.enter_context(Workers(self.devices.proof_workers, PROOF_SECONDS))
            for name, config, dtype in self._jobs():
                self.say(name)
                why = self._why_skipped(name)
                if why is not None:
                    yield Row(name, "skipped", "", why)
                    continue
                row = self.row(name, lambda: self._proof(name, config, dtype, shared))  # noqa: B023
                if not row.number:  # it raised an exception, which may have ended the workers
                    stack.close()
                    shared = None
                yield row

    def _jobs(self) -> Iterator[tuple[str, Config, Dtype]]:
        """Yield the name, the job and the dtype of each proof."""
        workers = self.devices.proof_workers
        for name, layout in layouts(workers).items():
            yield f"verify {name}", self.job(layout, EXPERTS if "expert" in layout else DENSE), "float64"
        low: Dtype = "bfloat16" if self.devices.kind == "cuda" else "float64"
        zero_3 = layouts(workers)["zero 3"]
        yield "float8", self.job(zero_3, DENSE, precision="float8", compile=False), low
        yield "compile", self.job(zero_3, DENSE, compile=True), low

    def _why_skipped(self, name: str) -> str | None:
        """Return why a check means nothing on these devices; None if it is run."""
        if name == "compile" and self.devices.kind == "cpu":
            return "blocks are compiled on GPUs only"
        if name == "float8" and self.devices.kind == "cuda":
            import torch

            if torch.cuda.get_device_capability(0) < FLOAT8_SINCE:
                return f"{torch.cuda.get_device_name(0)} has no products in float8; train in bfloat16"
        return None

    def _proof(self, name: str, config: Config, dtype: Dtype, workers: Workers | None) -> Row:
        result = prove(config, steps=2, dtype=dtype, workers=workers)
        worst = result.verdict.errors[0]
        words = f"largest relative error, in {dtype}; limit {worst.limit:.1g}"
        if not result.verdict.passes:
            found = result.diagnosis.sentences() if result.diagnosis else []
            words = "; ".join([*result.verdict.faults, *found]) or words
            (self.folder / f"{name.replace(' ', '-')}.json").write_text(json.dumps(result.to_json()))
        return Row(name, "pass" if result.verdict.passes else "fail", f"{worst.relative_error:.1e}", words)

    def job(self, layout: Json, model: Json, **train: Any) -> Config:
        """Return a small job on this layout."""
        return from_tables(
            {
                "model": model,
                "data": {
                    "source": str(self._text),
                    "sequence_length": 64,
                    "cache": str(self.folder / "data"),
                },
                "train": {"steps": 24, "global_batch": MOST, "micro_batch": 1, "warmup": 5, **train},
                "layout": layout,
                "run": {"folder": str(self.folder / "drill"), "device": self.devices.kind},
            }
        )


class _Drill:
    """A `shardwise drill` with one kill, in a process of its own."""

    def __init__(self, checks: _Checks) -> None:
        self._checks = checks
        self._log, self._answer = checks.folder / "drill.log", checks.folder / "drill.json"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Drill:
        return self

    def __exit__(self, *_: object) -> None:
        """End the drill. It ends its own processes on SIGTERM."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()

    def start(self) -> None:
        """Start the drill, unless it was started before."""
        if self._process is not None:
            return
        layout = layouts(self._checks.devices.drill_workers)["zero 3"]
        job = self._checks.folder / "drill.toml"
        config = self._checks.job(layout, DENSE, steps=DRILL_STEPS, evaluate_sequences=MOST)
        job.write_text(to_toml(config))
        words = [sys.executable, "-m", "shardwise", "drill", str(job), "checkpoint.every=3", "--json"]
        words += ["--faults", "kill", "--count", "1"]
        with self._log.open("wb") as log, self._answer.open("wb") as answer:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=answer, stderr=log)

    def result(self) -> Row:
        """Wait for the end of the drill, and return its row."""
        assert self._process is not None, "it was started"
        try:
            self._process.wait(DRILL_SECONDS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no end after {DRILL_SECONDS:.0f} s; see drill.log") from None
        return judge_drill(self._answer.read_text(), self._log.read_text(errors="replace"))


# From measurements to rows


def judge_transport(links: LinkReport, log: str, devices: Devices) -> Row:
    """Return the row of the transports in NCCL's log. GPUs of one host must not need the network."""
    if links.backend == "gloo":
        return Row("transport", "pass", "gloo", f"{devices.describe()}; gloo sends over sockets")
    used = nccl.transports(log)
    named = ", ".join(f"{name} ({count})" for name, count in used.most_common()) or "none in NCCL's log"
    words = f"{devices.describe()}; connections: {named}"
    over_network = any(name.startswith("NET") for name in used) and not devices.share
    if over_network:
        words += (
            "; NCCL sends between GPUs of this machine over the network: see `nvidia-smi topo -m`, and "
            "whether /dev/shm is large enough (docker: --shm-size=1g)"
        )
    good = bool(used) and not over_network
    return Row("transport", "pass" if good else "fail", f"NCCL {links.version}", words)


def judge_pairs(links: LinkReport) -> Row:
    """Return the row of all pairs: their numbers must arrive, and none may be far slower than the others."""
    ordered = sorted(links.pairs, key=lambda pair: pair.bytes_per_second)
    slowest, fastest, median = ordered[0], ordered[-1], ordered[len(ordered) // 2]
    number = f"{slowest.bytes_per_second / _GB:.2f} GB/s"
    wrong = [f"{pair.first}-{pair.second}" for pair in links.pairs if not pair.correct]
    if wrong:
        return Row("each pair", "fail", number, f"wrong numbers arrived between {', '.join(wrong)}")
    slow = [
        f"{pair.first}-{pair.second}"
        for pair in ordered
        if pair.bytes_per_second < SLOW_PAIR * median.bytes_per_second
    ]
    if slow:
        usual = f"{median.bytes_per_second / _GB:.2f} GB/s"
        return Row(
            "each pair", "fail", number, f"the median pair has {usual}; much slower: {', '.join(slow)}"
        )
    best = f"fastest {fastest.first}-{fastest.second}: {fastest.bytes_per_second / _GB:.2f} GB/s"
    words = f"slowest of {counted(len(ordered), 'pair')}, {slowest.first}-{slowest.second}; {best}"
    return Row("each pair", "pass", number, words)


def judge_together(links: LinkReport) -> Row:
    """Return the row of the all-reduce over all devices."""
    number = f"{links.together / _GB:.2f} GB/s"
    if not links.sum_is_correct:
        return Row("all together", "fail", number, "an all-reduce returned a wrong sum")
    return Row("all together", "pass", number, "all-reduce, bus bandwidth; the sum is right")


def judge_drill(answer: str, log: str) -> Row:
    """Return the row of the drill, from its JSON, or from its log if it wrote none."""
    name = "drill, one kill"
    if not answer.strip():
        return Row(name, "fail", "", (log.strip().splitlines() or ["no output"])[-1])
    found = json.loads(answer)
    seconds = [fault["seconds_to_recover"] for fault in found["faults"]]
    number = f"{max(seconds):.1f} s" if seconds else ""
    if found["pass"]:
        return Row(name, "pass", number, "to recover; losses, data and weights are equal to the last bit")
    failure: str = found["failure"] or "the run is not the undisturbed one"
    return Row(name, "fail", number, failure.splitlines()[0])


def pair_lines(links: LinkReport) -> Sequence[Sequence[str]]:
    """Return a table of the speed of every pair, in GB/s, with a row and a column for each worker."""
    speeds = {(pair.first, pair.second): pair.bytes_per_second for pair in links.pairs}
    ranks = range(1 + max(pair.second for pair in links.pairs))
    rows = [["GB/s", *map(str, ranks)]]
    for row in ranks:
        pairs = (speeds.get((min(row, column), max(row, column))) for column in ranks)
        rows.append([str(row), *("-" if speed is None else f"{speed / _GB:.1f}" for speed in pairs)])
    return rows
