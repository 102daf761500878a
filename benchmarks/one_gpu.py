"""Proofs of every axis with several workers on one GPU: whether a layout computes what one CPU process
computes, and the error.

    python benchmarks/one_gpu.py table.md            all rows, a few sets of workers at a time
    python benchmarks/one_gpu.py table.md --only zbv

Each row is a proof (`shardwise verify ... --device cuda`) in float64 unless it says otherwise: three steps of
one process on the CPU, and the same on workers that share the GPU and send over NCCL (mesh/nccl.py).
`delays`: before each collective its stream pauses for a random time of up to 5 milliseconds, so that a
missing wait shows (proof/delays.py). The seconds are those of the proof on a machine that may do other work;
they say nothing about the speed of the layout with one GPU for each worker.

The table is written again after every row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

JOB = Path(__file__).parents[1] / "examples" / "verify.toml"
DENSE = ("model.preset=bytes-400k", "model.layers=4", "model.kv_heads=4")
SETS = 2
"""Number of sets of workers that run at the same time, each set in its own process."""


@dataclass(frozen=True)
class Row:
    """One layout that the benchmark proves."""

    name: str
    layout: str
    """Overrides of the job, written without `layout.`"""
    experts: bool = False
    train: str = ""
    dtype: str = "float64"
    milliseconds: float = 0.0
    """Longest delay of a collective."""

    @property
    def workers(self) -> int:
        """Number of workers that the layout needs."""
        sizes = dict(word.split("=") for word in self.layout.split())
        count = 1
        for axis in ("pipeline", "replica", "data", "context", "tensor"):
            count *= int(sizes.get(axis, 1))
        return count

    @property
    def overrides(self) -> list[str]:
        """Overrides of the job, as the command takes them."""
        layout = [f"layout.{word}" for word in self.layout.split()]
        return [
            *(() if self.experts else DENSE),
            *layout,
            *(f"train.{word}" for word in self.train.split()),
            "run.device=cuda",
        ]


ROWS = [
    Row("data, zero 0 (DDP)", "data=4 zero=0"),
    Row("data, zero 1", "data=4 zero=1"),
    Row("data, zero 2", "data=4 zero=2", train="micro_batch=1"),
    Row("data, zero 3", "data=4 zero=3"),
    Row("replica x data, zero 3", "replica=2 data=2 zero=3"),
    Row("replica x data, zero 1", "replica=2 data=2 zero=1", train="micro_batch=1"),
    Row("tensor", "data=1 tensor=4"),
    Row("tensor x data, zero 0", "tensor=2 data=2 zero=0"),
    Row("tensor x data, zero 3", "tensor=2 data=2 zero=3"),
    Row("pipeline gpipe", "pipeline=4 data=1 schedule=gpipe"),
    Row("pipeline 1f1b", "pipeline=4 data=1 schedule=1f1b"),
    Row("pipeline zb1p", "pipeline=4 data=1 schedule=zb1p"),
    Row(
        "pipeline interleaved x data, zero 1",
        "pipeline=2 data=2 schedule=interleaved zero=1",
        train="micro_batch=1",
    ),
    Row("pipeline zbv x data, zero 2", "pipeline=2 data=2 schedule=zbv zero=2", train="micro_batch=1"),
    Row("pipeline dualpipev x data", "pipeline=2 data=2 schedule=dualpipev zero=0", train="micro_batch=1"),
    Row("pipeline 1f1b x data, zero 3", "pipeline=2 data=2 zero=3", train="micro_batch=1"),
    Row("pipeline 1f1b x tensor", "pipeline=2 data=1 tensor=2"),
    Row("context ring", "data=1 context=4 attention=ring"),
    Row("context Ulysses", "data=1 context=4 attention=ulysses"),
    Row("context ring x data, zero 3", "data=2 context=2 attention=ring zero=3"),
    Row("context ring x tensor", "data=1 context=2 tensor=2 attention=ring"),
    Row("context Ulysses x tensor", "data=1 context=2 tensor=2 attention=ulysses"),
    Row("context ring x pipeline 1f1b", "data=1 context=2 pipeline=2 attention=ring"),
    Row("experts x data, zero 3", "data=4 expert=4 zero=3", experts=True),
    Row("experts x data, zero 0", "data=4 expert=2 zero=0", experts=True),
    Row("experts x tensor x data, zero 2", "data=2 tensor=2 expert=2 zero=2", experts=True),
    Row("experts x context x data", "data=2 context=2 expert=4 zero=1", experts=True),
    Row(
        "experts x pipeline zbv x data",
        "pipeline=2 data=2 expert=2 schedule=zbv zero=1",
        experts=True,
        train="micro_batch=1",
    ),
    Row("data, top-k", "data=4 zero=0 compression=topk(0.05)"),
    Row("data, PowerSGD", "data=4 zero=0 compression=powersgd(2)"),
    Row("data, zero 3, ZeRO++", "data=4 zero=3 compression=int4 weight_compression=int8 backward_shards=2"),
    Row("data, zero 2, sign", "data=4 zero=2 compression=sign"),
    Row("tensor x data, zero 3, bfloat16", "tensor=2 data=2 zero=3", dtype="bfloat16"),
    Row("pipeline 1f1b x tensor, bfloat16", "pipeline=2 data=1 tensor=2", dtype="bfloat16"),
    Row("context ring, bfloat16", "data=1 context=4 attention=ring", dtype="bfloat16"),
    Row("experts x data, zero 3, bfloat16", "data=4 expert=4 zero=3", experts=True, dtype="bfloat16"),
    Row("tensor x data, zero 3, compiled", "tensor=2 data=2 zero=3", train="compile=true"),
    Row("data, zero 3, compiled bfloat16", "data=4 zero=3", train="compile=true", dtype="bfloat16"),
    Row(
        "tensor x data, zero 3, all but attention recomputed",
        "tensor=2 data=2 zero=3",
        train="recompute=all-but-attention",
    ),
    Row(
        "context ring x data, all but attention recomputed",
        "context=2 data=2 attention=ring",
        train="recompute=all-but-attention",
    ),
    Row(
        "data, zero 3, all but attention recomputed, compiled bfloat16",
        "data=4 zero=3",
        train="recompute=all-but-attention compile=true",
        dtype="bfloat16",
    ),
    Row("data, zero 3, float8", "data=4 zero=3", train="precision=float8"),
    Row("tensor x data, zero 3, float8", "tensor=2 data=2 zero=3", train="precision=float8"),
    Row("pipeline 1f1b x data, float8", "pipeline=2 data=2", train="precision=float8 micro_batch=1"),
    Row(
        "context ring x tensor, float8", "data=1 context=2 tensor=2 attention=ring", train="precision=float8"
    ),
    Row("experts x data, zero 3, float8", "data=4 expert=4 zero=3", experts=True, train="precision=float8"),
    Row(
        "tensor x data, zero 3, float8 and bfloat16",
        "tensor=2 data=2 zero=3",
        train="precision=float8",
        dtype="bfloat16",
    ),
    Row("pipeline x tensor x context", "pipeline=2 data=1 tensor=2 context=2 attention=ring"),
    Row("pipeline x tensor x data, zero 3", "pipeline=2 data=2 tensor=2 zero=3", train="micro_batch=1"),
    Row(
        "five axes",
        "pipeline=2 data=2 context=2 tensor=2 expert=4 zero=3",
        experts=True,
        train="micro_batch=1",
    ),
    Row("data, zero 3, delays", "data=4 zero=3", milliseconds=5),
    Row("data, zero 0 (DDP), delays", "data=4 zero=0", milliseconds=5),
    Row("replica x data, zero 3, delays", "replica=2 data=2 zero=3", milliseconds=5),
    Row("tensor x data, zero 3, delays", "tensor=2 data=2 zero=3", milliseconds=5),
    Row(
        "pipeline zbv x data, delays",
        "pipeline=2 data=2 schedule=zbv zero=1",
        train="micro_batch=1",
        milliseconds=5,
    ),
    Row("pipeline 1f1b, delays", "pipeline=4 data=1", milliseconds=5),
    Row("context ring, delays", "data=1 context=4 attention=ring", milliseconds=5),
    Row("context Ulysses, delays", "data=1 context=4 attention=ulysses", milliseconds=5),
    Row("experts x data, zero 3, delays", "data=4 expert=4 zero=3", experts=True, milliseconds=5),
    Row("data, top-k, delays", "data=4 zero=0 compression=topk(0.05)", milliseconds=5),
]
HEAD = ["layout", "workers", "numbers", "largest difference", "in roundings", "verdict", "seconds"]


def prove_rows(rows: list[Row], results: Path, seconds: float) -> None:
    """One after the other, with one set of workers for as long as they fit; a line of JSON each."""
    from contextlib import ExitStack

    from shardwise.config import read
    from shardwise.proof.proof_workers import Workers
    from shardwise.proof.prove import prove

    with ExitStack() as stack:
        workers: Workers | None = None
        for row in rows:
            needed = (row.workers, row.milliseconds / 1e3)
            if workers is None or (workers.count, workers.longest_delay) != needed:
                stack.close()
                workers = stack.enter_context(Workers(row.workers, seconds, row.milliseconds / 1e3))
            began = time.monotonic()
            try:
                proof = prove(read(JOB, row.overrides), dtype=row.dtype, workers=workers)  # type: ignore[arg-type]
                worst = proof.verdict.errors[0].to_json(proof.proof.dtype)
                said = proof.diagnosis.sentences() if proof.diagnosis else []
                found = {
                    "verdict": "PASS" if proof.verdict.passes else "FAIL",
                    "difference": worst["relative_error"],
                    "roundings": worst["rounding_units"],
                    "said": [*proof.verdict.faults, *said],
                }
            except Exception as error:
                found, workers = {"verdict": "ERROR", "said": [str(error)[-3000:]]}, None
            with results.open("a") as file:
                file.write(
                    json.dumps({"name": row.name, "seconds": time.monotonic() - began, **found}) + "\n"
                )


def write_table(rows: list[Row], results: list[Path], table: Path) -> None:
    """What is known so far."""
    lines = [line for path in results if path.exists() for line in path.read_text().splitlines()]
    known = {found["name"]: found for found in map(json.loads, lines)}
    cells, said = [HEAD, ["---"] * len(HEAD)], []
    for row in (row for row in rows if row.name in known):
        found = known[row.name]
        difference, roundings = (
            f"{found[key]:.2g}" if key in found else "" for key in ("difference", "roundings")
        )
        cells.append(
            [
                row.name,
                str(row.workers),
                row.dtype,
                difference,
                roundings,
                found["verdict"],
                f"{found['seconds']:.1f}",
            ]
        )
        if found["verdict"] != "PASS":
            said += [f"\n## {row.name}\n", f"`{' '.join(row.overrides)}`\n", "```text", *found["said"], "```"]
    table.write_text("\n".join([f"| {' | '.join(line)} |" for line in cells] + said) + "\n")


def main() -> None:
    """Deal the rows out to sets of workers, and keep the table up to date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path)
    parser.add_argument(
        "--only", default="", help="rows whose name has this, or one of several with semicolons between"
    )
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="after which workers are taken to be stuck"
    )
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    rows = [row for row in ROWS if any(word in row.name for word in given.only.split(";"))]
    ordered = sorted(
        rows, key=lambda row: (row.milliseconds, row.workers)
    )  # those who can share a set of workers, in a row
    shares = [ordered[part::SETS] for part in range(SETS)]
    if given.part is not None:
        prove_rows(shares[given.part], given.table, given.seconds)
        return
    with tempfile.TemporaryDirectory(prefix="one-gpu-") as folder:
        results = [Path(folder) / f"{part}.jsonl" for part in range(SETS)]
        command = [sys.executable, __file__, "--only", given.only, "--seconds", str(given.seconds), "--part"]
        parts = [
            subprocess.Popen([*command, str(part), str(path)])
            for part, path in enumerate(results)
            if shares[part]
        ]
        while any(part.poll() is None for part in parts):
            time.sleep(1.0)
            write_table(rows, results, given.table)
        write_table(rows, results, given.table)
    print(given.table.read_text())


if __name__ == "__main__":
    main()
