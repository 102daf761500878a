"""A `Config` back to TOML, so that a run folder holds the job exactly as it was understood."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shardwise.config.schema import Config


def to_toml(config: Config) -> str:
    """Every key of every section, defaults included; keys that are unset are left out."""
    blocks = []
    for name in Config.model_fields:
        section = getattr(config, name).model_dump()
        lines = [f"{key} = {_value(value)}" for key, value in section.items() if not _unset(value)]
        if name == "train" and section["clip"] is None:
            lines.append("clip = false")
        blocks.append("\n".join([f"[{name}]", *lines]))
    return "\n\n".join(blocks) + "\n"


def tables_to_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A few keys of a few sections, to paste into a job."""
    blocks = (["[" + name + "]", *(f"{key} = {_value(value)}" for key, value in table.items())] for name, table in tables.items())
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _unset(value: Any) -> bool:
    return value is None or value == ()


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON strings are TOML basic strings
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    return repr(value)
