"""A timeline of some steps as a file of Chrome's trace events, which Perfetto (ui.perfetto.dev) shows.

Each rank writes what it did and what was under way meanwhile: a lane for the step, cut into spans, and a lane
for each axis with its collectives; another one where two of them overlap, since events of a lane must not.
What lies beside computing was hidden, what lies beside a wait was not. Ranks of one machine have one clock,
so that their files can be laid side by side (`merge`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.errors import UserError
from shardwise.files import parse_as, read_bytes, regular_file_opener
from shardwise.observe.clock import Stretch, present_time
from shardwise.observe.files import write_text
from shardwise.observe.ledger import Collective
from shardwise.observe.records import to_json

MERGED = "trace.json"
STEP_LANE = "step"
_ADVICE = "It is written by `shardwise train` with observe.trace; remove it."

Event = dict[str, Any]


class StepTrace:
    """The events of one rank, gathered step by step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lanes: dict[str, int] = {}
        """Numbers of the lanes, by name."""
        self.events: list[Event] = [_named("process_name", rank, 0, f"rank {rank}")]
        self._epoch = present_time() - perf_counter()

    def add(self, step: int, stretches: Sequence[Stretch], collectives: Sequence[Collective]) -> None:
        """What happened in a step. Collectives of which nobody knows the end are left out."""
        for part in stretches:
            self._add(STEP_LANE, part.name, part.start, part.end, {"step": step})
        ends: dict[str, float] = {}
        for collective in sorted(collectives, key=lambda collective: collective.start):
            if collective.ended is not None:
                lane = _free_lane(collective, ends)
                ends[lane] = collective.ended
                known = {"step": step, "bytes": collective.bytes, "plain_bytes": collective.plain}
                notes = {name: value for name, value in known.items() if value is not None}
                self._add(lane, collective.kind, collective.start, collective.ended, notes)

    def write(self, folder: Path) -> None:
        """Into the run's folder."""
        write_text(folder / f"trace-rank{self.rank}.json", to_json({"traceEvents": self.events}))

    def _add(self, lane: str, name: str, start: float, end: float, notes: dict[str, Any]) -> None:
        if lane not in self.lanes:
            self.lanes[lane] = len(self.lanes)
            self.events.append(_named("thread_name", self.rank, self.lanes[lane], lane))
        times = {"ts": 1e6 * (self._epoch + start), "dur": 1e6 * (end - start)}
        self.events.append(
            {"name": name, "ph": "X", **times, "pid": self.rank, "tid": self.lanes[lane], "args": notes}
        )


def _free_lane(collective: Collective, ends: dict[str, float]) -> str:
    """The first lane of its axis in which nothing is under way when it begins."""
    lane, number = collective.axis, 1
    while ends.get(lane, collective.start) > collective.start:
        number += 1
        lane = f"{collective.axis} ({number})"
    return lane


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


@with_config(ConfigDict(strict=True))
class _TraceFile(TypedDict):
    traceEvents: list[Event]  # Chrome's name


def merge(folder: Path) -> Path | None:
    """Lay the timelines of all ranks side by side in one file; None where there are none."""
    files = sorted(folder.glob("trace-rank*.json"))
    if not files:
        return None
    events = [
        event
        for path in files
        for event in parse_as(_TraceFile, read_bytes(path, _ADVICE), path, _ADVICE)["traceEvents"]
    ]
    merged = folder / MERGED
    try:
        with open(merged, "w", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(to_json({"traceEvents": events}))
    except OSError as error:
        raise UserError(
            f"{merged} cannot be written ({error.strerror}); the ranks' own traces are beside it"
        ) from None
    return merged
