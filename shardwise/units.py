"""Units of memory in bytes."""

from __future__ import annotations

GIB = 2.0**30
