"""A module that is imported when it is first used.

An optimizer or a codec is one file. The planner reads its settings and its costs, and must start quickly and
without torch; a worker calls its arithmetic, which needs torch. So such a file writes

    if TYPE_CHECKING:
        import torch
    else:
        torch = LazyModule("torch")
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class LazyModule:
    """Imports the module of this name when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value
