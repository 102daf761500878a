"""Convert answers of the planner to plain data, ready for JSON."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any


def plain_data(answer: Any) -> Any:
    """Return a dataclass as a dictionary, recursively. Fields that are not shown (`repr=False`), such as jobs
    and searches, are left out."""
    if is_dataclass(answer):
        return {field.name: plain_data(getattr(answer, field.name)) for field in fields(answer) if field.repr}
    return [plain_data(part) for part in answer] if isinstance(answer, tuple) else answer
