"""Rows of columnar files: Parquet, and the Arrow files that Hugging Face data sets are made of.

Both are read a batch of rows at a time and only the text column, so memory stays at a few thousand documents. pyarrow
is an optional dependency (the `parquet` extra), imported only when such a file is met.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shardwise.errors import UserError

_ROWS = 1024


def text_of(value: object, field: str, where: str) -> str:
    """The text in a row's field; a null is no text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    raise UserError(f"{where}: field {field!r} holds {type(value).__name__}, not text. Name another one with data.text_field.")


def no_field(field: str, present: Iterable[str], where: str) -> UserError:
    """The error for a missing text field, naming those that are there."""
    return UserError(f"{where}: no field {field!r}; there are: {', '.join(present)}. Name the text with data.text_field.")


def parquet_rows(path: Path, field: str) -> Iterator[tuple[str, float]]:
    """Each row's text, and the share of the file that was read by then."""
    arrow = _pyarrow(path)
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise no_field(field, file.schema_arrow.names, str(path))
        yield from _texts(_parquet_batches(file, field), field, path)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from None


def arrow_rows(path: Path, field: str) -> Iterator[tuple[str, float]]:
    """As `parquet_rows`, for Arrow IPC: the stream form (what `save_to_disk` writes) or the file form."""
    arrow = _pyarrow(path)
    import pyarrow.ipc

    try:
        with arrow.memory_map(str(path)) as source:
            seekable = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pyarrow.ipc.open_file(source) if seekable else pyarrow.ipc.open_stream(source)
            if field not in reader.schema.names:
                raise no_field(field, reader.schema.names, str(path))
            yield from _texts(_file_batches(reader) if seekable else _stream_batches(reader, source), field, path)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Arrow file: {error}") from None


def _parquet_batches(file: Any, field: str) -> Iterator[tuple[Any, float]]:
    rows = 0
    for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
        rows += len(batch)
        yield batch, rows / file.metadata.num_rows


def _file_batches(reader: Any) -> Iterator[tuple[Any, float]]:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number), (number + 1) / reader.num_record_batches


def _stream_batches(reader: Any, source: Any) -> Iterator[tuple[Any, float]]:
    for batch in reader:
        yield batch, source.tell() / source.size()


def _texts(batches: Iterable[tuple[Any, float]], field: str, path: Path) -> Iterator[tuple[str, float]]:
    rows = 0
    for batch, share in batches:
        column = batch.column(batch.schema.get_field_index(field))
        for start in range(0, len(column), _ROWS):  # an Arrow batch may be large: turn it to Python text bit by bit
            for number, value in enumerate(column.slice(start, _ROWS).to_pylist(), start=rows + start):
                if text := text_of(value, field, f"{path}, row {number}"):
                    yield text, share
        rows += len(column)


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UserError(f"{path}: reading it needs pyarrow. Install it with: pip install 'shardwise[parquet]'") from None
    return pyarrow
