"""Whose code raised an exception: a user's own, which does the same when it is tried again, or the
libraries'.

A worker that is tried again may succeed where a disk, a network or a neighbour failed. An exception that
rises twice in the same line of a user's own module, at the same step on the same data, rises a third time; so
the run says that line, and stops.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(
    {
        str(Path(__file__).parents[1]) + os.sep,
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def own_line(error: BaseException) -> str:
    """The innermost line of a user's own file on the way to this exception: `model.py, line 12, in forward`;
    or nothing."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{near}, line {frames[-1].lineno}, in {frames[-1].name}"


def _is_own(file: str) -> bool:
    return os.path.isabs(file) and not file.startswith(_LIBRARIES)
