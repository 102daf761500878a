"""Goodput: how much of the time that a run took went into steps that count.

Throughput looks only at steps and is therefore too optimistic: it does not contain the hour that a dead
machine cost. Goodput looks at the clock. The run's records say when things happened, so every second is
assigned to exactly one part, and the parts add up to the whole:

| part       | what                                                                                   |
| ---------- | -------------------------------------------------------------------------------------- |
| productive | steps that are part of the run's history, with their communication, without the two    |
|            | waits in the next rows                                                                 |
| stragglers | in those steps: how much longer the latest rank worked than the median of its peers    |
| data       | in those steps: how long the main rank waited for its batch                            |
| checkpoint | training stood still for a save                                                        |
| evaluation | the held-out loss was computed                                                         |
| recovery   | from a fault, or from a stop to change the number of workers, until the next step that |
|            | counts begins                                                                          |
| lost       | computed before a fault and thrown away: from the last step that counts to the fault   |
| start_up   | from the start of the workers to the first step: importing torch, building the model,  |
|            | opening the data, compiling                                                            |
| other      | what no record explains: writing records, samples, the end                             |

A run that ends and is started again by hand or by a scheduler has several sessions; the time between them
does not count. A fault that the run survives does not end a session. Time that two records claim goes to the
stronger claim (`_CLAIMS`): a step that runs while a checkpoint is written in the background is a step.

The numbers come from metrics.jsonl, which contains only the steps that count, and events.jsonl, which is
never shortened. Steps between which nothing happened are added up while they are read, so that memory grows
with the events of a run and not with its steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from shardwise.observe.records import Record

PARTS = (
    "productive",
    "stragglers",
    "data",
    "checkpoint",
    "evaluation",
    "recovery",
    "lost",
    "start_up",
    "other",
)

TICK = 0.002
"""Seconds within which two times count as the same. Events are written with milliseconds."""
_CLAIMS = ("step", "checkpoint", "evaluation", "recovery", "lost", "start_up")
"""Kinds of claims by strength. Time that several claim goes to the first of these."""
_BEGIN = ("start", "resume")
_BREAK = ("fault", "regroup")
_CLOSED = ("stop", "end", "failure")
_SAVES = ("save", "save_failed")


_Timed = tuple[float, Record]
"""An event and the time at which it was written, in seconds since the epoch."""


@dataclass(frozen=True)
class _Claim:
    """Something that took the time from `start` to `end`, in seconds since the epoch."""

    part: str
    start: float
    end: float
    shares: Mapping[str, float] = field(default_factory=dict)
    """For steps, the seconds of each part, which add up to the whole."""


@dataclass
class _StepGroup:
    """Consecutive steps between which nothing happened, as one."""

    start: float
    end: float
    until: float
    """Time of the next event."""
    last: float
    """Last step before something else happened."""
    data: float = 0.0
    stragglers: float = 0.0
    productive: float = 0.0
    other: float = 0.0
    """Seconds of pauses between the steps."""

    def takes(self, begin: float, end: float, number: int) -> bool:
        """Return whether a step follows without anything in between."""
        return end < self.until and number <= self.last and self.start <= begin and self.end <= end

    def add(self, begin: float, step: Record) -> None:
        """Add the next step, which began at `begin`. Time that it shares with the step before is not counted
        again.
        """
        end, whole, spans, latest = step["time"], step["seconds"], step.get("spans", {}), step.get("latest")
        fetched = spans.get("data", 0.0)
        # On a GPU a batch is fetched while the device computes; the hidden part is not a wait.
        data = min(fetched, max(0.0, whole - (sum(spans.values()) - fetched)))
        behind = 0.0
        if latest is not None:  # reading by the main rank is already counted as data
            behind = min(max(0.0, latest["behind"] - (data if latest["rank"] == 0 else 0.0)), whole - data)
        fraction = 1.0
        if begin >= self.end:
            self.other += begin - self.end
        else:
            fraction = (end - self.end) / (end - begin)
        self.data += fraction * data
        self.stragglers += fraction * behind
        self.productive += fraction * (whole - data - behind)
        self.end = end

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, which add up to the whole."""
        return {name: getattr(self, name) for name in ("data", "stragglers", "productive", "other")}


@dataclass(frozen=True)
class _Session:
    """What was recorded from a start of the command to its end."""

    start: float
    end: float
    events: tuple[_Timed, ...]
    steps: tuple[_StepGroup, ...]
    saved: Mapping[int, float]
    """Times at which the steps that were saved were completed."""


def goodput(events: Sequence[Record], steps: Iterable[Record]) -> dict[str, Any]:
    """Return the productive fraction of the time, the seconds of each part, and what disturbed the run.

    The fraction is null if the records have no times. The steps are read once, in their order.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    wall = 0.0
    timed = _this_run(events)
    events = [event for _, event in timed]
    for session in _sessions(timed, *_group_steps(timed, steps)):
        wall += session.end - session.start
        for part, seconds in _seconds_by_part(session):
            parts[part] += seconds
    return {
        "share": parts["productive"] / wall if wall > 0 else None,
        "wall_seconds": wall,
        "parts": parts,
        "faults": _faults(timed),
        "recoveries": [_without_name(event) for _, _, event in _recoveries(timed)],
        "stragglers": _stragglers(events),
    }


def _without_name(event: Record) -> Record:
    return {key: value for key, value in event.items() if key != "event"}


def _faults(timed: Sequence[_Timed]) -> list[Record]:
    """Return the faults, each with the index of its recovery in the list of recoveries; null if there is
    none.
    """
    spans = _recoveries(timed)
    faults = [(at, event) for at, event in timed if event["event"] == "fault"]
    return [{**_without_name(fault), "recovery": _index_of(at, spans)} for at, fault in faults]


def _index_of(at: float, recoveries: Sequence[tuple[float, float, Record]]) -> int | None:
    """Return the index of the recovery that contains this time; None if there is none."""
    for index, (start, end, _) in enumerate(recoveries):
        if start - TICK <= at <= end:
            return index
    return None


def _stragglers(events: Sequence[Record]) -> list[Record]:
    """Return the ranks that were reported as slow, and the step at which that ended; null if it did
    not end.
    """
    stragglers: list[Record] = []
    for event in events:
        if event["event"] == "straggler":
            stragglers.append(
                {key: event.get(key) for key in ("rank", "factor", "cause", "step")} | {"until_step": None}
            )
        elif event["event"] == "straggler_gone":
            for straggler in stragglers:
                if straggler["rank"] == event.get("rank") and straggler["until_step"] is None:
                    straggler["until_step"] = event.get("step")
    return stragglers


def _group_steps(
    timed: Sequence[_Timed], steps: Iterable[Record]
) -> tuple[list[_StepGroup], dict[int, float]]:
    """Return the steps, added up between events, and the times at which the saved steps were completed."""
    times = [*sorted({edge for at, event in timed for edge in _edges(at, event)}), math.inf]
    saved = {event.get("step", -1) for _, event in timed if event["event"] in _SAVES}
    numbers: list[float] = [*sorted(saved), math.inf]
    groups_of_steps, done = [_StepGroup(0.0, 0.0, -math.inf, 0)], dict[int, float]()
    for step in steps:
        end, number = step.get("time"), step["step"]
        if end is None or (begin := end - step["seconds"]) >= end:
            continue
        if not groups_of_steps[-1].takes(begin, end, number):
            until = times[bisect_right(times, begin)]
            last = numbers[bisect_left(numbers, number)]
            groups_of_steps.append(_StepGroup(begin, begin, until if end < until else -math.inf, last))
        groups_of_steps[-1].add(begin, step)
        if number in saved:
            done[number] = end
    return groups_of_steps[1:], done


def _edges(at: float, event: Record) -> Iterator[float]:
    """Yield the times at which something began or ended that an event reports."""
    yield at
    if seconds := event.get("seconds"):
        yield at - seconds
        yield at - seconds + (event.get("stall_seconds") or 0.0)


def _sessions(
    timed: Sequence[_Timed], steps: Sequence[_StepGroup], saved: Mapping[int, float]
) -> Iterator[_Session]:
    groups = [timed[first:last] for first, last in pairwise([*_session_starts(timed), len(timed)])]
    starts = [at - (event.get("start_up_seconds") or 0.0) for at, event in (group[0] for group in groups)]
    for group, (start, until) in zip(groups, pairwise([*starts, math.inf]), strict=True):
        inside = tuple(step for step in steps if start <= step.end < until)
        end = max(group[-1][0], *(step.end for step in inside), start)
        yield _Session(start, end, tuple(group), inside, saved)


def _this_run(events: Sequence[Record]) -> list[_Timed]:
    """Return the events with their times, from the last start that did not resume."""
    pairs = [(_timestamp(event), event) for event in events if "time" in event]
    timed = sorted(pairs, key=lambda pair: pair[0])
    fresh = [index for index in _session_starts(timed) if timed[index][1]["event"] == "start"]
    return timed[fresh[-1] if fresh else 0 :]


def _session_starts(timed: Sequence[_Timed]) -> list[int]:
    """Return the indices at which sessions begin.

    These are the first event, and each start or resume that does not follow from a fault.
    """
    recoveries = _recoveries(timed)
    names = (*_BREAK, *_BEGIN, *_CLOSED)
    marks = [index for index, (_, event) in enumerate(timed) if event["event"] in names]
    events = [timed[index][1] for index in marks]
    around = zip(marks, [None, *events], [*events[1:], None], strict=False)
    starts = [
        index
        for index, before, after in around
        if timed[index][1]["event"] in _BEGIN
        and _index_of(timed[index][0], recoveries) is None
        and not _continues(before, after)
    ]
    return sorted({0, *starts}) if timed else []


def _recoveries(timed: Iterable[_Timed]) -> list[tuple[float, float, Record]]:
    """Return each recovery with the times at which it began and ended."""
    recoveries = (
        (at, event)
        for at, event in timed
        if event["event"] == "recovery" and event.get("seconds") is not None
    )
    return [(at - event["seconds"], at, event) for at, event in recoveries]


def _continues(before: Record | None, after: Record | None) -> bool:
    """Return whether the team that begins between these events replaces one that broke, without a recorded
    recovery.

    That is so if the former team was dissolved on purpose, or if this team broke as well, as the next
    generation of the same run.
    """
    if before is None or before["event"] not in _BREAK:
        return False
    if before["event"] == "regroup":
        return True
    return (
        after is not None
        and after["event"] == "fault"
        and after.get("generation", 0) > before.get("generation", 0)
    )


def _timestamp(event: Record) -> float:
    return datetime.fromisoformat(event["time"]).timestamp()


def _seconds_by_part(session: _Session) -> Iterator[tuple[str, float]]:
    """Yield the seconds of each part. All time of a session goes to the strongest claim; steps are split
    further.
    """
    claims = [claim for claim in _claims(session) if claim.end > claim.start]
    claims.sort(key=lambda claim: _CLAIMS.index(claim.part))
    edges = sorted(
        {session.start, session.end, *(edge for claim in claims for edge in (claim.start, claim.end))}
    )
    edges = [edge for edge in edges if session.start <= edge <= session.end]
    seconds_of: dict[int, float] = {}
    for claim, (start, end) in zip(_claim_of_each(claims, edges), pairwise(edges), strict=True):
        seconds_of[claim] = seconds_of.get(claim, 0.0) + end - start
    for index, seconds in seconds_of.items():
        yield from [("other", seconds)] if index < 0 else _split(claims[index], seconds)


def _claim_of_each(claims: Sequence[_Claim], edges: Sequence[float]) -> list[int]:
    """Return, for each interval between two edges, the index of the strongest claim that covers it; -1 for
    none.

    Weaker claims are overwritten by stronger ones.
    """
    index_of = {edge: index for index, edge in enumerate(edges)}
    owner = [-1] * (len(edges) - 1)
    for index in reversed(range(len(claims))):
        first, last = max(claims[index].start, edges[0]), min(claims[index].end, edges[-1])
        if first < last:
            owner[index_of[first] : index_of[last]] = [index] * (index_of[last] - index_of[first])
    return owner


def _split(claim: _Claim, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield a claim's time by part. That of steps is split by their shares."""
    if claim.part != "step":
        yield claim.part, seconds
    for part, share in claim.shares.items():
        yield part, seconds * share / (claim.end - claim.start)


def _claims(session: _Session) -> Iterator[_Claim]:
    """Yield everything that claims time of a session."""
    for group in session.steps:
        yield _Claim("step", group.start, group.end, group.parts)
    evaluations = [
        (at, event) for at, event in session.events if event["event"] == "evaluate" and event.get("seconds")
    ]
    for at, event in evaluations:
        yield _Claim("evaluation", at - event["seconds"], at)
    yield from _saves(session, evaluations)
    begins = sorted(group.start for group in session.steps)
    ends = sorted(group.end for group in session.steps)
    yield from _breaks(session, begins, ends)
    breaks = [at for at, _ in _broken(session)]
    yield _Claim("start_up", session.start, min((*begins, *breaks), default=session.end))


def _broken(session: _Session) -> list[_Timed]:
    """Return the events at which a team broke or was dissolved."""
    return [(at, event) for at, event in session.events if event["event"] in _BREAK]


def _saves(session: _Session, evaluations: Sequence[_Timed]) -> Iterator[_Claim]:
    """Yield the time of each save, after the evaluations at its step."""
    evaluated: dict[int, list[float]] = defaultdict(list)
    for at, event in evaluations:
        evaluated[event.get("step", -1)].append(at)
    for at, event in session.events:
        if event["event"] in _SAVES:
            ended = [over for over in evaluated.get(event.get("step", -1), []) if over <= at]
            yield _save(event, at, session.saved.get(event.get("step", -1)), ended)


def _save(event: Record, at: float, step_done: float | None, evaluated: Sequence[float]) -> _Claim:
    """Return the time for which training stopped for a save.

    It stops after the step, and after an evaluation at that step. The event is written when the save is
    complete.
    """
    seconds = event.get("seconds")
    stall: float = event.get("stall_seconds") or seconds or 0.0
    begun: float = step_done if step_done is not None else at - (stall if seconds is None else seconds)
    begun = max([begun, *evaluated])
    return _Claim("checkpoint", begun, begun + stall)


def _breaks(session: _Session, begins: Sequence[float], ends: Sequence[float]) -> Iterator[_Claim]:
    """Yield, for each fault, the work that was lost before it, and the time until training continues."""
    recoveries = _recoveries(session.events)
    breaks = _broken(session)
    for index, (at, event) in enumerate(breaks):
        # A fault is recorded some time after it happened; its recovery contains the time at which it did.
        recovery = next((recovery for recovery in recoveries if recovery[0] <= at <= recovery[1]), None)
        began, recovery_event = (at, {}) if recovery is None else (recovery[0], recovery[2])
        next_break = [later for later, _ in breaks[index + 1 :] if later > at]
        until = begins[bisect_left(begins, at) :] if recovery is None else [recovery[1]]
        yield _Claim("recovery", began, min([*until, *next_break], default=session.end))
        if event["event"] == "fault":
            kept_until = _end_of_last_step(session, ends, began, recovery_event.get("lost_seconds"))
            yield _Claim("lost", max(session.start, kept_until), began)


def _end_of_last_step(session: _Session, ends: Sequence[float], began: float, lost: float | None) -> float:
    """Return the end of the last step before a fault, or the time from which on its work was lost."""
    before = [end for end in ends if end <= began]
    if before:
        return before[-1]
    return session.start if lost is None else began - lost
