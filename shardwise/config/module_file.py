"""Where a user's own module is (`[model] module = "file.py:Class"`), and what can be said of it without
running it.

Running it needs torch, which takes seconds. That the file is there, is Python, and has something of that name
is known from its text. So is, mostly, that a class has no sharding table: where neither it nor the classes it
is derived from, up to torch's own, are in a file that has the word `sharding`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from shardwise.config.axes import MODEL_AXES
from shardwise.config.layout import Layout
from shardwise.config.model import Model
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
            raise UserError(
                f"{where}: no such file: {path}. Paths in a job start from the folder where the command "
                f"is run"
            )
    if path.suffix != ".py":
        raise UserError(f"{where}: {file} is not a Python file; its name must end in .py")
    return path, name


TABLE = "sharding"
"""The attribute of a module that is its table."""


def without_table(name: str, layout: Layout) -> Iterator[str]:
    """What of a layout a module that has no sharding table cannot have."""
    for axis in MODEL_AXES:
        if (size := getattr(layout, axis)) > 1:
            yield (
                f"layout.{axis} = {size}: {name} has no sharding table, so only replica, data and zero can "
                f"be used. Give it "
                f"an attribute `{TABLE}` (docs/sharding.md)"
            )


def problems_of_module(model: Model, layout: Layout | None = None) -> Iterator[str]:
    """What is wrong with the module's file, as far as its text tells, and with a layout for a module without
    a table."""
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
        yield (
            f"{where}: {path.name} has no class or function {name}; it has {', '.join(own) or 'none at all'}"
        )
    elif layout is not None and _surely_without_table(tree, name):
        yield from without_table(name, layout)


def _surely_without_table(tree: ast.Module, name: str) -> bool:
    """Whether this is a class, derived from classes of the file and of torch alone, and nothing in the file
    could be a table."""
    if any(TABLE in _words(node) for node in ast.walk(tree)):
        return False
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    of_torch, pending, seen = _names_of_torch(tree), [name], set()
    while pending:
        if (wanted := pending.pop()) in seen:
            continue
        seen.add(wanted)
        found = classes.get(wanted, [])
        if (
            len(found) != 1 or found[0].decorator_list or found[0].keywords
        ):  # a decorator or a metaclass may add anything
            return False
        for base in found[0].bases:
            root = base
            while isinstance(root, ast.Attribute):
                root = root.value
            if not isinstance(root, ast.Name):
                return False
            if root.id not in of_torch:
                if root is not base:
                    return False
                pending.append(root.id)
    return True


def _words(node: ast.AST) -> tuple[object, ...]:
    """Every name and text that a node of the syntax tree has."""
    values = [value for _, value in ast.iter_fields(node)]
    return tuple(
        word
        for value in values
        for word in (value if isinstance(value, list) else [value])
        if isinstance(word, str)
    )


def _names_of_torch(tree: ast.Module) -> set[str]:
    """Names in a file that only an import of torch gives."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname or "torch" for alias in node.names if alias.name.split(".")[0] == "torch"}
        elif (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").split(".")[0] == "torch"
        ):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    """All that some statement, wherever it stands, may give a name to; `*`: names that only an import
    knows."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("globals", "exec", "setattr")
        ):
            yield "*"
