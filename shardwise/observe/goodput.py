"""Goodput: of all the time a run took, how much went into steps that count.

Throughput looks at steps and so flatters: it does not see the hour that a dead machine cost. Goodput looks at
the clock. The run's records say when things happened, so every second is given to exactly one thing, and the
parts add up to the whole:

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

A run that ends and is started again by hand or by a scheduler has several sessions; the time between them is
not the run's. A fault that the run survives does not end a session. Time that two records claim goes to the
stronger claim (`_CLAIMS`): a step that is done while a checkpoint is written in the background is a step.

It is made from metrics.jsonl, which holds only the steps that count, and events.jsonl, which is never cut.
Steps between which nothing happened are added up while they are read, so that memory grows with the events of
a run and not with its steps.
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
"""Events are written to the millisecond; what is nearer than this happened at once."""
_CLAIMS = ("step", "checkpoint", "evaluation", "recovery", "lost", "start_up")
"""What gets the time that several claim: the first of these."""
_BEGIN = ("start", "resume")
_BREAK = ("fault", "regroup")
_CLOSED = ("stop", "end", "failure")
_SAVES = ("save", "save_failed")


_Timed = tuple[float, Record]
"""An event and when it was written, in seconds since the epoch."""


@dataclass(frozen=True)
class _Claim:
    """Something that took the time from `start` to `end`, in seconds since the epoch."""

    part: str
    start: float
    end: float
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of steps: the seconds of each part, which add up to the whole."""


@dataclass
class _Stretch:
    """Steps one after the other between which nothing happened, as one."""

    start: float
    end: float
    until: float
    """When something happened next, and"""
    last: float
    """the last step before which nothing else did."""
    data: float = 0.0
    stragglers: float = 0.0
    productive: float = 0.0
    other: float = 0.0
    """Pauses between the steps."""

    def takes(self, begin: float, end: float, number: int) -> bool:
        """Whether a step follows without anything between."""
        return end < self.until and number <= self.last and self.start <= begin and self.end <= end

    def add(self, begin: float, step: Record) -> None:
        """The next step, which began at `begin`. What it shares with the one before is that one's."""
        end, whole, spans, latest = step["time"], step["seconds"], step.get("spans", {}), step.get("latest")
        fetched = spans.get("data", 0.0)
        # On a GPU a batch is fetched while the device computes; what is hidden there is no wait.
        data = min(fetched, max(0.0, whole - (sum(spans.values()) - fetched)))
        behind = 0.0
        if latest is not None:  # the main rank's own reading is data already
            behind = min(max(0.0, latest["behind"] - (data if latest["rank"] == 0 else 0.0)), whole - data)
        own = 1.0
        if begin >= self.end:
            self.other += begin - self.end
        else:
            own = (end - self.end) / (end - begin)
        self.data += own * data
        self.stragglers += own * behind
        self.productive += own * (whole - data - behind)
        self.end = end

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part, which add up to the whole."""
        return {name: getattr(self, name) for name in ("data", "stragglers", "productive", "other")}


@dataclass(frozen=True)
class _Session:
    """From a start of the command to its end: what was recorded in between."""

    start: float
    end: float
    events: tuple[_Timed, ...]
    steps: tuple[_Stretch, ...]
    saved: Mapping[int, float]
    """When the steps were done that were saved."""


def goodput(events: Sequence[Record], steps: Iterable[Record]) -> dict[str, Any]:
    """The share of time that was productive, the seconds of each part, and what disturbed the run; share is
    null where the records have no times. The steps are read once, in their order.
    """
    parts = dict.fromkeys(PARTS, 0.0)
    wall = 0.0
    timed = _this_run(events)
    events = [event for _, event in timed]
    for session in _sessions(timed, *_stretches(timed, steps)):
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
    """Each with the number of its recovery in the list of those; null: none."""
    spans = _recoveries(timed)
    faults = [(at, event) for at, event in timed if event["event"] == "fault"]
    ends = [
        next((index for index, (start, end, _) in enumerate(spans) if start - TICK <= at <= end), None)
        for at, _ in faults
    ]
    return [{**_without_name(fault), "recovery": end} for (_, fault), end in zip(faults, ends, strict=True)]


def _stragglers(events: Sequence[Record]) -> list[Record]:
    """Who was named, and at which step let off; null: never."""
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


def _stretches(timed: Sequence[_Timed], steps: Iterable[Record]) -> tuple[list[_Stretch], dict[int, float]]:
    """The steps, added up from one time at which something happened to the next; and when those were done
    that were saved."""
    times = [*sorted({edge for at, event in timed for edge in _edges(at, event)}), math.inf]
    saved = {event.get("step", -1) for _, event in timed if event["event"] in _SAVES}
    numbers: list[float] = [*sorted(saved), math.inf]
    stretches, done = [_Stretch(0.0, 0.0, -math.inf, 0)], dict[int, float]()
    for step in steps:
        end, number = step.get("time"), step["step"]
        if end is None or (begin := end - step["seconds"]) >= end:
            continue
        if not stretches[-1].takes(begin, end, number):
            until = times[bisect_right(times, begin)]
            stretches.append(
                _Stretch(
                    begin, begin, until if end < until else -math.inf, numbers[bisect_left(numbers, number)]
                )
            )
        stretches[-1].add(begin, step)
        if number in saved:
            done[number] = end
    return stretches[1:], done


def _edges(at: float, event: Record) -> Iterator[float]:
    """When something began or ended that an event tells of."""
    yield at
    if seconds := event.get("seconds"):
        yield at - seconds
        yield at - seconds + (event.get("stall_seconds") or 0.0)


def _sessions(
    timed: Sequence[_Timed], steps: Sequence[_Stretch], saved: Mapping[int, float]
) -> Iterator[_Session]:
    groups = [timed[first:last] for first, last in pairwise([*_session_starts(timed), len(timed)])]
    starts = [at - (event.get("start_up_seconds") or 0.0) for at, event in (group[0] for group in groups)]
    for group, (start, until) in zip(groups, pairwise([*starts, math.inf]), strict=True):
        inside = tuple(step for step in steps if start <= step.end < until)
        yield _Session(
            start, max(group[-1][0], *(step.end for step in inside), start), tuple(group), inside, saved
        )


def _this_run(events: Sequence[Record]) -> list[_Timed]:
    """Events with their timestamps, from the last start that did not resume."""
    timed = sorted(
        ((_timestamp(event), event) for event in events if "time" in event), key=lambda pair: pair[0]
    )
    fresh = [index for index in _session_starts(timed) if timed[index][1]["event"] == "start"]
    return timed[fresh[-1] if fresh else 0 :]


def _session_starts(timed: Sequence[_Timed]) -> list[int]:
    """Where a session begins: at the first event, and at a start or resume that is not the way out of a
    fault."""
    recoveries = _recoveries(timed)
    marks = [
        index for index, (_, event) in enumerate(timed) if event["event"] in (*_BREAK, *_BEGIN, *_CLOSED)
    ]
    around = zip([None, *marks], marks, [*marks[1:], None], strict=False)
    again = [
        index
        for before, index, after in around
        if timed[index][1]["event"] in _BEGIN
        and not any(start - TICK <= timed[index][0] <= end for start, end, _ in recoveries)
        and not _continues(
            None if before is None else timed[before][1], None if after is None else timed[after][1]
        )
    ]
    return sorted({0, *again}) if timed else []


def _recoveries(timed: Iterable[_Timed]) -> list[tuple[float, float, Record]]:
    """Each with when it began and ended."""
    recoveries = (
        (at, event)
        for at, event in timed
        if event["event"] == "recovery" and event.get("seconds") is not None
    )
    return [(at - event["seconds"], at, event) for at, event in recoveries]


def _continues(before: Record | None, after: Record | None) -> bool:
    """Whether the team that begins between these takes over from one that broke, though no recovery is
    recorded: that one parted on purpose, or this one broke as well, as the next generation of the same
    run.
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
    """Seconds of each part: all time of a session goes to the first that claims it; then steps are split into
    work and waits."""
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
    """For each interval between two edges the index of the first claim that covers it; -1: none. Later claims
    are overwritten by earlier ones.
    """
    index_of = {edge: index for index, edge in enumerate(edges)}
    owner = [-1] * (len(edges) - 1)
    for index in reversed(range(len(claims))):
        first, last = max(claims[index].start, edges[0]), min(claims[index].end, edges[-1])
        if first < last:
            owner[index_of[first] : index_of[last]] = [index] * (index_of[last] - index_of[first])
    return owner


def _split(claim: _Claim, seconds: float) -> Iterator[tuple[str, float]]:
    """A claim's time by part; that of steps by their shares."""
    if claim.part != "step":
        yield claim.part, seconds
    for part, share in claim.shares.items():
        yield part, seconds * share / (claim.end - claim.start)


def _claims(session: _Session) -> Iterator[_Claim]:
    evaluated: dict[int, list[float]] = defaultdict(list)
    for stretch in session.steps:
        yield _Claim("step", stretch.start, stretch.end, stretch.parts)
    for at, event in session.events:
        if event["event"] == "evaluate" and event.get("seconds"):
            evaluated[event.get("step", -1)].append(at)
            yield _Claim("evaluation", at - event["seconds"], at)
    for at, event in session.events:
        if event["event"] in _SAVES:
            ended = [over for over in evaluated.get(event.get("step", -1), []) if over <= at]
            yield _save(event, at, session.saved.get(event.get("step", -1)), ended)
    begins, ends = (
        sorted(stretch.start for stretch in session.steps),
        sorted(stretch.end for stretch in session.steps),
    )
    yield from _breaks(session, begins, ends)
    breaks = [at for at, event in session.events if event["event"] in _BREAK]
    yield _Claim("start_up", session.start, min((*begins, *breaks), default=session.end))


def _save(event: Record, at: float, step_done: float | None, evaluated: Sequence[float]) -> _Claim:
    """Training stops when a save begins: after its step, and after an evaluation there. The event comes when
    it is complete."""
    seconds = event.get("seconds")
    stall: float = event.get("stall_seconds") or seconds or 0.0
    begun: float = step_done if step_done is not None else at - (stall if seconds is None else seconds)
    begun = max([begun, *evaluated])
    return _Claim("checkpoint", begun, begun + stall)


def _breaks(session: _Session, begins: Sequence[float], ends: Sequence[float]) -> Iterator[_Claim]:
    """For each fault: what was lost before it, and the time until training goes on or the next fault."""
    recoveries = _recoveries(session.events)
    breaks = [(at, event) for at, event in session.events if event["event"] in _BREAK]
    for index, (at, event) in enumerate(breaks):
        # A fault is written down some time after it happened; its recovery knows when that was.
        own_recovery = [recovery for recovery in recoveries if recovery[0] <= at <= recovery[1]][:1]
        began, recovery_event = (own_recovery[0][0], own_recovery[0][2]) if own_recovery else (at, {})
        next_break = [later for later, _ in breaks[index + 1 :] if later > at]
        until = [over for _, over, _ in own_recovery] or [begin for begin in begins if begin >= at]
        yield _Claim("recovery", began, min([*until, *next_break], default=session.end))
        if event["event"] == "fault":
            lost = recovery_event.get("lost_seconds")
            ends_before = [end for end in ends if end <= began] or [
                session.start if lost is None else began - lost
            ]
            yield _Claim("lost", max(session.start, ends_before[-1]), began)
