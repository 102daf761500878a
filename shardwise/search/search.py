"""The best layout: cost every candidate, keep what fits, and play the finalists' schedules through.

All candidates are costed by closed forms. The few best are then costed again with their own schedule, action by action, and
their stages as they will be cut, because the closed forms take stages for equal. Of those within `NEAR` of the best, the one
with the fewest moving parts wins: two per cent are less than the model is accurate, and every axis is one more thing that can
go wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from shardwise.config import Config
from shardwise.config.compression import SumCompression, WeightGathers
from shardwise.cost.cluster import Cluster
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.space import Array, Ints, Space, Work, take
from shardwise.cost.stack import SHARDWISE
from shardwise.errors import UserError
from shardwise.plan.dtypes import reduce_dtype, state_dtype
from shardwise.plan.schedule import SCHEDULES, make_schedule
from shardwise.plan.timeline import Programme, programme
from shardwise.plan.timeline import play as play_through
from shardwise.search.candidates import candidates, fixed_fields

NEAR = 0.02
FINALISTS = 16


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `order` lists the candidates that fit, best first; its first is the winner."""

    work: Work
    cluster: Cluster
    devices: int
    space: Space
    total: Array
    peak: Array
    order: Ints
    margin: float
    refused: dict[str, int]
    seconds: float
    fixed: Mapping[str, Any]
    exact: Mapping[int, Prediction]
    """The finalists, costed with their own schedules."""

    @property
    def limit(self) -> float:
        """Bytes a plan may use of each device."""
        return limit(self.cluster, self.margin, self.devices)

    @property
    def fits(self) -> Any:
        """Which candidates do."""
        return self.peak <= self.limit

    def prediction(self, index: int) -> Prediction:
        """One candidate's, term by term."""
        return self.exact[index] if index in self.exact else play(self.work, self.space.take([index]), self.cluster)[0]


def work_of(config: Config, bucket_bytes: int | None = None) -> Work:
    """What a step of this job computes; `bucket_bytes` as in its plan."""
    train = config.train
    widths = (train.precision, state_dtype(train), reduce_dtype(train))
    size = config.data.sequence_length, train.global_batch
    wire = SumCompression.of(config.layout), WeightGathers.of(config.layout)
    return Work(config.model, *size, *widths, config.layout.stages, train.compile, *wire, bucket_bytes)


def limit(cluster: Cluster, margin: float, devices: int) -> float:
    """Bytes that one device may use."""
    sharing = min(devices, cluster.devices_per_node) if cluster.shared else 1
    return cluster.device.memory / sharing * (1 - margin)


def check_countable(config: Config) -> None:
    """Refuse what cannot be planned for on any cluster."""
    if config.model.module is not None:
        raise UserError(
            "model.module: the planner knows the transformer of [model] and cannot count a module of your own; "
            "leave it out to plan for a transformer of that size, or choose a [layout] yourself"
        )
    if config.train.driver != "synchronous":
        raise UserError(
            f"train.driver = {config.train.driver!r}: the planner predicts devices in lockstep; "
            "add train.driver=synchronous to plan for those, and leave the driver's own table out"
        )


def search(config: Config, cluster: Cluster, devices: int) -> SearchResult:
    """Cost every layout of this job on so many devices of the cluster."""
    started, margin = time.perf_counter(), config.cluster.margin
    check_countable(config)
    fixed, work = fixed_fields(config), work_of(config)
    proposed = candidates(config, devices, fixed, bool(fixed.get("offload")))
    result = _costed(work, cluster, proposed.space, margin, proposed.refused, fixed, devices)
    if not len(result.order) and "offload" not in fixed and cluster.device.overlap:
        proposed = candidates(config, devices, fixed, offload=True)
        offloaded = _costed(work, cluster, proposed.space, margin, proposed.refused, fixed, devices)
        result = offloaded if len(offloaded.order) else result
    return replace(result, seconds=time.perf_counter() - started)


def _costed(
    work: Work, cluster: Cluster, space: Space, margin: float, refused: dict[str, int], fixed: Mapping[str, Any], devices: int
) -> SearchResult:
    total, peak = _cost(work, space, cluster)
    fitting = np.flatnonzero(peak <= limit(cluster, margin, devices))
    order = fitting[np.argsort(total[fitting], kind="stable")]
    exact: dict[int, Prediction] = {}
    while len(order) and int(order[0]) not in exact:
        finalists = _finalists(space, total, order, exact)
        exact |= zip(finalists, play(work, space.take(finalists), cluster), strict=True)
        total[finalists] = [exact[index].total[0] for index in finalists]
        order = order[np.argsort(total[order], kind="stable")]
    order = _simplest_first(space, total, order, exact)
    return SearchResult(work, cluster, devices, space, total, peak, order, margin, refused, 0.0, fixed, exact)


def _cost(work: Work, space: Space, cluster: Cluster) -> tuple[Array, Array]:
    """Seconds and bytes of every candidate; nothing else of a prediction is kept, which of a million would be gigabytes."""
    predictions = (predict(work, part, cluster, SHARDWISE) for part in space.parts())
    total, peak = zip(*((prediction.total, prediction.peak) for prediction in predictions), strict=True)
    return np.concatenate(total), np.concatenate(peak)


def _finalists(space: Space, total: Array, order: Ints, exact: Mapping[int, Prediction]) -> list[int]:
    """The best that were not played yet, and at first the best of every kind of layout near them, so that no schedule is judged
    by its closed form alone.
    """
    chosen = [int(index) for index in order[: 4 * FINALISTS] if int(index) not in exact][:FINALISTS]
    if exact:
        return chosen
    near = order[: np.searchsorted(total[order], 1.3 * total[order[0]])] if len(order) else order
    kind = np.stack([space.pipeline[near], space.schedule[near], space.tensor[near]], axis=1)
    _, first = np.unique(kind, axis=0, return_index=True)
    return sorted({*chosen, *(int(index) for index in near[np.sort(first)][:FINALISTS])})


def _simplest_first(space: Space, total: Array, order: Ints, exact: Mapping[int, Prediction]) -> Ints:
    """Put the simplest of the near ties in front."""
    if not len(order):
        return order
    played = order[np.isin(order, list(exact))]
    near = played[total[played] <= (1 + NEAR) * total[played[0]]]
    best = min(near, key=lambda index: (moving_parts(space.row(index)), total[index]))
    return np.concatenate([[best], order[order != best]])


def moving_parts(row: Mapping[str, int]) -> float:
    """How much can go wrong: axes in use, states sharded, special schedules, work done again."""
    axes = sum(row[axis] > 1 for axis in ("pipeline", "replica", "context", "tensor", "expert"))
    schedule = (
        {"1f1b": 0.0, "gpipe": 0.0, "interleaved": 0.5}.get(SCHEDULES[row["schedule"]], 1.0) if row["pipeline"] > 1 else 0.0
    )
    return axes + 0.25 * row["zero"] + schedule + 0.2 * row["recompute"] + 2 * row["offload"]


# -- one candidate, with its own schedule -------------------------------------------------------------------------------


def play(work: Work, space: Space, cluster: Cluster) -> list[Prediction]:
    """A prediction for each candidate by itself, its pipeline played through as it will run, stages cut as they will be."""
    closed = predict(work, space, cluster, SHARDWISE)
    return [_played(work, space.row(index), take(closed, [index]), cluster) for index in range(len(space))]


def _played(work: Work, row: Mapping[str, int], closed: Prediction, cluster: Cluster) -> Prediction:
    if row["pipeline"] == 1:
        return closed
    blocks = work.blocks(row["pipeline"] * row["stages_per_rank"])
    stage = [count * float(closed.block_seconds[0]) for count in blocks]
    stage[0] += float(closed.embedding_seconds[0])
    stage[-1] += float(closed.head_seconds[0])
    makespan, slowest = _makespan(row, tuple(stage))
    average = row["accumulation"] * sum(stage) / row["pipeline"]
    seconds = dict(closed.seconds)
    seconds["imbalance"] = np.asarray([slowest - average]) * cluster.corrections.get("imbalance", 1.0)
    seconds["bubble"] = np.asarray([makespan - slowest]) * cluster.corrections.get("bubble", 1.0)
    return replace(closed, seconds=seconds)


def _makespan(row: Mapping[str, int], stage: tuple[float, ...]) -> tuple[float, float]:
    """Seconds from the first action to the last, and of the busiest rank's own work. Beyond a few rounds every micro-batch adds
    what the busiest rank takes, so no more than those are played; the last round is as incomplete as it will be.
    """
    few = min(row["accumulation"], 2 * row["pipeline"] + row["accumulation"] % row["pipeline"])
    played = _programme(SCHEDULES[row["schedule"]], row["pipeline"], few, row["stages_per_rank"])
    makespan, busiest = play_through(played, stage)
    rest = (row["accumulation"] - few) * busiest / few
    return makespan + rest, busiest + rest


@lru_cache(maxsize=256)
def _programme(name: str, ranks: int, micro_batches: int, per_rank: int) -> Programme:
    return programme(make_schedule(name, ranks, micro_batches, per_rank, checked=False))
