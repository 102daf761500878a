"""Summarise a run from its folder, as a value that `render` draws and `--json` prints.

Speeds and shares are computed over the steady steps: all but the first two, which compile, allocate and warm
up. A speed is the median, so that a few slow steps do not change it. A share is a ratio of sums, so that the
shares add up to one. Everything comes from four files (config.toml, plan.json, metrics.jsonl, events.jsonl);
what a file does not contain is null. The steps are read once and not kept (observe/totals.py), so that a run
of a million steps takes seconds and little memory. Damaged lines are skipped and counted.

How often to save is advice of the planner. This package may not import the planner, so the caller passes the
function that gives the advice.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.errors import UserError
from shardwise.files import parse_toml_as, read_bytes
from shardwise.observe.compare_prediction import Row, compare, waits_are_known
from shardwise.observe.goodput import goodput
from shardwise.observe.memory_use import memory_kind
from shardwise.observe.records import Record, median_of, read_events, read_metrics
from shardwise.observe.spans import EXPOSED, SPANS
from shardwise.observe.totals import RunTotals
from shardwise.plans import SavedLayout, SavedPlan, read_plan

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CURVE_POINTS = 240
"""Maximum number of points of the loss curve."""
_SHORTEST_STEP = 1e-6
"""Minimum number of seconds of a real step; below it no advice about saving is given."""

Summary = dict[str, Any]

_T = TypeVar("_T")


def summarise(
    folder: str | Path,
    advise: Callable[..., DataclassInstance] | None = None,
    kept_steps: Sequence[int] | None = None,
) -> Summary:
    """Return the summary of the run in a folder. The run may still be going on.

    `advise` (search/interval.py) says how often to save. `kept_steps` are the steps of the run's checkpoints;
    None: they are not known.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder. Give the folder of a run, the run.folder of its job.")
    config, plan, (events, damaged_events) = _job(folder), read_plan(folder / "plan.json"), _events(folder)
    start = next((event for event in reversed(events) if event["event"] in ("start", "resume")), {})
    run, time_used, damaged_steps = _steps(folder, events)
    steady = run.steady.sample
    times = _time(steady)
    saves = _checkpoints(kept_steps, events)
    return {
        "run": str(folder),
        "steps": run.last["step"],
        "planned_steps": config.get("train", {}).get("steps"),
        "seconds": run.seconds,
        "loss": _loss(run),
        "held_out": run.held_out,
        "tokens": run.tokens,
        "tokens_per_second": {
            "median": median_of(steady, "tokens_per_second"),
            "last": run.last.get("tokens_per_second"),
        },
        "sequences_per_second": median_of(steady, "sequences_per_second"),
        "mfu": median_of(steady, "mfu"),
        "flop_convention": plan.get("flop_convention"),
        "peak_memory_bytes": run.peak_memory,
        "memory_kind": start.get("memory_kind"),
        "predicted_states_gib": plan.get("memory_gib", {}).get("states"),
        "predicted_and_measured": _predicted(plan, run.like_planned.sample, start),
        "measured_steps": run.like_planned.count,
        "time": times,
        "communication": _communication(steady) | {"axes": _axes(steady)},
        "collectives": _collectives(run, steady),
        "float8": _float8(run),
        "experts": _experts(run),
        "staleness": {str(updates): count for updates, count in sorted(run.staleness.items())} or None,
        "dropped": run.dropped,
        "updates": {**run.updates, "per_second": run.updates["made"] / run.seconds}
        if run.updates["made"]
        else None,
        "load": {"imbalance": median_of(steady, "load_imbalance"), "rows": run.last.get("rows")},
        "goodput": time_used,
        "checkpoints": {
            **saves,
            "advice": _advice(advise, saves, time_used, times, start.get("world", 1)),
        },
        "skipped_steps": run.skipped,
        "events": dict(Counter(event["event"] for event in events)),
        "damaged_lines": {"metrics.jsonl": damaged_steps, "events.jsonl": damaged_events},
        "layout": plan.get("layout", config.get("layout")),
        "precision": config.get("train", {}).get("precision"),
        "device": start.get("device"),
        "parameters": plan.get("parameters"),
        "micro_batch": plan.get("micro_batch"),
        "accumulation": plan.get("accumulation"),
        "recompute": plan.get("recompute"),
        "bucket_bytes": plan.get("bucket_bytes"),
        "cluster_file": plan.get("cluster_file"),
        "curve": _thinned(run.curve),
    }


def _steps(folder: Path, events: Sequence[Record]) -> tuple[RunTotals, Summary, int]:
    """Read the steps once. Return the totals, where the time went, and the number of damaged lines."""
    run, lines = RunTotals(_planned_since(events)), read_metrics(folder, needs=("loss", "seconds"))
    time_used = _read(lines.path, lambda: goodput(events, run.gather(lines)))
    if time_used is None or not run.count:
        damaged = f" {lines.damaged} lines of it are damaged." if lines.damaged else ""
        reason = f"Nothing has been trained in {folder}, or its first step is not done."
        raise UserError(f"{lines.path}: no metrics yet.{damaged} {reason}")
    return run, time_used, lines.damaged


@with_config(ConfigDict(strict=True))
class _TrainTable(TypedDict, total=False):
    steps: Annotated[int, Field(ge=0, le=2**40)]
    precision: str


class _Job(TypedDict, total=False):
    """The fields of a run's config.toml that are shown, whichever version wrote it."""

    train: _TrainTable
    layout: SavedLayout


def _job(folder: Path) -> _Job:
    path, advice = folder / "config.toml", "It is written by `shardwise train`; restore or remove it."
    try:
        return parse_toml_as(_Job, read_bytes(path, advice), path, advice)
    except FileNotFoundError:
        return {}


def _events(folder: Path) -> tuple[list[Record], int]:
    """Return the run's events, and the number of damaged lines."""
    lines = read_events(folder)
    return _read(lines.path, lambda: list(lines)) or [], lines.damaged


def _read(path: Path, load: Callable[[], _T]) -> _T | None:
    try:
        return load()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {error}. It is written by `shardwise train`; restore or remove it."
        ) from None


def _planned_since(events: Sequence[Record]) -> int:
    """Return the step since which the run has the plan's layout.

    It is 0, unless workers were lost or added and the run continued with another layout.
    """
    since, layout = 0, None
    for event in events:
        if event["event"] in ("start", "resume") and event.get("layout") != layout:
            since, layout = event.get("step", 0), event.get("layout")
    return since


def _predicted(plan: SavedPlan, steps: Sequence[Record], start: Record) -> list[Row] | None:
    """Return predicted and measured values, term by term; null if the plan predicted nothing."""
    predicted = plan.get("predicted")
    if not predicted or not steps:
        return None
    on_cpu = start.get("memory_kind") in (None, memory_kind("cpu"))
    return compare(predicted, steps, waits_are_known(steps), on_cpu)


def _loss(run: RunTotals) -> Summary:
    ends = {"first": run.first["loss"], "last": run.last["loss"]}
    return {**ends, "minimum": run.lowest["loss"], "minimum_step": run.lowest["step"]}


def _time(steps: Sequence[Record]) -> Summary:
    """Return the seconds of a step, and the share of each span; `other` belongs to no span."""
    seconds = math.fsum(step["seconds"] for step in steps)
    spans: dict[str, float] = {
        name: math.fsum(step.get("spans", {}).get(name, 0.0) for step in steps) for name in SPANS
    }
    spans["other"] = max(0.0, seconds - math.fsum(spans.values()))
    return {
        "seconds_a_step": statistics.median(step["seconds"] for step in steps),
        "shares": {name: value / seconds if seconds else 0.0 for name, value in spans.items()},
    }


def _communication(steps: Sequence[Record]) -> Summary:
    """Return the efficiency, which is the share of a step without waiting for communication, and the overlap.

    The overlap is the share of communication that was hidden. It needs the time that collectives took, hidden
    or not, which CPU workers record; elsewhere it is null.
    """
    seconds = math.fsum(step["seconds"] for step in steps)
    waits = [step.get("spans", {}).get(EXPOSED) for step in steps]
    if None in waits:
        return {"efficiency": None, "overlap": None}
    exposed = math.fsum(waits)
    times = [times for step in steps for times in step.get("communication", {}).values()]
    busy, hidden = (math.fsum(part[what] for part in times) for what in ("seconds", "hidden"))
    return {
        "efficiency": 1 - exposed / seconds if seconds else None,
        "overlap": hidden / busy if busy else None,
    }


def _axes(steps: Sequence[Record]) -> Summary:
    """Return, for each axis, the bytes of its collectives in a step, their seconds, and the share that was
    hidden.

    Seconds and share are null if times are not known.
    """
    table: Summary = {}
    for axis in sorted({key.partition("/")[2] for step in steps for key in step.get("collectives", {})}):
        bytes = [_bytes_over(axis, step.get("collectives", {})) for step in steps]
        times = [step["communication"][axis] for step in steps if axis in step.get("communication", {})]
        seconds, hidden = (math.fsum(part[what] for part in times) for what in ("seconds", "hidden"))
        table[axis] = {
            "bytes": statistics.median(bytes),
            "seconds": seconds / len(steps) if times else None,
            "hidden": hidden / seconds if seconds else None,
        }
    return table


def _bytes_over(axis: str, collectives: dict[str, dict[str, int]]) -> int:
    return sum(counts["bytes"] for key, counts in collectives.items() if key.partition("/")[2] == axis)


def _collectives(run: RunTotals, steady: Sequence[Record]) -> Summary:
    """Return, for each kind and axis, the counts of a typical (median) step, and the totals of the run."""
    nothing = {"count": 0, "bytes": 0}
    table: Summary = {}
    for key, total in sorted(run.collectives.items()):
        typical = [step.get("collectives", {}).get(key, nothing) for step in steady]
        table[key] = {what: statistics.median(counts[what] for counts in typical) for what in nothing}
        table[key] |= {f"total_{what}": total[what] for what in nothing}
    return table


def _float8(run: RunTotals) -> Summary | None:
    """Return how well tensors fit into 8 bits, by layer; null if there are none."""
    if not run.last_float8:
        return None
    layers = {
        layer: {"lost": lost, "most_lost": run.float8_lost.get(layer, lost), "of_range": relative}
        for layer, (lost, relative) in run.last_float8.items()
    }
    return {"layers": layers, "made_again": run.again}


def _experts(run: RunTotals) -> Summary | None:
    """Return how evenly tokens were distributed, 1 being even; null for a model without experts."""
    last, worst = run.last_with_experts, run.worst_with_experts
    if not last:
        return None
    imbalance = {
        "last": last["expert_imbalance"],
        "worst": worst["expert_imbalance"],
        "worst_step": worst["step"],
    }
    return {"imbalance": imbalance, "load": last["expert_load"]}


def _checkpoints(kept_steps: Sequence[int] | None, events: Sequence[Record]) -> Summary:
    """Return what was saved and is kept, and the duration, the pause of training and the size of a typical
    save.
    """
    saves = [event for event in events if event["event"] == "save"]
    typical = {key: median_of(saves, key) for key in ("seconds", "stall_seconds", "bytes")}
    return {
        "saved": len(saves),
        "kept_steps": None if kept_steps is None else sorted(kept_steps),
        "save_seconds": typical["seconds"],
        "stall_seconds": typical["seconds"] if typical["stall_seconds"] is None else typical["stall_seconds"],
        "bytes": typical["bytes"],
    }


def _advice(
    advise: Callable[..., DataclassInstance] | None,
    saves: Summary,
    time_used: Summary,
    time: Summary,
    world: int,
) -> Summary | None:
    """Return how often to save, from this run's saves, steps and faults.

    The advice is null if the run has not saved yet, or if its steps took no time.
    """
    if advise is None or saves["save_seconds"] is None or time["seconds_a_step"] < _SHORTEST_STEP:
        return None
    advice = advise(
        stall=saves["stall_seconds"],
        save=saves["save_seconds"],
        step=time["seconds_a_step"],
        devices=world,
        faults=len(time_used["faults"]),
        seconds=time_used["wall_seconds"],
        restart=median_of(time_used["recoveries"], "seconds") or 0.0,
    )
    return asdict(advice)


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Return at most CURVE_POINTS points, including the first and the last."""
    if len(points) <= CURVE_POINTS:
        return points
    last = len(points) - 1
    return [points[index * last // (CURVE_POINTS - 1)] for index in range(CURVE_POINTS)]
