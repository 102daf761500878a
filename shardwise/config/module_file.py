"""Checks of a user's own classes (`[model] module = "file.py:Class"`, `[observe] callbacks`) that read their
file without running it.

Running it needs torch, which takes seconds. The text of the file shows whether it is Python and defines the
name. It also shows in most cases that a class has no sharding table: the class and its bases, up to torch's
classes, are all in the file, and the file never mentions `sharding`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from shardwise.config.axes import MODEL_AXES
from shardwise.config.layout import Layout
from shardwise.config.model import Model
from shardwise.errors import UserError
from shardwise.files import read_bytes
from shardwise.user_file import locate


def locate_module(model: Model) -> tuple[Path, str]:
    """Return the path of the module's file, and the name of the module in it."""
    assert model.module is not None, "the job has a module"
    return locate(f"model.module = {model.module!r}", model.module, "model.py:OwnModel")


PICKLED = ".pkl"
"""End of the address of a program that `shardwise.launch` has written to a file itself."""
TABLE = "sharding"
"""Name of the attribute that is a module's sharding table."""


def problems_without_table(
    name: str, layout: Layout, where: str = f"it an attribute `{TABLE}`"
) -> Iterator[str]:
    """Yield the degrees of a layout that a module without a sharding table does not support. `where` says
    where the table belongs."""
    for axis in MODEL_AXES:
        if (size := getattr(layout, axis)) > 1:
            yield (
                f"layout.{axis} = {size}: {name} has no sharding table, so only replica, data and zero can "
                f"be used. Give {where} (docs/sharding.md)"
            )


def problems_of_module(model: Model, layout: Layout | None = None) -> Iterator[str]:
    """Yield what is wrong with the module's file, and with a layout if the module has no sharding table."""
    path, name = locate_module(model)
    tree = _parse(f"model.module = {model.module!r}", path, name)
    if layout is not None and _surely_without_table(tree, name):
        yield from problems_without_table(name, layout)


def problems_of_callbacks(callbacks: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the files of callbacks."""
    for address in callbacks:
        where = f"observe.callbacks: {address!r}"
        try:
            _parse(where, *locate(where, address, "callbacks.py:Notify"))
        except UserError as error:
            yield str(error)


def problems_of_program(address: str) -> Iterator[str]:
    """Yield what is wrong with the file of a program."""
    where = f"run.program = {address!r}"
    try:
        if address.endswith(PICKLED):
            return
        _parse(where, *locate(where, address, "train.py:program"))
    except UserError as error:
        yield str(error)


def _parse(where: str, path: Path, name: str) -> ast.Module:
    """Return the syntax tree of a file that surely or possibly defines this name."""
    try:
        tree = ast.parse(read_bytes(path), str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f" ({path}, line {line})" if line else ""
        raise UserError(f"{where}: {path.name} is not Python: {error}{place}") from None
    names = set(_defined_names(tree))
    if name not in names and "*" not in names:
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        raise UserError(
            f"{where}: {path.name} has no class or function {name}; it has "
            f"{', '.join(defined) or 'none at all'}"
        )
    return tree


def _surely_without_table(tree: ast.Module, name: str) -> bool:
    """Whether the name is a class derived only from classes of the file and of torch, and nothing in the file
    could be a sharding table."""
    if any(TABLE in _words(node) for node in ast.walk(tree)):
        return False
    classes: dict[str, list[ast.ClassDef]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes.setdefault(node.name, []).append(node)
    torch_names, pending, seen = _torch_names(tree), [name], set[str]()
    while pending:
        class_name = pending.pop()
        bases = _plain_bases(classes.get(class_name, []), torch_names)
        if bases is None:
            return False
        seen.add(class_name)
        pending.extend(base for base in bases if base not in seen)
    return True


def _plain_bases(definitions: Sequence[ast.ClassDef], torch_names: Set[str]) -> list[str] | None:
    """Return the bases of a class that are not torch's; None if the text does not show what the class has.

    A decorator or a metaclass may add attributes, and so may a base that is computed or imported.
    """
    if len(definitions) != 1 or definitions[0].decorator_list or definitions[0].keywords:
        return None
    names: list[str] = []
    for base in definitions[0].bases:
        root = base
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            return None
        if root.id not in torch_names:
            if root is not base:
                return None
            names.append(root.id)
    return names


def _words(node: ast.AST) -> tuple[object, ...]:
    """Return every name and text that a node of the syntax tree has."""
    values = [value for _, value in ast.iter_fields(node)]
    return tuple(
        word
        for value in values
        for word in (value if isinstance(value, list) else [value])
        if isinstance(word, str)
    )


def _torch_names(tree: ast.Module) -> set[str]:
    """Return the names that imports of torch define."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or "torch" for alias in node.names if _is_torch(alias.name)}
        elif isinstance(node, ast.ImportFrom) and not node.level and _is_torch(node.module):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _is_torch(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "torch"


def _defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield every name that a statement of the file may define; `*`: names that the text does not show."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.name
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Import() | ast.ImportFrom():
                yield from (alias.asname or alias.name for alias in node.names)
            case ast.Call(func=ast.Name(id="globals" | "exec" | "setattr")):
                yield "*"
