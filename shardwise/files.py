"""Read files from outside: with limits, with types, and with one line that says why a file is refused.

A job from a colleague, a model from a hub, a run folder from another machine or a file on a damaged disk may
contain anything. This module imports no torch and does the following:

- It never reads what is not a regular file or is too large, so that no pipe or device blocks a command.
- Text must be JSON or TOML within the limits of what shardwise itself writes: nested at most `MAX_DEPTH`
  times, with numbers of limited length, and without control characters, which a terminal would obey as
  commands. pydantic then checks the values against the types of a schema.
- Files that shardwise writes and later relies on are sealed: they are JSON objects whose last key is the
  CRC-32 of everything before it, so that one flipped bit is noticed. A seal protects against damage, not
  against a person who knows the format, so the values are checked as well.
- A file may name other files in its own folder only (`file_in_folder`): no `..`, no absolute path and no
  link that points out of the folder. Models on shared storage and in the hub's cache are folders of links on
  purpose; their links are followed to regular files (`file_or_link_in_folder`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shardwise.errors import Unreadable, UserError, printable, shown

MAX_FILE_BYTES = 1 << 30
"""Maximum size in bytes of a file that is read whole. The list of tensors of a huge checkpoint has a few
hundred MiB.
"""
MAX_DEPTH = 64
"""Maximum number of tables inside tables. A plan has six."""
_PERMANENT_ERRORS = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)
"""Error numbers that mean a wrong path or a missing permission, for which a later attempt does not help."""
_NOT_REGULAR = "it is not a regular file"
_SEAL = b',\n "crc32": '

T = TypeVar("T")
Json = dict[str, object]
"""A JSON object or a TOML table whose values are not checked yet."""
Place = tuple["Place", object] | tuple[()]
"""Where a value is: the place of the table that contains it, and its key there."""


def read_bytes(path: Path, advice: str = "") -> bytes:
    """Return the content of a file.

    A missing file raises `FileNotFoundError`, which the caller explains. Any other obstacle is a `UserError`.
    """
    with reading(path, advice), open_regular(path, advice) as stream:
        if os.fstat(stream.fileno()).st_size > MAX_FILE_BYTES:
            _refuse(path, f"is larger than {MAX_FILE_BYTES >> 20} MiB", advice)
        return stream.read()


@contextmanager
def reading(source: str | Path, advice: str = "") -> Iterator[None]:
    """Turn errors of the system inside the `with` block into a `UserError`, except `FileNotFoundError`.

    Examples are a missing permission, a name that is too long and a failing disk. `Path.is_file` and similar
    methods raise these errors too. The caller explains a missing file.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # a path with a NUL character is a ValueError
        if is_temporary(error):
            raise Unreadable(f"{source} cannot be read: {error}") from None
        _refuse(source, f"cannot be read: {getattr(error, 'strerror', None) or error}", advice)


def open_regular(path: Path, advice: str = "") -> BinaryIO:
    """Open a file for reading if it is a regular file.

    Opening a pipe without a writer would block, and a device may have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            _refuse(path, "is a folder" if stat.S_ISDIR(mode) else "is not a regular file", advice)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def regular_file_opener(path: str, flags: int) -> int:
    """Open regular files only; used as the `opener` of `open` for writing.

    A pipe would block until it has a reader, and a device may not store anything. Both raise an OSError,
    which callers that write files handle anyway.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: a pipe without a reader
            raise
        raise OSError(errno.EINVAL, _NOT_REGULAR, path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_REGULAR, path)
    return descriptor


def is_temporary(error: BaseException) -> bool:
    """Return whether an error may disappear after a while.

    That is true where a disk or a server does not answer, and false for a wrong path.
    """
    return isinstance(error, OSError) and error.errno not in _PERMANENT_ERRORS


def parse_json(content: bytes, source: str | Path, advice: str = "") -> Any:
    """Return the value of a JSON text, after checking the limits of this module."""
    try:
        value = json.loads(content, parse_constant=_no_number)
    # ValueError: no JSON, no UTF-8, or a number with thousands of digits. RecursionError: endless nesting.
    except (ValueError, RecursionError) as error:
        _refuse(source, f"is not valid JSON: {error}", advice)
    return _bounded(value, source, advice, bits=63)


def parse_toml(content: bytes, source: str | Path, advice: str = "") -> dict[str, Any]:
    """Return the tables of a TOML text, after checking the limits of this module.

    People write TOML, so numbers may be large here: the schema explains better what is wrong with a number.
    """
    try:
        value = tomllib.loads(content.decode("utf-8-sig"))  # some editors write a byte order mark
    except (ValueError, RecursionError) as error:
        _refuse(source, f"is not valid TOML: {error}", advice)
    _bounded(value, source, advice, bits=10_000)
    return value


def parse_as(schema: type[T], content: bytes, source: str | Path, advice: str = "") -> T:
    """Return the value of a JSON text as a type that pydantic knows. An error names the first wrong value."""
    parse_json(content, source, advice)
    return _as(schema, lambda adapter: adapter.validate_json(content), source, advice)


def parse_toml_as(schema: type[T], content: bytes, source: str | Path, advice: str = "") -> T:
    """Return the value of a TOML text as a type that pydantic knows. An error names the first wrong value."""
    tables = parse_toml(content, source, advice)
    return _as(schema, lambda adapter: adapter.validate_python(tables), source, advice)


def _as(schema: Any, validate: Callable[[TypeAdapter[T]], T], source: str | Path, advice: str) -> T:
    try:
        return validate(_adapter(schema))
    except ValidationError as error:
        _refuse(f"{source}:", first_problem(error), advice)


def first_problem(error: ValidationError) -> str:
    """Return pydantic's first problem as text: the key, its value, and what is wrong with it."""
    return problems_of(error)[0]


def problems_of(error: ValidationError) -> list[str]:
    """Return all problems that pydantic found, as texts: the key, its value, and what is wrong with it."""
    return [_problem(detail) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"])
    key = "".join(parts).lstrip(".")
    value = "" if detail["type"] == "missing" else f"{' = ' if key else ''}{shown(detail['input'])}"
    return f"{key}{value}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def seal(values: Mapping[str, object]) -> bytes:
    """Return the values as JSON whose last key is the CRC-32 of everything before it."""
    body = json.dumps(values, indent=1).encode().removesuffix(b"\n}")
    return body + _end_of(body)


def unseal(content: bytes) -> bytes | None:
    """Return the JSON that was sealed, or None if the content was changed since, or was never sealed."""
    body, end, tail = content.rpartition(_SEAL)
    return body + b"\n}" if end and end + tail == _end_of(body) else None


def read_sealed(
    schema: type[T], content: bytes, source: str | Path, version: tuple[str, int], advice: str
) -> T:
    """Return the values of a sealed file as a type.

    `version` is the key that holds the version of the format, and the version that is read here.
    """
    key, wanted = version
    body = unseal(content)
    if body is None:
        older = None
        with suppress(UserError):
            older = parse_json(content, source)
        number = older.get(key) if isinstance(older, dict) and "crc32" not in older else None
        is_other = type(number) is int and number != wanted
        reason = f"has format {number}; this version of shardwise reads {wanted}"
        _refuse(source, reason if is_other else "is damaged", advice)
    number = parse_json(body, source, advice).get(key)
    if number != wanted:
        reason = f"has format {shown(number)}; this version of shardwise reads {wanted}"
        _refuse(source, reason, advice)
    return parse_as(schema, body, source, advice)


def file_in_folder(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, and refuse a name or a link that leads out of the folder.

    The folder itself may be a link: that is its owner's decision.
    """
    path = _child(folder, name)
    with reading(path):
        if is_link_outside(path, folder):
            raise UserError(f"{path} is a link that leads out of its folder; put the file itself there")
    return path


def file_or_link_in_folder(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, where the file may be a link to anywhere.

    The file may be missing. A folder, a pipe, a device, a link to one of these and a broken link are refused.
    """
    path = _child(folder, name)
    with reading(path):
        if os.path.lexists(path) and not path.is_file():
            if not path.is_symlink():
                raise UserError(f"{path} is not a regular file")
            absent = "leads back to it" if _loops(path) else "is not there"
            wrong = "is not a regular file" if os.path.exists(path) else absent
            raise UserError(f"{path} is a link to {os.readlink(path)}, which {wrong}")
    return path


def _loops(path: Path) -> bool:
    """Return whether following a link never ends."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def is_link_outside(path: Path, folder: Path) -> bool:
    """Return whether a path is a link to something outside a folder."""
    # Path.resolve would raise an error for a link to itself.
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _child(folder: Path, name: str) -> Path:
    """Return the path of a name in a folder, and refuse a name that leads elsewhere."""
    if not name or name in (".", "..") or "/" in name or "\0" in name or len(os.fsencode(name)) > 255:
        raise UserError(f"{folder} names a file {shown(name)}; only files in the folder itself are read")
    return folder / name


def _end_of(body: bytes) -> bytes:
    return _SEAL + b"%d\n}\n" % zlib.crc32(body)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


@lru_cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _bounded(value: T, source: str | Path, advice: str, bits: int) -> T:
    """Return the value if all its parts are within the limits. Numbers have at most `bits` bits and a
    sign.
    """
    # Each entry is an item, its place as (place of the container, key), and its depth.
    pending: list[tuple[object, Place, int]] = [(value, (), 0)]
    while pending:
        item, place, depth = pending.pop()
        if isinstance(item, dict | list):
            if depth == MAX_DEPTH:
                _refuse(source, f"is nested more than {MAX_DEPTH} times", advice)
            entries: Iterable[tuple[object, object]] = (
                item.items() if isinstance(item, dict) else enumerate(item)
            )
            pending += [(part, (place, key), depth + 1) for key, part in entries]
        reason = _wrong_item(item, bits)
        if reason:
            _refuse(f"{source}:", f"{_key_path(place)}{reason}", advice)
    return value


def _wrong_item(item: object, bits: int) -> str | None:
    """Return what is wrong with one value, or with the keys of a table; None if it is within the limits."""
    if isinstance(item, dict):
        return _wrong_key(item)
    if isinstance(item, str) and not _is_text(item):
        return f"= {shown(item)} has a control character"
    if isinstance(item, float) and bits < 64 and not math.isfinite(item):
        return "is not a finite number"
    if isinstance(item, int) and item.bit_length() > bits:
        return f"is a number of {item.bit_length()} bits, of at most {bits}"
    return None


def _wrong_key(table: Mapping[str, object]) -> str | None:
    key = next((key for key in table if not key.isprintable()), None)
    return None if key is None else f"has a key {shown(key)} with a control character"


def _is_text(text: str) -> bool:
    """Return whether a text has no surrogates, and no control characters except tabs and line ends."""
    return text.isprintable() or not any(
        (code < 32 and code not in (9, 10, 13)) or 127 <= code < 160 or 0xD800 <= code < 0xE000
        for code in map(ord, text)
    )


def _key_path(place: Place) -> str:
    """Return the keys that lead to a value, as in "model.layers[3] "."""
    keys: list[str] = []
    while place:
        place, key = place
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(keys)).lstrip(".") + " " if keys else ""


def _refuse(source: str | Path, reason: str, advice: str) -> NoReturn:
    raise UserError(f"{source} {printable(reason)}" + (f". {advice}" if advice else "")) from None
