"""Convert answers of the planner to plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING

from shardwise.files import Json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def plain_data(answer: DataclassInstance) -> Json:
    """Return a dataclass as a dictionary, recursively. Fields that are not shown (`repr=False`), such as jobs
    and searches, are left out."""
    return {field.name: _plain(getattr(answer, field.name)) for field in fields(answer) if field.repr}


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return plain_data(value)
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
