"""Tokenize sources once into a folder of shards (the format is in shards.py).

Pieces of text go through the tokenizer in batches of a few MiB, which its Rust code distributes over all
cores. Whenever a shard is full, the position (which file, how many of its pieces) is recorded beside it. An
interrupted run therefore continues after the last complete shard and ends with the same bytes; it loses at
most the work of one shard. The record contains a fingerprint of the source files (paths, sizes, times), the
tokenizer and the settings: if any of them changed, preparing starts again. Only a folder that is empty or
made by shardwise is written to (ownership.py).

A lock file makes it safe for all ranks of a machine to prepare at once: one does the work, the others wait
and find it done.
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

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from shardwise.config import Data, TextSource
from shardwise.data.chat import Span, copy_template
from shardwise.data.ownership import LOCK, RECORD, check_target, clear, is_begun, is_prepared
from shardwise.data.shards import VERSION, Index, Shard, ShardWriter, token_dtype, write_atomically
from shardwise.data.source_files import (
    PIECE_BYTES,
    SourceFile,
    TextPiece,
    find_files,
    holds_answers,
    read_pieces,
)
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
"""Function that receives the number of source bytes that are done, and the number of all."""

SHARD_TOKENS = 64 << 20
"""Number of tokens after which a shard is full."""
_BATCH_CHARACTERS = 8 << 20
"""Number of characters that go through the tokenizer at a time."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _ResumePoint:
    """How far preparing has come: the complete shards, and the first piece that is in none of them."""

    __pydantic_config__ = ConfigDict(strict=True)

    fingerprint: str
    shards: tuple[Shard, ...] = ()
    file: int = 0
    piece: int = 0

    def write(self, folder: Path) -> None:
        write_atomically(folder / RECORD, seal(asdict(self)))

    @classmethod
    def read(cls, folder: Path, fingerprint: str) -> _ResumePoint:
        """Return the point recorded in the folder if it belongs to the same work, else the beginning."""
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
    """Tokenize the sources into the folder, or continue, or find it done. Return the folder's index."""
    if not str(folder).strip():
        raise UserError("the folder for the prepared data is an empty path. Name a folder.")
    folder = Path(folder)
    files = _files_of(sources)
    answers = holds_answers(files, text_field)
    fingerprint = fingerprint_of(
        files, _encoder(tokenizer, end_of_document, answers), text_field, shard_tokens
    )
    created = _outermost_missing(folder)
    try:
        check_target(folder)
        if (index := _finished(folder, fingerprint)) is not None:
            return index
        with _lock(folder):
            if (index := _finished(folder, fingerprint)) is not None:  # another process has done it meanwhile
                return index
            loaded = load_tokenizer(tokenizer, end_of_document)
            work = _Preparation(folder, files, loaded, text_field, shard_tokens, progress, answers)
            return work.run(fingerprint)
    except UserError:
        if created is not None and not _ResumePoint.read(folder, fingerprint).shards:
            shutil.rmtree(created, ignore_errors=True)  # a source that cannot be read leaves nothing behind
        raise
    except OSError as error:
        raise UserError(
            f"prepared data cannot be written to {folder}: {error.strerror or error}. Free some space or "
            "choose another folder (data.cache); preparing continues where it stopped."
        ) from None


def _files_of(sources: str | Path | Sequence[str | Path]) -> list[SourceFile]:
    roots = [sources] if isinstance(sources, str | Path) else list(sources)
    return [file for source in roots for file in find_files(source)]


def _outermost_missing(folder: Path) -> Path | None:
    """Return the outermost folder that must be created for this one; None if it exists."""
    outermost_first = reversed([folder, *folder.parents])
    return next((path for path in outermost_first if not os.path.lexists(path)), None)


def prepare_sources(data: Data, progress: Progress | None = None) -> list[tuple[Path, float]]:
    """Return a prepared folder and a weight for each source of a job.

    Sources that are not prepared yet are prepared into `data.cache`.
    """
    if data.source is None and not data.sources:
        raise UserError(
            "data.source: missing; give a text, JSONL or Parquet file, a folder, or prepared shards"
        )
    return [(_folder_of(source.path, data, progress), source.weight) for source in sources_of(data)]


def sources_of(data: Data) -> tuple[TextSource, ...]:
    """Return the sources of a job, whether it names one or several."""
    return data.sources or (TextSource(path=str(data.source), weight=1.0),)


def tokenizer_of_run(data: Mapping[str, object]) -> tuple[str | None, str | int | None]:
    """Return the tokenizer of a run and what ends a document, as arguments of `load_tokenizer`.

    `data` are the data settings that the run's checkpoints contain.
    """
    name, end = data.get("tokenizer"), data.get("end_of_document")
    # With prepared data, `bytes` means the tokenizer that they were prepared with.
    paths = _source_paths(data) if name == BYTES else [name]
    folders = [Path(path) for path in paths if isinstance(path, str)]
    for folder in filter(is_prepared, folders):
        index = Index.read(folder)
        return BYTES if index.tokenizer == BYTES else str(folder), index.end
    return name if isinstance(name, str) else None, end if isinstance(end, str) else None


def _source_paths(data: Mapping[str, object]) -> list[object]:
    several = data.get("sources")
    entries = several if isinstance(several, list) else []
    return [data.get("source"), *(source.get("path") for source in entries if isinstance(source, dict))]


def sources_hold_answers(data: Data) -> bool:
    """Return whether any source of a job contains conversations or prompts with a completion, prepared or
    not.
    """
    paths = [Path(source.path) for source in sources_of(data) if data.source or data.sources]
    return any(
        Index.read(path).holds_answers
        if is_prepared(path)
        else holds_answers(find_files(path), data.text_field)
        for path in paths
    )


def fingerprint_of(files: Sequence[SourceFile], tokenizer: str, text_field: str, shard_tokens: int) -> str:
    """Return a text that is equal only for equal work: the same files, cut and tokenized in the same way."""
    inputs = [[str(file.path.resolve()), file.size, file.modified] for file in files]
    work = json.dumps([VERSION, PIECE_BYTES, tokenizer, text_field, shard_tokens, inputs])
    return hashlib.sha256(work.encode()).hexdigest()[:32]


def _encoder(tokenizer: str | Path, end_of_document: str | None, answers: bool) -> str:
    """Return a text that identifies how text becomes ids.

    It names the tokenizer, the token that ends documents if the job names one, and the chat template if the
    source contains answers.
    """
    end = [] if end_of_document is None else [end_of_document]
    template = ["answers", template_fingerprint(tokenizer)] if answers else []
    return " ".join([tokenizer_fingerprint(tokenizer), *end, *template])


def _folder_of(path: str, data: Data, progress: Progress | None) -> Path:
    folder = prepared_folder(path, data)
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


def prepared_folder(path: str, data: Data) -> Path:
    """Return the folder in which the tokens of a source are, or will be once it is prepared.

    Problems that can be found quickly are reported.
    """
    if not path.strip():
        raise UserError(
            "data.source: an empty path; give a text, JSONL or Parquet file, a folder, or prepared shards"
        )
    folder = Path(path)
    if is_begun(folder) and not is_prepared(folder):
        advice = "Run `shardwise data prepare` again; it continues where it stopped."
        raise UserError(f"{folder} is only half prepared. {advice}")
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
            f"{end_of_document!r}. Set data.end_of_document to {used!r}, or prepare the source again with "
            f"--end-of-document {end_of_document!r}."
        )


def _check_tokenizer(folder: Path, tokenizer: str) -> None:
    """Raise a UserError if the data were prepared with another tokenizer than the job's.

    `bytes` is the default, so with prepared data it means the tokenizer that they were prepared with.
    """
    if tokenizer != BYTES and Index.read(folder).tokenizer_fingerprint != tokenizer_fingerprint(tokenizer):
        raise UserError(
            f"{folder} was prepared with another tokenizer than data.tokenizer = {tokenizer!r}. Leave "
            "data.tokenizer out to use the folder's own, or prepare the source again with this one."
        )


def _finished(folder: Path, fingerprint: str) -> Index | None:
    if not is_prepared(folder):
        return None
    index = Index.read(folder)
    return index if index.source == fingerprint else None


def _lock(folder: Path) -> ExitStack:
    """Return the folder's lock. Wait for it while another process prepares the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    message = f"waiting for another process that prepares {folder}"
    return take_lock(folder / LOCK, message, wait=lambda: _log.info(message))


@dataclass(frozen=True)
class _PositionedPiece:
    """A piece, where the next one begins, and how many bytes of all sources come before that."""

    piece: TextPiece
    file: int
    next_piece: int
    bytes_done: int


@dataclass(frozen=True)
class _Preparation:
    """The work of preparing one folder."""

    folder: Path
    files: list[SourceFile]
    tokenizer: Tokenizer
    text_field: str
    shard_tokens: int
    progress: Progress | None
    answers: bool
    """Whether the source contains conversations or answered prompts, whose answers are learned."""

    def run(self, fingerprint: str) -> Index:
        """Write all shards, then the index, which makes the folder complete; then remove the record."""
        point = _ResumePoint.read(self.folder, fingerprint)
        if not point.shards:
            self._start_over(point)
        shards = self._tokenise(point)
        if not shards:
            problem = f"{self.files[0].path}: no text in it (of {counted(len(self.files), 'file')})"
            raise UserError(f"{problem}. Give a source that has some.")
        self.tokenizer.save(self.folder)
        name = BYTES if self.tokenizer.name == BYTES else FILE
        if name == FILE:
            # A model that was trained on this folder can then be used in a chat.
            copy_template(self.tokenizer.name, self.folder)
        index = Index(
            source=fingerprint,
            tokenizer=name,
            tokenizer_fingerprint=self.tokenizer.fingerprint,
            vocabulary=self.tokenizer.vocabulary,
            end=self.tokenizer.end,
            dtype=token_dtype(self.tokenizer.vocabulary),
            shards=tuple(shards),
            holds_answers=self.answers,
        )
        index.write(self.folder)
        (self.folder / RECORD).unlink(missing_ok=True)
        return index

    def _start_over(self, point: _ResumePoint) -> None:
        if is_prepared(self.folder):
            _log.warning("%s was prepared from other or since changed files; preparing it again", self.folder)
        point.write(self.folder)  # first, so that the folder is recognised even if this is interrupted
        clear(self.folder)

    def _tokenise(self, point: _ResumePoint) -> list[Shard]:
        shards, writer = list(point.shards), None
        dtype = token_dtype(self.tokenizer.vocabulary)
        try:
            for batch in _batches(self._items(point)):
                encoded = self._encoded([item.piece for item in batch])
                for item, (ids, learnt) in zip(batch, encoded, strict=True):
                    writer = writer or ShardWriter(self.folder, len(shards), dtype)
                    writer.append(ids, item.piece.ends, learnt)
                    if writer.tokens >= self.shard_tokens:
                        shards.append(writer.finish())
                        writer = None
                        reached = (item.file, item.next_piece)
                        _ResumePoint(point.fingerprint, tuple(shards), *reached).write(self.folder)
                self._report(batch[-1].bytes_done)
            return [*shards, writer.finish()] if writer else shards
        except BaseException:
            if writer:
                writer.abandon()
            raise

    def _encoded(
        self, pieces: Sequence[TextPiece]
    ) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.bool_] | None]]:
        """Yield the ids of each piece, with the end-of-document id, and which of them are learned; None if
        all are.
        """
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
        """Yield every piece from a point on. Earlier pieces of the same file are read again, but not
        tokenized.
        """
        before = sum(file.size for file in self.files[: point.file])
        template = self.tokenizer.find_template() if self.answers else None
        for number, file in enumerate(self.files[point.file :], start=point.file):
            skipped = point.piece if number == point.file else 0
            following = self.files[number + 1 :]
            pieces = read_pieces(file, self.text_field, self.answers, template, following)
            for count, piece in enumerate(islice(pieces, skipped, None), start=skipped + 1):
                yield _PositionedPiece(piece, number, count, before + piece.position)
            before += file.size

    def _report(self, done: int) -> None:
        if self.progress is not None:
            self.progress(done, sum(file.size for file in self.files))


def tokens_within(offsets: Offsets, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return which tokens have a character within one of the spans.

    A token that begins before an answer and ends in it counts, because the answer begins with that token.
    """
    within = np.zeros(len(offsets), dtype=bool)
    for first, after in spans:
        within |= (offsets[:, 0] < after) & (offsets[:, 1] > np.maximum(first, offsets[:, 0]))
    return within


def _batches(items: Iterator[_PositionedPiece]) -> Iterator[list[_PositionedPiece]]:
    """Yield items in lists of a few MiB of text: enough to keep all cores busy, and little enough for
    memory.
    """
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
