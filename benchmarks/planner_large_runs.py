"""Eight large published runs: their layouts, those that the planner chooses, and the predictions for both.

    python benchmarks/planner_large_runs.py [WORDS…]

prints the table of docs/planner.md; with words, only the runs whose name has one of them. Both predictions
are for shardwise on the run's devices, so they differ from the published figures where the original program
differed: full recomputation, attention that was not fused, gradients in two bytes. The planner chooses what
the publication leaves open (micro-batch, recomputation, sharding). Our MFU follows our convention
(shardwise/plans/flops.py); published figures are quoted unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner_models import shape_of

from shardwise.config import Config, from_tables
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.clusters import named
from shardwise.cost.predict import Prediction
from shardwise.cost.space import RECOMPUTE, Space
from shardwise.plans.flops import flops_per_token
from shardwise.search.search import SearchResult, search


@dataclass(frozen=True)
class Run:
    """A run as it was published."""

    name: str
    model: str
    cluster: str
    sequence: int
    batch: int
    layout: Mapping[str, Any]
    """Keys of a job's [layout]."""
    mfu: str
    """MFU as the source prints it."""
    train: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


RUNS = (
    Run("Llama 3 405B", "llama3-405b", "h100x16384", 8192, 2048,
        {"tensor": 8, "pipeline": 16, "data": 128, "schedule": "interleaved"}, "41 %",
        source="Grattafiori et al. 2024"),
    Run("Llama 3 405B, 128k", "llama3-405b", "h100x16384", 131072, 128,
        {"tensor": 8, "context": 16, "pipeline": 16, "data": 8, "schedule": "interleaved"}, "38 %",
        source="Grattafiori et al. 2024"),
    Run("GPT-3 175B", "gpt3-175b", "a100-80x512", 2048, 512,
        {"tensor": 8, "pipeline": 8, "data": 8, "schedule": "interleaved", "stages_per_rank": 3},
        "51 % on 64",
        {"micro_batch": 1}, "Korthikanti et al. 2022"),
    Run("Mixtral 8x22B", "mixtral-8x22b", "h100x128", 4096, 256,
        {"tensor": 2, "expert": 8, "pipeline": 8, "data": 8, "schedule": "interleaved"}, "49 %",
        source="Liu et al. 2025"),
    Run("Qwen3 235B", "qwen3-235b-a22b", "h100x256", 4096, 2048,
        {"tensor": 2, "expert": 32, "pipeline": 8, "data": 16, "schedule": "interleaved",
        "stages_per_rank": 4}, "25 %",
        {"micro_batch": 1}, "Megatron's model zoo"),
    Run("Nemotron-4 340B", "nemotron-340b", "h100x6144", 4096, 2304,
        {"tensor": 8, "pipeline": 12, "data": 64, "schedule": "interleaved", "stages_per_rank": 8}, "41 %",
        {"micro_batch": 1},
        "Adler et al. 2024"),
    Run("MPT 70B", "mpt-70b", "h100x512", 2048, 4096, {"data": 512, "zero": 3}, "41 %",
        {"micro_batch": 8, "recompute": "full"}, "llm-foundry"),
    Run("BLOOM 176B", "bloom-176b", "a100-80x384", 2048, 2048, {"tensor": 4, "pipeline": 12, "data": 8,
    "schedule": "1f1b"},
        "36 %", {"micro_batch": 2, "recompute": "full"}, "Le Scao et al. 2022"),
)  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """One layout of a run, costed."""

    layout: str
    seconds: Mapping[str, float]
    mfu: float
    fits: bool

    @property
    def total(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())


def job(run: Run, published: bool) -> Config:
    """The run as a job: as published, or with all left open."""
    shape = {**shape_of(run.model), "max_positions": run.sequence}
    train = {"global_batch": run.batch, "precision": "bfloat16", **(run.train if published else {})}
    tables = {"model": shape, "data": {"source": "tokens", "sequence_length": run.sequence}, "train": train}
    return from_tables({**tables, "layout": dict(run.layout)} if published else tables)


def predicted(run: Run, published: bool) -> Predicted:
    """What the planner says of the run: as published, or as it would lay it out itself."""
    cluster = named(run.cluster)
    result = search(job(run, published), cluster, cluster.devices)
    best = int(result.order[0]) if len(result.order) else int(result.peak.argmin())
    found = result.prediction(best)
    return Predicted(words(result.space, best), _terms(found), _mfu(result, found), bool(len(result.order)))


def _terms(found: Prediction) -> dict[str, float]:
    return {name: float(value[0]) for name, value in found.seconds.items()}


def _mfu(result: SearchResult, found: Prediction) -> float:
    work, peak = result.work, result.cluster.device.peak["bfloat16"]
    return (
        flops_per_token(work.model, work.sequence_length)
        * work.tokens
        / result.devices
        / float(found.total[0])
        / peak
    )


def words(space: Space, index: int) -> str:
    """A layout in a few words."""
    row = space.row(index)
    names = {
        "pipeline": "PP",
        "tensor": "TP",
        "context": "CP",
        "expert": "EP",
        "data": "DP",
        "replica": "replicas ",
    }
    parts = [f"{short}{row[axis]}" for axis, short in names.items() if row[axis] > 1]
    if row["pipeline"] > 1:
        stages = f" x {row['stages_per_rank']}" if row["stages_per_rank"] > 1 else ""
        parts.append(SCHEDULES[row["schedule"]] + stages)
    return ", ".join([" ".join(parts[:-1] + parts[-1:]), f"ZeRO-{row['zero']}",
    f"{row['micro_batch']} a micro-batch",
                      f"recompute {RECOMPUTE[row['recompute']]}",
                      *(["offload"] if row["offload"] else [])])  # fmt: skip


_NAMES = {"matmul": "products", "elementwise": "memory-bound kernels", "launch": "starting kernels",
"pipeline_sends": "sends",
          "recompute": "recomputation", "data": "gathers and gradient sums", "replica": "sums over replicas",
          "tensor": "tensor collectives", "context": "context exchanges", "expert": "expert exchanges",
          "bubble": "the bubble", "imbalance": "uneven stages", "optimizer": "the optimizer"}  # fmt: skip


def difference(own: Predicted, published: Predicted) -> str:
    """In a sentence, where the planner's layout wins and what it pays for that."""
    if own.layout == published.layout:
        return "The same."
    if not published.fits:
        return "As published it would not fit shardwise's memory."
    change = {_NAMES.get(name, name): own.seconds[name] - published.seconds[name] for name in own.seconds}
    share = {name: value / published.total for name, value in change.items()}
    saved = [
        f"{name} ({-share[name]:.0%})"
        for name in sorted(share, key=lambda key: share[key])[:2]
        if share[name] < -0.005
    ]
    paid = [
        f"{name} ({share[name]:.0%})"
        for name in sorted(share, key=lambda key: -share[key])[:2]
        if share[name] > 0.005
    ]
    costs = f", and pays for {' and '.join(paid)}" if paid else ""
    return f"The planner's saves {' and '.join(saved) or 'little'} of the published step{costs}."


def rows(chosen: tuple[Run, ...]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield (
        "| run | devices | published | MFU | predicted for it | the planner's choice | predicted | where "
        "they differ |"
    )
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for run in chosen:
        published, own = predicted(run, True), predicted(run, False)
        cells = (run.name, run.cluster, published.layout, run.mfu,
        f"{published.total:.1f} s, {published.mfu:.0%}", own.layout,
                 f"{own.total:.1f} s, {own.mfu:.0%}", difference(own, published))  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    asked = [word.lower() for word in sys.argv[1:]]
    chosen = tuple(run for run in RUNS if not asked or any(word in run.name.lower() for word in asked))
    if not chosen:
        sys.exit(
            f"no run has {' or '.join(sys.argv[1:])} in its name; known are "
            f"{', '.join(run.name for run in RUNS)}"
        )
    for line in rows(chosen):
        print(line, flush=True)


if __name__ == "__main__":
    main()
