"""Whose folder is it? Asked before a single file is overwritten or removed.

Preparing clears a folder that was made from other sources. `index.json` and `tokenizer.json` are common
names, so only what is in a file tells that the folder is ours: the index of finished data, or the record of
unfinished work. The record is the first file written and goes only after the index is there, so a folder we
touched always holds one of them, wherever a crash fell. A new folder must be empty; a user's own is refused
and left as it is.

The same names tell that a source is no text: shards are never tokenised again, whatever became of their
index.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from shardwise.data.chat import FILES as CHAT_FILES
from shardwise.data.shards import INDEX, Index, prepare_again
from shardwise.data.tokenizer import FILE
from shardwise.errors import UserError
from shardwise.files import parse_json, read_bytes, reading

RECORD = "preparing.json"
LOCK = ".lock"
_RECORD_NAMES = ("fingerprint", "shards", "file", "piece")
_UNTOUCHED = {LOCK, RECORD + ".partial"}  # all there can be before the record is
_SHARD = re.compile(r"shard-\d{5,}\.(bin|ends|answers)")
_OTHERS = re.compile(r"shard-\d{5,}\.(bin|ends|answers)(\.partial)?|(index|preparing)\.json\.partial")


def is_prepared(folder: Path) -> bool:
    """Whether the folder's index is one of ours, be it damaged."""
    return _ours(folder / INDEX, Index.__dataclass_fields__)


def is_begun(folder: Path) -> bool:
    """Whether the folder holds a record of unfinished work."""
    return _ours(folder / RECORD, _RECORD_NAMES)


def check_target(folder: Path) -> None:
    """Refuse to prepare into a file, or into a folder that holds anything not made here."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder. Choose another folder for the prepared data.")
    # The listing comes first: while another process works here, what it shows is vouched for by one of the
    # next two.
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    if not (names <= _UNTOUCHED or is_begun(folder) or is_prepared(folder)):
        raise UserError(
            f"{folder} is not empty and was not made by shardwise; nothing in it was changed. "
            "Choose another folder for the prepared data."
        )


def refuse_shards(names: Iterable[Path]) -> None:
    """Refuse to read prepared tokens as text. A prepared folder that has lost its index looks like any folder
    of files."""
    shard = next((path for path in names if _SHARD.fullmatch(path.name.removesuffix(".partial"))), None)
    if shard is None:
        return
    folder, index = shard.parent, shard.parent / INDEX
    if is_prepared(folder):
        raise UserError(f"{shard} holds prepared tokens, not text. Give its folder {folder} as data.source.")
    if not os.path.lexists(index):
        problem = "is missing"
    else:
        problem = "is not one that shardwise wrote" if index.is_file() else "is not a regular file"
    raise UserError(f"{index} {problem}, so {shard.name} beside it cannot be read. {prepare_again(folder)}")


def clear(folder: Path) -> None:
    """Remove what an earlier source left in a folder of ours, the index first, so that it never vouches for
    other shards.

    The record stays, and with it the folder is still ours if this is interrupted.
    """
    for name in (INDEX, FILE, *CHAT_FILES):
        (folder / name).unlink(missing_ok=True)
    for name in os.listdir(folder):
        if _OTHERS.fullmatch(name):
            (folder / name).unlink()


def _ours(path: Path, names: Collection[str]) -> bool:
    """A JSON object with most of our names; or, beside shards, a file that is no JSON object any more."""
    with reading(path.parent):
        if not path.is_file():
            return False
    try:
        values = parse_json(read_bytes(path), path)
    except (OSError, UserError):
        values = None
    if isinstance(values, dict):
        return 2 * sum(name in values for name in names) >= len(names)
    with reading(path.parent):
        return any(_SHARD.fullmatch(name) for name in os.listdir(path.parent))
