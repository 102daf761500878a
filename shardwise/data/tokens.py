"""Read prepared tokens as one long memory-mapped row, whatever the shards.

Files are mapped and not read, so that the ranks of one machine share the page cache, and opening a terabyte
takes no time. Each block of 1 MiB is checked against its CRC-32 when it is first read. Data of at most 256
MiB are checked as a whole when they are opened, so that a damaged file is found before training starts. The
tokens of a block are also compared with the vocabulary, because a larger id would read outside the embedding.
"""

from __future__ import annotations

import stat
import zlib
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardwise.data.shards import BLOCK, Index, Shard, prepare_again
from shardwise.errors import UserError
from shardwise.files import file_in_folder

CHECKED_WHOLE = 256 << 20
"""Maximum number of bytes of data that are checked as a whole when they are opened."""


class _MappedShard:
    """One shard, mapped when it is first used."""

    def __init__(self, folder: Path, shard: Shard, index: Index) -> None:
        self.shard = shard
        self._folder = folder
        self._dtype, self._vocabulary = np.dtype(index.dtype), index.vocabulary
        self._verified = np.zeros(len(shard.blocks), dtype=bool)
        self._check_size(shard.file, shard.tokens * self._dtype.itemsize)
        self._check_size(shard.ends_file, shard.documents * 8)
        self.holds_answers = index.holds_answers
        if self.holds_answers:
            self._check_size(shard.answers_file, shard.answers * 16)

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        return np.memmap(self._folder / self.shard.file, dtype=np.uint8, mode="r")

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        """Offset just after the last token of each document, checked."""
        ends = self._offsets(self.shard.ends_file, self.shard.documents, self.shard.ends_checksum)
        # Every document has a token, so an offset is above the one before it, and the first is above 0.
        self._check_order(self.shard.ends_file, ends, ends > np.concatenate([[0], ends[:-1]]))
        return ends

    @cached_property
    def answers(self) -> NDArray[np.int64]:
        """Offsets at which spans of learned tokens begin and end, alternating, checked."""
        answers = self._offsets(self.shard.answers_file, self.shard.answers, self.shard.answers_checksum)
        self._check_order(self.shard.answers_file, answers, answers >= np.concatenate([[0], answers[:-1]]))
        return answers

    def _offsets(self, name: str, count: int, checksum: int) -> NDArray[np.int64]:
        """Map a file of offsets, and compare its checksum."""
        offsets = np.memmap(self._folder / name, dtype="<i8", mode="r") if count else np.zeros(0, dtype="<i8")
        if zlib.crc32(offsets.data) != checksum:
            raise self._damaged(name, "its checksum is wrong")
        return offsets

    def _check_order(self, name: str, offsets: NDArray[np.int64], in_order: NDArray[np.bool_]) -> None:
        if not in_order.all() or (len(offsets) and offsets[-1] > self.shard.tokens):
            raise self._damaged(name, "its offsets do not ascend within the shard")

    def learnt(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return, for each token from start to stop, whether it is learned."""
        if not self.holds_answers:
            return np.ones(stop - start, dtype=bool)
        # An odd number of earlier begins and ends means that the token is inside a span.
        changes = np.searchsorted(self.answers, np.arange(start, stop), side="right")
        return np.asarray(changes % 2 == 1)

    def read(self, start: int, stop: int) -> NDArray[np.generic]:
        """Return the tokens from start to stop, after checking their blocks."""
        size = self._dtype.itemsize
        self.verify(start * size // BLOCK, -(-stop * size // BLOCK))
        return self._bytes[start * size : stop * size].view(self._dtype)

    def verify(self, first: int, last: int) -> None:
        """Check the blocks of [first, last) that were not checked yet."""
        for number in np.flatnonzero(~self._verified[first:last]) + first:
            block = self._bytes[number * BLOCK : (number + 1) * BLOCK]
            if zlib.crc32(block.data) != self.shard.blocks[number]:
                raise self._damaged(self.shard.file, f"the checksum of MiB {number} is wrong")
            if (largest := int(block.view(self._dtype).max())) >= self._vocabulary:
                raise self._damaged(
                    self.shard.file,
                    f"MiB {number} has a token {largest} of a vocabulary of {self._vocabulary}",
                )
            self._verified[number] = True

    def _check_size(self, name: str, expected: int) -> None:
        try:
            status = file_in_folder(self._folder, name).stat()
        except OSError as error:
            raise self._damaged(name, f"it cannot be read: {error.strerror or error}") from None
        size = status.st_size if stat.S_ISREG(status.st_mode) else None
        if size != expected:
            reason = "it is not a file" if size is None else f"it has {size} bytes, not {expected}"
            raise self._damaged(name, reason)

    def _damaged(self, name: str, reason: str) -> UserError:
        return UserError(f"{self._folder / name} is damaged: {reason}. {prepare_again(self._folder)}")


class Tokens:
    """All tokens of a prepared folder as one row, whatever the shards."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder = folder
        self.index = index
        self._shards = [_MappedShard(folder, shard, index) for shard in index.shards]
        self._starts = np.cumsum([0, *(shard.tokens for shard in index.shards)], dtype=np.int64)

    @classmethod
    def open(cls, folder: Path) -> Tokens:
        """Map a prepared folder. Check every size, and every checksum too if that takes no time."""
        tokens = cls(folder, Index.read(folder))
        if len(tokens) * np.dtype(tokens.index.dtype).itemsize <= CHECKED_WHOLE:
            for mapped in tokens._shards:
                mapped.verify(0, len(mapped.shard.blocks))
                _ = mapped.ends, mapped.answers if mapped.holds_answers else None
        return tokens

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, length: int) -> NDArray[np.generic]:
        """Return the tokens from `start` on, across shards. It is a view of the file if one shard contains
        them all.
        """
        parts = [shard.read(first, last) for shard, _, first, last in self._overlaps(start, length)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def boundaries(self, start: int, length: int) -> NDArray[np.int64]:
        """Return the positions, counted from `start`, of the tokens in this window that end a document."""
        ends = [np.zeros(0, dtype=np.int64)]
        for shard, base, first, last in self._overlaps(start, length):
            low, high = np.searchsorted(shard.ends, [first, last], side="right")
            ends.append(shard.ends[low:high] + (base - 1 - start))
        return np.concatenate(ends)

    def learnt(self, start: int, length: int) -> NDArray[np.bool_]:
        """Return, for each token from `start` on, whether it is learned.

        All tokens are, except in a folder of conversations.
        """
        return np.concatenate(
            [shard.learnt(first, last) for shard, _, first, last in self._overlaps(start, length)]
        )

    @property
    def ends(self) -> NDArray[np.int64]:
        """For every document, the position at which the next one begins."""
        bases = self._starts[:-1].tolist()
        return np.concatenate([shard.ends + base for shard, base in zip(self._shards, bases, strict=True)])

    @property
    def answers(self) -> NDArray[np.int64]:
        """In a folder of conversations, the position at which each learned span begins."""
        bases = self._starts[:-1].tolist()
        return np.concatenate(
            [shard.answers[::2] + base for shard, base in zip(self._shards, bases, strict=True)]
        )

    def _overlaps(self, start: int, length: int) -> list[tuple[_MappedShard, int, int, int]]:
        """Return, for each shard in the window: the shard, the position of its first token, and the covered
        part.
        """
        stop = start + length
        assert 0 <= start < stop <= len(self), "window outside the tokens"
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        covered = []
        for shard, base in zip(self._shards[first:last], self._starts[first:last].tolist(), strict=True):
            covered.append((shard, base, max(start - base, 0), min(stop - base, shard.shard.tokens)))
        return covered
