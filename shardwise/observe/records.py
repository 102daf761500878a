"""Reading a run's records, `metrics.jsonl` and `events.jsonl`: the one place where their lines become values.

Nothing that trains or reports may stop for a damaged line: a flipped bit turns `"step"` into `"stdp"`, a disk that filled up
leaves half a line. A line that is not whole, that lacks what its reader needs, or in which a field we know has a value of another
kind, is skipped and counted; `Lines.damaged` says how many. The torn end of a file is not counted: it is being written.

Files grow by a line a step. They are read one line at a time, and from their end by whoever needs only the last steps. A line
costs about ten microseconds, of which the JSON parser takes most; a million steps take seconds, and none of them is kept here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]
Check = Callable[[Any], bool]

LONGEST_LINE = 1 << 22
"""Bytes: a longer line is damaged. One with the load of ten thousand experts takes a twentieth of it."""
_BLOCK = 1 << 16
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(record: Any, indent: int | None = None) -> str:
    """Strict JSON: floats to the bit, non-finite ones as strings."""
    return json.dumps(_encode_non_finite(record), allow_nan=False, ensure_ascii=False, indent=indent)


def from_json(text: str | bytes) -> Any:
    """What `to_json` wrote, non-finite floats included."""
    return _decode_non_finite(json.loads(text))


class Lines:
    """The whole records of a file of JSON lines, one after the other; `damaged` counts the lines that were skipped so far."""

    def __init__(self, path: Path, needs: tuple[str, ...], fields: dict[str, Check]) -> None:
        self.path, self.damaged = path, 0
        self._needs, self._fields = frozenset(needs), fields

    def __iter__(self) -> Iterator[Record]:
        self.damaged = 0
        with self.path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                if (record := self.parse(line)) is not None:
                    yield record
                elif line.endswith(b"\n") or len(line) == LONGEST_LINE:
                    self.damaged += 1
                    _skip_rest(file, line)

    def backwards(self) -> Iterator[tuple[int, Record]]:
        """The same records from the last to the first, each with the offset at which its line ends."""
        self.damaged = 0
        with self.path.open("rb") as file:
            for end, line in _lines_backwards(file):
                if (record := self.parse(line)) is not None:
                    yield end, record
                else:
                    self.damaged += 1

    def parse(self, line: bytes) -> Record | None:
        """A line's record; None for a line that is torn or damaged."""
        if not line.endswith(b"\n"):
            return None
        try:
            record = json.loads(line.decode())
        except (ValueError, RecursionError):
            return None
        if not isinstance(record, dict) or not self._needs <= record.keys():
            return None
        if b"NaN" in line or b"Infinity" in line:
            record = _decode_non_finite(record)
        fields = self._fields
        for key, value in record.items():
            if key in fields and not fields[key](value):
                return None
        return record


def read_metrics(folder: Path, needs: tuple[str, ...] = ("step",)) -> Lines:
    """The steps of the run in this folder; each has the fields that are needed."""
    return Lines(folder / "metrics.jsonl", ("step", *needs), _METRICS)


def read_events(folder: Path) -> Lines:
    """The events of the run in this folder, in the order in which they were written."""
    return Lines(folder / "events.jsonl", ("event",), _EVENTS)


def newest(folder: Path) -> Record:
    """The last step in the records of this folder; empty before the first. Reads only the end of the file."""
    try:
        return next((record for _, record in read_metrics(folder).backwards()), {})
    except OSError:
        return {}


def _skip_rest(file: BinaryIO, line: bytes) -> None:
    while line and not line.endswith(b"\n"):
        line = file.readline(LONGEST_LINE)


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Whole lines from the end of the file, with the offsets at which they end; what follows the last line end is torn."""
    position = file.seek(0, 2)
    rest, torn = b"", True
    while position:
        size = min(max(_BLOCK, len(rest)), position)  # a long line is not put together again and again
        position -= size
        file.seek(position)
        first, *pieces = (file.read(size) + rest).split(b"\n")
        end = position + len(first) + sum(len(piece) + 1 for piece in pieces)
        for piece in reversed(pieces):
            if not torn:
                yield end + 1, piece + b"\n"
            torn = False
            end -= len(piece) + 1
        rest = first
    if not torn:
        yield len(rest) + 1, rest + b"\n"


# -- What each field holds, where it is there -----------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    """Any float: a loss need not be finite."""
    return type(value) is float or _is_finite(value)


def _is_finite(value: Any) -> bool:
    return math.isfinite(value) if type(value) is float else _is_count(abs(value)) if type(value) is int else False


def _is_measured(value: Any) -> bool:
    """A number that can be added up; null where it was not measured."""
    return value is None or _is_finite(value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_rank(value: Any) -> bool:
    return value is None or _is_count(value)


def _is_spans(value: Any) -> bool:
    return type(value) is dict and all(map(_is_finite, value.values()))


def _is_collectives(value: Any) -> bool:
    return type(value) is dict and all(map(_is_collective, value.values()))


def _is_collective(value: Any) -> bool:
    return type(value) is dict and _is_count(value.get("count")) and _is_count(value.get("bytes"))


def _is_latest(value: Any) -> bool:
    return type(value) is dict and _is_rank(value.get("rank")) and _is_finite(value.get("behind"))


def _is_load(value: Any) -> bool:
    return type(value) is list and all(map(_is_number, value))


def _is_timestamp(value: Any) -> bool:
    try:
        return type(value) is str and math.isfinite(datetime.fromisoformat(value).timestamp())
    except (ValueError, OverflowError, OSError):
        return False


def _is_duration(value: Any) -> bool:
    return value is None or (_is_finite(value) and value >= 0)


def _is_table(value: Any) -> bool:
    return value is None or type(value) is dict


_METRICS: dict[str, Check] = {
    "step": _is_count,
    "time": _is_finite,
    "loss": _is_number,
    "gradient_norm": _is_number,
    "learning_rate": _is_finite,
    "tokens": _is_count,
    "tokens_per_second": _is_measured,
    "sequences_per_second": _is_measured,
    "seconds": _is_finite,
    "mfu": _is_measured,
    "memory_bytes": _is_measured,
    "spans": _is_spans,
    "data": _is_text,
    "collectives": _is_collectives,
    "communication_efficiency": _is_measured,
    "communication_seconds": _is_finite,
    "latest": _is_latest,
    "loss_scale": _is_number,
    "skipped": _is_bool,
    "expert_imbalance": _is_number,
    "expert_load": _is_load,
    "held_out_loss": _is_number,
}
_EVENTS: dict[str, Check] = {
    "event": _is_text,
    "time": _is_timestamp,
    "step": _is_count,
    "seconds": _is_duration,
    "stall_seconds": _is_duration,
    "lost_seconds": _is_duration,
    "lost_steps": _is_count,
    "bytes": _is_measured,
    "rank": _is_rank,
    "world": _is_count,
    "generation": _is_count,
    "factor": _is_finite,
    "kind": _is_text,
    "cause": _is_text,
    "memory_kind": _is_text,
    "layout": _is_table,
    "parts": _is_table,
    "held_out_loss": _is_number,
}


def _encode_non_finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, dict):
        return {key: _encode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode_non_finite(item) for item in value]
    return value


def _decode_non_finite(value: Any) -> Any:
    if isinstance(value, str):
        return _NOT_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode_non_finite(item) for item in value]
    return value
