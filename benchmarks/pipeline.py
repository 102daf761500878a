"""How long pipeline ranks wait, compared with the prediction from the list of actions; and what stage 0 keeps
in memory.

    python benchmarks/pipeline.py [--quick] [--only waits|compute|memory] [--wait 0.04]

prints three tables. All run shardwise's `Pipelined` on local processes. The idle share is 1 - busy / (ranks x
makespan), from the times at which each rank began and ended each action. The prediction is `simulate` of
shardwise/plans/timeline.py for the same list. Each step is measured, and the median is shown.

`waits`: 4 ranks. A forward and the input and weight halves of a backward are each a wait of 40 ms instead of
computation. So 4 processes do not need 4 cores, and messages are short in comparison. The waits of the halves
are in the autograd graph where those gradients are computed, and are counted: each must run once for every
micro-batch. The input of stage 0 needs no gradient, so stage 0 computes its whole backward in the action W;
the prediction uses these costs. `even` is the prediction for equal costs on all stages, which a plan shows.
If other programs use the cores, messages are delayed: set a longer --wait.

`compute`: 2 ranks of one thread train a transformer. The prediction uses the median time of each kind of
action on each stage. `to replay` is the difference from a simulation with the measured time of every single
action of that step: on a shared machine some actions are slow, and ranks wait for them longer than the
medians predict.

`memory`: 4 ranks train a transformer with 8 and with 32 micro-batches. Counts the storages that are alive on
rank 0 (stage 0) at the fullest moment of a step, without those that existed before it (weights, gradients and
receive buffers, which torch creates for every micro-batch and keeps). These are activations: 1F1B keeps as
many as there are ranks, GPipe as many as there are micro-batches. The count also has the step's tokens and
the output of every micro-batch, which torch's runtime keeps until it waits for all sends at the end of the
step: `tokens and output of one` micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import random_tokens
import torch
import torch.distributed as dist
from memory import LiveBytes, _free_ports
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.multiprocessing.spawn import spawn

from shardwise.comm import Comm
from shardwise.config import Config, Layout, from_tables
from shardwise.config.schedules import SCHEDULES
from shardwise.data.batches import Batch, Batches
from shardwise.mesh import Worker, join, leave
from shardwise.models import Sharding
from shardwise.parallel.data import SingleDevice
from shardwise.parallel.pipeline import Pipelined
from shardwise.parallel.stage_modules import Stages
from shardwise.plans import Action, Schedule, choose, make_schedule, peak_in_flight, simulate
from shardwise.plans.schedule import in_order, waits_for
from shardwise.train.build import Training, build
from shardwise.train.sources import count_tokens, forward_backward

ACTIONS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")
"""The methods of torch's stage that compute; its runtime waits and sends outside of them."""
WIDTH = 16
"""Numbers that a waiting stage hands on."""
CLOSE = 0.05
WAITING_RANKS, COMPUTING_RANKS = 4, 2
MICRO_BATCHES = 8
MODEL = {"layers": 8, "hidden": 256, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 704, "vocabulary": 512}
SMALL = {"layers": 8, "hidden": 128, "heads": 4, "kv_heads": 4, "head_dim": 32, "ffn": 352, "vocabulary": 512}
LENGTH = 128
ROWS = 4
"""Sequences of a micro-batch that is computed."""

GROWING = (8, 32)
"""Micro-batches between which memory is compared."""


@dataclass(frozen=True)
class Options:
    """What the command line says, for the workers."""

    steps: int
    wait: float
    """Seconds of a forward, of an input half and of a weight half."""


Span = tuple[int, str, int, float, float]
"""Stage, kind, micro-batch, start and end of an action."""
Run = list[list[Span]]
"""The spans of every step, of one rank."""


@contextmanager
def recorded(spans: list[Span]) -> Iterator[None]:
    """Note when actions begin and end. The clock is the machine's, one for all its processes."""
    originals = {name: getattr(PipelineStage, name) for name in ACTIONS}

    def timed(name: str) -> Callable[..., Any]:
        def action(stage: PipelineStage, micro_batch: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = originals[name](stage, micro_batch, *args, **kwargs)
            spans.append((stage.stage_index, _kind(name, kwargs), micro_batch, start, time.monotonic()))
            return result

        return action

    try:
        for name in originals:
            setattr(PipelineStage, name, timed(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(PipelineStage, name, original)


def _kind(name: str, kwargs: dict[str, Any]) -> str:
    if name == "backward_one_chunk":
        return "B" if kwargs["full_backward"] else "I"
    return "F" if name == "forward_one_chunk" else "W"


def run_steps(step: Callable[[], Any], count: int) -> Run:
    """Spans of that many steps that all ranks begin together, after two to warm up."""
    run: Run = []
    for _ in range(count + 2):
        spans: list[Span] = []
        dist.barrier()
        with recorded(spans):
            step()
        run.append(spans)
    return run[2:]


def idle_share(steps: list[list[Span]]) -> float:
    """Return the idle share of one step, given the spans of every rank."""
    makespan = max(span[4] for rank in steps for span in rank) - min(
        span[3] for rank in steps for span in rank
    )
    return 1 - sum(span[4] - span[3] for rank in steps for span in rank) / (len(steps) * makespan)


# -- waits in the place of computation -----------------------------------------------------------------------


class _Wait(torch.autograd.Function):
    """Nothing forward, a wait backward, for whichever gradient flows through here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.wait()
        return gradient, None


class WaitingStage(nn.Module):
    """x · weight, whose backward waits once on the way to x and once on the way to the weight."""

    def __init__(self, seconds: float, first: bool, last: bool) -> None:
        super().__init__()
        self.seconds = seconds
        self.embedding = nn.Embedding(4, WIDTH) if first else None
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.last = last
        self.halves: Counter[str] = Counter()

    def forward(self, inputs: Tensor, targets: Tensor | None = None, **_: Any) -> Tensor:
        time.sleep(self.seconds)
        x = inputs if self.embedding is None else self.embedding(inputs)
        x = self._waiting(x, "input") * self._waiting(self.weight, "weight")
        return x.sum() if self.last else x

    def _waiting(self, x: Tensor, half: str) -> Tensor:
        result: Tensor = _Wait.apply(x, partial(self._wait, half))  # type: ignore[no-untyped-call]
        return result

    def _wait(self, half: str) -> None:
        time.sleep(self.seconds)
        self.halves[half] += 1


def waiting_pipeline(comm: Comm, schedule: Schedule, seconds: float) -> Pipelined:
    """`Pipelined`, with stages that wait where a model's would compute."""
    stages = Stages(
        schedule=schedule,
        blocks=tuple(range(stage, stage + 1) for stage in range(schedule.stages)),
        rank=comm.mesh.coordinate("pipeline"),
        micro_batch=1,
        length=1,
        hidden=WIDTH,
        dtype=torch.float32,
    )
    parts = [
        SingleDevice(WaitingStage(seconds, stage == 0, stage == stages.last))
        for stage, _ in stages.local_stages
    ]
    return Pipelined(comm, parts, Sharding(modules={}), stages=stages)


def waits(worker: Worker, name: str, count: int, seconds: float) -> Run:
    """The steps of one rank; each half of every backward must have run once."""
    sizes: dict[str, Any] = {"data": 1, "pipeline": worker.world}
    comm = Comm(join(worker, Layout(**sizes)))
    schedule = make_schedule(name, worker.world, MICRO_BATCHES)
    pipeline = waiting_pipeline(comm, schedule, seconds)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    batch = [Batch(tokens, tokens, None, 1)] * MICRO_BATCHES
    run = run_steps(lambda: pipeline.forward_backward(batch, torch.ones(())), count)
    for part in pipeline.parts:
        assert isinstance(part.model, WaitingStage)
        assert set(part.model.halves.values()) == {MICRO_BATCHES * (count + 2)}, part.model.halves
    return run


def waits_row(name: str, runs: list[Run]) -> dict[str, Any]:
    schedule = make_schedule(name, WAITING_RANKS, MICRO_BATCHES)
    later = schedule.stages - 1
    expected = simulate(schedule, 1.0, [0.0] + [1.0] * later, [2.0] + [1.0] * later).bubble
    return {
        "schedule": name,
        "stages": schedule.stages,
        "even": simulate(schedule).bubble,
        **_compared(expected, runs),
    }


def _compared(expected: float, runs: list[Run]) -> dict[str, Any]:
    shares = [idle_share(list(step)) for step in zip(*runs, strict=True)]
    measured = statistics.median(shares)
    close = "yes" if abs(measured - expected) <= CLOSE else "NO"
    spread = f"{min(shares):.3f} to {max(shares):.3f}"
    return {
        "predicted": expected,
        "measured": measured,
        "steps": spread,
        "difference": measured - expected,
        "within 0.05": close,
    }


# -- a model -------------------------------------------------------------------------------------------------


def job(
    folder: Path, model: dict[str, int], ranks: int, schedule: str, micro_batches: int, rows: int = 1
) -> Config:
    return from_tables(
        {
            "model": model,
            "data": {"source": str(folder), "sequence_length": LENGTH, "held_out": 0.0},
            "train": {
                "steps": 1,
                "global_batch": rows * micro_batches,
                "micro_batch": rows,
                "precision": "float32",
            },
            "layout": {"pipeline": ranks, "data": 1, "schedule": schedule},
        }
    )


def training_and_step(worker: Worker, config: Config) -> tuple[Training, Callable[[], Any]]:
    """A run, and its forward and backward over one and the same global batch."""
    training = build(config, choose(config, worker.world), worker)
    whole = config.train.global_batch
    batches = Batches(training.text, whole, range(whole), training.plan.accumulation, training.mesh.device)
    batch = next(batches)
    batches.close()
    return training, lambda: forward_backward(training, batch, count_tokens(training, batch))


def compute(worker: Worker, name: str, count: int, folder: Path) -> Run:
    return run_steps(
        training_and_step(worker, job(folder, MODEL, worker.world, name, MICRO_BATCHES, ROWS))[1], count
    )


def compute_row(name: str, runs: list[Run]) -> dict[str, Any]:
    schedule = make_schedule(name, COMPUTING_RANKS, MICRO_BATCHES)
    costs = _costs(schedule.stages, runs)
    shown = "; ".join(" ".join(f"{1e3 * cost:.0f}" for cost in costs[kind]) for kind in "FIW")
    compared = _compared(simulate(schedule, costs["F"], costs["I"], costs["W"]).bubble, runs)
    steps = [list(step) for step in zip(*runs, strict=True)]
    apart = statistics.median(idle_share(step) - replayed(schedule, step) for step in steps)
    close = "yes" if abs(apart) <= CLOSE else "NO"
    return {
        "schedule": name,
        "F; I; W of the stages (ms)": shown,
        **compared,
        "to replay": apart,
        "within 0.05 of it": close,
    }


def replayed(schedule: Schedule, step: list[list[Span]]) -> float:
    """The idle share if every action took exactly as long as it did in this step, and messages no time."""
    seconds = {
        Action(stage, kind, index): end - start  # type: ignore[arg-type]
        for rank in step
        for stage, kind, index, start, end in rank
    }
    ends: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    for rank, action in in_order(schedule):
        arrivals = (
            ends[before]
            for choices in waits_for(action, schedule.stages)
            for before in choices
            if before in ends
        )
        free[rank] = ends[action] = max(free[rank], *arrivals, 0.0) + seconds[action]
    return 1 - sum(seconds.values()) / (schedule.ranks * max(free))


def _costs(stages: int, runs: list[Run]) -> dict[str, list[float]]:
    """Median seconds of F, I and W on every stage; a backward that is never split counts as an I."""
    times: dict[tuple[int, str], list[float]] = {}
    for stage, kind, _, start, end in (span for run in runs for step in run for span in step):
        times.setdefault((stage, kind), []).append(end - start)
    median = {key: statistics.median(all_) for key, all_ in times.items()}
    return {
        "F": [median[stage, "F"] for stage in range(stages)],
        "I": [median.get((stage, "I"), median.get((stage, "B"), 0.0)) for stage in range(stages)],
        "W": [median.get((stage, "W"), 0.0) for stage in range(stages)],
    }


# -- memory --------------------------------------------------------------------------------------------------


def activations(worker: Worker, name: str, micro_batches: int, folder: Path) -> int:
    """Bytes of stage 0 at the fullest moment of a step beyond those held before it; gradients are held from
    the step before."""
    config = job(folder, SMALL, worker.world, name, micro_batches)
    if worker.rank > 0:
        _, step = training_and_step(worker, config)
        step()
        step()
        return 0
    with LiveBytes() as live:
        _, step = training_and_step(worker, config)
        step()
        gc.collect()
        before = live.total()
        live.watching = True
        step()
    return int(live.fullest - before)


def memory_row(name: str, measured: list[int]) -> dict[str, Any]:
    few, many = GROWING
    kept = [str(peak_in_flight(make_schedule(name, WAITING_RANKS, count))[0]) for count in GROWING]
    return {
        "schedule": name,
        **{f"bytes, {count} micro-batches": held for count, held in zip(GROWING, measured, strict=True)},
        "ratio": measured[1] / measured[0],
        "more for each micro-batch": (measured[1] - measured[0]) // (many - few),
        "tokens and output of one": LENGTH * (2 * 8 + 4 * SMALL["hidden"]),
        "micro-batches kept, by the list": " and ".join(kept),
    }


# -- workers and tables --------------------------------------------------------------------------------------


def _work(
    rank: int, world: int, part: str, ports: list[int], names: tuple[str, ...], options: Options, folder: Path
) -> None:
    """One process of a part of the benchmark; each case meets on a port of its own."""
    torch.set_num_threads(1)
    cases = [(name, size) for name in names for size in (GROWING if part == "memory" else (MICRO_BATCHES,))]
    for (name, size), port in zip(cases, ports, strict=True):
        worker = Worker(rank, world, rank, world, "127.0.0.1", port, "benchmark")
        result: Any
        if part == "waits":
            result = waits(worker, name, options.steps, options.wait)
        elif part == "compute":
            result = compute(worker, name, options.steps, folder)
        else:
            result = activations(worker, name, size, folder)
        (folder / f"{part}-{name}-{size}-{rank}.json").write_text(json.dumps(result))
        leave()


def measure(
    part: str, world: int, names: tuple[str, ...], options: Options, folder: Path
) -> list[dict[str, Any]]:
    """The table of one part."""
    ports = _free_ports(len(names) * (len(GROWING) if part == "memory" else 1))
    spawn(_work, (world, part, ports, names, options, folder), world)

    def answer(name: str, size: int, rank: int) -> Any:
        return json.loads((folder / f"{part}-{name}-{size}-{rank}.json").read_text())

    if part == "memory":
        return [memory_row(name, [answer(name, size, 0) for size in GROWING]) for name in names]
    row = waits_row if part == "waits" else compute_row
    return [row(name, [answer(name, MICRO_BATCHES, rank) for rank in range(world)]) for name in names]


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A Markdown table."""
    print(f"\n{title}\n")
    for cells in (rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)):
        print(
            "| "
            + " | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
            + " |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer steps, and three schedules of computation"
    )
    parser.add_argument("--only", choices=("waits", "compute", "memory"))
    parser.add_argument(
        "--wait", type=float, default=0.04, help="seconds of a forward and of each half of a backward"
    )
    given = parser.parse_args()
    options = Options(2 if given.quick else 5, given.wait)
    computing = ("gpipe", "1f1b", "zb1p") if given.quick else SCHEDULES
    with tempfile.TemporaryDirectory() as name:
        folder = random_tokens.write(Path(name), 50_000, MODEL["vocabulary"])
        if given.only in (None, "waits"):
            rows = measure("waits", WAITING_RANKS, SCHEDULES, options, folder)
            show(f"Idle share, {WAITING_RANKS} ranks that wait, {MICRO_BATCHES} micro-batches", rows)
        if given.only in (None, "compute"):
            rows = measure("compute", COMPUTING_RANKS, computing, options, folder)
            show(f"Idle share, {COMPUTING_RANKS} ranks that compute, {MICRO_BATCHES} micro-batches", rows)
        if given.only in (None, "memory"):
            rows = measure("memory", WAITING_RANKS, ("gpipe", "1f1b"), options, folder)
            show(f"Activations on stage 0 of {WAITING_RANKS}", rows)


if __name__ == "__main__":
    main()
