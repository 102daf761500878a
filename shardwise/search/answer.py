"""The planner's answer: the winner, what it takes, why it won, what the next best of another kind loses on, and what binds.

The answer is plain data: the terminal, the page (cli/plan_page.py) and `--json` show the same object. Its sentences are made in
search/reasons.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import tomli_w

from shardwise.config import Config, Layout
from shardwise.cost.axes import devices
from shardwise.cost.cluster import GIB, Cluster
from shardwise.cost.collectives import group_of
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.space import RECOMPUTE, Ints, Space, Work
from shardwise.cost.traffic import flows
from shardwise.errors import ConfigError
from shardwise.plan.flops import FLOP_CONVENTION, flops_per_token
from shardwise.plan.grid import COPIES, SHARDS, label
from shardwise.plan.parameters import active_count, count
from shardwise.plan.schedule import SCHEDULES
from shardwise.plan.timeline import simulate
from shardwise.search.reasons import binding, describe_layout, loses_on, nothing_fits, reason
from shardwise.search.search import SearchResult, limit, schedule_of

LISTED = 4000
"""Layouts in an answer, best first, unless all are asked for."""
MAPPED = 4096
"""Ranks of which a place on the cluster is given; on a larger one the pattern repeats."""
DRAWN = 24
"""Micro-batches of a timeline, or three for each pipeline rank where that is more; a longer middle looks like the middle."""
_AXES = ("pipeline", "replica", "data", "context", "tensor", "expert")


def answer(config: Config, result: SearchResult, everything: bool = False) -> dict[str, Any]:
    """All of it, ready for JSON. With `everything` each candidate is listed; else each layout once, in its best form."""
    if not len(result.order):
        raise ConfigError(f"the job on {result.devices} devices", nothing_fits(config, result))
    best = int(result.order[0])
    second = runner_up(result)
    listed = result.order if everything else best_of_each(result)[:LISTED]
    fits = result.fits
    return {
        "job": config.run.folder,
        "cluster": cluster_json(result.cluster, result.devices, result.margin),
        "model": {
            "parameters": count(config.model),
            "active_parameters": active_count(config.model),
            "flops_per_token": flops_per_token(config.model, config.data.sequence_length),
            "flop_convention": FLOP_CONVENTION,
        },
        "tokens_per_step": result.work.tokens,
        "best": {**_best(config, result, best), "reason": reason(result, best)},
        "runner_up": None if second is None else {**candidate(result, second), "loses_on": loses_on(result, best, second)},
        "binding": binding(config, result, best),
        "candidates": _listed(result, listed),
        "rejected": {**result.refused, **_too_large(fits)},
        "considered": len(result.space) + sum(result.refused.values()),
        "seconds": result.seconds,
    }


def _too_large(fits: Any) -> dict[str, int]:
    missed = int((~fits).sum())
    return {"does not fit in memory": missed} if missed else {}


def cluster_json(cluster: Cluster, count_of: int, margin: float) -> dict[str, Any]:
    """What was planned for."""
    per_node = min(cluster.devices_per_node, count_of)
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "devices": count_of,
        "devices_per_node": per_node,
        "nodes": -(-count_of // per_node),
        "memory_gib": limit(cluster, 0.0, count_of) / GIB,
        "margin": margin,
    }


def _listed(result: SearchResult, places: Ints) -> list[dict[str, Any]]:
    """The numbers of these candidates, costed together; finalists as they were played through."""
    together = predict(result.work, result.space.take(places), result.cluster)
    return [
        candidate(result, int(place), result.exact.get(int(place)) or _at(together, index)) for index, place in enumerate(places)
    ]


def _at(found: Prediction, place: int) -> Prediction:
    one = slice(place, place + 1)
    return replace(
        found,
        seconds={name: value[one] for name, value in found.seconds.items()},
        memory={name: value[one] for name, value in found.memory.items()},
        block_seconds=found.block_seconds[one],
    )


@lru_cache(maxsize=8)
def _flops(work: Work) -> float:
    return flops_per_token(work.model, work.sequence_length)


def candidate(result: SearchResult, place: int, prediction: Prediction | None = None) -> dict[str, Any]:
    """One candidate's numbers."""
    found, row = prediction or result.prediction(place), result.space.row(place)
    total = float(found.total[0])
    tokens = result.work.tokens / total / result.devices
    peak = result.cluster.device.peak.get(result.work.precision)
    sharing = min(result.devices, result.cluster.devices_per_node) if result.cluster.shared else 1
    return {
        "kind": describe_layout(row),
        "layout": result.space.layout(place).model_dump(exclude={"stages"}),
        "micro_batch": row["micro_batch"],
        "accumulation": row["accumulation"],
        "schedule": SCHEDULES[row["schedule"]] if row["pipeline"] > 1 else None,
        "recompute": RECOMPUTE[row["recompute"]],
        "memory_gib": {name: float(v[0]) / GIB for name, v in found.memory.items()} | {"total": float(found.peak[0]) / GIB},
        "step_seconds": {name: float(value[0]) for name, value in found.seconds.items()} | {"total": total},
        "tokens_per_second_per_device": tokens,
        "mfu": tokens * _flops(result.work) / (peak / sharing) if peak else None,
        "fits": bool(found.peak[0] <= result.limit),
    }


def _best(config: Config, result: SearchResult, place: int) -> dict[str, Any]:
    prediction, one = result.prediction(place), result.space.take([place])
    return {
        **candidate(result, place, prediction),
        "bytes": traffic(result.work, result.cluster, one),
        "links": links(result, one),
        "memory_limit_gib": result.limit / GIB,
        "config": to_paste(result, place),
        "timeline": timeline(result, place, prediction),
        "map": rank_map(one, result.cluster),
    }


def traffic(work: Work, cluster: Cluster, one: Space) -> list[dict[str, Any]]:
    """Bytes and calls of each collective of one step on rank 0, in the ledger's convention."""
    rows: dict[tuple[str, str], list[int]] = {}
    for flow in flows(work, one, device="cpu" if cluster.shared else "cuda"):
        if flow.count[0] and devices(flow.axis, one)[0] > 1:
            entry = rows.setdefault((flow.kind, label(flow.axis, one.layout(0))), [0, 0])
            entry[0], entry[1] = entry[0] + int(flow.count[0]), entry[1] + int(flow.bytes[0])
    return [{"kind": kind, "axis": axis, "count": n, "bytes": size} for (kind, axis), (n, size) in sorted(rows.items())]


def links(result: SearchResult, one: Space) -> list[dict[str, Any]]:
    """Bytes of one step by axis, and whether they stay inside a node."""
    sums: dict[tuple[str, str], int] = {}
    for flow in flows(result.work, one, device="cpu" if result.cluster.shared else "cuda"):
        if flow.axis not in (SHARDS, COPIES, *_AXES) or devices(flow.axis, one)[0] <= 1:
            continue
        where = "between" if group_of(flow.axis, one, result.cluster).nodes[0] > 1 else "inside"
        sums[where, flow.axis] = sums.get((where, flow.axis), 0) + int(flow.bytes[0])
    return [{"from": where, "axis": axis, "bytes": size} for (where, axis), size in sums.items() if size]


def timeline(result: SearchResult, place: int, prediction: Prediction) -> dict[str, Any] | None:
    """When each action of the pipeline runs, of its first micro-batches; None without a pipeline."""
    row = result.space.row(place)
    if row["pipeline"] == 1:
        return None
    few = min(row["accumulation"], max(DRAWN, 3 * row["pipeline"]))
    schedule = schedule_of(row, few)
    third = float(prediction.block_seconds[0]) * result.work.model.layers / schedule.stages / 3
    played = simulate(schedule, third, third, third)
    rows = [
        [
            {"stage": s.action.stage, "kind": s.action.kind, "micro_batch": s.action.micro_batch, "start": s.start, "end": s.end}
            for s in spans
        ]
        for spans in played.spans
    ]
    return {"rank_rows": rows, "makespan": played.makespan, "micro_batches": few, "of": row["accumulation"]}


def rank_map(one: Space, cluster: Cluster) -> list[dict[str, int]]:
    """Where each rank sits, and its coordinate on every axis: tensor innermost, pipeline outermost."""
    world = int(one.world[0])
    sizes = {axis: int(getattr(one, axis)[0]) for axis in ("tensor", "context", "data", "replica", "pipeline")}
    ranks = []
    for rank in range(min(world, MAPPED)):
        left, place = rank, {}
        for axis, size in sizes.items():
            place[axis], left = left % size, left // size
        ranks.append({"rank": rank, "node": rank // cluster.devices_per_node, **place})
    return ranks


def to_paste(result: SearchResult, place: int) -> str:
    """The winner as lines of a job file."""
    row = result.space.row(place)
    layout = result.space.layout(place).model_dump(exclude_defaults=True, exclude_none=True)
    layout["data"] = row["data"]
    if row["pipeline"] > 1:
        layout["schedule"] = SCHEDULES[row["schedule"]]
    if result.work.model.experts:
        layout["expert"] = row["expert"]
    if row["pipeline"] > 1 and "stages" in result.fixed:
        layout["stages"] = list(result.fixed["stages"])
    train = {"micro_batch": row["micro_batch"], "recompute": RECOMPUTE[row["recompute"]]}
    return tomli_w.dumps({"layout": layout, "train": train})


def chosen(config: Config, result: SearchResult) -> Config:
    """The job with the winner's choices put in."""
    best = int(result.order[0])
    row = result.space.row(best)
    recompute = config.train.recompute if "recompute" in result.fixed else RECOMPUTE[row["recompute"]]
    train = config.train.model_copy(update={"micro_batch": row["micro_batch"], "recompute": recompute})
    return config.model_copy(update={"layout": _kept(config.layout, result.space.layout(best)), "train": train})


def _kept(asked: Layout, found: Layout) -> Layout:
    return found.model_copy(update={"stages": asked.stages})


# -- which candidates are listed ---------------------------------------------------------------------------------------


def runner_up(result: SearchResult) -> int | None:
    """The best candidate of another kind: with other axes in use than the winner, or else another ZeRO stage."""
    best = int(result.order[0])
    axes = _pattern(result.space, result.order)
    other = np.flatnonzero((axes != axes[0]).any(axis=1))
    if not len(other):
        other = np.flatnonzero(result.space.zero[result.order] != result.space.zero[best])
    return int(result.order[other[0]]) if len(other) else None


def _pattern(space: Space, places: Ints) -> Any:
    columns = [getattr(space, axis)[places] > 1 for axis in ("pipeline", "replica", "context", "tensor", "expert")]
    return np.stack([*columns, space.zero[places] == 3], axis=1)


def best_of_each(result: SearchResult) -> Ints:
    """Every layout once, best first: the same axes, ZeRO stage and schedule count as one."""
    space, order = result.space, result.order
    names = (*_AXES, "zero", "schedule", "stages_per_rank", "ring", "offload")
    key = np.stack([getattr(space, name)[order] for name in names], axis=1)
    _, first = np.unique(key, axis=0, return_index=True)
    return order[np.sort(first)]
