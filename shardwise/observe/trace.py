"""A timeline of some steps as a file of Chrome trace events, for Perfetto (ui.perfetto.dev).

Each rank writes what it did and which collectives ran meanwhile: one lane for the step, split into spans, and
one lane for each axis with its collectives. If two collectives of an axis overlap, it gets another lane,
because events of a lane must not overlap. A collective beside computing was hidden; a collective beside a
wait was not. The ranks of one machine have the same clock, so their files can be combined (`merge`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.errors import UserError
from shardwise.files import Json, parse_as, read_bytes, regular_file_opener
from shardwise.observe.clock import SpanPart, present_time
from shardwise.observe.ledger import Collective
from shardwise.observe.record_files import write_text
from shardwise.observe.records import to_json

MERGED = "trace.json"
"""Name of the file with the timelines of all ranks."""
STEP_LANE = "step"
"""Name of the lane with the spans of the step."""
_ADVICE = "It is written by `shardwise train` with observe.trace; remove it."

Event = Json


class StepTrace:
    """The events of one rank, collected step by step."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lanes: dict[str, int] = {}
        """Numbers of the lanes by name."""
        self.events: list[Event] = [_named("process_name", rank, 0, f"rank {rank}")]
        self._epoch = present_time() - perf_counter()

    def add(self, step: int, stretches: Sequence[SpanPart], collectives: Sequence[Collective]) -> None:
        """Add the events of a step. Collectives whose end is unknown are left out."""
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
        """Write the events to a file in the run's folder."""
        write_text(folder / f"trace-rank{self.rank}.json", to_json({"traceEvents": self.events}))

    def _add(self, lane: str, name: str, start: float, end: float, notes: Mapping[str, object]) -> None:
        if lane not in self.lanes:
            self.lanes[lane] = len(self.lanes)
            self.events.append(_named("thread_name", self.rank, self.lanes[lane], lane))
        times = {"ts": 1e6 * (self._epoch + start), "dur": 1e6 * (end - start)}
        self.events.append(
            {"name": name, "ph": "X", **times, "pid": self.rank, "tid": self.lanes[lane], "args": notes}
        )


def _free_lane(collective: Collective, ends: dict[str, float]) -> str:
    """Return the first lane of its axis in which no other collective is running when this one begins."""
    lane, number = collective.axis, 1
    while ends.get(lane, collective.start) > collective.start:
        number += 1
        lane = f"{collective.axis} ({number})"
    return lane


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


@with_config(ConfigDict(strict=True))
class _TraceFile(TypedDict):
    traceEvents: list[Event]  # the name in Chrome's format


def merge(folder: Path) -> Path | None:
    """Write the timelines of all ranks into one file; return None if there are none."""
    files = sorted(folder.glob("trace-rank*.json"))
    if not files:
        return None
    traces = [parse_as(_TraceFile, read_bytes(path, _ADVICE), path, _ADVICE) for path in files]
    events = [event for trace in traces for event in trace["traceEvents"]]
    merged = folder / MERGED
    try:
        with open(merged, "w", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(to_json({"traceEvents": events}))
    except OSError as error:
        raise UserError(
            f"{merged} cannot be written ({error.strerror}); the ranks' own traces are beside it"
        ) from None
    return merged
