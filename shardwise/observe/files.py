"""The run's own records: `metrics.jsonl`, one object a step, and `events.jsonl`, one object an event.

JSON lines are appended with one unbuffered write each, so a killed run has every finished step on disk and at most one
torn line, which readers skip and the next writer cuts off. Floats are written in the shortest form that reads back to the
same bits, so two runs can be compared exactly by comparing their files. JSON has no NaN or infinity; those are written as
the strings "NaN", "Infinity" and "-Infinity", which any JSON parser accepts and `read_lines` turns back into floats.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from shardwise.errors import RunFailed

Record = dict[str, Any]

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(record: Any, indent: int | None = None) -> str:
    """Strict JSON: floats to the bit, non-finite ones as strings."""
    return json.dumps(_encode_non_finite(record), allow_nan=False, ensure_ascii=False, indent=indent)


def from_json(text: str | bytes) -> Any:
    """What `to_json` wrote, non-finite floats included."""
    return _decode_non_finite(json.loads(text))


def read_lines(path: Path) -> Iterator[Record]:
    """Every whole record of a file of JSON lines; a torn line is skipped."""
    with path.open("rb") as file:
        for line in file:
            if (record := _parse(line)) is not None:
                yield record


class MetricsFile:
    """`metrics.jsonl`. Resuming at step N drops the lines after step N, so that each step appears once."""

    def __init__(self, path: str | Path, resume_step: int = 0) -> None:
        self.path = Path(path)
        with explain_write_errors(self.path):
            _keep_until(self.path, resume_step)
        self._lines = _LineWriter(self.path)

    def write(self, record: Record) -> None:
        """Append the record of one step."""
        self._lines.write(record)

    def close(self) -> None:
        """No more steps."""
        self._lines.close()


class EventsFile:
    """`events.jsonl`: starts, saves, evaluations, skipped steps, stops. Kept over resumes: it is the run's history."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines = _LineWriter(self.path)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the present time (UTC) and its fields."""
        self._lines.write({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields})

    def close(self) -> None:
        """No more events."""
        self._lines.close()


class _LineWriter:
    """Appends one JSON object a line; a torn last line left by a killed run is cut off first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with explain_write_errors(path):
            _cut_torn_line(path)
            self._file = FileIO(path, "a")

    def write(self, record: Record) -> None:
        data = memoryview(to_json(record).encode() + b"\n")
        with explain_write_errors(self._path):
            while data:
                data = data[self._file.write(data) :]

    def close(self) -> None:
        with explain_write_errors(self._path):
            self._file.close()


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusal into a message that names the file, the reason and the way out."""
    try:
        yield
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be written: {error.strerror or error}. Free space there or give another folder with "
            "run.folder=PATH, then start again: training resumes from the last checkpoint in the run folder."
        ) from None


def _keep_until(path: Path, step: int) -> None:
    """Only whole lines up to this step, put in place in one move, so that a kill here loses nothing."""
    if not path.is_file():
        return
    beside = path.with_name(path.name + ".kept")
    with path.open("rb") as old, beside.open("wb") as new:
        new.writelines(line for line in old if (record := _parse(line)) is not None and record.get("step", 0) <= step)
    os.replace(beside, path)


def _cut_torn_line(path: Path) -> None:
    if path.is_file() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _parse(line: bytes) -> Record | None:
    """A whole record, or None for a torn line: without its end, or not an object."""
    try:
        record = from_json(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


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
