"""Writing a run's own records: `metrics.jsonl`, one object a step, and `events.jsonl`, one object an event.

JSON lines are appended with one unbuffered write each, so a killed run has every finished step on disk and at
most one torn line, which readers skip and the next writer cuts off. Floats are written in the shortest form
that reads back to the same bits, so two runs can be compared exactly by comparing their files. JSON has no
NaN or infinity; those are written as the strings "NaN", "Infinity" and "-Infinity", which any JSON parser
accepts and readers (records.py) turn back into floats.

Records tell of training and must not stop it. What cannot be written, because the disk is full or the file
server away, is kept in memory, the newest `KEPT_BYTES` of it, and written as soon as that is possible; the
first failure is said, and the end of it. A run folder that was deleted is said too, and made again.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatch
from io import FileIO
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.files import regular_file_opener
from shardwise.observe.clock import present_time
from shardwise.observe.format import format_bytes
from shardwise.observe.records import Record, read_metrics, to_json

Say = Callable[[str], None]
"""Tells the user something that is no reason to stop."""
KEPT_BYTES = 16 << 20
"""How much that cannot be written is kept in memory: about twenty thousand steps."""
PROBE_BYTES = 1 << 20
"""What must fit into a folder at the start of a run."""
_BLOCK = 1 << 16
_WRITTEN = {
    "": ("config.toml*", "plan.json*", "metrics.jsonl", "events.jsonl", "wandb-id", "trace*.json*"),
    "logs": ("rank-*.log*", "workers-*.json*"),
}
"""What a run writes, by folder; checkpoints are made under new names."""

log = logging.getLogger("shardwise")


class MetricsFile:
    """`metrics.jsonl`. Resuming at step N drops the lines after step N, so that each step appears once."""

    def __init__(self, path: str | Path, resume_step: int = 0, say: Say = log.warning) -> None:
        self.path = Path(path)
        self.dropped: list[float] = []
        """The seconds that each of the dropped steps took, which are done again."""
        try:
            self.dropped = _keep_until(self.path, resume_step)
        except OSError as error:
            say(f"steps after {resume_step} may be twice in {self.path}: {_reason(error)}")
        self._lines = _LineWriter(self.path, say)

    def write(self, record: Record) -> None:
        """Append the record of one step."""
        self._lines.write(record)

    def close(self) -> None:
        """No more steps."""
        self._lines.close()


class EventsFile:
    """`events.jsonl`: starts, saves, evaluations, skipped steps, stops. Kept over resumes: it is the run's
    history."""

    def __init__(self, path: str | Path, say: Say = log.warning) -> None:
        self.path = Path(path)
        self._lines = _LineWriter(self.path, say)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the present time (UTC) and its fields."""
        time = datetime.fromtimestamp(present_time(), UTC).isoformat(timespec="milliseconds")
        self._lines.write({"time": time, "event": event, **fields})

    def close(self) -> None:
        """No more events."""
        self._lines.close()


def write_text(path: Path, text: str, say: Say = log.warning) -> None:
    """Put a file in place whole, in one move; that it cannot be written is said, and the old one stays."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "w", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(text)
        beside.replace(path)
    except OSError as error:
        say(f"{path} cannot be written: {_reason(error)}")


def check_room(folder: Path, setting: str, needed: int) -> None:
    """Refuse a folder that cannot be written to now, or where fewer bytes are free than are needed. One that
    is not there yet is not made: the folder that it would be made in is asked."""
    there = next(above for above in [folder.absolute(), *folder.absolute().parents] if os.path.lexists(above))
    probe, way_out = there / f".room-{os.getpid()}", f"Free space there, or give another {setting}"
    try:
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
            free = shutil.disk_usage(there).free
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{setting} = {str(folder)!r}: cannot be written ({_reason(error)}). {way_out}"
        ) from None
    if free < needed:
        room = f"{format_bytes(free)} are free, and one checkpoint of this model takes {format_bytes(needed)}"
        raise UserError(f"{setting} = {str(folder)!r}: {room}. {way_out}")


def check_run_files(folder: Path) -> None:
    """Refuse a run folder in which something that a run writes is there already, and is not a regular
    file."""
    found = []
    for place, patterns in _WRITTEN.items():
        with suppress(OSError):  # no such folder: `check_room` tells whether it can be made
            entries = os.listdir(folder / place)
            names = [name for name in entries if any(fnmatch(name, pattern) for pattern in patterns)]
            found += [str(Path(place) / name) for name in names if not (folder / place / name).is_file()]
    if found:
        *most, last = sorted(found)
        names_found = (
            f"{', '.join(most)} and {last} are not regular files" if most else f"{last} is not a regular file"
        )
        raise UserError(
            f"run.folder = {str(folder)!r}: {names_found}, which a run would write. "
            f"Remove {'them' if most else 'it'}, or give another run.folder"
        )


class _LineWriter:
    """Appends one JSON object a line, or keeps it until it can; never raises."""

    def __init__(self, path: Path, say: Say) -> None:
        self._path, self._say = path, say
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes, self._lost = 0, 0
        self._trouble: str | None = None

    def write(self, record: Record) -> None:
        line = to_json(record).encode() + b"\n"
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > KEPT_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._lost += 1
        self._try()

    def close(self) -> None:
        if self._waiting:
            self._try()
        if lost := self._lost + len(self._waiting):
            self._say(f"{lost} records could not be written to {self._path} and are lost: {self._trouble}")
        if self._file is not None:
            self._file.close()

    def _try(self) -> None:
        """Write all that waits; say when that begins to fail, and when it works again."""
        try:
            file = self._opened()
            while self._waiting:
                _append(file, self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            if self._trouble is None:
                kept = f"up to {KEPT_BYTES >> 20} MiB of records are kept in memory until it can be written"
                self._say(f"{self._path} cannot be written: {_reason(error)}. Training goes on; {kept}")
            self._trouble = _reason(error)
            return
        if self._trouble is not None:
            lost = (
                f"{self._lost} records were too many to keep and are lost"
                if self._lost
                else "nothing was lost"
            )
            self._say(f"{self._path} can be written again; {lost}")
            self._trouble, self._lost = None, 0

    def _opened(self) -> FileIO:
        """The file, opened again should it not be in its place any more."""
        if self._file is not None and not _is_in_place(self._file, self._path):
            self._say(
                f"{self._path} was deleted or moved while the run was writing it; a new one holds what comes "
                f"from now on"
            )
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self._path)
            self._file = FileIO(self._path, "a", opener=regular_file_opener)
        return self._file


def _append(file: FileIO, line: bytes) -> None:
    """The whole line, or nothing of it."""
    before, done = os.fstat(file.fileno()).st_size, 0
    try:
        while done < len(line):
            done += file.write(line[done:])
    except OSError:
        if done and os.fstat(file.fileno()).st_size == before + done:  # nobody else has written since
            file.truncate(before)
        raise


def _is_in_place(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _keep_until(path: Path, step: int) -> list[float]:
    """Cut off the lines after this step; the seconds that each of those steps took. Reads only what it cuts,
    and two lines more.

    A damaged number may pass for an early step. So a line is the last to keep only if the one before it is of
    an earlier step.
    """
    if not path.is_file():
        return []
    kept: int | None = None
    cut, dropped = 0, []
    for end, record in read_metrics(path.parent).backwards():
        if kept is not None and record["step"] < kept:
            break
        kept, cut = (record["step"], end) if record["step"] <= step else (None, 0)
        if kept is None:
            dropped.append(record.get("seconds", 0.0))
    if cut < path.stat().st_size:
        os.truncate(path, cut)
    return dropped


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = position = file.seek(0, 2)
        while position:
            start = max(0, position - _BLOCK)
            file.seek(start)
            if (found := file.read(position - start).rfind(b"\n")) >= 0:
                position = start + found + 1
                break
            position = start
        if position < end:
            file.truncate(position)
