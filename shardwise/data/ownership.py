"""Find out whether shardwise made a folder, before any file in it is overwritten or removed.

Preparing data clears a folder that was made from other sources. `index.json` and `tokenizer.json` are common
names, so the content of a file must say that the folder is ours: the index of finished data, or the record of
unfinished work. The record is written first and removed only after the index is written. A folder that
shardwise worked in therefore always contains one of them, even after a crash. A new folder must be empty. A
folder of the user is refused and left unchanged.

The same names show that a source is not text: shards are never tokenized again, even if their index is lost.
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
"""Name of the file that says how far preparing has come."""
LOCK = ".lock"
"""Name of the file that is locked while data are prepared."""
_RECORD_NAMES = ("fingerprint", "shards", "file", "piece")
_BEFORE_RECORD = {LOCK, RECORD + ".partial"}
"""Names of all files that may exist before the record is written."""
_SHARD = re.compile(r"shard-\d{5,}\.(bin|ends|answers)")
_OTHERS = re.compile(r"shard-\d{5,}\.(bin|ends|answers)(\.partial)?|(index|preparing)\.json\.partial")


def is_prepared(folder: Path) -> bool:
    """Return whether the folder has an index that shardwise wrote, even a damaged one."""
    return _ours(folder / INDEX, Index.__dataclass_fields__)


def is_begun(folder: Path) -> bool:
    """Return whether the folder has a record of unfinished work."""
    return _ours(folder / RECORD, _RECORD_NAMES)


def check_target(folder: Path) -> None:
    """Raise a UserError for a target that is a file, or a folder with files that shardwise did not make."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise UserError(f"{folder} is a file, not a folder. Choose another folder for the prepared data.")
    # List the folder first. If another process is working here, then the record or the index, which are
    # checked next, exists for everything in this list.
    names = set(os.listdir(folder)) if folder.is_dir() else set()
    if not (names <= _BEFORE_RECORD or is_begun(folder) or is_prepared(folder)):
        raise UserError(
            f"{folder} is not empty and was not made by shardwise; nothing in it was changed. "
            "Choose another folder for the prepared data."
        )


def refuse_shards(paths: Iterable[Path]) -> None:
    """Raise a UserError if prepared tokens would be read as text.

    A prepared folder that has lost its index looks like any folder of files.
    """
    shard = next((path for path in paths if _SHARD.fullmatch(path.name.removesuffix(".partial"))), None)
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
    """Remove what an earlier source left in a folder of ours.

    The index is removed first, so that it never stands beside other shards. The record stays, and so the
    folder is still recognised if this is interrupted.
    """
    for name in (INDEX, FILE, *CHAT_FILES):
        (folder / name).unlink(missing_ok=True)
    for name in os.listdir(folder):
        if _OTHERS.fullmatch(name):
            (folder / name).unlink()


def _ours(path: Path, names: Collection[str]) -> bool:
    """Return whether a file is a JSON object with most of these names.

    Beside shards, a file that is no longer a JSON object counts too: it is a damaged one of ours.
    """
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
