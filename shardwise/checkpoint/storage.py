"""Storage of checkpoints: a folder on this machine, or any address that fsspec supports. It needs no torch.

Both have the same interface, and both can write a small file whole or not at all, which makes a save atomic.
On a disk that is a write under another name, fsync, rename, fsync of the folder, which POSIX promises to be
all or nothing, also through a loss of power. An object store has no rename, but there a single put is atomic.
Local paths use plain system calls and not fsspec, which has no fsync, and whose rename may be a copy.
"""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.errors import UserError
from shardwise.files import file_in_folder, read_bytes, reading

BLOCK = 1 << 24
"""Bytes read or written at once: large enough that the calls cost nothing, small enough for any memory."""


class Storage(ABC):
    """A folder. The names in arguments are those of files and folders in it."""

    address: str

    @abstractmethod
    def inside(self, name: str) -> Storage:
        """Return the storage of a folder in it."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names in it; none if it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the bytes of a file; None: there is no such file."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill a buffer with a part of a file."""

    @abstractmethod
    def blocks(self, name: str) -> Iterator[bytes | memoryview]:
        """Yield the content of a file in blocks; a block is valid until the next one."""

    @abstractmethod
    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file for writing: it is durable after the `with` block, and removed if that fails."""
        yield from ()

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """Write a small file atomically and durably. If this fails, an older file of that name stays."""

    @abstractmethod
    def make(self) -> None:
        """Create the folder and its parents."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file or a folder with its content, if it exists."""

    @abstractmethod
    def move(self, name: str, to: Storage) -> None:
        """Move a folder in it to another folder of the same storage."""


def storage(address: str | Path) -> Storage:
    """Return the storage at a path or an address such as `s3://bucket/run`."""
    text = str(address)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _Local(text)
    return _Local(rest) if scheme == "file" else _Remote.at(text)


def parent(address: str) -> str:
    """Return the folder that contains a checkpoint."""
    return address.rstrip("/").rpartition("/")[0] or "."


def same_folder(first: str, second: str) -> bool:
    """Return whether two addresses name the same folder."""
    if "://" in first or "://" in second:
        return first.rstrip("/") == second.rstrip("/")
    return Path(first).resolve() == Path(second).resolve()


class _Local(Storage):
    def __init__(self, address: str) -> None:
        self.address, self._path = address, Path(address)

    def inside(self, name: str) -> Storage:
        return _Local(str(self._path / name))

    def names(self) -> list[str]:
        with reading(self._path), suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(self._path))
        return []

    def size(self, name: str) -> int | None:
        path = file_in_folder(self._path, name)
        with reading(path):
            return path.stat().st_size if path.is_file() else None

    def read(self, name: str) -> bytes:
        return read_bytes(file_in_folder(self._path, name))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        with file_in_folder(self._path, name).open("rb", buffering=0) as stream:
            stream.seek(start)
            filled = 0
            while filled < len(buffer):
                got = stream.readinto(buffer[filled:])
                if not got:
                    raise OSError(f"{self._path / name} ends before byte {start + len(buffer)}")
                filled += got

    def blocks(self, name: str) -> Iterator[bytes | memoryview]:
        buffer = memoryview(bytearray(BLOCK))
        with file_in_folder(self._path, name).open("rb", buffering=0) as stream:
            while got := stream.readinto(buffer):
                yield buffer[:got]

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        path = self._path / name
        try:
            with path.open("xb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def put(self, name: str, content: bytes) -> None:
        aside = f".{name}.{secrets.token_hex(4)}"
        with self.create(aside) as stream:
            stream.write(content)
        try:
            _settle(self._path)  # the names of the files written before come first
            (self._path / aside).replace(self._path / name)
        except OSError:
            (self._path / aside).unlink(missing_ok=True)
            raise
        _settle(self._path)

    def make(self) -> None:
        missing = [path for path in (self._path, *self._path.parents) if not path.exists()]
        self._path.mkdir(parents=True, exist_ok=True)
        for path in missing:
            _settle(path.parent)

    def remove(self, name: str) -> None:
        path = self._path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def move(self, name: str, to: Storage) -> None:
        (self._path / name).rename(Path(to.address) / name)


def _settle(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Remote(Storage):
    """A folder behind fsspec, which caches listings: they are dropped before every question about names."""

    def __init__(self, address: str, system: Any, path: str) -> None:
        self.address, self._system, self._path = address, system, path

    @classmethod
    def at(cls, address: str) -> Storage:
        import fsspec

        try:
            system, path = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError) as error:
            raise UserError(
                f"{address} cannot be reached: {error}. Give a folder, or an address that fsspec knows."
            ) from None
        return cls(address.rstrip("/"), system, path.rstrip("/"))

    def inside(self, name: str) -> Storage:
        return _Remote(f"{self.address}/{name}", self._system, f"{self._path}/{name}")

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        try:
            return sorted(
                path.rstrip("/").rpartition("/")[2] for path in self._system.ls(self._path, detail=False)
            )
        except FileNotFoundError:
            return []

    def size(self, name: str) -> int | None:
        self._system.invalidate_cache()
        try:
            file = self._system.info(f"{self._path}/{name}")
        except FileNotFoundError:
            return None
        return int(file["size"]) if file["type"] == "file" else None

    def read(self, name: str) -> bytes:
        return bytes(self._system.cat_file(f"{self._path}/{name}"))

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        content = (
            self._system.cat_file(f"{self._path}/{name}", start=start, end=start + len(buffer))
            if len(buffer)
            else b""
        )
        if len(content) != len(buffer):
            raise OSError(f"{self.address}/{name} ends before byte {start + len(buffer)}")
        buffer[:] = content

    def blocks(self, name: str) -> Iterator[bytes | memoryview]:
        with self._system.open(f"{self._path}/{name}", "rb") as stream:
            while block := stream.read(BLOCK):
                yield block

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        try:
            with self._system.open(f"{self._path}/{name}", "wb") as stream:
                yield stream
        except BaseException:
            with suppress(Exception):
                self.remove(name)
            raise

    def put(self, name: str, content: bytes) -> None:
        self._system.pipe_file(f"{self._path}/{name}", content)

    def make(self) -> None:
        self._system.makedirs(self._path, exist_ok=True)

    def remove(self, name: str) -> None:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            self._system.rm(f"{self._path}/{name}", recursive=True)

    def move(self, name: str, to: Storage) -> None:
        assert isinstance(to, _Remote), "moves stay within one storage"
        self._system.mv(f"{self._path}/{name}", f"{to._path}/{name}", recursive=True)
