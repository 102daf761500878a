"""Seeded damage to files, and what must hold of whoever reads them: taken as meant, or refused in safe words.

Bytes are flipped, cut, removed, doubled and overwritten; values are replaced by others of the wrong type or
an absurd size, removed, doubled and renamed, by a hand that knows the format and writes it well. The same
seed gives the same cases.
"""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shardwise.errors import MAX_LINE_LENGTH, MAX_PROBLEMS, UserError

T = TypeVar("T")
Edit = Callable[[Any], Any]

SOME_AND_MANY = [pytest.param(30, id="some"), pytest.param(400, id="many", marks=pytest.mark.full)]
"""Cases of each kind of damage: in the usual tests, and where there is time."""

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
MARKUP = "x/[/x][red]y"
_DEEP, _DIGITS = "@deep@", "@digits@"
_RAW = {_DEEP: "[" * 20_000 + "]" * 20_000, _DIGITS: "9" * 5000}
_ODD: list[Any] = [
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        3,
        2**31,
        2**62,
        2**63,
        2**70,
        1 << 20_000,
        -(2**62),
        0.5,
        -0.5,
        1e308,
        1e-320,
        1e18,
    ),
    *(
        "",
        "x",
        "1",
        "x" * 100_000,
        ESCAPE,
        "../x.bin",
        "/etc/passwd",
        "..",
        "a\nb",
        "a\0b",
        "\u202eabc",
        "\ud800",
        "nan",
        ">u2",
    ),
    *(MARKUP, {MARKUP: MARKUP}),
    *(
        [],
        {},
        [1],
        [[]],
        {"a": 1},
        [1] * 20_000,
        {"x" * 5000: 1},
        {ESCAPE: ESCAPE},
        _DEEP,
        _DIGITS,
        float("inf"),
        float("nan"),
    ),
]
_THROUGHOUT: list[list[Any]] = [
    *(
        [0],
        [0.0],
        [-1],
        [1e-320],
        [2**62],
        [1e308],
        [-1e308],
        [1e308, -1e308],
        ["NaN", "Infinity", 1.0],
        [MARKUP],
    ),
    [{MARKUP: {"count": 1, "bytes": 1}}],
]


def damaged(content: bytes, seed: int, count: int) -> Iterator[bytes]:
    """The same bytes with one thing wrong."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content)
        start = draw.randrange(len(content))
        end = min(len(content), start + draw.choice((1, 2, 8, 64, 512)))
        match draw.choice(("flip", "flip", "flip", "cut", "remove", "double", "overwrite", "insert", "zero")):
            case "flip":
                changed[start] ^= 1 << draw.randrange(8)
            case "cut":
                del changed[start:]
            case "remove":
                del changed[start:end]
            case "double":
                changed[start:start] = changed[start:end]
            case "overwrite":
                changed[start:end] = draw.randbytes(end - start)
            case "insert":
                changed[start:start] = draw.choice(
                    (ESCAPE.encode(), b"\0", b"[" * 5000, b"9" * 5000, b'"', b"}", b"\xff\xfe")
                )
            case "zero":
                changed[start:end] = bytes(end - start)
        yield bytes(changed)


def rewritten(value: Any, seed: int, count: int) -> Iterator[Any]:
    """The same value with one thing replaced, removed, doubled or renamed."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = copy.deepcopy(value)
        holder, key = draw.choice(list(_places(changed)))
        match draw.choice(("replace", "replace", "replace", "remove", "double", "rename", "swap")):
            case "replace":
                holder[key] = copy.deepcopy(draw.choice(_ODD))
            case "remove":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case "double" | "rename" if isinstance(holder, dict):
                holder[draw.choice((f"{key}x", ESCAPE, MARKUP, "", "__class__", str(key).upper()))] = holder[
                    key
                ]
            case _:
                other, place = draw.choice(list(_places(changed)))
                holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])
        yield changed


def lacking(value: Any) -> Iterator[Any]:
    """The same value without one entry: each in turn."""
    for number in range(len(list(_places(value)))):
        changed = copy.deepcopy(value)
        holder, key = list(_places(changed))[number]
        del holder[key]
        yield changed


def throughout(values: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The same records with one field replaced in all of them: each field in turn, by one value, or by
    several by turns."""
    for field in dict.fromkeys(key for value in values for key in value):
        for numbers in _THROUGHOUT:
            yield [{**value, field: numbers[index % len(numbers)]} for index, value in enumerate(values)]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of every object and list."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def as_json(value: Any) -> bytes:
    """JSON, with what no writer would write put in as text."""
    return _with_raw(json.dumps(_writable(value), indent=1)).encode("utf-8", "surrogatepass")


def sealed(values: Any) -> bytes:
    """JSON with the checksum that belongs to it: not damage, but a hand that knows the format."""
    body = as_json(values).removesuffix(b"\n}")
    return body + b',\n "crc32": %d\n}\n' % zlib.crc32(body)


def as_toml(value: dict[str, Any]) -> bytes:
    """TOML of tables of tables."""
    lines: list[str] = []
    for name, table in value.items():
        if isinstance(table, dict):
            lines.append(f"[{_toml(name)}]")
            lines += [f"{_toml(key)} = {_toml(part)}" for key, part in table.items()]
        else:
            lines.insert(0, f"{_toml(name)} = {_toml(table)}")
    return _with_raw("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value) if value >= 2**62 else str(value)  # which may have any number of digits
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value) if value is not None else '""'


def _writable(value: Any) -> Any:
    """Python refuses to write numbers of thousands of digits."""
    if isinstance(value, dict):
        return {key: _writable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(part) for part in value]
    return _DIGITS if isinstance(value, int) and value.bit_length() > 10_000 else value


def _with_raw(text: str) -> str:
    for name, raw in _RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text


def read_or_refused(read: Callable[[], T], what: object) -> T | None:
    """What was read; None where it was refused, as a user must be told: bounded, and without a command to the
    terminal."""
    try:
        return read()
    except UserError as error:
        message = str(error)
    except BaseException as error:
        raise AssertionError(
            f"{type(error).__name__} instead of a refusal, for {str(what)[:2000]!r}"
        ) from error
    assert message
    lines = message.split("\n")
    assert len(lines) <= 2 * MAX_PROBLEMS + 2, message
    assert all(len(line) <= 2 * MAX_LINE_LENGTH for line in lines), message[:5000]
    assert not [
        mark for line in lines for mark in line if unicodedata.category(mark) in ("Cc", "Cf", "Cs")
    ], message
    return None


_watched: list[tuple[Path, list[str]]] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched and event == "open" and isinstance(arguments[0], str | bytes):
        folder, outside = _watched[-1]
        path = Path(os.path.realpath(os.fsdecode(arguments[0])))  # of a link to itself, Path.resolve raises
        if path.is_relative_to(folder.parent) and not path.is_relative_to(folder):
            outside.append(str(path))


sys.addaudithook(_note)


@contextmanager
def nothing_outside(folder: Path) -> Iterator[None]:
    """No file beside this folder is opened, by whatever name."""
    outside: list[str] = []
    _watched.append((folder.resolve(), outside))
    yield
    _watched.pop()
    assert outside == []
