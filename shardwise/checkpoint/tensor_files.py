"""Read and write the tensors of a checkpoint in one process, with one tensor in memory at a time.

Data files hold raw bytes; each tensor begins at a multiple of 64. A JSON file lists for each key the dtype,
the shape of the whole tensor, and its pieces: offset and shape, the file, and the first byte in it. A tensor
can be assembled from this list on any mesh. The list is checked before any data are read: pieces must lie
inside their tensor and inside their file, and fill the tensor.

Tensors are identified by their keys (state_key.py defines the text). A checkpoint may hold weights alone.

Another thread computes the checksum of a data file while it is written: zlib releases the interpreter lock,
so with a second core it costs nothing if the disk is slower than 1 GB/s, and no file is read again.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import torch
from pydantic import AfterValidator, ConfigDict, Field
from torch import Tensor

from shardwise.checkpoint.folder import MANIFEST, Manifest, WrittenFile, advice_if_damaged, read_manifest
from shardwise.checkpoint.state_key import Box, StateKey
from shardwise.checkpoint.storage import BLOCK, Storage, storage
from shardwise.errors import Unreadable, UserError, shown
from shardwise.files import is_temporary, parse_as

ALIGNMENT = 64
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128",
    )
}  # fmt: skip
"""Dtypes of tensors in checkpoints."""

Count = Annotated[int, Field(ge=0, lt=1 << 60)]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]
Files = dict[str, WrittenFile]
"""Size and CRC-32 of files by name."""


def _known_dtype(name: str) -> str:
    if name not in DTYPES:
        raise ValueError(f"not one of {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor, and the place of its bytes."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    offset: Shape
    shape: Shape
    file: str
    start: Count


@dataclass(frozen=True)
class StoredTensor:
    """The description of a tensor in a checkpoint."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    dtype: Annotated[str, AfterValidator(_known_dtype)]
    shape: Shape
    pieces: tuple[TensorPiece, ...]

    def bytes_of(self, shape: Shape) -> int:
        """Return the bytes of a part of this shape."""
        return math.prod(shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Contents:
    """A checkpoint opened for reading."""

    address: str
    manifest: Manifest
    tensors: dict[StateKey, StoredTensor]

    @classmethod
    def open(cls, folder: str | Path) -> Contents:
        """Read the manifest and the list of tensors, and check them as far as is possible without reading the
        tensors."""
        where = storage(folder)
        manifest = read_manifest(where.address)
        indices = [name for name in manifest.files if name.startswith("tensors-")]
        if len(indices) != 1:
            raise UserError(
                f"{where.address}/{MANIFEST} does not belong to a checkpoint: it names {len(indices)} lists "
                "of tensors"
            )
        _refuse_damaged(where, manifest, indices)
        tensors = _parse(where.read(indices[0]), manifest, f"{where.address}/{indices[0]}")
        return cls(where.address, manifest, tensors)

    def read(self, key: StateKey) -> Tensor:
        """Return one whole tensor, put together from its pieces."""
        stored = self.tensors[key]
        result = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        for piece in stored.pieces:
            region = result
            for dim, (begin, length) in enumerate(zip(piece.offset, piece.shape, strict=True)):
                region = region.narrow(dim, begin, length)
            region.copy_(self.read_rows(stored, piece, 0, piece.shape[0] if piece.shape else 1))
        return result

    def read_rows(self, stored: StoredTensor, piece: TensorPiece, first: int, count: int) -> Tensor:
        """Return some rows of a piece, which are contiguous in the file too."""
        shape = (count, *piece.shape[1:]) if piece.shape else ()
        buffer = torch.empty(stored.bytes_of(shape), dtype=torch.uint8)
        start = piece.start + stored.bytes_of((first, *piece.shape[1:]))
        storage(self.address).read_into(piece.file, start, _view(buffer))
        return buffer.view(DTYPES[stored.dtype]).view(shape)

    def check(self) -> None:
        """Read every byte, and raise an error with the name of the first damaged file."""
        _refuse_damaged(storage(self.address), self.manifest, self.manifest.files)


def _refuse_damaged(where: Storage, manifest: Manifest, files: Iterable[str]) -> None:
    for problem in damaged_files(where, manifest, files):
        raise UserError(f"{problem}. {advice_if_damaged(where)}")


Progress = Callable[[int, int, int, int], None]
"""Takes the number of files read and of all, and the number of bytes read and of all."""


def faults(folder: str | Path, on_progress: Progress = lambda *_: None) -> Iterator[str]:
    """Read every byte of a checkpoint, and yield a sentence for each damaged file."""
    try:
        contents = Contents.open(folder)
    except UserError as error:
        yield str(error)
        return
    manifest, done = contents.manifest, 0
    for count, (name, file) in enumerate(manifest.files.items()):
        on_progress(count, len(manifest.files), done, manifest.total_bytes)
        yield from damaged_files(storage(contents.address), manifest, [name])
        done += file["bytes"]


def damaged_files(where: Storage, manifest: Manifest, files: Iterable[str]) -> Iterator[str]:
    """Yield a sentence for each of these files whose checksum is not that of the manifest."""
    for name in files:
        problem = _problem_of_file(where, manifest, name)
        if problem:
            yield problem


def _problem_of_file(where: Storage, manifest: Manifest, name: str) -> str | None:
    crc = size = 0
    try:
        for block in where.blocks(name):
            crc, size = zlib.crc32(block, crc), size + len(block)
    except OSError as error:
        if is_temporary(error):
            raise Unreadable(f"{where.address}/{name} cannot be read ({error})") from None
        return f"{where.address}/{name} cannot be read ({error})"
    whole = manifest.files[name] == {"bytes": size, "crc32": crc}
    return None if whole else f"{where.address}/{name} is damaged"


def _parse(content: bytes, manifest: Manifest, source: str) -> dict[StateKey, StoredTensor]:
    listed = parse_as(dict[str, StoredTensor], content, source)
    tensors = {StateKey.parse(text): stored for text, stored in listed.items()}
    checks = _PieceChecks(manifest, source)
    for key, stored in tensors.items():
        checks.check(key, stored)
    checks.check_files(tensors)
    return tensors


@dataclass(frozen=True)
class _PieceChecks:
    """Checks that pieces lie inside their tensor and their file, fill the tensor, and share no byte of the
    file."""

    manifest: Manifest
    source: str

    def check(self, key: StateKey, stored: StoredTensor) -> None:
        if math.prod(stored.shape) >= 1 << 60:
            self._refuse(f"{key} has an absurd shape {stored.shape}")
        for piece in stored.pieces:
            self._check_piece(key, stored, piece)
        boxes = [_box(piece.offset, piece.shape) for piece in stored.pieces]
        empty = 0 in stored.shape and not boxes
        if not empty and not _fills(boxes, _box((0,) * len(stored.shape), stored.shape)):
            self._refuse(f"the pieces of {key} do not fill it, each part once")

    def _check_piece(self, key: StateKey, stored: StoredTensor, piece: TensorPiece) -> None:
        inside = len(piece.offset) == len(piece.shape) == len(stored.shape) and all(
            length and begin + length <= size
            for begin, length, size in zip(piece.offset, piece.shape, stored.shape, strict=True)
        )
        if not inside:
            self._refuse(f"a piece of {key} is empty or reaches beyond it")
        if piece.file not in self.manifest.files or not piece.file.startswith("rank-"):
            self._refuse(f"a piece of {key} lies in {shown(piece.file)}")
        if piece.start + stored.bytes_of(piece.shape) > self.manifest.files[piece.file]["bytes"]:
            self._refuse(f"a piece of {key} reaches beyond the end of {piece.file}")

    def check_files(self, tensors: dict[StateKey, StoredTensor]) -> None:
        spans: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for key, stored in tensors.items():
            for piece in stored.pieces:
                spans[piece.file].append((piece.start, piece.start + stored.bytes_of(piece.shape), str(key)))
        for file, parts in spans.items():
            for (_, end, first), (start, _, second) in pairwise(sorted(parts)):
                if start < end:
                    self._refuse(f"pieces of {first} and {second} share bytes of {file}")

    def _refuse(self, problem: str) -> NoReturn:
        raise UserError(f"{self.source} does not belong to a checkpoint: {problem}")


def _box(offset: Shape, shape: Shape) -> Box:
    return tuple((begin, begin + length) for begin, length in zip(offset, shape, strict=True))


def _fills(boxes: list[Box], whole: Box, cuts: int = 16) -> bool:
    """Return whether boxes cover the whole, each point once.

    A mesh splits a tensor by cuts through its whole width, one dim after the other. So the boxes are split
    again along every plane that none of them crosses, until each is alone, which takes at most n log n steps.
    """
    if len(boxes) <= 1:
        return boxes == [whole]
    for dim, (first, last) in enumerate(whole):
        groups = _split(boxes, dim)
        if len(groups) > 1:
            edges = [first, *(max(box[dim][1] for box in group) for group in groups)]
            parts = [(*whole[:dim], edge, *whole[dim + 1 :]) for edge in pairwise(edges)]
            fits = edges[-1] == last and cuts > 0
            return fits and all(
                _fills(group, part, cuts - 1) for group, part in zip(groups, parts, strict=True)
            )
    return False


def _split(boxes: list[Box], dim: int) -> list[list[Box]]:
    groups: list[list[Box]] = []
    reached = -1
    for box in sorted(boxes, key=lambda box: box[dim]):
        begin, end = box[dim]
        if begin >= reached:
            groups.append([])
        groups[-1].append(box)
        reached = max(reached, end)
    return groups


def encode(tensors: dict[StateKey, StoredTensor]) -> bytes:
    """Return the list of tensors as its file holds it, one line per tensor."""
    lines = (f"{json.dumps(str(key))}: {json.dumps(asdict(stored))}" for key, stored in tensors.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


class DataFile:
    """A file to which raw tensors are written."""

    def __init__(self, stream: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._stream, self._pool, self._size = stream, pool, 0
        self._crc: Future[int] = pool.submit(int)

    def append(self, tensor: Tensor) -> int:
        """Write a tensor from any device, and return the byte at which it begins."""
        self._write(memoryview(bytes(-self._size % ALIGNMENT)))
        start = self._size
        self._write(_view(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)))
        return start

    def _write(self, content: memoryview) -> None:
        for begin in range(0, len(content), BLOCK):
            block = content[begin : begin + BLOCK]
            before = self._crc.result()  # at most one block behind, so that only one block waits in memory
            if len(block) > 1 << 16:
                self._crc = self._pool.submit(zlib.crc32, block, before)
            else:
                self._crc = _done(zlib.crc32(block, before))
            self._stream.write(block)
            self._size += len(block)

    def size_and_crc(self) -> WrittenFile:
        """Return the size and the CRC-32 of the file so far."""
        return {"bytes": self._size, "crc32": self._crc.result()}


def _view(numbers: Tensor) -> memoryview:
    return numbers.numpy().data


def _done(value: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(value)
    return future


@contextmanager
def data_file(where: Storage, name: str) -> Iterator[DataFile]:
    """Open a new data file: it is durable after the `with` block, and removed if that fails."""
    with ThreadPoolExecutor(1, "checksum") as pool, where.create(name) as stream:
        yield DataFile(stream, pool)


def save_id() -> str:
    """Return a random id that is part of the names of a save's files."""
    return secrets.token_hex(6)


def commit(
    where: Storage, manifest: Manifest, tensors: dict[StateKey, StoredTensor], files: Files, identity: str
) -> Manifest:
    """Make a checkpoint of these data files, which are durable already. Return its manifest."""
    index, name = encode(tensors), f"tensors-{identity}.json"
    with where.create(name) as stream:
        stream.write(index)
    files = {**files, name: {"bytes": len(index), "crc32": zlib.crc32(index)}}
    for file, written in files.items():
        if where.size(file) != written["bytes"]:  # another run may have cleaned up here
            raise OSError(f"{where.address}/{file} was removed while the checkpoint was being written")
    complete = replace(manifest, files=files)
    where.put(MANIFEST, complete.encode())
    return complete


def write_checkpoint(
    folder: str | Path, manifest: Manifest, tensors: Iterable[tuple[StateKey, Tensor]]
) -> None:
    """Write a checkpoint from one process, tensor by tensor. It exists whole at the end, or not at all."""
    where, identity = storage(folder), save_id()
    file = f"rank-0-{identity}.data"
    stored: dict[StateKey, StoredTensor] = {}
    try:
        where.make()
        with data_file(where, file) as data:
            for key, tensor in tensors:
                shape = tuple(tensor.shape)
                start = data.append(tensor)
                pieces = (TensorPiece((0,) * len(shape), shape, file, start),) if tensor.numel() else ()
                stored[key] = StoredTensor(str(tensor.dtype).removeprefix("torch."), shape, pieces)
            size_and_crc = data.size_and_crc()
        commit(where, manifest, stored, {file: size_and_crc}, identity)
    except OSError as error:
        with contextlib.suppress(OSError):
            where.remove(file)
        raise UserError(f"the checkpoint could not be written to {where.address}: {error}") from None
