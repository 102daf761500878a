"""Documents, as pieces of text, from whatever the user has on disk.

| given | a document is |
| --- | --- |
| .jsonl, .ndjson, .json (one object a line) | the text field of a line |
| .parquet, .arrow | the text field of a row |
| any other file | the whole file |
| a folder saved by Hugging Face `save_to_disk` | a row of the Arrow files that its state.json names |
| any other folder, in depth and sorted; a glob | as above, for each file |

In a folder that has JSONL, Parquet or Arrow files only those are read: a README beside them is not data. Hidden files,
and .json files met in a folder (they describe data sets), are passed over. Text and JSON files may be gzipped. Rows
without text are no documents.

Whole text files are read in pieces of about 1 MiB cut after a line, so that memory stays bounded; a piece knows whether
it ends its document. The cost: a token that would have spanned the cut is split there, once in a MiB.
"""

from __future__ import annotations

import glob
import gzip
import json
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NotRequired, cast

from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from shardwise.data.columnar import arrow_rows, no_field, parquet_rows, text_of
from shardwise.errors import UserError
from shardwise.files import inside, parse_as, read_bytes, reading

PIECE_BYTES = 1 << 20
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_TABLES = (".parquet", ".arrow")


@dataclass(frozen=True)
class TextPiece:
    """A stretch of one document."""

    text: str
    ends: bool
    """True: the document ends here. False: the next piece continues it."""
    position: int
    """Bytes of the file read when this piece is complete."""


@dataclass(frozen=True)
class SourceFile:
    """A file to read, and what tells whether it changed since."""

    path: Path
    size: int
    modified: int


class _DataFile(TypedDict):
    filename: str


class _SavedState(TypedDict):
    _data_files: list[_DataFile]
    _indices_data_files: NotRequired[Any]
    _indices_files: NotRequired[Any]


"""What of a `state.json` is read here."""


def find_files(source: str | Path) -> list[SourceFile]:
    """Every file of a source: a file, a folder or a glob. Sorted, so that the order never depends on the file system."""
    if not str(source).strip():
        raise UserError("data source: an empty path. Give a text, JSONL or Parquet file, or a folder of them.")
    with reading(f"data source {source}:"):
        paths = _paths(source)
    if not paths:
        raise UserError(f"data source {source}: no files in it. Give a text, JSONL or Parquet file, or a folder of them.")
    return [_described(path) for path in paths]


def _paths(source: str | Path) -> list[Path]:
    path = Path(source)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [path]
    if glob.has_magic(str(source)):
        return [file for match in sorted(glob.glob(str(source), recursive=True)) for file in _matched(Path(match))]
    raise UserError(f"data source {source}: no such file or folder. Check the path (it is relative to {Path.cwd()}).")


def read_pieces(file: SourceFile, text_field: str) -> Iterator[TextPiece]:
    """The documents of one file, in order."""
    kind = _kind(file.path)
    try:
        if kind == "json":
            yield from _json_lines(file.path, text_field)
        elif kind == "text":
            yield from _text(file.path)
        else:
            rows = parquet_rows if kind == "parquet" else arrow_rows
            for text, share in rows(file.path, text_field):
                yield TextPiece(text, True, int(share * file.size))
    except (OSError, EOFError, zlib.error) as error:  # the last two: a damaged gzip file
        raise UserError(f"{file.path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _kind(path: Path) -> str:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() in _JSON_LINES:
        return "json"
    return suffix.lower().lstrip(".") if path.suffix.lower() in _TABLES else "text"


def _in_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(child.name for child in folder.iterdir() if (child / "state.json").is_file())
        raise UserError(f"data source {folder}: holds several splits; give one of them: {', '.join(splits)}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        return _saved_to_disk(folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not _hidden(path.relative_to(folder)))
    data = [path for path in files if path.suffix.lower() != ".json" and _kind(path) != "text"]
    return data or [path for path in files if path.suffix.lower() != ".json"]


def _matched(path: Path) -> list[Path]:
    return _in_folder(path) if path.is_dir() else [path]


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _saved_to_disk(folder: Path) -> list[Path]:
    """The files of `save_to_disk`, in the order of its state.json."""
    path, advice = folder / "state.json", "Save the data set again with save_to_disk."
    state = parse_as(_SavedState, read_bytes(path, advice), path, advice)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise UserError(f"{folder} was saved with an index of chosen rows; call flatten_indices() on it and save it again.")
    return [inside(folder, entry["filename"]) for entry in state["_data_files"]]


def _described(path: Path) -> SourceFile:
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"data source {path}: is not a regular file. Write what comes out of a pipe or a device to a file first.")
    return SourceFile(path, status.st_size, status.st_mtime_ns)


def _open(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """The text's bytes, and the file on disk whose position tells how much was read."""
    raw = open(path, "rb")  # noqa: SIM115  (the reader closes it)
    return (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if path.suffix == ".gz" else raw), raw


def _text(path: Path) -> Iterator[TextPiece]:
    stream, raw = _open(path)
    with raw:
        held: TextPiece | None = None  # one piece is held back, since only the next read tells whether it was the last
        offset = 0
        for block in _blocks(stream):
            if held is not None:
                yield held
            text = _decode(block, path, offset)
            held = TextPiece(text.removeprefix("\ufeff") if offset == 0 else text, False, raw.tell())
            offset += len(block)
        if held is not None:
            yield replace(held, ends=True)


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
    """Where to end a piece: after its last line, or, in a line longer than a piece, between two characters."""
    if newline := block.rfind(b"\n") + 1:
        return newline
    for back in range(1, min(4, len(block)) + 1):
        byte = block[-back]
        if byte < 0x80:
            return len(block) - back + 1
        if byte >= 0xC0:  # first byte of a character whose tail may be yet to come
            return len(block) - back
    return len(block)


def _decode(content: bytes, path: Path, offset: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text (byte {offset + error.start}). Convert it to UTF-8, or leave it out."
        ) from None


def _json_lines(path: Path, text_field: str) -> Iterator[TextPiece]:
    stream, raw = _open(path)
    with raw:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            row = _object(line, where)
            if text_field not in row:
                raise no_field(text_field, row, where)
            if text := text_of(row[text_field], text_field, where):
                yield TextPiece(_without_lone_surrogates(text), True, raw.tell())


def _object(line: bytes, where: str) -> dict[str, object]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8 and brackets without end alike
        raise UserError(f"{where}: not valid JSON ({error}). Each line must be one JSON object.") from None
    if not isinstance(value, dict):
        raise UserError(f"{where}: a JSON {type(value).__name__}, not an object. Each line must be one JSON object.")
    return value


def _without_lone_surrogates(text: str) -> str:
    """JSON escapes can spell half a character, which no tokenizer can encode; it becomes U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
