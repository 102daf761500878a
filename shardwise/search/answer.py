"""The planner's answer: the best layout, its costs, why it is the best, where the best layout of another kind
is slower, and what limits the result.

The answer is plain data: the terminal, the page (library/plan_page.py) and `--json` show the same object. Its
sentences are made in search/reasons.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import tomli_w

from shardwise.config import Config, Layout
from shardwise.config.compression import GATHER_SETTINGS, SETTINGS
from shardwise.config.parameters import active_count, count
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.cluster import Cluster
from shardwise.cost.pipeline_time import total as total_of
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.space import RECOMPUTE, Array, Bools, Ints, Space, Workload, concatenate, take
from shardwise.cost.traffic import flows, totals
from shardwise.errors import ConfigError
from shardwise.files import Json
from shardwise.plans.flops import FLOP_CONVENTION, flops_per_token
from shardwise.search.reasons import binding, describe_layout, loses_on, nothing_fits, reason
from shardwise.search.search import BESIDE_DATA, SearchResult, limit, simulate_pipelines
from shardwise.units import GIB

LISTED = 4000
"""Largest number of layouts in an answer, best first, unless all are requested."""


def answer(config: Config, result: SearchResult, everything: bool = False) -> dict[str, Any]:
    """Return the whole answer, ready for JSON. With `everything` all candidates are listed; otherwise each
    layout once, with its quickest candidate."""
    if not len(result.order):
        raise ConfigError(f"the job on {result.devices} devices", nothing_fits(config, result))
    best = int(result.order[0])
    second = runner_up(result)
    choices = result.order if everything else best_of_each(result)
    listed = choices if everything else choices[:LISTED]
    too_large = int((~result.fits).sum())
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
        "runner_up": None
        if second is None
        else {**candidate(result, second), "loses_on": loses_on(result, best, second)},
        "binding": binding(config, result, best),
        "candidates": _listed(result, listed),
        "found": len(choices),
        "rejected": result.refused | ({"does not fit in memory": too_large} if too_large else {}),
        "considered": len(result.space) + sum(result.refused.values()),
        "seconds": result.seconds,
    }


def cluster_json(cluster: Cluster, devices: int, margin: float) -> Json:
    """Return the cluster and the devices that the plan is for."""
    per_node = min(cluster.devices_per_node, devices)
    return {
        "name": cluster.name,
        "device": cluster.device.name,
        "devices": devices,
        "devices_per_node": per_node,
        "nodes": -(-devices // per_node),
        "memory_gib": limit(cluster, 0.0, devices) / GIB,
        "margin": margin,
    }


def _listed(result: SearchResult, listed: Ints) -> list[Json]:
    """Return the numbers of these candidates, computed together. Pipelines that were simulated in the search
    are simulated again; the others use closed forms."""
    simulated = np.intersect1d(listed, result.simulated)
    others = np.setdiff1d(listed, simulated)
    parts = [
        cost(result.work, result.space.take(part), result.cluster)
        for cost, part in ((simulate_pipelines, simulated), (predict, others))
    ]
    order = np.concatenate([simulated, others])
    predictions, row_of = concatenate(parts), {int(index): row for row, index in enumerate(order)}
    return [candidate(result, index, take(predictions, [row_of[index]])) for index in listed.tolist()]


@lru_cache(maxsize=8)
def _flops(work: Workload) -> float:
    return flops_per_token(work.model, work.sequence_length)


def device_peak(cluster: Cluster, precision: str) -> float | None:
    """Return the peak FLOP/s of one device. CPU workers of a machine share its cores."""
    peak = cluster.device.peak.get(precision)
    return peak / min(cluster.devices, cluster.devices_per_node) if peak and cluster.shared else peak


def candidate(result: SearchResult, index: int, prediction: Prediction | None = None) -> Json:
    """Return the predicted numbers of one candidate."""
    predicted, row = prediction or result.prediction(index), result.space.row(index)
    total = float(predicted.total[0])
    tokens = result.work.tokens / total / result.devices
    peak = device_peak(result.cluster.with_devices(result.devices), result.work.precision)
    return {
        "kind": describe_layout(row),
        "layout": layout_of(result, index).model_dump(exclude={"stages"}),
        "micro_batch": row["micro_batch"],
        "accumulation": row["accumulation"],
        "schedule": SCHEDULES[row["schedule"]] if row["pipeline"] > 1 else None,
        "recompute": RECOMPUTE[row["recompute"]],
        "memory_gib": with_total(predicted.memory, GIB),
        "step_seconds": with_total(predicted.seconds),
        "tokens_per_second_per_device": tokens,
        "mfu": tokens * _flops(result.work) / peak if peak else None,
        "host_memory_gib": float(predicted.host[0]) / GIB,
        "fits": bool(result.holds(predicted.peak, predicted.host)[0]),
    }


def with_total(parts: Mapping[str, Array], unit: float = 1.0) -> dict[str, float]:
    """Return the parts of a prediction of one candidate in this unit, and their total."""
    return {name: float(values[0]) / unit for name, values in {**parts, "total": total_of(parts)}.items()}


def _best(config: Config, result: SearchResult, index: int) -> Json:
    prediction, winner = result.prediction(index), result.space.take([index])
    return {
        **candidate(result, index, prediction),
        "bytes": traffic(result.work, result.cluster, winner),
        "memory_limit_gib": result.limit / GIB,
        "config": to_paste(result, index),
    }


def traffic(work: Workload, cluster: Cluster, space: Space) -> list[Json]:
    """Return the bytes and calls of each collective of one step on rank 0, counted as in the ledger."""
    sent = totals(flows(work, space, device=cluster.device_type), space, 0)
    keys = [key.partition("/") for key in sent]
    return [{"kind": kind, "axis": axis, **sent[f"{kind}/{axis}"]} for kind, _, axis in keys]


def layout_of(result: SearchResult, index: int) -> Layout:
    """Return the layout of one candidate, with the compression and the gathers of the job."""
    how = {name: result.fixed[name] for name in (*SETTINGS, *GATHER_SETTINGS) if name in result.fixed}
    return result.space.layout(index).model_copy(update=how)


def to_paste(result: SearchResult, index: int) -> str:
    """Return the best layout as lines of a job file."""
    row = result.space.row(index)
    layout = layout_of(result, index).model_dump(exclude_defaults=True, exclude_none=True)
    layout["data"] = row["data"]
    if row["pipeline"] > 1:
        layout["schedule"] = SCHEDULES[row["schedule"]]
    if result.work.model.experts:
        layout["expert"] = row["expert"]
    stages = result.fixed.get("stages")
    if row["pipeline"] > 1 and isinstance(stages, tuple):
        layout["stages"] = list(stages)
    train = {"micro_batch": row["micro_batch"], "recompute": RECOMPUTE[row["recompute"]]}
    return tomli_w.dumps({"layout": layout, "train": train})


def chosen(config: Config, result: SearchResult) -> Config:
    """Return the job with the settings of the best layout."""
    best = int(result.order[0])
    row = result.space.row(best)
    recompute = config.train.recompute if "recompute" in result.fixed else RECOMPUTE[row["recompute"]]
    train = config.train.model_copy(update={"micro_batch": row["micro_batch"], "recompute": recompute})
    layout = layout_of(result, best).model_copy(update={"stages": config.layout.stages})
    return config.model_copy(update={"layout": layout, "train": train})


# -- which candidates are listed -----------------------------------------------------------------------------


def runner_up(result: SearchResult) -> int | None:
    """Return the best candidate of another kind: one that uses other axes than the winner, or else another
    ZeRO stage."""
    best = int(result.order[0])
    axes = _pattern(result.space, result.order)
    other = np.flatnonzero((axes != axes[0]).any(axis=1))
    if not len(other):
        other = np.flatnonzero(result.space.zero[result.order] != result.space.zero[best])
    return int(result.order[other[0]]) if len(other) else None


def _pattern(space: Space, indices: Ints) -> Bools:
    columns = [getattr(space, axis)[indices] > 1 for axis in BESIDE_DATA]
    return np.stack([*columns, space.zero[indices] == 3], axis=1)


def best_of_each(result: SearchResult) -> Ints:
    """Return the best candidate of every layout, best first: those of one layout differ in micro-batch and
    recomputation."""
    _, first = np.unique(result.space.layouts[1][result.order], return_index=True)
    return result.order[np.sort(first)]
