"""Find out whether an exception was raised in the user's code or in a library.

If a disk, a network or another worker failed, a second attempt may succeed. An exception that is raised twice
in the same line of the user's code, at the same step on the same data, will be raised a third time. The run
then reports that line and stops.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

_LIBRARIES = tuple(  # folders of shardwise, of Python and of installed packages
    {
        str(Path(__file__).parents[1]) + os.sep,
        *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def line_in_user_code(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback; empty if there is none.

    It looks like `model.py, line 12, in forward`.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]
    if not frames:
        return ""
    path = Path(frames[-1].filename)
    near = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{near}, line {frames[-1].lineno}, in {frames[-1].name}"


def trace_of_user_code(error: BaseException) -> str:
    """Return the traceback from the first line of the user's code on; the whole one if there is no such
    line."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((index for index, frame in enumerate(frames) if _is_user_file(frame.filename)), 0)
    lines = traceback.format_list(frames[first:]) + traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *lines])


def _is_user_file(file: str) -> bool:
    """Return whether a file belongs to the user and not to a library."""
    return os.path.isabs(file) and not file.startswith(_LIBRARIES)
