"""What happened in a run, read from its folder: a value that `render` draws and `--json` prints.

Speeds and shares are taken over the steady steps, all but the first two, which compile, allocate and warm up; a speed is
the median, so that a slow step here and there does not move it, and a share is a ratio of sums, so that the shares add up
to one. Everything comes from four files (config.toml, plan.json, metrics.jsonl, events.jsonl); what a file does not say
is null.

How often to save is the planner's to say. This package may not import the planner, so whoever knows both hands its advice in.
"""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import UserError
from shardwise.observe.clock import SPANS
from shardwise.observe.files import Record, read_lines
from shardwise.observe.goodput import goodput
from shardwise.observe.memory import memory_kind
from shardwise.observe.predicted import Row, compare, waits_are_known

WARM_UP = 2
"""Steps at the start that are left out of speeds and shares."""

CURVE_POINTS = 240

Summary = dict[str, Any]

_T = TypeVar("_T")


def summarise(folder: str | Path, advise: Callable[..., Any] | None = None) -> Summary:
    """The summary of the run in a folder; it may still be running. `advise` (search/interval.py) says how often to save."""
    folder = Path(folder)
    steps = _steps(folder)
    config, plan, events = _table(folder), _plan(folder), _events(folder)
    start = next((event for event in reversed(events) if event["event"] in ("start", "resume")), {})
    steady = steps[WARM_UP:] or steps
    like_planned = _like_planned(steps, events)
    time_used = goodput(events, steps)
    saves = _checkpoints(folder, events)
    return {
        "run": str(folder),
        "steps": steps[-1]["step"],
        "planned_steps": config.get("train", {}).get("steps"),
        "seconds": math.fsum(step["seconds"] for step in steps),
        "loss": _loss(steps),
        "held_out": [{"step": s["step"], "loss": s["held_out_loss"]} for s in steps if "held_out_loss" in s],
        "tokens": sum(step.get("tokens", 0) for step in steps),
        "tokens_per_second": {"median": _median(steady, "tokens_per_second"), "last": steps[-1]["tokens_per_second"]},
        "sequences_per_second": _median(steady, "sequences_per_second"),
        "mfu": _median(steady, "mfu"),
        "flop_convention": plan.get("flop_convention"),
        "peak_memory_bytes": max((step["memory_bytes"] for step in steps if "memory_bytes" in step), default=None),
        "memory_kind": start.get("memory_kind"),
        "predicted_states_gib": plan.get("memory_gib", {}).get("states"),
        "predicted_and_measured": _predicted(plan, like_planned, start),
        "measured_steps": len(like_planned),
        "time": _time(steady),
        "communication": _communication(steady),
        "collectives": _collectives(steps, steady),
        "experts": _experts(steps),
        "goodput": time_used,
        "checkpoints": {**saves, "advice": _advice(advise, saves, time_used, _time(steady), start.get("world", 1))},
        "skipped_steps": [step["step"] for step in steps if step.get("skipped")],
        "events": dict(Counter(event["event"] for event in events)),
        "layout": plan.get("layout", config.get("layout")),
        "precision": config.get("train", {}).get("precision"),
        "device": start.get("device"),
        "parameters": plan.get("parameters"),
        "micro_batch": plan.get("micro_batch"),
        "accumulation": plan.get("accumulation"),
        "recompute": plan.get("recompute"),
        "cluster_file": plan.get("cluster_file"),
        "curve": _thinned([[step["step"], step["loss"]] for step in steps]),
    }


def _steps(folder: Path) -> list[Record]:
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder. Give the folder of a run, the run.folder of its job.")
    path = folder / "metrics.jsonl"
    steps = [line for line in _read(path, lambda: list(read_lines(path))) or [] if {"step", "loss", "seconds"} <= line.keys()]
    if not steps:
        raise UserError(f"{path}: no metrics yet. Nothing has been trained in {folder}, or its first step is not done.")
    return steps


def _table(folder: Path) -> Record:
    path = folder / "config.toml"
    return _read(path, lambda: tomllib.loads(path.read_text(encoding="utf-8"))) or {}


def _plan(folder: Path) -> Record:
    path = folder / "plan.json"
    return _read(path, lambda: json.loads(path.read_bytes())) or {}


def _events(folder: Path) -> list[Record]:
    path = folder / "events.jsonl"
    return _read(path, lambda: list(read_lines(path))) or []


def _read(path: Path, load: Callable[[], _T]) -> _T | None:
    try:
        return load()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}. It is written by `shardwise train`; restore or remove it.") from None


def _like_planned(steps: Sequence[Record], events: Sequence[Record]) -> Sequence[Record]:
    """The steady steps on the plan's layout: all, unless workers were lost or won and the run went on with another layout."""
    since, layout = 0, None
    for event in events:
        if event["event"] in ("start", "resume") and event.get("layout") != layout:
            since, layout = event.get("step", 0), event.get("layout")
    on_layout = [step for step in steps if step["step"] > since]
    return on_layout[WARM_UP:] or on_layout


def _predicted(plan: Record, steps: Sequence[Record], start: Record) -> list[Row] | None:
    """Term by term, what the plan predicted and what was measured; null where it predicted nothing."""
    if not plan.get("predicted") or not steps:
        return None
    on_cpu = start.get("memory_kind") in (None, memory_kind("cpu"))
    return compare(plan["predicted"], steps, waits_are_known(steps, plan.get("layout", {}), on_cpu), on_cpu)


def _loss(steps: Sequence[Record]) -> Summary:
    finite = [step for step in steps if math.isfinite(step["loss"])]
    lowest = min(finite, key=lambda step: float(step["loss"]), default={"loss": None, "step": None})
    return {
        "first": steps[0]["loss"],
        "last": steps[-1]["loss"],
        "minimum": lowest["loss"],
        "minimum_step": lowest["step"],
    }


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
    """Efficiency: the share of a step not spent waiting for communication. Overlap: the share of communication hidden.

    Overlap needs the time the collectives took, hidden or not, which a run records as `communication_seconds` where it
    measures it; elsewhere it is null.
    """
    seconds = math.fsum(step["seconds"] for step in steps)
    waits = [step.get("spans", {}).get("exposed_communication") for step in steps]
    if None in waits:
        return {"efficiency": None, "overlap": None}
    exposed = math.fsum(waits)
    busy = math.fsum(step.get("communication_seconds", 0.0) for step in steps)
    return {
        "efficiency": 1 - exposed / seconds if seconds else None,
        "overlap": max(0.0, 1 - exposed / busy) if busy else None,
    }


def _collectives(steps: Sequence[Record], steady: Sequence[Record]) -> Summary:
    """Per kind and axis: what a typical (median) step does, and the run's total."""
    nothing = {"count": 0, "bytes": 0}
    table: Summary = {}
    for key in sorted({key for step in steps for key in step.get("collectives", {})}):
        typical = [step.get("collectives", {}).get(key, nothing) for step in steady]
        every = [step.get("collectives", {}).get(key, nothing) for step in steps]
        table[key] = {what: statistics.median(counts[what] for counts in typical) for what in nothing}
        table[key] |= {f"total_{what}": sum(counts[what] for counts in every) for what in nothing}
    return table


def _experts(steps: Sequence[Record]) -> Summary | None:
    """How evenly tokens were dealt out, 1 being even; null for a model without experts."""
    known = [step for step in steps if step.get("expert_load")]
    if not known:
        return None
    worst = max(known, key=lambda step: float(step["expert_imbalance"]))
    return {
        "imbalance": {
            "last": known[-1]["expert_imbalance"],
            "worst": worst["expert_imbalance"],
            "worst_step": worst["step"],
        },
        "load": known[-1]["expert_load"],
    }


def _checkpoints(folder: Path, events: Sequence[Record]) -> Summary:
    """What was saved and is kept; of a typical save, how long it took, for how long training stood still, and its size."""
    kept = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*") if path.name[5:].isdigit()]
    saves = [event for event in events if event["event"] == "save"]
    typical = {key: _median(saves, key) for key in ("seconds", "stall_seconds", "bytes")}
    return {
        "saved": len(saves),
        "kept_steps": sorted(kept),
        "save_seconds": typical["seconds"],
        "stall_seconds": typical["seconds"] if typical["stall_seconds"] is None else typical["stall_seconds"],
        "bytes": typical["bytes"],
    }


def _advice(advise: Callable[..., Any] | None, saves: Summary, time_used: Summary, time: Summary, world: int) -> Summary | None:
    """How often to save, from this run's own saves, steps and faults; null where it has not saved yet."""
    if advise is None or saves["save_seconds"] is None:
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
