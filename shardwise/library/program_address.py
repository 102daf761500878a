"""The address of a program that a Python script or a notebook has as a function.

Workers are other processes, so they need the program's code. A function at the top of a file is named by the
file: workers run the file to get it. Any other function (of a notebook, inside of another function) is
written to a file by cloudpickle, with everything that it refers to.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.errors import UserError

FOLDER = Path(".shardwise/programs")
"""Where programs are written that are in no file."""


def address_of(program: Callable[[Any], object]) -> str:
    """Return the address by which workers find a program, as "file.py:function" or "file.pkl"."""
    if not callable(program):
        raise UserError(
            f"a {type(program).__name__} is no program; give a function of an engine, a Job, or the path of "
            "a job file"
        )
    name, file = getattr(program, "__qualname__", ""), _file_of(program)
    if name.isidentifier() and file is not None and file.suffix == ".py":
        return f"{file}:{name}"
    return str(_written(program))


def _file_of(program: Callable[[Any], object]) -> Path | None:
    """Return the file that has the program at its top; None if it is in none that can be run again."""
    module = sys.modules.get(getattr(program, "__module__", ""))
    if getattr(module, getattr(program, "__name__", ""), None) is not program:
        return None
    try:
        path = Path(inspect.getfile(program)).resolve()
    except (TypeError, OSError):
        return None
    return path if path.is_file() and getattr(module, "__file__", None) else None


def _written(program: Callable[[Any], object]) -> Path:
    """Write a program to a file, and return its path."""
    import cloudpickle

    try:
        content = cloudpickle.dumps(program)
    except Exception as error:
        raise UserError(
            f"{getattr(program, '__qualname__', program)}: cannot be sent to workers: {error}. Put the "
            "program at the top of a file, or let it make what cannot be sent"
        ) from error
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{hashlib.sha256(content).hexdigest()[:16]}.pkl"
    path.write_bytes(content)
    path.chmod(0o600)
    return path.resolve()
