"""Tokenise once: sources in, a folder of shards out (the format is in shards.py).

Pieces of text go through the tokenizer in batches of a few MiB, which its Rust code spreads over all cores.
Whenever a shard is full, the point reached (which file, how many of its pieces) is recorded beside it, so an
interrupted run continues after the last whole shard and ends with the same bytes; what it loses is at most
one shard of work. The record carries a fingerprint of the source files (paths, sizes, times), the tokenizer
and the settings: when any of them changed, preparing starts over. Only a folder that is empty or ours is
written to (ownership.py).

A lock file makes it safe for all ranks of a machine to ask at once: one works, the others wait and find it
done.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from shardwise.config import Data, Source
from shardwise.data.chat import Span, copy_template
from shardwise.data.ownership import LOCK, RECORD, check_target, clear, is_begun, is_prepared
from shardwise.data.shards import VERSION, Index, Shard, ShardWriter, token_dtype, write_atomically
from shardwise.data.sources import PIECE_BYTES, SourceFile, TextPiece, find_files, holds_answers, read_pieces
from shardwise.data.tokenizer import (
    BYTES,
    FILE,
    Offsets,
    Tokenizer,
    load_tokenizer,
    template_fingerprint,
    tokenizer_fingerprint,
)
from shardwise.errors import UserError
from shardwise.files import file_in_folder, parse_as, read_bytes, seal, unseal
from shardwise.locks import take_lock
from shardwise.plurals import counted

Progress = Callable[[int, int], None]
"""Called with the bytes of source done and the bytes in all."""

SHARD_TOKENS = 64 << 20
_BATCH_CHARACTERS = 8 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ResumePoint:
    """How far preparing has come: the whole shards, and the first piece that is in none of them."""

    __pydantic_config__ = ConfigDict(strict=True)

    fingerprint: str
    shards: tuple[Shard, ...] = ()
    file: int = 0
    piece: int = 0

    def write(self, folder: Path) -> None:
        write_atomically(folder / RECORD, seal(asdict(self)))

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> _ResumePoint:
        """The point recorded in the folder if it belongs to the same work, else the beginning."""
        try:
            sealed = unseal(read_bytes(file_in_folder(folder, RECORD)))
            point = parse_as(cls, sealed, folder / RECORD) if sealed else cls(fingerprint)
        except (FileNotFoundError, UserError):
            return cls(fingerprint)
        return point if point.fingerprint == fingerprint else cls(fingerprint)


def prepare(
    sources: str | Path | Sequence[str | Path],
    tokenizer: str | Path,
    folder: str | Path,
    text_field: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    progress: Progress | None = None,
    end_of_document: str | None = None,
) -> Index:
    """Tokenise the sources into the folder, or continue, or find it done. Returns the folder's index."""
    if not str(folder).strip():
        raise UserError("the folder for the prepared data is an empty path. Name a folder.")
    folder = Path(folder)
    roots = [sources] if isinstance(sources, str | Path) else list(sources)
    files = [file for source in roots for file in find_files(source)]
    answers = holds_answers(files, text_field)
    fingerprint = fingerprint_of(
        files, _encoder(tokenizer, end_of_document, answers), text_field, shard_tokens
    )
    made = next((above for above in reversed([folder, *folder.parents]) if not os.path.lexists(above)), None)
    try:
        check_target(folder)
        if (index := _finished(folder, fingerprint)) is not None:
            return index
        with _lock(folder):
            if (index := _finished(folder, fingerprint)) is not None:  # by the process we waited for
                return index
            loaded = load_tokenizer(tokenizer, end_of_document)
            work = _Preparation(folder, files, loaded, text_field, shard_tokens, progress, answers)
            return work.run(fingerprint)
    except UserError:
        if made is not None and not _ResumePoint.read(folder, fingerprint).shards:
            shutil.rmtree(made, ignore_errors=True)  # of a source that cannot be read nothing is left
        raise
    except OSError as error:
        raise UserError(
            f"prepared data cannot be written to {folder}: {error.strerror or error}. Free some space or "
            f"choose another "
            "folder (data.cache); preparing continues where it stopped."
        ) from None


def prepared(data: Data, progress: Progress | None = None) -> list[tuple[Path, float]]:
    """A prepared folder and a weight for each source of a job; sources that are not prepared yet are, into
    `data.cache`."""
    if data.source is None and not data.sources:
        raise UserError(
            "data.source: missing; give a text, JSONL or Parquet file, a folder, or prepared shards"
        )
    return [(_folder_of(source.path, data, progress), source.weight) for source in sources_of(data)]


def sources_of(data: Data) -> tuple[Source, ...]:
    """One or several."""
    return data.sources or (Source(path=str(data.source), weight=1.0),)


def tokenizer_of_run(data: Mapping[str, Any]) -> tuple[str | None, str | int | None]:
    """The tokenizer of a run, by the `data` that its checkpoints keep, and what closes a document, for
    `load_tokenizer`."""
    name, end, several = (data.get(key) for key in ("tokenizer", "end_of_document", "sources"))
    listed = (
        [source.get("path") for source in several if isinstance(source, dict)]
        if isinstance(several, list)
        else []
    )
    folders = (
        [data.get("source"), *listed] if name == BYTES else [name]
    )  # `bytes` means the tokenizer of data that are prepared
    for folder in (
        Path(folder) for folder in folders if isinstance(folder, str) and is_prepared(Path(folder))
    ):
        index = Index.read(folder)
        return BYTES if index.tokenizer == BYTES else str(folder), index.end
    return name if isinstance(name, str) else None, end if isinstance(end, str) else None


def sources_hold_answers(data: Data) -> bool:
    """Whether any source of a job holds conversations or prompts with a completion, prepared or not."""
    paths = [Path(source.path) for source in sources_of(data) if data.source or data.sources]
    return any(
        Index.read(path).holds_answers
        if is_prepared(path)
        else holds_answers(find_files(path), data.text_field)
        for path in paths
    )


def fingerprint_of(files: Sequence[SourceFile], tokenizer: str, text_field: str, shard_tokens: int) -> str:
    """Equal only for equal work: the same files, unchanged, cut and tokenised in the same way."""
    inputs = [[str(file.path.resolve()), file.size, file.modified] for file in files]
    work = json.dumps([VERSION, PIECE_BYTES, tokenizer, text_field, shard_tokens, inputs])
    return hashlib.sha256(work.encode()).hexdigest()[:32]


def _encoder(tokenizer: str | Path, end_of_document: str | None, answers: bool) -> str:
    """What makes ids of text: the tokenizer, the token that closes documents where it was chosen, and the
    chat template where the source holds answers."""
    end = [] if end_of_document is None else [end_of_document]
    template = ["answers", template_fingerprint(tokenizer)] if answers else []
    return " ".join([tokenizer_fingerprint(tokenizer), *end, *template])


def _folder_of(path: str, data: Data, progress: Progress | None) -> Path:
    folder = located(path, data)
    if folder != Path(path):
        prepare(
            path,
            data.tokenizer,
            folder,
            data.text_field,
            progress=progress,
            end_of_document=data.end_of_document,
        )
    return folder


def located(path: str, data: Data) -> Path:
    """Where the tokens of a source are, or will be once it is prepared. What can be told of it at a glance is
    checked."""
    if not path.strip():
        raise UserError(
            "data.source: an empty path; give a text, JSONL or Parquet file, a folder, or prepared shards"
        )
    folder = Path(path)
    if is_begun(folder) and not is_prepared(folder):
        raise UserError(
            f"{folder} is only half prepared. Run `shardwise data prepare` again; it continues where it "
            f"stopped."
        )
    if is_prepared(folder):
        _check_tokenizer(folder, data.tokenizer)
        _check_end(folder, data.end_of_document)
        return folder
    files = find_files(path)
    encoder = _encoder(data.tokenizer, data.end_of_document, holds_answers(files, data.text_field))
    return Path(data.cache) / fingerprint_of(files, encoder, data.text_field, SHARD_TOKENS)


def _check_end(folder: Path, end_of_document: str | None) -> None:
    if end_of_document is None:
        return
    index = Index.read(folder)
    name = BYTES if index.tokenizer == BYTES else folder
    if load_tokenizer(name, end_of_document).end != index.end:
        used = load_tokenizer(name, index.end).decode([index.end])
        raise UserError(
            f"{folder} was prepared with {used!r} at the end of a document, and data.end_of_document is "
            f"{end_of_document!r}. Set "
            f"data.end_of_document to {used!r}, or prepare the source again with --end-of-document "
            f"{end_of_document!r}."
        )


def _check_tokenizer(folder: Path, tokenizer: str) -> None:
    """`bytes` is the default, so with prepared data it means "the tokenizer they were made with"."""
    if tokenizer != BYTES and Index.read(folder).tokenizer_fingerprint != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{folder} was prepared with another tokenizer than data.tokenizer = {tokenizer!r}. Leave "
            f"data.tokenizer out to "
            "use the folder's own, or prepare the source again with this one."
        )


def _finished(folder: Path, fingerprint: str) -> Index | None:
    if not is_prepared(folder):
        return None
    index = Index.read(folder)
    return index if index.source == fingerprint else None


def _lock(folder: Path) -> ExitStack:
    """The folder's lock, waited for while another process prepares it."""
    folder.mkdir(parents=True, exist_ok=True)
    message = f"waiting for another process that prepares {folder}"
    return take_lock(folder / LOCK, message, wait=lambda: _log.info(message))


@dataclass(frozen=True)
class _PositionedPiece:
    """A piece, where the next one begins, and how many bytes of all sources are behind it."""

    piece: TextPiece
    file: int
    next_piece: int
    bytes_done: int


@dataclass(frozen=True)
class _Preparation:
    folder: Path
    files: list[SourceFile]
    tokenizer: Tokenizer
    text_field: str
    shard_tokens: int
    progress: Progress | None
    answers: bool
    """Whether the source holds conversations or answered prompts, of which the answers are to be learnt."""

    def run(self, fingerprint: str) -> Index:
        """All shards, then the index: with it the folder is whole, and the record of the way there is
        dropped."""
        point = _ResumePoint.read(self.folder, fingerprint)
        if not point.shards:
            self._start_over(point)
        shards = self._tokenise(point)
        if not shards:
            raise UserError(
                f"{self.files[0].path}: no text in it (of {counted(len(self.files), 'file')}). Give a source "
                f"that has some."
            )
        self.tokenizer.save(self.folder)
        name = BYTES if self.tokenizer.name == BYTES else FILE
        if name == FILE:
            copy_template(
                self.tokenizer.name, self.folder
            )  # so that a model which learnt from the folder can be talked to
        tokenizer = (name, self.tokenizer.fingerprint, self.tokenizer.vocabulary, self.tokenizer.end)
        index = Index(
            fingerprint,
            *tokenizer,
            token_dtype(self.tokenizer.vocabulary),
            tuple(shards),
            holds_answers=self.answers,
        )
        index.write(self.folder)
        (self.folder / RECORD).unlink(missing_ok=True)
        return index

    def _start_over(self, point: _ResumePoint) -> None:
        if is_prepared(self.folder):
            _log.warning("%s was prepared from other or since changed files; preparing it again", self.folder)
        point.write(self.folder)  # first, so that the folder stays ours whatever is interrupted
        clear(self.folder)

    def _tokenise(self, point: _ResumePoint) -> list[Shard]:
        shards, writer = list(point.shards), None
        try:
            for batch in _batches(self._items(point)):
                for item, (ids, learnt) in zip(
                    batch, self._encoded([item.piece for item in batch]), strict=True
                ):
                    writer = writer or ShardWriter(
                        self.folder, len(shards), token_dtype(self.tokenizer.vocabulary)
                    )
                    writer.append(ids, item.piece.ends, learnt)
                    if writer.tokens >= self.shard_tokens:
                        shards.append(writer.finish())
                        writer = None
                        _ResumePoint(point.fingerprint, tuple(shards), item.file, item.next_piece).write(
                            self.folder
                        )
                self._report(batch[-1].bytes_done)
            return [*shards, writer.finish()] if writer else shards
        except BaseException:
            if writer:
                writer.abandon()
            raise

    def _encoded(
        self, pieces: Sequence[TextPiece]
    ) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_] | None]]:
        """The ids of each piece, its end among them, and which of them are to be learnt; None: all."""
        texts = [piece.text for piece in pieces]
        if not self.answers:
            for piece, ids in zip(pieces, self.tokenizer.encode_batch(texts), strict=True):
                yield np.append(ids, np.uint32(self.tokenizer.end)) if piece.ends else ids, None
            return
        for piece, (ids, offsets) in zip(pieces, self.tokenizer.encode_with_offsets(texts), strict=True):
            learnt = tokens_within(offsets, piece.answers or ())
            if piece.closed:
                ids, learnt = np.append(ids, np.uint32(self.tokenizer.end)), np.append(learnt, True)
            yield ids, learnt

    def _items(self, point: _ResumePoint) -> Iterator[_PositionedPiece]:
        """Every piece from a point on; pieces of the file before it are read again, but not tokenised."""
        before = sum(file.size for file in self.files[: point.file])
        template = self.tokenizer.find_template() if self.answers else None
        for number, file in enumerate(self.files[point.file :], start=point.file):
            skipped = point.piece if number == point.file else 0
            following = self.files[number + 1 :]
            pieces = islice(
                read_pieces(file, self.text_field, self.answers, template, following), skipped, None
            )
            for count, piece in enumerate(pieces, start=skipped + 1):
                yield _PositionedPiece(piece, number, count, before + piece.position)
            before += file.size

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, sum(file.size for file in self.files))


def tokens_within(offsets: Offsets, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens have a character within one of the spans, by the characters that each stands for. A token
    that begins before an answer and ends in it counts: no other one could have said it."""
    within = np.zeros(len(offsets), dtype=bool)
    for first, after in spans:
        within |= (offsets[:, 0] < after) & (offsets[:, 1] > np.maximum(first, offsets[:, 0]))
    return within


def _batches(items: Iterator[_PositionedPiece]) -> Iterator[list[_PositionedPiece]]:
    """Items in groups of a few MiB of text: enough to keep every core busy, little enough to hold."""
    batch: list[_PositionedPiece] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.piece.text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
