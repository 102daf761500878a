"""The optimizers that a job may name: those of this folder, classes of torch.optim, and those of other
packages.

A package adds an optimizer by an entry point of the group `shardwise.optimizers`. Its name is the optimizer's
name in a job, and its value is the class:

    [project.entry-points."shardwise.optimizers"]
    mine = "my_package.optimizer:Mine"

The class is imported when a job names it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from shardwise.errors import UserError, shown
from shardwise.optimizers.adamw import AdamW
from shardwise.optimizers.base import Optimizer
from shardwise.optimizers.lion import Lion
from shardwise.optimizers.onebit_adam import OneBitAdam
from shardwise.optimizers.sgd import SGD
from shardwise.optimizers.torch_class import TorchClass

GROUP = "shardwise.optimizers"
DEFAULT = "adamw"
"""The optimizer of a job that names none."""
EXAMPLE = "torch.optim.NAdam"
"""A class that a job may name."""
TORCH_NAMES = {
    name.lower(): f"torch.optim.{name}"
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
}
"""Element-wise classes of torch by their names in small letters."""
BUILT_IN: dict[str, type[Optimizer]] = {
    str(kind.model_fields["name"].default): kind for kind in (AdamW, OneBitAdam, SGD, Lion)
}
"""The optimizers of this folder by name."""


def find(name: str) -> type[Optimizer]:
    """Return the optimizer of this name; raise a `UserError` if there is none or it cannot be used."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    for entry in entry_points(group=GROUP, name=name):
        return _load(entry)
    if "." in name or ":" in name:
        return TorchClass
    close = [TORCH_NAMES[name.lower()]] if name.lower() in TORCH_NAMES else []
    close += difflib.get_close_matches(name, names(), n=1, cutoff=0.6)
    known = f"; known are: {', '.join(names())}, and classes such as {EXAMPLE}"
    advice = f". Did you mean {' or '.join(map(repr, close))}?" if close else known
    raise UserError(f"optimizer.name = {shown(name)}: unknown optimizer{advice}")


def names() -> list[str]:
    """Return every name that a job may write, those of this folder first."""
    return [*BUILT_IN, *sorted({entry.name for entry in entry_points(group=GROUP)} - BUILT_IN.keys())]


def from_table(table: Mapping[str, object]) -> Optimizer:
    """Return the optimizer that an `[optimizer]` table describes."""
    return kind_of(table).model_validate(table)


def kind_of(table: Mapping[str, object]) -> type[Optimizer]:
    """Return the class of the optimizer that an `[optimizer]` table names, or the default."""
    name = table.get("name", DEFAULT)
    return find(name) if isinstance(name, str) else BUILT_IN[DEFAULT]


def _load(entry: EntryPoint) -> type[Optimizer]:
    package = f" of {entry.dist.name}" if entry.dist else ""
    what = f"optimizer.name = {entry.name!r}: the entry point {entry.value}{package}"
    try:
        kind = entry.load()
    except Exception as error:  # a package of others may raise anything
        raise UserError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UserError(f"{what} is no subclass of shardwise.optimizers.Optimizer")
    if missing := sorted(kind.__abstractmethods__):
        raise UserError(f"{what} lacks {', '.join(missing)}")
    if (declared := kind.model_fields["name"].default) != entry.name:
        raise UserError(f"{what} declares name = {declared!r}; give both the same name")
    return kind
