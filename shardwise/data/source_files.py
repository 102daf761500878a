"""Read documents, as pieces of text, from the files that a user has.

| given                                         | a document is                                         |
| --------------------------------------------- | ----------------------------------------------------- |
| .jsonl, .ndjson, .json (one object per line)  | a line: its text field, else its `messages`, else its |
|                                               | `prompt` and `completion`                             |
| .parquet, .arrow                              | a row, with the same fields                           |
| any other file                                | the whole file                                        |
| a folder saved by Hugging Face `save_to_disk` | a row of the Arrow files that its state.json names    |
| any other folder, in depth and sorted; a glob | as above, for each file                               |

In a folder that has JSONL, Parquet or Arrow files, only those are read: a README beside them is not data.
Skipped are hidden files, .json files in a folder (they describe datasets), folders of runs (metrics, logs and
checkpoints), and folders of prepared tokens inside the folder (such as data.cache). Text and JSON files may
be gzipped. Rows without text are not documents. Shards of prepared tokens are refused, because they are not
text. A source contains either texts or answers (conversations and prompts with a completion, data/chat.py):
its first valid record says which.

Whole text files are read in pieces of about 1 MiB that end after a line, so that memory stays bounded. A
piece knows whether its document ends with it. The cost is that a token which would have spanned two pieces is
split, once per MiB.
"""

from __future__ import annotations

import glob
import gzip
import json
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO, NotRequired, TypeVar, cast

from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.data.chat import (
    COMPLETION,
    MESSAGES,
    PROMPT,
    ChatTemplate,
    Span,
    TemplateUnusable,
    answered_texts,
    without_lone_surrogates,
)
from shardwise.data.columnar import arrow_rows, parquet_rows
from shardwise.data.ownership import is_begun, is_prepared, refuse_shards
from shardwise.errors import ConfigError, UserError
from shardwise.files import file_or_link_in_folder, parse_as, read_bytes, reading

T = TypeVar("T")
PIECE_BYTES = 1 << 20
"""Approximate number of bytes of a piece of a text file."""
MAX_REPORTED = 20
"""Maximum number of bad records that an error names."""
MAX_SEARCHED = 100_000
"""Maximum number of records that are searched for more bad ones after the first."""
SEARCH_SECONDS = 5.0
"""Maximum number of seconds of that search."""
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")
RUN_FILES = ("config.toml", "plan.json")
"""Files that every run writes first into its folder."""


@dataclass(frozen=True)
class TextPiece:
    """A piece of one document."""

    text: str
    ends: bool
    """Whether the document ends with this piece. Otherwise the next piece continues it."""
    position: int
    """Number of bytes of the file that were read when this piece was complete."""
    answers: tuple[Span, ...] | None = None
    """Spans of characters that are learned; None if all are."""
    closed: bool = True
    """Whether the end-of-document token follows the end of the document."""


@dataclass(frozen=True)
class _Record:
    """A line or a row."""

    content: Mapping[str, object] | bytes
    """Fields of a row, or a line of JSON. A line is parsed when its fields are read, so that a bad line does
    not end the reading of the file.
    """
    where: str
    position: int

    @cached_property
    def values(self) -> Mapping[str, object]:
        """The fields. A line that is not a JSON object raises a UserError."""
        return _object(self.content, self.where) if isinstance(self.content, bytes) else self.content


@dataclass(frozen=True)
class SourceFile:
    """A file to read, with its size and time, which show later whether it changed."""

    path: Path
    size: int
    modified: int


class _DataFile(TypedDict):
    filename: str


class _SavedState(TypedDict):
    """The fields of a `state.json` that are read here."""

    _data_files: list[_DataFile]
    _indices_data_files: NotRequired[object]
    _indices_files: NotRequired[object]


def find_files(source: str | Path) -> list[SourceFile]:
    """Return every file of a source, which is a file, a folder or a glob.

    The files are sorted, so that their order does not depend on the file system.
    """
    if not str(source).strip():
        raise UserError(
            "data source: an empty path. Give a text, JSONL or Parquet file, or a folder of them."
        )
    with reading(f"data source {source}:"):
        paths = _paths(source)
        refuse_shards(paths)
    if not paths:
        raise UserError(
            f"data source {source}: no files in it. Give a text, JSONL or Parquet file, or a folder of them."
        )
    return [_described(path) for path in paths]


def _paths(source: str | Path) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [path]
    if glob.has_magic(str(source)):
        matches = [Path(match) for match in sorted(glob.glob(str(source), recursive=True))]
        return [file for match in matches for file in _matched(match)]
    raise UserError(
        f"data source {source}: no such file or folder. Check the path (it is relative to {Path.cwd()})."
    )


def holds_answers(files: Sequence[SourceFile], text_field: str) -> bool:
    """Return whether a source contains conversations or prompts with a completion, and not texts.

    The first valid record says which.
    """
    bad: list[str] = []
    for file in files:
        if _kind(file.path) == "text":
            return False
        for record in _read(file, text_field):
            try:
                return _fields(record.values, text_field, record.where) != [text_field]
            except UserError as error:
                bad.append(str(error))
            if len(bad) == MAX_REPORTED:
                raise _refusal(bad)
    if bad:
        raise _refusal(bad)
    return False


def read_pieces(
    file: SourceFile,
    text_field: str,
    answers: bool = False,
    template: ChatTemplate | None = None,
    following: Sequence[SourceFile] = (),
) -> Iterator[TextPiece]:
    """Yield the documents of one file in order. In a source of answers, the template writes the
    conversations.

    If a record is bad, the rest of the file and the `following` files are searched for more bad records, and
    one error names them all. The search ends where the chat template cannot be used.
    """
    if _kind(file.path) == "text":
        if answers:
            raise UserError(
                f"{file.path}: a text among conversations. Give them as sources of their own (data.sources)."
            )
        yield from _guarded(file, _text(file.path))
        return
    records = _read(file, text_field)
    for record in records:
        try:
            pieces = _pieces(record, text_field, answers, template)
        except TemplateUnusable:
            raise
        except UserError as error:
            tables = (_read(other, text_field) for other in following if _kind(other.path) != "text")
            others = _within_time(islice(chain(records, *tables), MAX_SEARCHED))
            bad = _problems(others, lambda other: _pieces(other, text_field, answers, template))
            raise _refusal([str(error), *islice(bad, MAX_REPORTED - 1)]) from None
        yield from pieces


def _pieces(
    record: _Record, text_field: str, answers: bool, template: ChatTemplate | None
) -> list[TextPiece]:
    """Return the documents of one record. A UserError says what is wrong with it."""
    if (_fields(record.values, text_field, record.where) == [text_field]) == answers:
        kinds = "a text among conversations" if answers else "a conversation among texts"
        raise UserError(f"{record.where}: {kinds}. Give them as sources of their own (data.sources).")
    return list(_answers(record, template) if answers else _one_text(record, text_field))


def _within_time(records: Iterator[_Record]) -> Iterator[_Record]:
    """Yield the records that are read within SEARCH_SECONDS."""
    until = time.monotonic() + SEARCH_SECONDS
    for record in records:
        if time.monotonic() > until:
            return
        yield record


def _problems(records: Iterator[_Record], read: Callable[[_Record], object]) -> Iterator[str]:
    """Yield what is wrong with each bad record. The last problem is a file that cannot be read at all, or a
    chat template that cannot be used.
    """
    try:
        for record in records:
            try:
                read(record)
            except TemplateUnusable:
                raise
            except UserError as error:
                yield str(error)
    except UserError as error:
        yield str(error)


def _refusal(problems: list[str]) -> UserError:
    if len(problems) == 1:
        return UserError(problems[0])
    if len(problems) == MAX_REPORTED:
        problems[-1] += f"\n  and perhaps more: the search ended after {MAX_REPORTED}"
    return ConfigError("the data", problems)


def _answers(record: _Record, template: ChatTemplate | None) -> Iterator[TextPiece]:
    for document in answered_texts(record.values, template, record.where):
        yield TextPiece(document.text, True, record.position, document.answers, document.closed)


def _one_text(record: _Record, text_field: str) -> Iterator[TextPiece]:
    value = record.values[text_field]
    if value is not None and not isinstance(value, str):
        kind = type(value).__name__
        problem = f"{record.where}: field {text_field!r} holds {kind}, not text"
        raise UserError(f"{problem}. Name another one with data.text_field.")
    if value:
        yield TextPiece(without_lone_surrogates(value), True, record.position)


def _fields(present: Iterable[str], text_field: str, where: str) -> list[str]:
    """Return the names of those fields of a record that are read."""
    present = list(present)
    for fields in ([text_field], [MESSAGES], [PROMPT, COMPLETION]):
        if all(field in present for field in fields):
            return fields
    raise UserError(
        f"{where}: no field {text_field!r}; there are: {', '.join(present)}. Name the text with "
        f"data.text_field. A conversation is in {MESSAGES!r}, an answered prompt in {PROMPT!r} and "
        f"{COMPLETION!r}."
    )


def _read(file: SourceFile, text_field: str) -> Iterator[_Record]:
    """Yield the lines or rows of a file that is not plain text."""
    kind = _kind(file.path)
    return _guarded(file, _json_lines(file.path) if kind == "json" else _table(file, text_field, kind))


def _guarded(file: SourceFile, read: Iterator[T]) -> Iterator[T]:
    try:
        yield from read
    except (OSError, EOFError, zlib.error) as error:  # the last two come from a damaged gzip file
        raise UserError(f"{file.path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _table(file: SourceFile, text_field: str, kind: str) -> Iterator[_Record]:
    rows = parquet_rows if kind == "parquet" else arrow_rows
    for values, number, share in rows(file.path, lambda names: _fields(names, text_field, str(file.path))):
        yield _Record(values, f"{file.path}, row {number}", int(share * file.size))


def _kind(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() in _JSON_LINES:
        return "json"
    return suffix.lower().lstrip(".") if path.suffix.lower() in _TABLES else "text"


def _in_folder(folder: Path) -> list[Path]:
    """Return the files of a folder that contain data, sorted."""
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").is_file())
        raise UserError(f"data source {folder}: holds several splits; give one of them: {', '.join(splits)}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_to_disk(folder)
    refuse_shards(sorted(folder.iterdir()))  # even if other files beside them would be read
    return _below(folder)


def _below(folder: Path) -> list[Path]:
    """Return the data files of a folder and its subfolders, without what shardwise itself wrote there."""
    visible = (path for path in folder.rglob("*") if not _hidden(path.relative_to(folder)))
    files = sorted(path for path in visible if path.is_file())
    ours = {path for path in {file.parent for file in files} if _is_our_folder(path)}
    others = [path for path in files if ours.isdisjoint(path.parents) and path.suffix.lower() != ".json"]
    data = [path for path in others if _kind(path) != "text"]
    return data or others


def _is_our_folder(path: Path) -> bool:
    """Return whether shardwise made a folder: of prepared data, or of a run."""
    return is_prepared(path) or is_begun(path) or all((path / name).is_file() for name in RUN_FILES)


def _matched(path: Path) -> list[Path]:
    return _in_folder(path) if path.is_dir() else [path]


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _saved_to_disk(folder: Path) -> list[Path]:
    """Return the files of `save_to_disk`, in the order of its state.json."""
    path, advice = folder / "state.json", "Save the data set again with save_to_disk."
    state = parse_as(_SavedState, read_bytes(path, advice), path, advice)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        problem = f"{folder} was saved with an index of chosen rows"
        raise UserError(f"{problem}; call flatten_indices() on it and save it again.")
    return [file_or_link_in_folder(folder, entry["filename"]) for entry in state["_data_files"]]


def _described(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        advice = "Write what comes out of a pipe or a device to a file first."
        raise UserError(f"data source {path}: is not a regular file. {advice}")
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def _open(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """Return the stream of the text's bytes, and the file on disk, whose position says how much was read."""
    raw = open(path, "rb")  # noqa: SIM115  (the caller closes it)
    return (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw), raw


def _text(path: Path) -> Iterator[TextPiece]:
    stream, raw = _open(path)
    with raw:
        # One piece is delayed, because only the next read says whether it was the last.
        delayed: TextPiece | None = None
        offset = 0
        for block in _blocks(stream):
            if delayed is not None:
                yield delayed
            text = _decode(block, path, offset)
            delayed = TextPiece(text.removeprefix("\ufeff") if offset == 0 else text, False, raw.tell())
            offset += len(block)
        if delayed is not None:
            yield replace(delayed, ends=True)


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    rest = b""
    while read := stream.read(PIECE_BYTES):
        block = rest + read
        cut = _cut(block)
        if cut:
            yield block[:cut]
        rest = block[cut:]
    if rest:
        yield rest


def _cut(block: bytes) -> int:
    """Return where to end a piece: after its last line or, in a line longer than a piece, between two
    characters.
    """
    if newline := block.rfind(b"\n") + 1:
        return newline
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte < 0x80:
            return len(block) - back + 1
        if byte >= 0xC0:  # the first byte of a character whose other bytes may follow in the next block
            return len(block) - back
    return len(block)


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {offset + error.start}). Convert it to UTF-8, or leave it out."
        ) from None


def _json_lines(path: Path) -> Iterator[_Record]:
    stream, raw = _open(path)
    with raw:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield _Record(line, f"{path}, line {number}", raw.tell())


def _object(line: bytes, where: str) -> dict[str, object]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8 or endless nesting
        raise UserError(f"{where}: not valid JSON ({error}). Each line must be one JSON object.") from None
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: a JSON {type(value).__name__}, not an object. Each line must be one JSON object."
        )
    return value
