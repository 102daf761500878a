"""Where checkpoints lie: a folder on this machine, or any address that fsspec knows. No torch.

Both answer the same few questions, and both can do the one thing that makes a save atomic: put a small file
in place whole or not at all. On a disk that is a write under another name, fsync, rename, fsync of the
folder, which POSIX promises to be all or nothing, also through a loss of power. An object store has no
rename, but there a single put is atomic by itself. Local paths use plain system calls and not fsspec, because
it offers neither fsync nor a way to know that a rename is one.
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
    """One folder. Names are of files or folders in it."""

    address: str

    @abstractmethod
    def inside(self, name: str) -> Storage:
        """A folder in it."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in it; nothing where it does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A whole file."""

    @abstractmethod
    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill a buffer with a part of a file."""

    @abstractmethod
    def blocks(self, name: str) -> Iterator[bytes | memoryview]:
        """A whole file, block by block; a block is valid until the next is asked for."""

    @abstractmethod
    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """A new file to write to: durable after the block, and removed if the block fails."""
        yield from ()

    @abstractmethod
    def put(self, name: str, content: bytes) -> None:
        """A small file, in place whole and durable or, if this fails, not at all: an older one of that name
        stays."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder, and those above it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all in it; what is not there is removed already."""

    @abstractmethod
    def move(self, name: str, to: Storage) -> None:
        """Move a folder in it to another folder of the same storage."""


def storage(address: str | Path) -> Storage:
    """The storage behind a path or an address such as `s3://bucket/run`."""
    text = str(address)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return _Local(text)
    return _Local(rest) if scheme == "file" else _Remote.at(text)


def parent(address: str) -> str:
    """The folder that a checkpoint lies in."""
    return address.rstrip("/").rpartition("/")[0] or "."


def same_folder(first: str, second: str) -> bool:
    """Whether two addresses are of the same folder."""
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
    """Through fsspec, which caches listings: every question about names asks it to forget them first."""

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
