"""Write a run's records: `metrics.jsonl`, one object per step, and `events.jsonl`, one object per event.

JSON lines are appended with one unbuffered write each, so a killed run has every completed step on disk and
at most one incomplete line, which readers skip and the next writer removes. Floats are written in the
shortest form that reads back to the same bits, so two runs can be compared exactly by comparing their files.
JSON has no NaN or infinity; those are written as the strings "NaN", "Infinity" and "-Infinity", which any
JSON parser accepts and readers (records.py) turn back into floats.

Records describe training and must not stop it. Lines that cannot be written, because the disk is full or the
file server is away, are kept in memory, up to the newest `BUFFER_BYTES`, and written as soon as possible. The
first failure is reported, and also its end. If the run's folder was deleted, that is reported too, and it is
created again.
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

from shardwise.errors import UserError
from shardwise.files import regular_file_opener
from shardwise.observe.clock import present_time
from shardwise.observe.format import format_bytes
from shardwise.observe.records import Record, read_metrics, to_json

Warn = Callable[[str], None]
"""Function that tells the user something that is no reason to stop."""
BUFFER_BYTES = 16 << 20
"""Maximum number of bytes of unwritten records in memory: about twenty thousand steps."""
PROBE_BYTES = 1 << 20
"""Number of bytes that must fit into a folder at the start of a run."""
_BLOCK = 1 << 16
_WRITTEN = {
    "": ("config.toml*", "plan.json*", "metrics.jsonl", "events.jsonl", "wandb-id", "trace*.json*"),
    "logs": ("rank-*.log*", "workers-*.json*"),
}
"""Patterns of the files that a run writes, by folder. Checkpoints always get new names."""

log = logging.getLogger("shardwise")


class MetricsFile:
    """The file `metrics.jsonl`. Resuming at step N removes the lines after step N, so that each step appears
    once.
    """

    def __init__(self, path: str | Path, resume_step: int = 0, warn: Warn = log.warning) -> None:
        self.path = Path(path)
        self.dropped: list[float] = []
        """Seconds of each of the removed steps, which are done again."""
        try:
            self.dropped = _keep_until(self.path, resume_step)
        except OSError as error:
            warn(f"steps after {resume_step} may be twice in {self.path}: {_reason(error)}")
        self._lines = _LineWriter(self.path, warn)

    def write(self, record: Record) -> None:
        """Append the record of one step."""
        self._lines.write(record)

    def close(self) -> None:
        """Close the file, because there are no more steps."""
        self._lines.close()


class EventsFile:
    """The file `events.jsonl`, with starts, saves, evaluations, skipped steps and stops.

    It is kept when a run is resumed, because it is the run's history.
    """

    def __init__(self, path: str | Path, warn: Warn = log.warning) -> None:
        self.path = Path(path)
        self._lines = _LineWriter(self.path, warn)

    def write(self, event: str, **fields: object) -> None:
        """Append one event with the present time (UTC) and its fields."""
        time = datetime.fromtimestamp(present_time(), UTC).isoformat(timespec="milliseconds")
        self._lines.write({"time": time, "event": event, **fields})

    def close(self) -> None:
        """Close the file, because there are no more events."""
        self._lines.close()


def write_text(path: Path, text: str, warn: Warn = log.warning) -> None:
    """Write a file completely, in one step. If it cannot be written, warn and keep the old one."""
    beside = path.with_name(path.name + ".part")
    try:
        with open(beside, "w", encoding="utf-8", opener=regular_file_opener) as file:
            file.write(text)
        beside.replace(path)
    except OSError as error:
        warn(f"{path} cannot be written: {_reason(error)}")


def check_room(folder: Path, setting: str, needed: int) -> None:
    """Raise a UserError if a folder cannot be written to now, or has fewer free bytes than needed.

    A folder that does not exist yet is not created: the folder that would contain it is checked.
    """
    paths = [folder.absolute(), *folder.absolute().parents]
    existing = next(path for path in paths if os.path.lexists(path))
    probe, advice = existing / f".room-{os.getpid()}", f"Free space there, or give another {setting}"
    try:
        try:
            probe.write_bytes(bytes(PROBE_BYTES))
            free = shutil.disk_usage(existing).free
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        problem = f"cannot be written ({_reason(error)})"
        raise UserError(f"{setting} = {str(folder)!r}: {problem}. {advice}") from None
    if free < needed:
        room = f"{format_bytes(free)} are free, and one checkpoint of this model takes {format_bytes(needed)}"
        raise UserError(f"{setting} = {str(folder)!r}: {room}. {advice}")


def check_run_files(folder: Path) -> None:
    """Raise a UserError if a name that a run writes exists in its folder and is not a regular file."""
    irregular = []
    for subfolder, patterns in _WRITTEN.items():
        with suppress(OSError):  # if the folder does not exist, `check_room` checks that it can be created
            entries = os.listdir(folder / subfolder)
            names = [name for name in entries if any(fnmatch(name, pattern) for pattern in patterns)]
            irregular += [
                str(Path(subfolder) / name) for name in names if not (folder / subfolder / name).is_file()
            ]
    if irregular:
        *most, last = sorted(irregular)
        problem = f"{last} is not a regular file"
        if most:
            problem = f"{', '.join(most)} and {last} are not regular files"
        raise UserError(
            f"run.folder = {str(folder)!r}: {problem}, which a run would write. "
            f"Remove {'them' if most else 'it'}, or give another run.folder"
        )


class _LineWriter:
    """Appends one JSON object per line, or keeps it until that is possible. It never raises an error."""

    def __init__(self, path: Path, warn: Warn) -> None:
        self._path, self._warn = path, warn
        self._file: FileIO | None = None
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes, self._lost = 0, 0
        self._trouble: str | None = None

    def write(self, record: Record) -> None:
        line = to_json(record).encode() + b"\n"
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        while self._waiting_bytes > BUFFER_BYTES:
            self._waiting_bytes -= len(self._waiting.popleft())
            self._lost += 1
        self._try()

    def close(self) -> None:
        if self._waiting:
            self._try()
        if lost := self._lost + len(self._waiting):
            self._warn(f"{lost} records could not be written to {self._path} and are lost: {self._trouble}")
        if self._file is not None:
            self._file.close()

    def _try(self) -> None:
        """Write all waiting lines. Report when that begins to fail, and when it works again."""
        try:
            file = self._opened()
            while self._waiting:
                _append(file, self._waiting[0])
                self._waiting_bytes -= len(self._waiting.popleft())
        except OSError as error:
            if self._trouble is None:
                kept = f"up to {BUFFER_BYTES >> 20} MiB of records are kept in memory until it can be written"
                self._warn(f"{self._path} cannot be written: {_reason(error)}. Training goes on; {kept}")
            self._trouble = _reason(error)
            return
        if self._trouble is not None:
            lost = f"{self._lost} records were too many to keep and are lost"
            self._warn(f"{self._path} can be written again; {lost if self._lost else 'nothing was lost'}")
            self._trouble, self._lost = None, 0

    def _opened(self) -> FileIO:
        """Return the file. Open it again if it is no longer in its place."""
        if self._file is not None and not _is_in_place(self._file, self._path):
            event = f"{self._path} was deleted or moved while the run was writing it"
            self._warn(f"{event}; a new one holds what comes from now on")
            self._file.close()
            self._file = None
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self._path)
            self._file = FileIO(self._path, "a", opener=regular_file_opener)
        return self._file


def _append(file: FileIO, line: bytes) -> None:
    """Append the whole line, or nothing of it."""
    before, done = os.fstat(file.fileno()).st_size, 0
    try:
        while done < len(line):
            done += file.write(line[done:])
    except OSError:
        if done and os.fstat(file.fileno()).st_size == before + done:  # no other process has written since
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
    """Remove the lines after this step. Return the seconds of each removed step.

    Only the removed lines and two more are read. A damaged number may look like an early step, so a line is
    the last to keep only if the line before it has an earlier step.
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
    """Remove an incomplete last line."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = position = file.seek(0, 2)
        while position:
            start = max(0, position - _BLOCK)
            file.seek(start)
            if (line_end := file.read(position - start).rfind(b"\n")) >= 0:
                position = start + line_end + 1
                break
            position = start
        if position < end:
            file.truncate(position)
