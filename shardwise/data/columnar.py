"""Read rows of columnar files: Parquet, and the Arrow files of Hugging Face datasets.

Both are read one batch of rows at a time, and only the columns that are needed, so that memory stays at a few
thousand documents. pyarrow is an optional dependency (the `parquet` extra) and imported only for such a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from shardwise.errors import UserError

if TYPE_CHECKING:
    from pyarrow import MemoryMappedFile, RecordBatch
    from pyarrow.ipc import RecordBatchFileReader, RecordBatchStreamReader
    from pyarrow.parquet import ParquetFile

_ROWS = 1024
"""Number of rows that are converted to Python objects at a time."""
Row = tuple[dict[str, object], int, float]
"""Values by field, number of the row in the file, and the fraction of the file that was read by then."""
Choice = Callable[[Sequence[str]], Sequence[str]]
"""Function that returns, given the names of all columns, the names of those to read."""
Batches = Iterator[tuple["RecordBatch", float]]
"""Batches of rows, each with the fraction of the file that was read by then."""


def parquet_rows(path: Path, columns: Choice) -> Iterator[Row]:
    """Yield the rows of a Parquet file, with some of its columns."""
    arrow = _pyarrow(path)
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        yield from _rows(_parquet_batches(file, columns(file.schema_arrow.names)))
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file: {error}") from None


def arrow_rows(path: Path, columns: Choice) -> Iterator[Row]:
    """Yield the rows of an Arrow IPC file, with some of its columns.

    Both forms are read: the stream form, which `save_to_disk` writes, and the file form.
    """
    arrow = _pyarrow(path)
    import pyarrow.ipc

    try:
        with arrow.memory_map(str(path)) as source:
            seekable = source.read(6) == b"ARROW1"
            source.seek(0)
            reader = pyarrow.ipc.open_file(source) if seekable else pyarrow.ipc.open_stream(source)
            chosen = list(columns(reader.schema.names))
            batches = _file_batches(reader) if seekable else _stream_batches(reader, source)
            yield from _rows((batch.select(chosen), share) for batch, share in batches)
    except arrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Arrow file: {error}") from None


def _parquet_batches(file: ParquetFile, columns: Sequence[str]) -> Batches:
    rows = 0
    for batch in file.iter_batches(batch_size=_ROWS, columns=list(columns)):
        rows += len(batch)
        yield batch, rows / file.metadata.num_rows


def _file_batches(reader: RecordBatchFileReader) -> Batches:
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number), (number + 1) / reader.num_record_batches


def _stream_batches(reader: RecordBatchStreamReader, source: MemoryMappedFile) -> Batches:
    for batch in reader:
        yield batch, source.tell() / source.size()


def _rows(batches: Batches) -> Iterator[Row]:
    number = 0
    for batch, share in batches:
        # An Arrow batch may be large, so it is converted to Python objects in parts.
        for start in range(0, len(batch), _ROWS):
            for values in batch.slice(start, _ROWS).to_pylist():
                yield values, number, share
                number += 1


def _pyarrow(path: Path) -> ModuleType:
    try:
        return import_module("pyarrow")
    except ImportError:
        raise UserError(
            f"{path}: reading it needs pyarrow. Install it with: pip install 'shardwise[parquet]'"
        ) from None
