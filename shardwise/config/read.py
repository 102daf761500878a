"""Reading a job: TOML plus command-line overrides in, one valid `Config` out, or every problem at once.

Each table is validated on its own, so that a mistake in one does not hide a mistake in another; then the checks that span
tables (config/check.py) run over the tables that were valid.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.config.check import problems_across
from shardwise.config.compression import AUTO
from shardwise.config.layouts import problems_of_layout
from shardwise.config.presets import PRESETS
from shardwise.config.schema import Config, Data, Layout, Model, Section, Train
from shardwise.errors import ConfigError, UserError, shown
from shardwise.files import parse_toml, read_bytes

Tables = dict[str, dict[str, Any]]

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
}


PLANNED_LAYOUTS: Tables = {"auto": {}, "auto+lossy": {"compression": AUTO}}
"""Words in place of the layout's table that leave it to the planner: exact, or with compression if that pays."""


def read(path: str | Path, overrides: Sequence[str] = (), devices: int | None = None) -> Config:
    """The job in a TOML file, with `section.key=value` overrides laid over it. `devices`, where known, are what a nearest
    layout is looked for on.
    """
    path = Path(path)
    problems: list[str] = []
    tables = _tables(_load(path), problems)
    for override in overrides:
        _apply(override, tables, problems)
    return _validate(tables, str(path), problems, devices)


def from_tables(tables: Tables, source: str = "configuration") -> Config:
    """The job in a dictionary of tables, checked as a file would be."""
    return _validate(tables, source, [])


def _load(path: Path) -> dict[str, Any]:
    advice = "Give the path of a TOML job file, for example examples/quickstart.toml."
    try:
        return parse_toml(read_bytes(path, advice), path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. {advice}") from None


def _tables(raw: dict[str, Any], problems: list[str]) -> Tables:
    tables: Tables = {}
    for name, table in raw.items():
        if name == "layout" and isinstance(table, str) and table in PLANNED_LAYOUTS:
            tables[name] = dict(PLANNED_LAYOUTS[table])
        elif not isinstance(table, dict):
            words = f", or one of {', '.join(map(repr, PLANNED_LAYOUTS))}" if name == "layout" else ""
            problems.append(f"{name} = {shown(table)}: expected a table; write [{name}] and its keys below it{words}")
        else:
            tables[name] = dict(table)
    return tables


def _apply(override: str, tables: Tables, problems: list[str]) -> None:
    key, equals, text = override.partition("=")
    if key.strip() == "layout" and (word := text.strip(" \"'")) in PLANNED_LAYOUTS:
        tables["layout"] = dict(PLANNED_LAYOUTS[word])
        return
    section, dot, field = key.strip().partition(".")
    if not equals or not dot or not field:
        problems.append(f"override {shown(override)}: write it as section.key=value, for example train.steps=100")
        return
    tables.setdefault(section, {})[field] = _parse(text.strip(), section, field)


def _parse(text: str, section: str, field: str) -> Any:
    """A TOML value; what is not one, or stands where text is wanted, is a plain string, so that quotes are optional."""
    kind = SECTIONS.get(section)
    annotation = kind.model_fields[field].annotation if kind and field in kind.model_fields else None
    if annotation in (str, str | None) and not text.startswith(("'", '"')):
        return text
    try:
        return parse_toml(f"value = {text}".encode(), "override")["value"]
    except UserError:
        return text


def _validate(tables: Tables, source: str, problems: list[str], devices: int | None = None) -> Config:
    sections: dict[str, Section] = {}
    for name in tables.keys() - SECTIONS.keys():
        problems.append(f"[{name}]: unknown section{_suggest(name, SECTIONS)}")
    for name, kind in SECTIONS.items():
        table = tables.get(name, {})
        if name == "model":
            table = _with_preset(table, problems)
        try:
            sections[name] = kind.model_validate(table)
        except ValidationError as error:
            problems.extend(_explain(name, kind, detail) for detail in error.errors())
            if all(detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1 for detail in error.errors()):
                unknown = {detail["loc"][0] for detail in error.errors()}  # the rest is sound, and can be checked further
                sections[name] = kind.model_validate({key: value for key, value in table.items() if key not in unknown})
    problems.extend(problems_across(sections))
    model, data, train, layout = (sections.get(name) for name in ("model", "data", "train", "layout"))
    if isinstance(model, Model) and isinstance(data, Data) and isinstance(train, Train) and isinstance(layout, Layout):
        problems.extend(problems_of_layout(model, data, train, layout, devices))
    if problems:
        raise ConfigError(source, problems)
    return Config.model_validate(sections)


def _with_preset(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    preset = table.get("preset")
    if not isinstance(preset, str):
        return table
    if preset not in PRESETS:
        problems.append(f"model.preset = {shown(preset)}: unknown preset{_suggest(preset, PRESETS)}")
        return table
    return {**PRESETS[preset], **table}


def _explain(section: str, kind: type[Section], detail: ErrorDetails) -> str:
    location = [str(part) for part in detail["loc"] if not str(part).startswith(("literal", "float", "constrained", "function"))]
    key = ".".join([section, *_without_union_tags(location, kind)])
    setting = f"{key} = {shown(detail['input'])}"
    if detail["type"] == "extra_forbidden":
        return f"{setting}: unknown key{_suggest(location[-1], kind.model_fields, prefix=section + '.')}"
    if detail["type"] == "missing":
        return f"{key}: missing"
    return f"{setting}: {detail['msg'][0].lower()}{detail['msg'][1:]}"


def _without_union_tags(location: list[str], kind: type[Section]) -> list[str]:
    """pydantic appends the tried type of a union to the location; a user wants only the key."""
    tags = {"int", "str", "bool", "float", "none"}
    return [part for index, part in enumerate(location) if index == 0 or part not in tags]


def _suggest(word: str, known: Any, prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    if close:
        return f". Did you mean {prefix}{close[0]}?"
    return f"; known are: {', '.join(known)}"
