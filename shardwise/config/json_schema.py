"""The job file as JSON Schema, for editors that complete and check TOML (Even Better TOML, taplo, …).

Made from the definitions (schema.py), with what the reader accepts beyond their types: TOML has no null, and
`clip = false` is none; a word may stand for the layout's table; keys may be spelt as other libraries do.
"""

from __future__ import annotations

from typing import Any

from shardwise.config.presets import PRESETS
from shardwise.config.read import PLANNED_LAYOUTS
from shardwise.config.schema import SPELLINGS, Config
from shardwise.optimizers import BUILT_IN, DEFAULT


def job_schema() -> dict[str, Any]:
    """A schema that every job which can be read fulfils."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for section, spellings in SPELLINGS.items():
        keys = definitions[section.capitalize()]["properties"]
        keys |= {
            other: {**keys[ours], "title": f"Another name of {ours}"} for other, ours in spellings.items()
        }
    definitions["Optimizer"] = _optimizers()
    definitions["Train"]["properties"]["clip"]["anyOf"].append({"const": False})
    definitions["Model"]["properties"]["preset"]["examples"] = list(PRESETS)
    layout = schema["properties"]["layout"]
    schema["properties"]["layout"] = {
        "description": layout["description"],
        "anyOf": [{"$ref": layout["$ref"]}, {"enum": list(PLANNED_LAYOUTS)}],
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_without_null(schema),
        "title": "shardwise job",
    }


def _optimizers() -> dict[str, Any]:
    """Any of our optimizers with its own keys, or one of another package, whose keys only that knows."""
    ours = {name: kind.model_json_schema() for name, kind in BUILT_IN.items()}
    for name, schema in ours.items():
        schema["required"] = [] if name == DEFAULT else ["name"]
    another = {
        "type": "object",
        "properties": {"name": {"type": "string", "not": {"enum": list(ours)}}},
        "required": ["name"],
        "title": "An optimizer of another package",
    }
    return {"anyOf": [*ours.values(), another]}


def _without_null(part: Any) -> Any:
    """What TOML cannot say is not offered."""
    if isinstance(part, list):
        return [_without_null(item) for item in part if item != {"type": "null"}]
    if isinstance(part, dict):
        return {
            key: _without_null(value)
            for key, value in part.items()
            if not (key == "default" and value is None)
        }
    return part
