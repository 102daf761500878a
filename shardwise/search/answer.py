"""The planner's answer: the winner, what it takes, why it won, what the next best of another kind loses on, and what binds.

Reasons are found by asking again. Without tensor parallelism, what would be the best, and would it fit? The same for the
pipeline, for sharding, for recomputation. What the answer costs without each is the reason for having it. The answer is plain
data: the terminal, the page (cli/plan_page.py) and `--json` show the same object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import tomli_w

from shardwise.config import Config, Layout
from shardwise.cost.cluster import GIB, Cluster
from shardwise.cost.collectives import group_of
from shardwise.cost.predict import Prediction, predict
from shardwise.cost.space import RECOMPUTE, Ints, Space, Work
from shardwise.cost.traffic import devices, flows, label
from shardwise.errors import ConfigError
from shardwise.plan.dtypes import BYTES
from shardwise.plan.flops import FLOP_CONVENTION, flops_per_token
from shardwise.plan.parameters import active_count, count
from shardwise.plan.schedule import SCHEDULES
from shardwise.plan.timeline import simulate
from shardwise.search.candidates import candidates
from shardwise.search.search import Result, limit, schedule_of

LISTED = 4000
"""Layouts in an answer, best first, unless all are asked for."""
MAPPED = 4096
"""Ranks of which a place on the cluster is given; on a larger one the pattern repeats."""
DRAWN = 24
"""Micro-batches of a timeline, or three for each pipeline rank where that is more; a longer middle looks like the middle."""
TRIED = 64
"""Other numbers of devices that are tried where no layout is possible on the one asked for."""
_AXES = ("pipeline", "replica", "data", "context", "tensor", "expert")
_LINKS = {"data x context": "shards", "replica x data x context": "copies"}


def answer(config: Config, result: Result, everything: bool = False) -> dict[str, Any]:
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


def _listed(result: Result, places: Ints) -> list[dict[str, Any]]:
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


def candidate(result: Result, place: int, prediction: Prediction | None = None) -> dict[str, Any]:
    """One candidate's numbers."""
    found, row = prediction or result.prediction(place), result.space.row(place)
    total = float(found.total[0])
    tokens = result.work.tokens / total / result.devices
    peak = result.cluster.device.peak.get(result.work.precision)
    sharing = min(result.devices, result.cluster.devices_per_node) if result.cluster.shared else 1
    return {
        "kind": words(row),
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


def _best(config: Config, result: Result, place: int) -> dict[str, Any]:
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
            entry = rows.setdefault((flow.kind, label(flow.axis, one, 0)), [0, 0])
            entry[0], entry[1] = entry[0] + int(flow.count[0]), entry[1] + int(flow.bytes[0])
    return [{"kind": kind, "axis": axis, "count": n, "bytes": size} for (kind, axis), (n, size) in sorted(rows.items())]


def links(result: Result, one: Space) -> list[dict[str, Any]]:
    """Bytes of one step by axis, and whether they stay inside a node."""
    sums: dict[tuple[str, str], int] = {}
    for flow in flows(result.work, one, device="cpu" if result.cluster.shared else "cuda"):
        axis = _LINKS.get(flow.axis, flow.axis)
        if axis not in ("shards", "copies", *_AXES) or devices(flow.axis, one)[0] <= 1:
            continue
        where = "between" if group_of(axis, one, result.cluster).nodes[0] > 1 else "inside"
        sums[where, flow.axis] = sums.get((where, flow.axis), 0) + int(flow.bytes[0])
    return [{"from": where, "axis": axis, "bytes": size} for (where, axis), size in sums.items() if size]


def timeline(result: Result, place: int, prediction: Prediction) -> dict[str, Any] | None:
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


def to_paste(result: Result, place: int) -> str:
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


def chosen(config: Config, result: Result) -> Config:
    """The job with the winner's choices put in."""
    best = int(result.order[0])
    row = result.space.row(best)
    recompute = config.train.recompute if "recompute" in result.fixed else RECOMPUTE[row["recompute"]]
    train = config.train.model_copy(update={"micro_batch": row["micro_batch"], "recompute": recompute})
    return config.model_copy(update={"layout": _kept(config.layout, result.space.layout(best)), "train": train})


def _kept(asked: Layout, found: Layout) -> Layout:
    return found.model_copy(update={"stages": asked.stages})


# -- words ----------------------------------------------------------------------------------------------------------------


def words(row: Mapping[str, int]) -> str:
    """A layout in a few words."""
    axes = [f"{axis} {row[axis]}" for axis in _AXES if row[axis] > 1] or ["one device"]
    more = [f"zero {row['zero']}"] if row["zero"] else []
    if row["pipeline"] > 1:
        name = SCHEDULES[row["schedule"]]
        more.append(f"{name} x{row['stages_per_rank']}" if name == "interleaved" else name)
    if row["recompute"]:
        more.append(f"{RECOMPUTE[row['recompute']]} recomputation")
    if row["offload"]:
        more.append("offloaded")
    return " x ".join(axes) + "".join(f", {word}" for word in more)


def runner_up(result: Result) -> int | None:
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


def best_of_each(result: Result) -> Ints:
    """Every layout once, best first: the same axes, ZeRO stage and schedule count as one."""
    space, order = result.space, result.order
    names = (*_AXES, "zero", "schedule", "stages_per_rank", "ring", "offload")
    key = np.stack([getattr(space, name)[order] for name in names], axis=1)
    _, first = np.unique(key, axis=0, return_index=True)
    return order[np.sort(first)]


def loses_on(result: Result, best: int, other: int) -> str:
    """What the other candidate takes longer for, in a sentence."""
    one, two = result.prediction(best), result.prediction(other)
    more = {name: float(two.seconds[name][0] - one.seconds[name][0]) for name in one.seconds}
    worst = sorted((name for name in more if more[name] > 0), key=lambda name: -more[name])[:2]
    slower = float(two.total[0] / one.total[0] - 1)
    parts = " and ".join(f"{spoken(name)} (+{seconds(more[name])})" for name in worst)
    if slower < 0.0005:
        return f"moving parts: it is {-slower:.1%} quicker, less than the model is accurate, and has more that can go wrong"
    return f"{slower:+.1%} a step: {parts}" if parts else f"{slower:+.1%} a step"


_SPOKEN = {
    "matmul": "matrix products", "attention": "attention", "elementwise": "elementwise kernels", "launch": "starting kernels",
    "recompute": "recomputation", "optimizer": "the optimizer", "bubble": "the pipeline's bubble", "imbalance": "uneven stages",
    "tensor": "tensor collectives", "context": "context exchange", "expert": "sending tokens to experts",
    "data": "gathers and gradient sums", "replica": "joining replicas", "pipeline_sends": "messages between stages",
    "offload": "moving states to the host",
}  # fmt: skip


def spoken(term: str) -> str:
    """A term of a step in words."""
    return _SPOKEN.get(term, term)


def seconds(value: float) -> str:
    """So many seconds, in a unit that reads well."""
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms" if value >= 1e-3 else f"{1e6 * value:.0f} us"


def reason(result: Result, best: int) -> str:
    """Why the winner, in one line."""
    row, found = result.space.row(best), result.prediction(best)
    peak, total = float(found.peak[0]) / GIB, float(found.total[0])
    text = f"{words(row)}: {seconds(total)} a step and {peak:.3g} of {result.limit / GIB:.3g} GiB"
    if len(result.order) == 1:
        return f"{text}, the only layout that fits" if len(result.space) > 1 else f"{text}, the only layout there is"
    quickest = int(result.order[np.argmin(result.total[result.order])])
    if quickest != best:
        lead = result.total[best] / result.total[quickest] - 1
        return f"{text}, the simplest within {max(lead, 0.001):.1%} of the quickest of {len(result.order):,} that fit"
    return f"{text}, the quickest of {len(result.order):,} candidates that fit"


def binding(config: Config, result: Result, best: int) -> list[str]:
    """What holds the winner where it is: why each axis is there, what memory forces, which degrees are refused."""
    row = result.space.row(best)
    found = [_needed(result, best, axis) for axis in ("pipeline", "context", "tensor", "expert", "replica") if row[axis] > 1]
    if row["zero"]:
        found.append(_needed(result, best, "zero"))
    if row["recompute"]:
        found.append(_needed(result, best, "recompute"))
    if row["offload"]:
        found.append(_offloaded(config, result))
    return [*found, *_refusals(config, row), _largest(result, best)]


def _offloaded(config: Config, result: Result) -> str:
    """Why states are in the host's memory, and how much of it they take."""
    nodes = -(-result.devices // result.cluster.devices_per_node)
    host = 4.0 * BYTES[result.work.state_dtype] * count(config.model) / nodes / GIB
    why = "is as asked" if "offload" in result.fixed else "is needed: nothing fits without it"
    return f"offload {why}; it takes about {host:,.0f} GiB of each node's own memory, which the planner does not know"


def _needed(result: Result, best: int, field: str) -> str:
    """Why a choice was made: what is lost without it, or by how much nothing fits."""
    values = getattr(result.space, field)
    least = 0 if field in ("zero", "recompute") else 1
    without = np.flatnonzero(values == least)
    name = {"zero": "sharding (zero)", "recompute": "recomputation"}.get(field, field)
    if field in result.fixed:
        return f"{name} is {_value(field, int(values[best]))} as asked"
    if not len(without):
        return f"{name} is used by every layout that the job's sizes allow"
    fitting = without[result.fits[without]]
    if not len(fitting):
        short = float(result.peak[without].min()) / GIB
        return f"{name} is needed: without it the smallest layout takes {short:,.1f} GiB of {result.limit / GIB:,.1f} GiB"
    slower = float(result.total[fitting].min() / result.total[best] - 1)
    return f"{name} saves time: the best without it is {slower:.1%} slower" if slower > 0 else f"{name} is a near tie with none"


def _value(field: str, value: int) -> str:
    return RECOMPUTE[value] if field == "recompute" else str(value)


def _refusals(config: Config, row: Mapping[str, int]) -> list[str]:
    """The next tensor degree, if the model's heads refuse it."""
    model, tensor = config.model, 2 * row["tensor"]
    if model.heads % tensor:
        return [f"tensor = {tensor} is refused: {model.heads} heads do not divide over it"]
    if model.kv_heads % tensor and tensor % model.kv_heads:
        return [f"tensor = {tensor} is refused: {model.kv_heads} key heads can neither be split nor repeated evenly over it"]
    return []


def _largest(result: Result, best: int) -> str:
    """What the step spends most on beside its products, and how full memory is."""
    found = result.prediction(best)
    total, peak = float(found.total[0]), float(found.peak[0])
    others = {name: float(value[0]) for name, value in found.seconds.items() if name not in ("matmul", "attention")}
    worst = max(others, key=lambda name: others[name])
    kinds = {name: float(value[0]) for name, value in found.memory.items()}
    fullest = max(kinds, key=lambda name: kinds[name])
    return (
        f"beside products and attention most time goes to {spoken(worst)} ({others[worst] / total:.1%} of the step); "
        f"memory is {peak / result.limit:.0%} of what a plan may use, most of it {fullest} ({kinds[fullest] / peak:.0%})"
    )


def _impossible(result: Result) -> str:
    """Why there is not one layout: what was refused and how often, or degrees that do not multiply to the devices."""
    if result.refused:
        return "; ".join(f"{why} ({number:,})" for why, number in result.refused.items())
    given = {axis: result.fixed[axis] for axis in _AXES[:-1] if axis in result.fixed}
    asked = " x ".join(f"layout.{axis} = {degree}" for axis, degree in given.items())
    return f"{asked or 'what was asked'} cannot be part of {result.devices:,} devices"


def _other_devices(config: Config, result: Result) -> str:
    """The nearest numbers of devices, fewer and more, on which there are layouts."""
    counts = range(1, 2 * result.devices + 8)
    near = sorted((count for count in counts if count != result.devices), key=lambda count: abs(count - result.devices))[:TRIED]
    works = [count for count in near if len(candidates(config, count, result.fixed).space)]
    fewer, more = [count for count in works if count < result.devices], [count for count in works if count > result.devices]
    nearest = " or ".join(f"{count:,}" for count in (*fewer[:1], *more[:1]))
    others = f"there are some on {nearest} devices (cluster.devices)" if nearest else ""
    return others or "change the batch (train.global_batch, train.micro_batch), data.sequence_length, or what [layout] asks for"


def nothing_fits(config: Config, result: Result) -> list[str]:
    """By how much nothing fits, and what would."""
    if not len(result.space):
        return [f"no layout is possible: {_impossible(result)}; {_other_devices(config, result)}"]
    least = int(np.argmin(result.peak))
    peak, allowed = float(result.peak[least]), result.limit
    found = result.prediction(least)
    kinds = {name: float(value[0]) for name, value in found.memory.items()}
    fullest = max(kinds, key=lambda name: kinds[name])
    devices_of = result.devices
    missing = f"{peak / GIB:,.1f} GiB, {(peak - allowed) / GIB:,.1f} GiB more than the {allowed / GIB:,.1f} GiB a plan may use"
    smallest = f"the smallest of {len(result.space):,} layouts ({words(result.space.row(least))}) takes {missing}"
    states = sum(kinds[name] for name in ("weights", "gradients", "optimizer"))
    room = allowed - (peak - states)
    if fullest in ("weights", "gradients", "optimizer") and room > 0:
        more = devices_of * 2 ** int(np.ceil(np.log2(max(states / room, 1.01))))
        advice = f"most of it is model states: use about {more:,} devices, train.state_dtype=bfloat16, or layout.offload=true"
    elif fullest in ("activations", "logits"):
        advice = "most of it is activations: use a shorter data.sequence_length, train.recompute=full, or more devices"
    else:
        advice = "use more devices, a larger device, or a smaller model"
    return [f"nothing fits: {smallest}; {advice}"]
