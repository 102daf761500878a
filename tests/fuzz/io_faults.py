"""Every call of the file system by some work, made to fail in turn, as SQLite tests itself.

A call counts if it is about the folder under test: a path in it, or a file opened there. The n-th fails with
an error of the operating system, once or from then on, or is the last that the process makes: a crash, after
which nothing reaches the disk, not even what a `finally` would do. Then the truth is looked up on the disk,
without faults.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

KINDS = ("ENOSPC", "EIO", "EIO for good", "crash")
_BY_PATH = (
    "open",
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "truncate",
)
_BY_FILE = ("fsync", "fstat", "ftruncate")
_OF_STREAMS = ("write", "writelines", "read", "readinto", "readline", "flush", "truncate", "seek")


class Crashed(BaseException):
    """The process is gone."""


@dataclass
class Disk:
    """The calls so far, and which of them fails."""

    folder: Path
    kind: str = "none"
    fails_at: int = -1
    calls: list[str] = field(default_factory=list)
    files: set[int] = field(default_factory=set)

    def call(self, what: str) -> None:
        self.calls.append(what)
        number = len(self.calls) - 1
        if self.kind == "crash" and number >= self.fails_at:
            raise Crashed(what)
        if number == self.fails_at or (self.kind.endswith("for good") and number >= self.fails_at):
            code = getattr(errno, self.kind.split()[0])
            raise OSError(code, os.strerror(code))

    @property
    def failed(self) -> bool:
        """Whether the fault came at all."""
        return self.kind != "none" and len(self.calls) > self.fails_at

    def is_here(self, target: Any) -> bool:
        if isinstance(target, int):
            return target in self.files
        return isinstance(target, str | os.PathLike) and os.path.abspath(os.fspath(target)).startswith(
            str(self.folder)
        )


class _Stream:
    """An open file whose every use is a call."""

    def __init__(self, stream: Any, disk: Disk) -> None:
        self._stream, self._disk = stream, disk
        disk.files.add(stream.fileno())

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        if name not in _OF_STREAMS:
            return value

        def use(*arguments: Any) -> Any:
            self._disk.call(f"stream.{name}")
            return value(*arguments)

        return use

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *reason: Any) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        while line := self.readline():
            yield line

    def close(self) -> None:
        if not self._stream.closed:
            self._disk.files.discard(self._stream.fileno())
            if self._disk.kind == "crash" and self._disk.failed:
                with open(os.devnull, "wb") as nowhere:  # what was buffered is lost
                    os.dup2(nowhere.fileno(), self._stream.fileno())
            self._stream.close()


@contextmanager
def faulty(folder: Path, kind: str = "none", fails_at: int = -1) -> Iterator[Disk]:
    """The file system below a folder fails as asked."""
    disk = Disk(folder.resolve(), kind, fails_at)
    real = {name: getattr(os, name) for name in (*_BY_PATH, *_BY_FILE)}
    opened = io.open

    def watched(name: str) -> Callable[..., Any]:
        def act(*arguments: Any, **options: Any) -> Any:
            here = bool(arguments) and disk.is_here(arguments[0])
            if here:
                disk.call(name)
            result = real[name](*arguments, **options)
            if here and name == "open":
                disk.files.add(result)
            return result

        return act

    def open_stream(file: Any, *arguments: Any, **options: Any) -> Any:
        if not disk.is_here(file):
            return opened(file, *arguments, **options)
        disk.call("open stream")
        return _Stream(opened(file, *arguments, **options), disk)

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(os, name, watched(name))
        patch.setattr(io, "open", open_stream)
        patch.setattr(builtins, "open", open_stream)
        patch.setattr(
            "shardwise.observe.record_files.FileIO",
            lambda path, mode, opener=None: open_stream(path, mode + "b", buffering=0),
        )
        yield disk
    if kind == "crash":
        close_files(disk.folder)


def close_files(folder: Path) -> None:
    """Close the files below a folder that this process left open, as the system does when a process ends.

    Their descriptors stay valid, because an object may still hold one and close it later.
    """
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{folder.resolve()}/"):
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), int(descriptor))


def count_calls(folder: Path, work: Callable[[], object]) -> int:
    """How many calls some work makes when nothing fails."""
    with faulty(folder) as disk:
        work()
    return len(disk.calls)
