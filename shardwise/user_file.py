"""Python files of users, which a job names as "file.py:Class": where they are, and running them once.

It is below `optimizers` and `config`, because optimizers, modules, programs and callbacks may all be classes
or functions of the same file.
"""

from __future__ import annotations

import importlib
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
    """Run a Python file once, as an import would; files beside it can be imported from it. A file whose
    folder has an `__init__.py` is imported as part of that package."""
    _loading.append(path)
    try:
        return _loaded(path)
    finally:
        _loading.pop()


def being_loaded() -> Sequence[Path]:
    """Return the files of users that are being run now, the innermost last."""
    return _loading


def _loaded(path: Path) -> ModuleType:
    return _imported(path) or _run_alone(path)


def _imported(path: Path) -> ModuleType | None:
    """Import a file that is in a package by its name there, so that relative imports work and the file is not
    run twice. Return None if it is in no package, or if its package has the name of another one."""
    folder, names = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        names.insert(0, folder.name)
        folder = folder.parent
    if folder == path.parent or not all(name.isidentifier() for name in names):
        return None
    _search(folder)
    package = importlib.util.find_spec(names[0])
    if package is None or package.origin is None:
        return None
    if Path(package.origin).resolve() != folder / names[0] / "__init__.py":
        return None
    _search(path.parent)
    return importlib.import_module(".".join(names).removesuffix(".__init__"))


def _run_alone(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("not a Python file; its name must end in .py")
    loaded = importlib.util.module_from_spec(spec)
    _search(path.parent)
    sys.modules[loaded.__name__] = loaded  # dataclasses and the compiler look for it there
    spec.loader.exec_module(loaded)
    return loaded


def _search(folder: Path) -> None:
    """Let imports find what is in a folder."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
