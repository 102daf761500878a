"""Goodput: of all the time a run took, how much went into steps that count.

Throughput looks at steps and so flatters: it does not see the hour that a dead machine cost. Goodput looks at the clock. The
run's records say when things happened, so every second is given to exactly one thing, and the parts add up to the whole:

| part           | what                                                                                                   |
| -------------- | ------------------------------------------------------------------------------------------------------ |
| productive     | steps that are part of the run's history, with their communication, without the two waits that follow  |
| stragglers     | of those steps, what the latest rank worked longer than the median of its peers                        |
| data           | of those steps, what the main rank waited for its batch                                                |
| checkpoint     | training stood still for a save                                                                        |
| evaluation     | held-out loss                                                                                          |
| recovery       | from a fault (or from parting for more or fewer workers) until the next step begins that counts        |
| lost           | computed before a fault and thrown away: from the last step that counts to the fault                   |
| start_up       | from the start to the first step: opening data, compiling                                              |
| other          | what no record explains: writing records, samples, the end                                             |

A run that ends and is started again by hand or by a scheduler has several sessions; the time between them is not the run's. A
fault that the run survives does not end a session. Time that two records claim goes to the stronger claim (`_CLAIMS`): a step
that is done while a checkpoint is written in the background is a step.

It is made from metrics.jsonl, which holds only the steps that count, and events.jsonl, which is never cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from shardwise.observe.files import Record

PARTS = ("productive", "stragglers", "data", "checkpoint", "evaluation", "recovery", "lost", "start_up", "other")

TICK = 0.002
"""Events are written to the millisecond; what is nearer than this happened at once."""
_CLAIMS = ("step", "checkpoint", "evaluation", "recovery", "lost", "start_up")
"""What gets the time that several claim: the first of these."""
_BEGIN = ("start", "resume")
_BREAK = ("fault", "regroup")
_CLOSED = ("stop", "end", "failure")


_Timed = tuple[float, Record]
"""An event and when it was written, in seconds since the epoch."""


@dataclass(frozen=True)
class _Claim:
    """Something that took the time from `start` to `end`, in seconds since the epoch."""

    part: str
    start: float
    end: float
    step: Record = field(default_factory=dict)


@dataclass(frozen=True)
class _Session:
    """From a start of the command to its end: what was recorded in between."""

    start: float
    end: float
    events: tuple[_Timed, ...]
    steps: tuple[Record, ...]


def goodput(events: Sequence[Record], steps: Sequence[Record]) -> dict[str, Any]:
    """The share of time that was productive, the seconds of each part, and what disturbed the run; share is null where the
    records have no times.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    wall = 0.0
    timed = _this_run(events)
    events = [event for _, event in timed]
    for session in _sessions(timed, steps):
        wall += session.end - session.start
        for part, seconds in _seconds_by_part(session):
            parts[part] += seconds
    return {
        "share": parts["productive"] / wall if wall > 0 else None,
        "wall_seconds": wall,
        "parts": parts,
        "faults": _faults(timed),
        "recoveries": _events_named(events, "recovery"),
        "stragglers": _stragglers(events),
    }


def _events_named(events: Iterable[Record], name: str) -> list[Record]:
    return [{key: value for key, value in event.items() if key != "event"} for event in events if event["event"] == name]


def _faults(timed: Sequence[_Timed]) -> list[Record]:
    """Each with the number of its recovery in the list of those; null: none."""
    spans = [(at - event["seconds"] - TICK, at) for at, event in timed if event["event"] == "recovery"]
    fault_times = [at for at, event in timed if event["event"] == "fault"]
    ends = [next((index for index, (start, end) in enumerate(spans) if start <= at <= end), None) for at in fault_times]
    faults = _events_named((event for _, event in timed), "fault")
    return [{**fault, "recovery": end} for fault, end in zip(faults, ends, strict=True)]


def _stragglers(events: Sequence[Record]) -> list[Record]:
    """Who was named, and at which step let off; null: never."""
    stragglers: list[Record] = []
    for event in events:
        if event["event"] == "straggler":
            stragglers.append({key: event.get(key) for key in ("rank", "factor", "cause", "step")} | {"until_step": None})
        elif event["event"] == "straggler_gone":
            for straggler in stragglers:
                if straggler["rank"] == event.get("rank") and straggler["until_step"] is None:
                    straggler["until_step"] = event.get("step")
    return stragglers


def _sessions(timed: Sequence[_Timed], steps: Sequence[Record]) -> Iterator[_Session]:
    groups = [timed[first:last] for first, last in pairwise([*_session_starts(timed), len(timed)])]
    starts = [group[0][0] for group in groups]
    done = [step for step in steps if isinstance(step.get("time"), int | float)]
    for group, (start, until) in zip(groups, pairwise([*starts, math.inf]), strict=True):
        inside = tuple(step for step in done if start <= step["time"] < until)
        yield _Session(start, max(group[-1][0], *(step["time"] for step in inside), start), tuple(group), inside)


def _this_run(events: Sequence[Record]) -> list[_Timed]:
    """Events with their timestamps, from the last start that did not resume."""
    timed = sorted(((_timestamp(event), event) for event in events if "time" in event), key=lambda pair: pair[0])
    fresh = [index for index in _session_starts(timed) if timed[index][1]["event"] == "start"]
    return timed[fresh[-1] if fresh else 0 :]


def _session_starts(timed: Sequence[_Timed]) -> list[int]:
    """Where a session begins: at the first event, and at a start or resume that is not the way out of a fault."""
    again = [index for index, (_, event) in enumerate(timed) if event["event"] in _BEGIN and not _continues(timed, index)]
    return sorted({0, *again}) if timed else []


def _continues(timed: Sequence[_Timed], index: int) -> bool:
    """Whether the team that begins here takes over from one that broke: its recovery is recorded, or it parted on purpose, or it
    broke as well, as the next generation of the same run.
    """
    at = timed[index][0]
    if any(end - event["seconds"] - TICK <= at <= end for end, event in timed if event["event"] == "recovery"):
        return True
    marks = (*_BREAK, *_BEGIN, *_CLOSED)
    before = next((event for _, event in reversed(timed[:index]) if event["event"] in marks), None)
    after = next((event for _, event in timed[index + 1 :] if event["event"] in marks), None)
    if before is None or before["event"] not in _BREAK:
        return False
    if before["event"] == "regroup":
        return True
    return after is not None and after["event"] == "fault" and after.get("generation", 0) > before.get("generation", 0)


def _timestamp(event: Record) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds_by_part(session: _Session) -> Iterator[tuple[str, float]]:
    """Seconds of each part: all time of a session goes to the first that claims it; then steps are split into work and waits."""
    claims = [claim for claim in _claims(session) if claim.end > claim.start]
    claims.sort(key=lambda claim: _CLAIMS.index(claim.part))
    edges = sorted({session.start, session.end, *(edge for claim in claims for edge in (claim.start, claim.end))})
    edges = [edge for edge in edges if session.start <= edge <= session.end]
    seconds_of: dict[int, float] = {}
    for claim, (start, end) in zip(_claim_of_each(claims, edges), pairwise(edges), strict=True):
        seconds_of[claim] = seconds_of.get(claim, 0.0) + end - start
    for index, seconds in seconds_of.items():
        yield from [("other", seconds)] if index < 0 else _split(claims[index], seconds)


def _claim_of_each(claims: Sequence[_Claim], edges: Sequence[float]) -> list[int]:
    """For each interval between two edges the index of the first claim that covers it; -1: none. Later claims are overwritten by
    earlier ones.
    """
    index_of = {edge: index for index, edge in enumerate(edges)}
    owner = [-1] * (len(edges) - 1)
    for index in reversed(range(len(claims))):
        first, last = max(claims[index].start, edges[0]), min(claims[index].end, edges[-1])
        if first < last:
            owner[index_of[first] : index_of[last]] = [index] * (index_of[last] - index_of[first])
    return owner


def _split(claim: _Claim, seconds: float) -> Iterator[tuple[str, float]]:
    """A claim's time by part; a step's by its spans."""
    if claim.part != "step":
        yield claim.part, seconds
        return
    whole, spans = claim.step["seconds"], claim.step.get("spans", {})
    # On a GPU a batch is fetched while the device computes; what is hidden there is no wait.
    busy = math.fsum(value for name, value in spans.items() if name != "data")
    data = min(spans.get("data", 0.0), max(0.0, whole - busy))
    latest = claim.step.get("latest") or {"rank": None, "behind": 0.0}
    behind = latest["behind"] - (data if latest["rank"] == 0 else 0.0)  # the main rank's own reading is data already
    behind = min(max(0.0, behind), whole - data)
    for part, share in (("data", data), ("stragglers", behind), ("productive", whole - data - behind)):
        yield part, seconds * share / whole


def _claims(session: _Session) -> Iterator[_Claim]:
    done = {step["step"]: step["time"] for step in session.steps}
    for step in session.steps:
        yield _Claim("step", step["time"] - step["seconds"], step["time"], step)
    for at, event in session.events:
        if event["event"] == "evaluate" and event.get("seconds"):
            yield _Claim("evaluation", at - event["seconds"], at)
        elif event["event"] in ("save", "save_failed"):
            yield from _save(event, at, done.get(event.get("step", -1)), session)
    begins = sorted(step["time"] - step["seconds"] for step in session.steps)
    ends = sorted(step["time"] for step in session.steps)
    yield from _breaks(session, begins, ends)
    breaks = [at for at, event in session.events if event["event"] in _BREAK]
    yield _Claim("start_up", session.start, min((*begins, *breaks), default=session.end))


def _save(event: Record, at: float, step_done: float | None, session: _Session) -> Iterator[_Claim]:
    """Training stops when a save begins: after its step, and after an evaluation there. The event comes when it is complete."""
    stall: float = event.get("stall_seconds") or event.get("seconds") or 0.0
    begun: float = at - event.get("seconds", stall) if step_done is None else step_done
    for ended, other in session.events:
        if other["event"] == "evaluate" and other.get("step") == event.get("step") and ended <= at:
            begun = max(begun, ended)
    yield _Claim("checkpoint", begun, begun + stall)


def _breaks(session: _Session, begins: Sequence[float], ends: Sequence[float]) -> Iterator[_Claim]:
    """For each fault: what was lost before it, and the time until training goes on or the next fault."""
    recoveries = [(at - event["seconds"], at, event) for at, event in session.events if event["event"] == "recovery"]
    breaks = [(at, event) for at, event in session.events if event["event"] in _BREAK]
    for index, (at, event) in enumerate(breaks):
        # A fault is written down some time after it happened; its recovery knows when that was.
        own_recovery = [recovery for recovery in recoveries if recovery[0] <= at <= recovery[1]][:1]
        began, recovery_event = (own_recovery[0][0], own_recovery[0][2]) if own_recovery else (at, {})
        next_break = [later for later, _ in breaks[index + 1 :] if later > at]
        until = [over for _, over, _ in own_recovery] or [begin for begin in begins if begin >= at]
        yield _Claim("recovery", began, min([*until, *next_break], default=session.end))
        if event["event"] == "fault":
            ends_before = [end for end in ends if end <= began] or [
                began - recovery_event.get("lost_seconds", began - session.start)
            ]
            yield _Claim("lost", max(session.start, ends_before[-1]), began)
