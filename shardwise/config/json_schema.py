"""The job file as JSON Schema, for editors that complete and check TOML (Even Better TOML, taplo, …).

The schema is made from the definitions in schema.py. It adds what the reader accepts beyond their types:
`clip = false` (TOML has no null), a word in place of the layout's table, and keys as other libraries spell
them.
"""

from __future__ import annotations

from shardwise.config.presets import PRESETS
from shardwise.config.read import PLANNED_LAYOUTS
from shardwise.config.schema import SPELLINGS, Config
from shardwise.files import Json
from shardwise.optimizers import BUILT_IN, DEFAULT


def job_schema() -> Json:
    """Return a schema that accepts every valid job."""
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
        **{key: _without_null(part) for key, part in schema.items()},
        "title": "shardwise job",
    }


def _optimizers() -> Json:
    """Return the schema of [optimizer]: one of ours with its keys, or another package's with any keys."""
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


def _without_null(part: object) -> object:
    """Return a part of a schema without null, which TOML does not have."""
    if isinstance(part, list):
        return [_without_null(item) for item in part if item != {"type": "null"}]
    if isinstance(part, dict):
        return {
            key: _without_null(value)
            for key, value in part.items()
            if not (key == "default" and value is None)
        }
    return part
