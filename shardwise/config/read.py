"""Reading a job: TOML plus command-line overrides in, one valid `Config` out, or every problem at once.

Each table is validated on its own, so that a mistake in one does not hide a mistake in another; then the checks that span
tables (config/check.py) run over the tables that were valid.

What has to be looked up elsewhere (files of the data, the workers of a command) is checked by whoever reads a job, over the same
sound tables (`Check`), so that all mistakes are in one list.

Where a value comes from is noted on the way (`Origins`): the file, an override, or what filled it in; all else is a default.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.config.check import problems_across
from shardwise.config.compression import AUTO
from shardwise.config.layouts import problems_of_layout
from shardwise.config.presets import PRESETS
from shardwise.config.pretrained import Tables, with_pretrained
from shardwise.config.schema import SPELLINGS, Config, Data, Layout, Model, Section, Train
from shardwise.errors import ConfigError, RunFailed, UserError, shown
from shardwise.files import parse_toml, read_bytes
from shardwise.invoked import typed

Origins = dict[str, str]
"""By section.key, where a value comes from; one that is not in it has its default."""
Sections = Mapping[str, Section]
"""The tables that are sound in themselves."""
Check = Callable[[Sections], Iterable[str]]
"""Gives the problems that it finds, or raises one as a `UserError`."""

SECTIONS: dict[str, type[Section]] = {
    name: field.annotation for name, field in Config.model_fields.items() if isinstance(field.annotation, type)
}


PLANNED_LAYOUTS: Tables = {"auto": {}, "auto+lossy": {"compression": AUTO}}
"""Words in place of the layout's table that leave it to the planner: exact, or with compression if that pays."""


def read(path: str | Path, overrides: Sequence[str] = (), devices: int | None = None, checks: Sequence[Check] = ()) -> Config:
    """The job in a TOML file, with `section.key=value` overrides laid over it. `devices`, where known, are what a nearest
    layout is looked for on.
    """
    return read_with_origins(path, overrides, devices, checks)[0]


def read_with_origins(
    path: str | Path, overrides: Sequence[str] = (), devices: int | None = None, checks: Sequence[Check] = ()
) -> tuple[Config, Origins]:
    """The same, and where each of its values comes from."""
    path = Path(path)
    problems: list[str] = []
    tables = _tables(_load(path), problems)
    origins = {_name(section, key): str(path) for section, table in tables.items() for key in table}
    for override in overrides:
        origins |= dict.fromkeys(_apply(override, tables, problems), f"override {override}")
    origins |= _fill(tables, problems)
    if not tables.setdefault("run", {}).get("folder"):
        tables["run"].setdefault("folder", f"runs/{path.stem}")
        origins.setdefault("run.folder", "the job's name")
    return _validate(tables, str(path), problems, devices, checks), origins


def _name(section: str, key: str) -> str:
    return f"{section}.{SPELLINGS.get(section, {}).get(key, key)}"


def _fill(tables: Tables, problems: list[str]) -> Origins:
    """Put in what a value that was given stands for; which keys that were, and what filled them in."""
    given = tables.get("model", {})
    tables["model"] = _with_preset(given, problems)
    origins = {_name("model", key): f"preset {given['preset']}" for key in tables["model"].keys() - given.keys()}
    for section, table in with_pretrained(tables, problems).items():
        new = table.keys() - tables.get(section, {}).keys()
        origins |= {_name(section, key): f"the folder {given['pretrained']}" for key in new}
        tables[section] = table
    return origins


def from_tables(tables: Tables, source: str = "configuration") -> Config:
    """The job in a dictionary of tables, checked as a file would be."""
    problems: list[str] = []
    tables = dict(tables)
    _fill(tables, problems)
    return _validate(tables, source, problems)


def _load(path: Path) -> dict[str, Any]:
    advice = f"Give the path of a TOML job file; `{typed()} new demo` writes one to begin with."
    try:
        return parse_toml(read_bytes(path, advice), path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. {advice}") from None


def _tables(raw: dict[str, Any], problems: list[str]) -> Tables:
    tables: Tables = {}
    for name, table in raw.items():
        if name == "layout" and isinstance(table, str) and table in PLANNED_LAYOUTS:
            tables[name] = dict(PLANNED_LAYOUTS[table])
        elif not isinstance(table, dict) and name not in SECTIONS and (homes := _homes(name)):
            problems.append(f"{name} = {shown(table)}: a key outside of a section. Did you mean {' or '.join(homes)}?")
        elif not isinstance(table, dict):
            words = f", or one of {', '.join(map(repr, PLANNED_LAYOUTS))}" if name == "layout" else ""
            problems.append(f"{name} = {shown(table)}: expected a table; write [{name}] and its keys below it{words}")
        else:
            tables[name] = dict(table)
    return tables


def _homes(key: str) -> list[str]:
    """Where a key of this name belongs."""
    return [f"{section}.{key}" for section, kind in SECTIONS.items() if key in kind.model_fields]


def _apply(override: str, tables: Tables, problems: list[str]) -> list[str]:
    """Lay an override over the tables; the keys that it gives."""
    key, equals, text = override.partition("=")
    if key.strip() == "layout" and (word := text.strip(" \"'")) in PLANNED_LAYOUTS:
        before, tables["layout"] = tables.get("layout", {}), dict(PLANNED_LAYOUTS[word])
        return [_name("layout", field) for field in {*before, *tables["layout"]}]
    section, dot, field = key.strip().partition(".")
    if not equals or not section or not dot or not field:
        problems.append(f"override {shown(override)}: write it as section.key=value, for example train.steps=100")
        return []
    tables.setdefault(section, {})[field] = _parse(text.strip(), section, field)
    return [_name(section, field)]


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


def _validate(
    tables: Tables, source: str, problems: list[str], devices: int | None = None, checks: Sequence[Check] = ()
) -> Config:
    sections: dict[str, Section] = {}
    for name in tables.keys() - SECTIONS.keys():
        problems.append(f"[{name}]: unknown section{_suggest(name, SECTIONS)}")
    for name, kind in SECTIONS.items():
        table = tables.get(name, {})
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
    for check in checks:
        problems.extend(_found_by(check, sections, problems))
    if problems:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return Config.model_validate(sections)


def _found_by(check: Check, sections: Sections, known: Sequence[str]) -> list[str]:
    try:
        return list(check(sections))
    except RunFailed:  # no mistake of the job: it may go another time
        raise
    except ConfigError as error:
        return [f"{error.source}: {problem}" for problem in error.problems if problem not in known]
    except UserError as error:
        return [str(error)]


def whole(sections: Sections) -> Config | None:
    """The job, if all of its tables are sound."""
    return Config.model_validate(sections) if sections.keys() >= SECTIONS.keys() else None


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
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):  # of a list that is too short
        return f"{key.rpartition('.')[0]} = {shown(list(detail['input']))}: too few values; at least {detail['loc'][-1] + 1}"
    if detail["type"] == "missing":
        return f"{key}: missing"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{setting}: {message[0].lower()}{message[1:]}"


def _without_union_tags(location: list[str], kind: type[Section]) -> list[str]:
    """pydantic appends the tried type of a union to the location; a user wants only the key."""
    tags = {"int", "str", "bool", "float", "none"}
    return [part for index, part in enumerate(location) if index == 0 or part not in tags]


def _suggest(word: str, known: Any, prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    if close:
        return f". Did you mean {prefix}{close[0]}?"
    return f"; known are: {', '.join(known)}"
