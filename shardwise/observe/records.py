"""Read a run's records, `metrics.jsonl` and `events.jsonl`. Only this module parses their lines.

Nothing that trains or reports may stop because of a damaged line: a flipped bit turns `"step"` into `"stdp"`,
a full disk leaves half a line. A line is skipped and counted if it is incomplete, if it lacks a field that
the reader needs, or if a known field has a value of the wrong type; `Lines.damaged` is the number of such
lines. An incomplete last line is not counted, because it is being written.

The files grow by one line per step. They are read one line at a time, and from their end if only the last
steps are needed. A line of any length takes no more memory than the longest line that is read. Only regular
files are opened. pydantic parses and checks a line in a few microseconds, so a million steps take seconds,
and none of them is kept here.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.errors import UserError
from shardwise.files import open_regular

Record = dict[str, Any]
"""One line of a file, as a dictionary."""

LONGEST_LINE = 1 << 22
"""Maximum number of bytes of a line; a longer one counts as damaged. The load of ten thousand experts takes a
twentieth of it.
"""
_BLOCK = 1 << 16
_ADVICE = "It is written by `shardwise train`; restore or remove it."
_CONTROLS = {code: f"\\u{code:04x}" for code in range(127, 160)}
"""Escapes of the control characters that JSON leaves unescaped and a terminal may obey."""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(record: object, indent: int | None = None) -> str:
    """Return strict JSON, with exact floats, non-finite floats as strings, and all control characters as
    escapes.
    """
    values = _encode_non_finite(record)
    return json.dumps(values, allow_nan=False, ensure_ascii=False, indent=indent).translate(_CONTROLS)


def from_json(text: str | bytes) -> Any:
    """Return the value that `to_json` wrote, including non-finite floats."""
    return _decode_non_finite(json.loads(text))


_KNOWN = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
"""Known fields must have their types; other fields are allowed."""
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(strict=False, allow_inf_nan=True)]
"""A number that need not be finite. A non-finite one is a string in the file."""
MAX_MEASURED = 1e18
"""Maximum absolute value of a measurement. Sums, ratios and rounded values of such numbers are finite."""
Measured = Annotated[float, Field(ge=-MAX_MEASURED, le=MAX_MEASURED)]
Seconds = Annotated[float, Field(ge=0, le=MAX_MEASURED)]


def _check_drawable(loss: float) -> float:
    if math.isfinite(loss) and abs(loss) > 1e100:  # float32 ends at 3e38, even if a run diverges
        raise ValueError("out of range")
    return loss


Loss = Annotated[Number, AfterValidator(_check_drawable)]
"""A number that need not be finite, but can be drawn in a curve if it is."""


def _check_timestamp(text: str) -> str:
    try:
        datetime.fromisoformat(text).timestamp()
    except (OverflowError, OSError) as error:
        raise ValueError(str(error)) from None
    return text


@with_config(_KNOWN)
class _Calls(TypedDict):
    count: Count
    bytes: Count


@with_config(_KNOWN)
class _AxisTimes(TypedDict):
    seconds: Seconds
    hidden: Seconds


@with_config(_KNOWN)
class _Latest(TypedDict):
    rank: Count | None
    behind: Measured


@with_config(_KNOWN)
class _Updates(TypedDict):
    made: Count
    conflicting: Count
    rows: Count
    conflicting_rows: Count


@with_config(_KNOWN)
class _Step(TypedDict, total=False):
    """A line of metrics.jsonl, with the fields that are read."""

    step: Count
    time: Measured
    loss: Loss
    gradient_norm: Number
    learning_rate: float
    tokens: Count
    tokens_per_second: Measured | None
    sequences_per_second: Measured | None
    seconds: Seconds
    mfu: Measured | None
    memory_bytes: Measured | None
    spans: dict[str, Seconds]
    data: str
    collectives: dict[str, _Calls]
    communication_efficiency: Measured | None
    communication: dict[str, _AxisTimes]
    latest: _Latest
    load_imbalance: Measured
    rows: list[Count]
    staleness: list[Count]
    dropped: Count
    updates: _Updates
    loss_scale: Number
    skipped: bool
    float8: dict[str, tuple[Number, Number]]
    again: Count
    expert_imbalance: Number
    expert_load: list[Number]
    held_out_loss: Loss


@with_config(_KNOWN)
class _Event(TypedDict, total=False):
    """A line of events.jsonl, with the fields that are read."""

    event: str
    time: Annotated[str, AfterValidator(_check_timestamp)]
    step: Count
    seconds: Seconds | None
    stall_seconds: Seconds | None
    start_up_seconds: Seconds
    lost_seconds: Seconds | None
    lost_steps: Count
    bytes: Measured | None
    rank: Count | None
    world: Annotated[int, Field(ge=1, lt=2**63)]
    generation: Count
    factor: Measured
    kind: str
    cause: str
    memory_kind: str
    layout: dict[str, object] | None
    parts: dict[str, object]
    held_out_loss: Loss


_NEEDED = {"recovery": ("seconds",), "straggler": ("factor",)}
"""Fields without which an event of that name has no meaning."""


def _check_event(event: Record) -> Record:
    if any(event.get(name) is None for name in _NEEDED.get(event.get("event", ""), ())):
        raise ValueError("incomplete")
    return event


_STEP = TypeAdapter(_Step)
_EVENT = TypeAdapter(Annotated[_Event, AfterValidator(_check_event)])


class Lines:
    """The valid records of a file of JSON lines, in order. `damaged` counts the lines that were skipped so
    far.
    """

    def __init__(self, path: Path, needs: tuple[str, ...], kind: TypeAdapter[Any]) -> None:
        self.path, self.damaged = path, 0
        self._needs, self._kind = frozenset(needs), kind

    def __iter__(self) -> Iterator[Record]:
        self.damaged = 0
        with open_regular(self.path, _ADVICE) as file:
            while line := file.readline(LONGEST_LINE):
                if (record := self.parse(line)) is not None:
                    yield record
                elif line.endswith(b"\n") or len(line) == LONGEST_LINE:
                    self.damaged += 1
                    _skip_rest(file, line)

    def backwards(self) -> Iterator[tuple[int, Record]]:
        """Yield the same records from the last to the first, each with the offset at which its line ends."""
        self.damaged = 0
        with open_regular(self.path, _ADVICE) as file:
            for end, line in _lines_backwards(file):
                if (record := self.parse(line)) is not None:
                    yield end, record
                else:
                    self.damaged += 1

    def parse(self, line: bytes) -> Record | None:
        """Return the record of a line; None for an incomplete or damaged line."""
        if not line.endswith(b"\n") or len(line) > LONGEST_LINE:
            return None
        try:
            record: Record = self._kind.validate_json(line)
        except ValueError:
            return None
        return record if self._needs <= record.keys() else None


def read_metrics(folder: Path, needs: tuple[str, ...] = ()) -> Lines:
    """Return the steps of the run in this folder; each has the fields that are needed."""
    return Lines(folder / "metrics.jsonl", ("step", *needs), _STEP)


def read_events(folder: Path) -> Lines:
    """Return the events of the run in this folder, in the order in which they were written."""
    return Lines(folder / "events.jsonl", ("event",), _EVENT)


def median_of(records: Sequence[Record], field: str) -> float | None:
    """Return the median of a field over the records that have it; None if none has."""
    known = [record[field] for record in records if record.get(field) is not None]
    return statistics.median(known) if known else None


def newest(folder: Path) -> Record:
    """Return the last step in the records of this folder; empty before the first. Only the end of the file is
    read.
    """
    try:
        return next((record for _, record in read_metrics(folder).backwards()), {})
    except (OSError, UserError):
        return {}


def _skip_rest(file: BinaryIO, line: bytes) -> None:
    """Read to the end of a line that is too long."""
    while line and not line.endswith(b"\n"):
        line = file.readline(LONGEST_LINE)


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield lines from the end of the file, with the offsets at which they end.

    The text after the last line end is incomplete and left out. A line that is too long is not assembled: it
    is yielded as an empty line, which counts as damaged too.
    """
    end = position = file.seek(0, 2)
    # The part that was read of the line that ends at `end`, the number of its bytes that were skipped, and
    # whether it is the last, incomplete line.
    rest, passed, torn = b"", 0, True
    while position:
        # The size doubles while a long line is read, so that its parts are not joined too often.
        size = min(max(_BLOCK, len(rest)), position)
        position -= size
        file.seek(position)
        first, *pieces = (file.read(size) + rest).split(b"\n")
        for piece in reversed(pieces):
            if not torn:
                yield end + 1, b"\n" if passed else piece + b"\n"
            end, passed, torn = end - len(piece) - passed - 1, 0, False
        rest, passed = (b"", passed + len(first)) if passed or len(first) >= LONGEST_LINE else (first, 0)
    if not torn:
        yield end + 1, b"\n" if passed else rest + b"\n"


def _encode_non_finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_non_finite(item) for item in value]
    return value


def _decode_non_finite(value: object) -> object:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_non_finite(item) for item in value]
    return value
