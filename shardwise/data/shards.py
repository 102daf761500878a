"""Prepared tokens on disk: written once, and memory-mapped when they are read.

A prepared folder contains

    index.json          the dtype, the tokenizer, counts, and the checksums of each shard; the index ends with
                        a checksum of itself
    shard-00000.bin     token ids, little-endian, uint16 where the vocabulary allows, else uint32
    shard-00000.ends    int64: for each document that ends in this shard, the offset just after its last token
    shard-00000.answers only for conversations; pairs of int64: for each span of tokens that the model learns,
                        the offset of its first token and the offset just after its last
    tokenizer.json      a copy of the tokenizer, unless it is `bytes`; beside it tokenizer_config.json and
                        chat_template.jinja, if the tokenizer has them

Shards form one long row of tokens (`tokens.py` reads it); a document may continue in the next shard. A token
takes two bytes for vocabularies of up to 65,536 ids and four above, and a document takes eight bytes. Every
block of 1 MiB has a CRC-32. A file is written under a temporary name, synced and renamed, so that a crash
never leaves an incomplete shard that looks complete. Data of another version are refused; the command that
prepares data makes them again.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

from shardwise.errors import UserError
from shardwise.files import file_in_folder, read_bytes, read_sealed, regular_file_opener, seal

VERSION = 2
"""Version of the format. Since version 2 the index is sealed (files.py)."""
BLOCK = 1 << 20
"""Number of bytes that have one checksum."""
INDEX = "index.json"
"""Name of the index file."""

_Count = Annotated[int, Field(ge=0, lt=1 << 60)]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]


@dataclass(frozen=True)
class Shard:
    """The files of one shard, and what they must contain."""

    __pydantic_config__ = ConfigDict(strict=True)

    file: Annotated[str, Field(pattern=r"^shard-\d{5,9}\.bin$")]
    tokens: Annotated[_Count, Field(ge=1)]
    documents: _Count
    blocks: tuple[_Checksum, ...]
    ends_checksum: _Checksum
    answers: _Count = 0
    """Number of learned spans, if the index says that the folder contains conversations."""
    answers_checksum: _Checksum = 0

    @property
    def ends_file(self) -> str:
        """Name of the file of document ends beside the tokens."""
        return self.file.removesuffix(".bin") + ".ends"

    @property
    def answers_file(self) -> str:
        """Name of the file of learned spans beside the tokens of conversations."""
        return self.file.removesuffix(".bin") + ".answers"


@dataclass(frozen=True)
class Index:
    """Description of a prepared folder."""

    __pydantic_config__ = ConfigDict(strict=True)

    source: str
    tokenizer: Annotated[str, Field(pattern=r"^(bytes|tokenizer\.json)$")]
    tokenizer_fingerprint: str
    vocabulary: Annotated[int, Field(ge=1, le=1 << 32)]
    end: _Count
    dtype: Annotated[str, Field(pattern="^<u[24]$")]
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]
    version: int = VERSION
    holds_answers: bool = False
    """Whether documents are conversations. These are cut only if they must be, never attend to each other,
    and are learned in parts.
    """

    @property
    def tokens(self) -> int:
        """Number of all tokens, including end-of-document tokens."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Number of documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Write the index. It is the last file, so a folder with an index is complete."""
        totals = {"tokens": self.tokens, "documents": self.documents}
        write_atomically(folder / INDEX, seal({**asdict(self), **totals}))

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Return the index of a folder. Raise a `UserError` if it cannot be read or contradicts itself."""
        path, advice = folder / INDEX, prepare_again(folder)
        try:
            content = read_bytes(file_in_folder(folder, INDEX), advice)
        except FileNotFoundError:
            raise UserError(f"{path} is missing. {advice}") from None
        index = read_sealed(cls, content, path, ("version", VERSION), advice)
        for problem in index._contradictions():
            raise UserError(f"{path} contradicts itself: {problem}. {advice}")
        return index

    def _contradictions(self) -> Iterator[str]:
        if self.dtype != token_dtype(self.vocabulary) or self.end >= self.vocabulary:
            yield (
                f"a vocabulary of {self.vocabulary} with dtype {self.dtype} "
                f"and {self.end} as the end of a document"
            )
        size = int(self.dtype[-1])
        for number, shard in enumerate(self.shards):
            if shard.file != shard_name(number):
                yield f"shards[{number}] is {shard.file}"
            if len(shard.blocks) != -(-shard.tokens * size // BLOCK):
                yield f"{shard.file} has {shard.tokens} tokens and {len(shard.blocks)} checksums"
            if shard.answers and not self.holds_answers:
                yield f"{shard.file} has {shard.answers} answers, but the folder has none"
            if shard.documents > shard.tokens:
                yield f"{shard.file} has {shard.tokens} tokens and {shard.documents} documents"


def shard_name(number: int) -> str:
    """Return the name of the file of a shard's tokens."""
    return f"shard-{number:05d}.bin"


def token_dtype(vocabulary: int) -> str:
    """Return the smaller of two dtypes that can represent every id."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that it exists completely or not at all."""
    aside = path.with_name(path.name + ".partial")
    with open(aside, "wb", opener=regular_file_opener) as file:
        file.write(content)
        _sync(file)
    os.replace(aside, path)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def prepare_again(folder: Path) -> str:
    """Return the advice for a damaged folder."""
    return f"Delete the folder {folder} and prepare the data again."


class ShardWriter:
    """Writes one shard. Checksums are computed before the bytes reach the disk, so that they detect bad
    writes.
    """

    def __init__(self, folder: Path, number: int, dtype: str) -> None:
        self.tokens = 0
        self._answers: list[NDArray[np.int64]] = []
        self._path = folder / shard_name(number)
        self._aside = self._path.with_name(self._path.name + ".partial")
        # `finish` or `abandon` closes the file.
        self._file = open(self._aside, "wb", opener=regular_file_opener)  # noqa: SIM115
        self._dtype = np.dtype(dtype)
        self._buffer = bytearray()
        self._ends: list[int] = []
        self._blocks: list[int] = []

    def append(
        self, ids: NDArray[np.generic], ends_document: bool, learnt: NDArray[np.bool_] | None = None
    ) -> None:
        """Add tokens, the last of which may end a document.

        For a conversation, `learnt` says which tokens are learned.
        """
        if learnt is not None:
            # These are the positions at which a learned span begins or ends.
            changes = np.flatnonzero(np.diff(learnt, prepend=False, append=False))
            self._answers.append(changes + self.tokens)
        self._buffer += ids.astype(self._dtype).tobytes()
        self.tokens += len(ids)
        if ends_document:
            self._ends.append(self.tokens)
        while len(self._buffer) >= BLOCK:
            self._flush(BLOCK)

    def finish(self) -> Shard:
        """Sync and rename the files. Only now does the shard exist."""
        if self._buffer:
            self._flush(len(self._buffer))
        _sync(self._file)
        self._file.close()
        ends = np.asarray(self._ends, dtype="<i8").tobytes()
        shard = Shard(self._path.name, self.tokens, len(self._ends), tuple(self._blocks), zlib.crc32(ends))
        if self._answers:
            answers = np.concatenate(self._answers).astype("<i8").tobytes()
            shard = replace(shard, answers=len(answers) // 16, answers_checksum=zlib.crc32(answers))
            write_atomically(self._path.with_name(shard.answers_file), answers)
        write_atomically(self._path.with_name(shard.ends_file), ends)
        os.replace(self._aside, self._path)
        return shard

    def abandon(self) -> None:
        """Remove the files of an unfinished shard."""
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def _flush(self, length: int) -> None:
        block = bytes(self._buffer[:length])
        self._file.write(block)
        self._blocks.append(zlib.crc32(block))
        del self._buffer[:length]
