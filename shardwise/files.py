"""Files from outside, through one reader: bounded, typed, and refused in one line that says file, place and
reason. No torch.

A job from a colleague, a model from a hub, a run folder from another machine, a disk that flips a bit:
whatever is read here may be anything. What is not a regular file or too large is never read, so that no pipe
or device hangs a command. Text must be JSON or TOML that stays within what we ever write: nested at most
`DEEPEST` times, numbers of a bounded length, and no control characters, which would reach a terminal as
commands to it. pydantic then holds the values to the types of a schema.

What we write and later rely on is sealed: a JSON object whose last key is the CRC-32 of all that stands
before it, so that one flipped bit is noticed. A seal is against damage, not against a hand that knows the
format: meaning is checked as well.

A file may name others only in its own folder (`inside`): no `..`, no absolute path, no link that leads out.
Models on shared storage and in the hub's cache are folders of links on purpose: those are followed to regular
files (`linked`).
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from shardwise.errors import Unreadable, UserError, printable, shown

LARGEST = 1 << 30
"""Bytes of a file that is read whole; the list of tensors of the largest checkpoints is a few hundred MiB."""
DEEPEST = 64
"""Tables in tables; a plan has six."""
_LASTING = (
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EINVAL,
)
_NOT_REGULAR = "it is not a regular file"
_SEAL = b',\n "crc32": '

T = TypeVar("T")


def read_bytes(path: Path, advice: str = "") -> bytes:
    """A whole file. One that is not there is the caller's to explain (`FileNotFoundError`); any other
    obstacle is named here."""
    with reading(path, advice), open_regular(path, advice) as stream:
        if os.fstat(stream.fileno()).st_size > LARGEST:
            _refuse(path, f"is larger than {LARGEST >> 20} MiB", advice)
        return stream.read()


@contextmanager
def reading(source: str | Path, advice: str = "") -> Iterator[None]:
    """Refuse a path that the system will not look at: no permission, a name too long, a disk that fails.
    `Path.is_file` and the like raise these too; only that nothing is there (`FileNotFoundError`) is left to
    the caller.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        if may_pass(error):
            raise Unreadable(f"{source} cannot be read: {error}") from None
        _refuse(source, f"cannot be read: {getattr(error, 'strerror', None) or error}", advice)


def open_regular(path: Path, advice: str = "") -> BinaryIO:
    """A file to be read, if it is a regular one: a pipe that nobody writes to would block, and a device need
    not end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            _refuse(path, "is a folder" if stat.S_ISDIR(mode) else "is not a regular file", advice)
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def only_regular(path: str, flags: int) -> int:
    """An `opener` for `open` that writes to regular files alone: a pipe would wait for its reader, and a
    device need not keep anything. Others are an OSError, for which writers are prepared anyway."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # of a pipe without a reader
            raise
        raise OSError(errno.EINVAL, _NOT_REGULAR, path) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_REGULAR, path)
    return descriptor


def may_pass(error: BaseException) -> bool:
    """Whether what kept us from a file may be over in a while: a disk or a server that does not answer, and
    not a wrong path."""
    return isinstance(error, OSError) and error.errno not in _LASTING


def parse_json(content: bytes, source: str | Path, advice: str = "") -> Any:
    """What JSON text holds, within bounds."""
    try:
        value = json.loads(content, parse_constant=_no_number)
    except (
        ValueError,
        RecursionError,
    ) as error:  # no JSON, no UTF-8, a number of thousands of digits, brackets without end
        _refuse(source, f"is not valid JSON: {error}", advice)
    return _bounded(value, source, advice, bits=63)


def parse_toml(content: bytes, source: str | Path, advice: str = "") -> dict[str, Any]:
    """What TOML text holds, within bounds. People write it, so what is wrong with a number is the schema's to
    say."""
    try:
        value = tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with a mark
    except (ValueError, RecursionError) as error:
        _refuse(source, f"is not valid TOML: {error}", advice)
    _bounded(value, source, advice, bits=10_000)
    return value


def parse_as(schema: type[T], content: bytes, source: str | Path, advice: str = "") -> T:
    """What JSON text holds, as a type that pydantic knows; the first value that is not of its type is
    named."""
    parse_json(content, source, advice)
    value: T = _as(schema, lambda adapter: adapter.validate_json(content), source, advice)
    return value


def parse_toml_as(schema: type[T], content: bytes, source: str | Path, advice: str = "") -> T:
    """The same of TOML text."""
    tables = parse_toml(content, source, advice)
    value: T = _as(schema, lambda adapter: adapter.validate_python(tables), source, advice)
    return value


def _as(schema: Any, validate: Callable[[TypeAdapter[Any]], Any], source: str | Path, advice: str) -> Any:
    try:
        return validate(_adapter(schema))
    except ValidationError as error:
        _refuse(f"{source}:", first_problem(error), advice)


def first_problem(error: ValidationError) -> str:
    """The first of pydantic's findings: the place, what is there, and what is wrong with it."""
    detail = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in detail["loc"]).lstrip(
        "."
    )
    held = "" if detail["type"] == "missing" else f"{' = ' if where else ''}{shown(detail['input'])}"
    return f"{where}{held}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def seal(values: Mapping[str, Any]) -> bytes:
    """As JSON whose last key is the CRC-32 of all that stands before it."""
    body = json.dumps(values, indent=1).encode().removesuffix(b"\n}")
    return body + _end_of(body)


def unseal(content: bytes) -> bytes | None:
    """The JSON that was sealed; None where it is not what was sealed."""
    body, end, tail = content.rpartition(_SEAL)
    return body + b"\n}" if end and end + tail == _end_of(body) else None


def read_sealed(
    schema: type[T], content: bytes, source: str | Path, version: tuple[str, int], advice: str
) -> T:
    """What was sealed, as a type; `version` is the key that says which format a file has, and the one that is
    read here."""
    key, wanted = version
    body = unseal(content)
    if body is None:
        older = None
        with suppress(UserError):
            older = parse_json(content, source)
        found = older.get(key) if isinstance(older, dict) and "crc32" not in older else None
        other = type(found) is int and found != wanted
        _refuse(
            source,
            f"has format {found}; this version of shardwise reads {wanted}" if other else "is damaged",
            advice,
        )
    values = parse_json(body, source, advice)
    if values.get(key) != wanted:
        _refuse(
            source, f"has format {shown(values.get(key))}; this version of shardwise reads {wanted}", advice
        )
    return parse_as(schema, body, source, advice)


def inside(folder: Path, name: str) -> Path:
    """The file of this name in a folder, refused if it is elsewhere: by its name, or by a link that leads out
    of the folder. The folder itself may be reached by a link: that is its owner's choice.
    """
    path = _child(folder, name)
    with reading(path):
        if leads_out(path, folder):
            raise UserError(f"{path} is a link that leads out of its folder; put the file itself there")
    return path


def linked(folder: Path, name: str) -> Path:
    """The file of this name in a folder, or where a link of this name leads to, which may be anywhere. It
    need not be there. What is there and is not a regular file is refused: a folder, a pipe, a device, a link
    to one, a link that leads nowhere.
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
    """Whether following a link never ends."""
    try:
        os.stat(path)
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to something outside of a folder."""
    # Not Path.resolve, which raises for a link to itself.
    return path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _child(folder: Path, name: str) -> Path:
    """The path of this name in a folder, refused if the name leads elsewhere."""
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


def _bounded(value: Any, source: str | Path, advice: str, bits: int) -> Any:
    """The value, if nothing in it is beyond what we would write; numbers of so many bits and a sign."""
    pending: list[tuple[Any, tuple[Any, ...], int]] = [
        (value, (), 0)
    ]  # what, its place as (outer place, key), how deep
    while pending:
        item, place, depth = pending.pop()
        kind = type(item)
        if kind is dict or kind is list:
            if depth == DEEPEST:
                _refuse(source, f"is nested more than {DEEPEST} times", advice)
            entries = item.items() if kind is dict else enumerate(item)
            pending += [(part, (place, key), depth + 1) for key, part in entries]
            if (
                kind is dict
                and (key := next((key for key in item if not key.isprintable()), None)) is not None
            ):
                _refuse(
                    f"{source}:", f"{_named(place)}has a key {shown(key)} with a control character", advice
                )
        elif kind is str and not _is_text(item):
            _refuse(f"{source}:", f"{_named(place)}= {shown(item)} has a control character", advice)
        elif kind is float and bits < 64 and not math.isfinite(item):
            _refuse(f"{source}:", f"{_named(place)}is not a finite number", advice)
        elif kind is int and item.bit_length() > bits:
            _refuse(
                f"{source}:",
                f"{_named(place)}is a number of {item.bit_length()} bits, of at most {bits}",
                advice,
            )
    return value


def _is_text(text: str) -> bool:
    """Whether it has no control characters but tabs and line ends, and no half of a character."""
    return text.isprintable() or not any(
        (code < 32 and code not in (9, 10, 13)) or 127 <= code < 160 or 0xD800 <= code < 0xE000
        for code in map(ord, text)
    )


def _named(place: tuple[Any, ...]) -> str:
    keys: list[str] = []
    while place:
        place, key = place
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(keys)).lstrip(".") + " " if keys else ""


def _refuse(source: str | Path, reason: str, advice: str) -> NoReturn:
    raise UserError(f"{source} {printable(reason)}" + (f". {advice}" if advice else "")) from None
