"""Where a user's own module is (`[model] module = "file.py:Class"`), and what can be said of it without running it.

Running it needs torch, which takes seconds. That the file is there, is Python, and has something of that name is known from its
text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from shardwise.config.schema import Model
from shardwise.errors import UserError
from shardwise.files import read_bytes, reading


def locate_module(model: Model) -> tuple[Path, str]:
    """The file, and the name in it."""
    assert model.module is not None, "there is one"
    where = f"model.module = {model.module!r}"
    file, colon, name = model.module.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UserError(f"{where}: write it as file.py:Class, for example model.py:OwnModel")
    path = Path(file).resolve()
    with reading(f"{where}:"):
        if not path.is_file():
            raise UserError(f"{where}: no such file: {path}. Paths in a job start from the folder where the command is run")
    if path.suffix != ".py":
        raise UserError(f"{where}: {file} is not a Python file; its name must end in .py")
    return path, name


def problems_of_module(model: Model) -> Iterator[str]:
    """What is wrong with the module's file, as far as its text tells."""
    path, name = locate_module(model)
    where = f"model.module = {model.module!r}"
    try:
        tree = ast.parse(read_bytes(path), str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        yield f"{where}: {path.name} is not Python: {error}" + (f" ({path}, line {line})" if line else "")
        return
    names = set(_names(tree))
    if name not in names and "*" not in names:
        own = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        yield f"{where}: {path.name} has no class or function {name}; it has {', '.join(own) or 'none at all'}"


def _names(tree: ast.Module) -> Iterator[str]:
    """All that some statement, wherever it stands, may give a name to; `*`: names that only an import knows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("globals", "exec", "setattr"):
            yield "*"
