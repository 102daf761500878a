"""Find the best layout: cost every candidate, keep what fits, and simulate the pipelines that could win.

For all candidates, closed forms, which assume equal stages, give the time of a step and a lower bound for it.
Pipelines are then simulated in the order of their bounds, action by action and with their actual stages,
until the next bound is above the best time so far. So the winner is the quickest of all, and a better cluster
never has a slower winner. Of equally quick layouts the simplest wins, because every axis is one more thing
that can go wrong. A simpler layout that is slower by less than `NEAR` is mentioned, but not chosen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwise.config import AXES, Config
from shardwise.config.compression import SumCompression, WeightGathers
from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES
from shardwise.cost.cluster import Cluster
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Array, Bools, Ints, Space, Workload, take
from shardwise.drivers.registry import driver_of
from shardwise.errors import ConfigError, UserError
from shardwise.plans.dtypes import Dtypes
from shardwise.plans.float8_choice import gathered_in_float8, scale_count, shares, unknown_patterns
from shardwise.plans.schedule import make_schedule
from shardwise.plans.timeline import PreparedSchedule, prepare_schedule, simulate_times
from shardwise.search.candidates import candidates, fixed_fields

BESIDE_DATA = tuple(axis for axis in AXES if axis != "data")
"""Axes that distinguish kinds of layouts. The data axis takes the devices that these leave."""
NEAR = 0.02
"""Relative differences below the accuracy of the model."""
EQUAL = 1e-9
"""Relative differences that come from the order of additions."""
AT_FIRST = 16
"""Number of pipelines that are simulated before the next bound is checked; then twice as many, and so on."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. `order` lists the candidates that fit, best first; the first is the winner."""

    work: Workload
    cluster: Cluster
    devices: int
    space: Space
    total: Array
    peak: Array
    host: Array
    """Bytes of a node's own memory that each candidate takes."""
    order: Ints
    margin: float
    refused: dict[str, int]
    seconds: float
    fixed: Mapping[str, object]
    simulated: Ints
    """The pipelines that could win, which were simulated with their own schedules."""

    @property
    def limit(self) -> float:
        """Bytes that a plan may use of each device."""
        return limit(self.cluster, self.margin, self.devices)

    @property
    def host_limit(self) -> float:
        """Bytes that a plan may use of each node's own memory."""
        return host_limit(self.cluster, self.margin)

    @property
    def fits(self) -> Bools:
        """Whether each candidate fits in the memory of the devices and of their hosts."""
        return self.holds(self.peak, self.host)

    def holds(self, peak: Array, host: Array) -> Bools:
        """Return whether this many bytes fit on a device and on the host of its node."""
        return within_limits(peak, host, self.cluster, self.margin, self.devices)

    def prediction(self, index: int) -> Prediction:
        """Return the prediction of one candidate, term by term."""
        return simulate_pipelines(self.work, self.space.take([index]), self.cluster)


def workload_of(config: Config, bucket_bytes: int | None = None) -> Workload:
    """Return what a step of this job computes. `bucket_bytes` is that of its plan."""
    train = config.train
    if problems := list(unknown_patterns(config.model, train)):
        raise ConfigError("the job", problems)
    dtypes = Dtypes.of(train)
    return Workload(
        config.model,
        sequence_length=config.data.sequence_length,
        global_batch=train.global_batch,
        precision=train.precision,
        state_dtype=dtypes.states,
        reduce_dtype=dtypes.sums,
        stages=config.layout.stages,
        compile=train.compile,
        compression=SumCompression.of(config.layout),
        gathers=WeightGathers.of(config.layout),
        bucket_bytes=bucket_bytes,
        scales=scale_count(config.model, train),
        cast=gathered_in_float8(config.model, train),
        float8=shares(config.model, train),
        optimizer=config.optimizer,
    )


def limit(cluster: Cluster, margin: float, devices: int) -> float:
    """Return the bytes that one device may use."""
    sharing = min(devices, cluster.devices_per_node) if cluster.shared else 1
    return cluster.device.memory / sharing * (1 - margin)


def host_limit(cluster: Cluster, margin: float) -> float:
    """Return the bytes that the devices of a node may use of its own memory."""
    return cluster.host_memory * (1 - margin)


def within_limits(peak: Array, host: Array, cluster: Cluster, margin: float, devices: int) -> Bools:
    """Return whether this many bytes fit on a device and on the host of its node."""
    fits: Bools = (peak <= limit(cluster, margin, devices)) & (host <= host_limit(cluster, margin))
    return fits


def check_countable(config: Config) -> None:
    """Refuse a job that the planner cannot handle on any cluster."""
    if config.model.is_of_program:
        raise UserError(
            "run.program: the planner knows the transformer of [model] and cannot count the model of a "
            "program; choose a [layout] yourself, and prove it with verify"
        )
    if config.model.module is not None:
        raise UserError(
            "model.module: the planner knows the transformer of [model] and cannot count a module of your "
            "own; leave it out to plan for a transformer of that size, or choose a [layout] yourself"
        )
    if not driver_of(config).lockstep:
        raise UserError(
            f"train.driver = {config.train.driver!r}: the planner predicts devices in lockstep; "
            "add train.driver=synchronous to plan for those, and leave the driver's own table out"
        )


def search(config: Config, cluster: Cluster, devices: int) -> SearchResult:
    """Cost every layout of this job on this many devices of the cluster."""
    started, margin = time.perf_counter(), config.cluster.margin
    check_countable(config)
    fixed, work = fixed_fields(config), workload_of(config)
    proposed = candidates(config, devices, fixed, offloads(cluster))
    result = _costed(work, cluster, proposed.space, margin, proposed.refused, fixed, devices)
    return replace(result, seconds=time.perf_counter() - started)


def offloads(cluster: Cluster) -> bool:
    """Return whether devices have their own memory beside that of the host."""
    return cluster.device_type == "cuda"


def _costed(
    work: Workload,
    cluster: Cluster,
    space: Space,
    margin: float,
    refused: dict[str, int],
    fixed: Mapping[str, object],
    devices: int,
) -> SearchResult:
    total, least, peak, host = _cost(work, space, cluster)
    fitting = np.flatnonzero(within_limits(peak, host, cluster, margin, devices))
    by_bound = fitting[np.argsort(least[fitting], kind="stable")]
    simulated = _simulate_best(work, space, cluster, total, by_bound, least)
    order = _simplest_first(space, total, fitting[np.argsort(total[fitting], kind="stable")])
    return SearchResult(
        work, cluster, devices, space, total, peak, host, order, margin, refused, 0.0, fixed, simulated
    )


def _cost(work: Workload, space: Space, cluster: Cluster) -> tuple[Array, Array, Array, Array]:
    """Return the seconds of every candidate, their lower bounds, and the bytes of devices and hosts.

    Nothing else of a prediction is kept, because for a million candidates it would take gigabytes.
    """
    predictions = (predict(work, part, cluster, SHARDWISE) for part in space.parts())
    rows = ((part.total, part.least, part.peak, part.host) for part in predictions)
    columns = zip(*rows, strict=True)
    total, least, peak, host = (np.concatenate(column) for column in columns)
    return np.maximum(total, least), least, peak, host


def _simulate_best(
    work: Workload, space: Space, cluster: Cluster, total: Array, order: Ints, least: Array
) -> Ints:
    """Simulate the pipelines that could be the quickest, in the order of their bounds, and return them.

    `total` is set to the simulated seconds.
    """
    alone = space.pipeline[order] == 1
    pipelines, quickest = order[~alone], float(np.min(total[order[alone]], initial=np.inf))
    start, size = 0, AT_FIRST
    while start < len(pipelines) and least[pipelines[start]] <= quickest * (1 + EQUAL):
        chosen = pipelines[start : start + size]
        total[chosen] = simulate_pipelines(work, space.take(chosen), cluster).total
        quickest = min(quickest, float(total[chosen].min()))
        start, size = start + len(chosen), 2 * size  # a few pipelines take as long to simulate as one
    simulated: Ints = pipelines[:start]
    return simulated


def _simplest_first(space: Space, total: Array, order: Ints) -> Ints:
    """Return the order with the simplest of the equally quick candidates in front."""
    if not len(order):
        return order
    tied = order[: np.searchsorted(total[order], (1 + EQUAL) * total[order[0]], side="right")]
    best = min(tied, key=lambda index: (complexity(space.row(index)), total[index]))
    return np.concatenate([[best], order[order != best]])


def simpler(result: SearchResult) -> int | None:
    """Return the simplest of the candidates that are nearly as quick as the winner, if it is simpler than the
    winner."""
    best, total = result.order[0], result.total[result.order]
    near = result.order[: np.searchsorted(total[1:], (1 + NEAR) * total[0]) + 1]  # all but the winner ascend
    complexities = [complexity(result.space.row(int(index))) for index in near]
    least = int(np.argmin(complexities))
    return int(near[least]) if complexities[least] < complexity(result.space.row(int(best))) else None


def complexity(row: Mapping[str, int]) -> float:
    """Return a measure of complexity: axes in use, states sharded, special schedules, work done again."""
    axes = sum(row[axis] > 1 for axis in BESIDE_DATA)
    schedule = SCHEDULE_FACTS[SCHEDULES[row["schedule"]]].complexity if row["pipeline"] > 1 else 0.0
    return axes + 0.25 * row["zero"] + schedule + 0.2 * bool(row["recompute"]) + 2 * row["offload"]


# -- candidates with their own schedules ---------------------------------------------------------------------


def simulate_pipelines(work: Workload, space: Space, cluster: Cluster) -> Prediction:
    """Return a prediction whose pipelines are simulated as they will run, with their actual stages."""
    closed = predict(work, space, cluster, SHARDWISE)
    pipelines = np.flatnonzero(space.pipeline > 1)
    if not len(pipelines):
        return closed
    times = np.array([_times(work, space, closed, index) for index in pipelines.tolist()])  # (pipelines, 2)
    makespan, busiest = times.T
    simulated = take(closed.step, pipelines).seconds(busiest, makespan, cluster, SHARDWISE)
    seconds = {name: value.copy() for name, value in closed.seconds.items()}
    for name, value in simulated.items():
        seconds[name][pipelines] = value
    return replace(closed, seconds=seconds)


def _times(work: Workload, space: Space, closed: Prediction, index: int) -> tuple[float, float]:
    """Return the seconds of a pipeline, and of its busiest rank's own work."""
    row = space.row(index)
    stage = [
        count * float(closed.block_seconds[index])
        for count in work.blocks(row["pipeline"] * row["stages_per_rank"])
    ]
    stage[0] += float(closed.embedding_seconds[index])
    stage[-1] += float(closed.head_seconds[index])
    return _makespan(row, tuple(stage))


def _makespan(row: Mapping[str, int], stage: tuple[float, ...]) -> tuple[float, float]:
    """Return the seconds from the first action to the last, and of the busiest rank's own work.

    After a few rounds every micro-batch adds what the busiest rank takes, so only a few rounds are simulated.
    The last round is as incomplete as it will be.
    """
    few = min(row["accumulation"], 2 * row["pipeline"] + row["accumulation"] % row["pipeline"])
    prepared = _prepared(SCHEDULES[row["schedule"]], row["pipeline"], few, row["stages_per_rank"])
    makespan, busiest = simulate_times(prepared, stage)
    rest = (row["accumulation"] - few) * busiest / few
    return makespan + rest, busiest + rest


@lru_cache(maxsize=256)
def _prepared(name: str, ranks: int, micro_batches: int, per_rank: int) -> PreparedSchedule:
    return prepare_schedule(make_schedule(name, ranks, micro_batches, per_rank, checked=False))
