"""Python files of users, which a job names as "file.py:Class": where they are, and running them once.

It is below `optimizers` and `config`, because optimizers, modules, programs and callbacks may all be classes
or functions of the same file.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType

from shardwise.errors import UserError
from shardwise.files import reading


def locate(where: str, address: str, example: str) -> tuple[Path, str]:
    """Return the path of the file that "file.py:Class" names, and the name of the class. `where` begins the
    message if it names none."""
    file, colon, name = address.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UserError(f"{where}: write it as file.py:Class, for example {example}")
    path = Path(file).resolve()
    with reading(f"{where}:"):
        if not path.is_file():
            raise UserError(
                f"{where}: no such file: {path}. Paths in a job start from the folder where the command is "
                "run"
            )
    if path.suffix != ".py":
        raise UserError(f"{where}: {file} is not a Python file; its name must end in .py")
    return path, name


_loading: list[Path] = []


@cache
def load_file(path: Path) -> ModuleType:
    """Run a Python file once, as an import would; files beside it can be imported from it."""
    _loading.append(path)
    try:
        return _loaded(path)
    finally:
        _loading.pop()


def being_loaded() -> Sequence[Path]:
    """Return the files of users that are being run now, the innermost last."""
    return _loading


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file; its name must end in .py")
    loaded = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    sys.modules[loaded.__name__] = loaded  # dataclasses and the compiler look for it there
    spec.loader.exec_module(loaded)
    return loaded
