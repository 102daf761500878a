"""What happened in a run, read from its folder: a value that `render` draws and `--json` prints.

Speeds and shares are taken over the steady steps, all but the first two, which compile, allocate and warm up;
a speed is the median, so that a slow step here and there does not move it, and a share is a ratio of sums, so
that the shares add up to one. Everything comes from four files (config.toml, plan.json, metrics.jsonl,
events.jsonl); what a file does not say is null. The steps are read once and not kept (observe/totals.py), so
that a run of a million steps takes seconds and little memory; damaged lines are skipped and counted.

How often to save is the planner's to say. This package may not import the planner, so whoever knows both
hands its advice in.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.errors import UserError
from shardwise.files import parse_toml_as, read_bytes
from shardwise.observe.clock import SPANS
from shardwise.observe.goodput import goodput
from shardwise.observe.memory import memory_kind
from shardwise.observe.predicted import Row, compare, waits_are_known
from shardwise.observe.records import Record, read_events, read_metrics
from shardwise.observe.totals import RunTotals
from shardwise.plan import KeptLayout, KeptPlan, read_plan

CURVE_POINTS = 240
_SHORTEST_STEP = 1e-6
"""Seconds; no step takes less, and an interval has no number of such steps."""

Summary = dict[str, Any]

_T = TypeVar("_T")


def summarise(folder: str | Path, advise: Callable[..., Any] | None = None) -> Summary:
    """The summary of the run in a folder; it may still be running. `advise` (search/interval.py) says how
    often to save."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder. Give the folder of a run, the run.folder of its job.")
    config, plan, (events, damaged_events) = _job(folder), read_plan(folder / "plan.json"), _events(folder)
    start = next((event for event in reversed(events) if event["event"] in ("start", "resume")), {})
    run, time_used, damaged_steps = _steps(folder, events)
    steady = run.steady.kept
    saves = _checkpoints(folder, events)
    return {
        "run": str(folder),
        "steps": run.last["step"],
        "planned_steps": config.get("train", {}).get("steps"),
        "seconds": run.seconds,
        "loss": _loss(run),
        "held_out": run.held_out,
        "tokens": run.tokens,
        "tokens_per_second": {
            "median": _median(steady, "tokens_per_second"),
            "last": run.last.get("tokens_per_second"),
        },
        "sequences_per_second": _median(steady, "sequences_per_second"),
        "mfu": _median(steady, "mfu"),
        "flop_convention": plan.get("flop_convention"),
        "peak_memory_bytes": run.peak_memory,
        "memory_kind": start.get("memory_kind"),
        "predicted_states_gib": plan.get("memory_gib", {}).get("states"),
        "predicted_and_measured": _predicted(plan, run.like_planned.kept, start),
        "measured_steps": run.like_planned.count,
        "time": _time(steady),
        "communication": _communication(steady) | {"axes": _axes(steady)},
        "collectives": _collectives(run, steady),
        "float8": _float8(run),
        "experts": _experts(run),
        "staleness": {str(updates): count for updates, count in sorted(run.staleness.items())} or None,
        "dropped": run.dropped,
        "updates": {**run.updates, "per_second": run.updates["made"] / run.seconds}
        if run.updates["made"]
        else None,
        "load": {"imbalance": _median(steady, "load_imbalance"), "rows": run.last.get("rows")},
        "goodput": time_used,
        "checkpoints": {
            **saves,
            "advice": _advice(advise, saves, time_used, _time(steady), start.get("world", 1)),
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
    """What is to be known of all steps, where the time went, and how many lines were damaged: from one
    reading."""
    run, lines = RunTotals(_planned_since(events)), read_metrics(folder, needs=("loss", "seconds"))
    time_used = _read(lines.path, lambda: goodput(events, run.gather(lines)))
    if time_used is None or not run.count:
        damaged = f" {lines.damaged} lines of it are damaged." if lines.damaged else ""
        raise UserError(
            f"{lines.path}: no metrics yet.{damaged} Nothing has been trained in {folder}, or its first step "
            f"is not done."
        )
    return run, time_used, lines.damaged


@with_config(ConfigDict(strict=True))
class _TrainTable(TypedDict, total=False):
    steps: Annotated[int, Field(ge=0, le=2**40)]
    precision: str


class _Job(TypedDict, total=False):
    """What of a run's config.toml is shown, whichever version wrote it."""

    train: _TrainTable
    layout: KeptLayout


def _job(folder: Path) -> _Job:
    path, advice = folder / "config.toml", "It is written by `shardwise train`; restore or remove it."
    try:
        return parse_toml_as(_Job, read_bytes(path, advice), path, advice)
    except FileNotFoundError:
        return {}


def _events(folder: Path) -> tuple[list[Record], int]:
    """The run's events, and how many lines were damaged."""
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
    """The step since which the run has the plan's layout: 0, unless workers were lost or won and it went on
    with another."""
    since, layout = 0, None
    for event in events:
        if event["event"] in ("start", "resume") and event.get("layout") != layout:
            since, layout = event.get("step", 0), event.get("layout")
    return since


def _predicted(plan: KeptPlan, steps: Sequence[Record], start: Record) -> list[Row] | None:
    """Term by term, what the plan predicted and what was measured; null where it predicted nothing."""
    predicted = plan.get("predicted")
    if not predicted or not steps:
        return None
    on_cpu = start.get("memory_kind") in (None, memory_kind("cpu"))
    return compare(predicted, steps, waits_are_known(steps, plan.get("layout", {}), on_cpu), on_cpu)


def _loss(run: RunTotals) -> Summary:
    ends = {"first": run.first["loss"], "last": run.last["loss"]}
    return {**ends, "minimum": run.lowest["loss"], "minimum_step": run.lowest["step"]}


def _median(steps: Sequence[Record], key: str) -> float | None:
    known = [step[key] for step in steps if step.get(key) is not None]
    return statistics.median(known) if known else None


def _time(steps: Sequence[Record]) -> Summary:
    """Seconds a step, and each span's share of them; `other` is what no span claimed."""
    seconds = math.fsum(step["seconds"] for step in steps)
    spans = {name: math.fsum(step.get("spans", {}).get(name, 0.0) for step in steps) for name in SPANS}
    spans["other"] = max(0.0, seconds - math.fsum(spans.values()))
    return {
        "seconds_a_step": statistics.median(step["seconds"] for step in steps),
        "shares": {name: value / seconds if seconds else 0.0 for name, value in spans.items()},
    }


def _communication(steps: Sequence[Record]) -> Summary:
    """Efficiency: the share of a step not spent waiting for communication. Overlap: the share of
    communication hidden.

    Overlap needs the time that collectives took, hidden or not, which CPU workers record; elsewhere it is
    null.
    """
    seconds = math.fsum(step["seconds"] for step in steps)
    waits = [step.get("spans", {}).get("exposed_communication") for step in steps]
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
    """Of each axis in a step: the bytes of its collectives, for how many seconds something was under way, and
    the share of them that was hidden; null where times are not known."""
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
    """Per kind and axis: what a typical (median) step does, and the run's total."""
    nothing = {"count": 0, "bytes": 0}
    table: Summary = {}
    for key, total in sorted(run.collectives.items()):
        typical = [step.get("collectives", {}).get(key, nothing) for step in steady]
        table[key] = {what: statistics.median(counts[what] for counts in typical) for what in nothing}
        table[key] |= {f"total_{what}": total[what] for what in nothing}
    return table


def _float8(run: RunTotals) -> Summary | None:
    """How tensors fitted into 8 bits, by layer; null where there are none."""
    if not run.last_float8:
        return None
    layers = {
        layer: {"lost": lost, "most_lost": run.float8_lost.get(layer, lost), "of_range": relative}
        for layer, (lost, relative) in run.last_float8.items()
    }
    return {"layers": layers, "made_again": run.again}


def _experts(run: RunTotals) -> Summary | None:
    """How evenly tokens were dealt out, 1 being even; null for a model without experts."""
    last, worst = run.last_with_experts, run.worst_with_experts
    if not last:
        return None
    imbalance = {
        "last": last["expert_imbalance"],
        "worst": worst["expert_imbalance"],
        "worst_step": worst["step"],
    }
    return {"imbalance": imbalance, "load": last["expert_load"]}


def _checkpoints(folder: Path, events: Sequence[Record]) -> Summary:
    """What was saved and is kept; of a typical save, how long it took, for how long training stood still, and
    its size."""
    kept = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdecimal()]
    saves = [event for event in events if event["event"] == "save"]
    typical = {key: _median(saves, key) for key in ("seconds", "stall_seconds", "bytes")}
    return {
        "saved": len(saves),
        "kept_steps": sorted(kept),
        "save_seconds": typical["seconds"],
        "stall_seconds": typical["seconds"] if typical["stall_seconds"] is None else typical["stall_seconds"],
        "bytes": typical["bytes"],
    }


def _advice(
    advise: Callable[..., Any] | None, saves: Summary, time_used: Summary, time: Summary, world: int
) -> Summary | None:
    """How often to save, from this run's own saves, steps and faults; null where it has not saved yet, or
    took no time."""
    if advise is None or saves["save_seconds"] is None or time["seconds_a_step"] < _SHORTEST_STEP:
        return None
    advice = advise(
        stall=saves["stall_seconds"],
        save=saves["save_seconds"],
        step=time["seconds_a_step"],
        devices=world,
        faults=len(time_used["faults"]),
        seconds=time_used["wall_seconds"],
        restart=_median(time_used["recoveries"], "seconds") or 0.0,
    )
    return asdict(advice)


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Few enough points to draw and to read, the first and the last among them."""
    if len(points) <= CURVE_POINTS:
        return points
    last = len(points) - 1
    return [points[index * last // (CURVE_POINTS - 1)] for index in range(CURVE_POINTS)]
