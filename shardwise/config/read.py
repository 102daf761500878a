"""Reading a job: TOML plus command-line overrides in, one valid `Config` out, or every problem at once.

Each table is validated on its own, so that a mistake in one does not hide a mistake in another. Then the
rules that span tables (config/check.py) run. A value that is wrong in itself is taken out of its table first:
a rule that needs it ends there, and every other rule still runs.

What has to be looked up elsewhere (files of the data, the workers of a command) is checked by whoever reads a
job, over the same tables (`Check`), so that all mistakes are in one list.

An override `section.key=value` replaces a value of the file. With nothing after the sign (`section.key=`, or
`section=` for a whole table) the job is read as if the file did not have the key.

The origin of each value is noted (`Origins`): the file, an override, or what filled it in. All others are
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.command_name import command_name
from shardwise.config.check import MODEL_SOURCES, found_by, problems_across, sources_of_model
from shardwise.config.compression import AUTO
from shardwise.config.layout import Layout
from shardwise.config.layouts import problems_of_layout
from shardwise.config.model import Model
from shardwise.config.other_names import did_you_mean, dtype_meant, our_key, suggestion
from shardwise.config.presets import PRESETS
from shardwise.config.pretrained_folder import Tables, with_pretrained
from shardwise.config.schema import SECTIONS, SPELLINGS, Config, Data, Source, Train, keys_of
from shardwise.errors import ConfigError, RunFailed, UserError, shown
from shardwise.files import parse_toml, read_bytes
from shardwise.optimizers import kind_of
from shardwise.section import Section

Origins = dict[str, str]
"""By section.key, where a value comes from; one that is not in it has its default."""
Sections = Mapping[str, Section]
"""The tables of a job by name. Values that are wrong in themselves are not in them (`Section.without`)."""
Check = Callable[[Sections], Iterable[str]]
"""Gives the problems that it finds, or raises one as a `UserError`."""

NOTHING = ("none", "None", "null", "nil", "unset")
"""Words that people write to leave a key out."""

PLANNED_LAYOUTS: Tables = {"auto": {}, "auto+lossy": {"compression": AUTO}}
"""Words in place of the layout's table that leave it to the planner: exact, or with compression if that
pays."""


def read(
    path: str | Path, overrides: Sequence[str] = (), devices: int | None = None, checks: Sequence[Check] = ()
) -> Config:
    """The job in a TOML file, with `section.key=value` overrides laid over it. `devices`, where known, are
    what a nearest layout is looked for on.
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
        origins |= dict.fromkeys(_apply(override, tables, problems, origins), f"override {override}")
    origins |= _fill(tables, problems)
    if "folder" not in tables.setdefault("run", {}):
        tables["run"]["folder"] = f"runs/{path.stem}"
        origins["run.folder"] = "the job's name"
    return _validate(tables, str(path), problems, devices, checks), origins


def _name(section: str, key: str) -> str:
    return f"{section}.{SPELLINGS.get(section, {}).get(key, key)}"


def _fill(tables: Tables, problems: list[str]) -> Origins:
    """Put in what a value that was given stands for; which keys that were, and what filled them in."""
    given = tables.get("model", {})
    tables["model"] = _with_preset(given, problems)
    origins = {
        _name("model", key): f"preset {given['preset']}" for key in tables["model"].keys() - given.keys()
    }
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
    advice = f"Give the path of a TOML job file; `{command_name()} new demo` writes one to begin with."
    try:
        return parse_toml(read_bytes(path, advice), path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. {advice}") from None


def _tables(raw: dict[str, Any], problems: list[str]) -> Tables:
    tables: Tables = {}
    for name, table in raw.items():
        if name == "layout" and isinstance(table, str) and table in PLANNED_LAYOUTS:
            tables[name] = dict(PLANNED_LAYOUTS[table])
        elif not isinstance(table, dict) and name not in SECTIONS and (meant := our_key(name)):
            problems.append(f"{name} = {shown(table)}: a key outside of a section. {meant}")
        elif not isinstance(table, dict):
            words = f", or one of {', '.join(map(repr, PLANNED_LAYOUTS))}" if name == "layout" else ""
            problems.append(
                f"{name} = {shown(table)}: expected a table; write [{name}] and its keys below it{words}"
            )
        else:
            tables[name] = dict(table)
    return tables


def _apply(override: str, tables: Tables, problems: list[str], origins: Origins) -> list[str]:
    """Lay an override over the tables, and return the names of the keys that it gives or leaves out. It
    replaces what the file has under another spelling of the key; two overrides with different spellings are a
    mistake that is found later."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if key == "layout" and (word := text.strip("\"'")) in PLANNED_LAYOUTS:
        before, tables["layout"] = tables.get("layout", {}), dict(PLANNED_LAYOUTS[word])
        return [_name("layout", field) for field in {*before, *tables["layout"]}]
    section, dot, field = key.partition(".")
    if equals and not text and section and (field or not dot):
        return _leave_out(section, field, tables, problems)
    if not equals or not section or not dot or not field:
        meant = our_key(key) if equals and not dot and (key not in SECTIONS or key == "optimizer") else None
        example = f"here {meant.setting(text)}" if meant and meant.key else "for example train.steps=100"
        note = f"; {meant.note}" if meant and not meant.key else ""
        problems.append(f"override {shown(override)}: write it as section.key=value, {example}{note}")
        return []
    table, name = tables.setdefault(section, {}), _name(section, field)
    if not origins.get(name, "").startswith("override "):
        for other in [key for key in table if key != field and _name(section, key) == name]:
            del table[other]
    table[field] = _parse(text, section, field)
    return [name]


def _leave_out(section: str, field: str, tables: Tables, problems: list[str]) -> list[str]:
    """Take a key out of its table, or all keys of it where none is named, as if the file did not have
    them."""
    if section not in SECTIONS:
        problems.append(f"[{section}]: unknown section{did_you_mean(section, SECTIONS)}")
        return []
    name, table = _name(section, field), tables.get(section, {})
    if field and field not in table and name.partition(".")[2] not in keys_of(section):
        problems.append(f"{section}.{field}: unknown key{suggestion(field, section)}")
        return []
    left_out = [key for key in table if not field or _name(section, key) == name]
    for key in left_out:
        del table[key]
    return [name] if field else [_name(section, key) for key in left_out]


def _parse(text: str, section: str, field: str) -> Any:
    """A TOML value; what is not one, or stands where text is wanted, is a plain string, so that quotes are
    optional."""
    fields = keys_of(section) if section in SECTIONS else {}
    annotation = fields[field].annotation if field in fields else None
    if annotation in (str, str | None) and not text.startswith(("'", '"')):
        return text
    try:
        return parse_toml(f"value = {text}".encode(), "override")["value"]
    except UserError:
        return text


def _validate(
    tables: Tables, source: str, problems: list[str], devices: int | None = None, checks: Sequence[Check] = ()
) -> Config:
    for name in tables.keys() - SECTIONS.keys():
        advice, meant = did_you_mean(name, SECTIONS), "; ".join(_keys_meant(name, tables[name]))
        also = f"{' ' if advice.endswith('?') else '; '}{meant}" if meant else ""
        problems.append(f"[{name}]: unknown section{advice}{also}")
    read_tables = {name: _read_table(name, tables.get(name, {}), problems) for name in SECTIONS}
    sections = {name: section for name, section in read_tables.items() if section is not None}
    if isinstance(model := sections.get("model"), Model) and len(sources_of_model(model.__dict__)) > 1:
        sections["model"] = model.without(
            Model.model_fields.keys() - set(MODEL_SOURCES)
        )  # its shape is that of either
    problems.extend(problems_across(sections))
    model, data, train, layout = (sections.get(name) for name in ("model", "data", "train", "layout"))
    if (
        isinstance(model, Model)
        and isinstance(data, Data)
        and isinstance(train, Train)
        and isinstance(layout, Layout)
    ):
        problems.extend(problems_of_layout(model, data, train, layout, devices))
    for check in checks:
        problems.extend(_found_by(check, sections, problems))
    if problems:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return Config.model_validate(sections)


def _read_table(name: str, table: dict[str, Any], problems: list[str]) -> Section | None:
    """A table without its unknown keys and wrong values; None where it is wrong as a whole."""
    try:
        kind = kind_of(table) if name == "optimizer" else SECTIONS[name]
        return kind.model_validate(table)
    except UserError as error:  # an optimizer that is not there
        problems.append(str(error))
        return None
    except ValidationError as error:
        details = error.errors()
    problems.extend(_explain(name, kind, details))
    wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]}
    rest = {key: value for key, value in table.items() if _name(name, key).partition(".")[2] not in wrong}
    try:
        return kind.model_validate(rest).without(wrong & kind.model_fields.keys())
    except ValidationError:
        return None


def _found_by(check: Check, sections: Sections, known: Sequence[str]) -> list[str]:
    try:
        return list(found_by(check, sections))
    except RunFailed:  # no mistake of the job: it may go another time
        raise
    except ConfigError as error:
        return [f"{error.source}: {problem}" for problem in error.problems if problem not in known]
    except UserError as error:
        return [str(error)]


def whole(sections: Sections) -> Config | None:
    """The job, if all of its tables are there with all of their values."""
    sound = sections.keys() >= SECTIONS.keys() and all(section.is_whole for section in sections.values())
    return Config.model_validate(sections) if sound else None


def _with_preset(table: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    preset = table.get("preset")
    if not isinstance(preset, str):
        return table
    if preset not in PRESETS:
        meant = _to_leave_out("model.preset", preset) or did_you_mean(preset, PRESETS)
        problems.append(f"model.preset = {shown(preset)}: unknown preset{meant}")
        return table
    return {**PRESETS[preset], **table}


def _to_leave_out(key: str, value: Any) -> str:
    """The end of a message about a word that was meant to leave out a key without a default; empty for all
    others."""
    section, _, name = key.partition(".")
    field = keys_of(section).get(name)
    meant = isinstance(value, str) and value in NOTHING and field is not None and field.default is None
    return f"; write {key}= with nothing after it to leave it out" if meant else ""


def _keys_meant(section: str, table: dict[str, Any]) -> list[str]:
    """What keys of an unknown section are called here, as far as that is known."""
    meant = {key: our.key for key in table if (our := our_key(key)) and our.key}
    return [f"{section}.{key} is {ours} here" for key, ours in meant.items()]


def _explain(section: str, kind: type[Section], details: Sequence[ErrorDetails]) -> list[str]:
    """The mistakes of a table in words, one for each key: a union has an error for every type that it
    allows."""
    messages: dict[str, list[str]] = {}
    given: dict[str, object] = {}
    for detail in details:
        setting, message = _explain_one(section, kind, detail)
        messages.setdefault(setting, []).append(message)
        given[setting] = detail["input"]
    joined = {setting: _joined(parts) for setting, parts in messages.items()}
    return [
        setting + text + dtype_meant(setting.partition(" = ")[0], given[setting], text)
        for setting, text in joined.items()
    ]


def _joined(messages: Sequence[str]) -> str:
    """Several reasons against one value: "should be at least 0, or 'unbounded'"."""
    first, *others = dict.fromkeys(messages)
    return ", or ".join([first, *(message.removeprefix(": input should be ") for message in others)])


def _explain_one(section: str, kind: type[Section], detail: ErrorDetails) -> tuple[str, str]:
    """The setting that is wrong, and what is wrong with it."""
    location = _without_union_tags([str(part) for part in detail["loc"]])
    key = ".".join([section, *location])
    given = list(detail["input"]) if isinstance(detail["input"], tuple) else detail["input"]  # as TOML has it
    setting, field = f"{key} = {shown(given)}", kind.model_fields.get(location[0] if location else "")
    if detail["type"] == "extra_forbidden":
        inner = did_you_mean(
            location[-1], Source.model_fields
        )  # of [[data.sources]], the only table in a table
        return setting, ": unknown key" + (
            suggestion(location[0], section, kind.model_fields) if len(location) == 1 else inner
        )
    if detail["type"] == "missing" and isinstance(detail["loc"][-1], int):  # of a list that is too short
        setting = f"{key.rpartition('.')[0]} = {shown(list(detail['input']))}"
        return setting, f": too few values; at least {detail['loc'][-1] + 1}"
    if detail["type"] == "missing":
        return key, ": missing"
    if detail["type"] == "tuple_type" and len(location) == 1 and field is not None:
        return (
            setting,
            f": input should be a list in brackets, such as "
            f"{shown((field.examples or [list(field.default)])[0])}",
        )
    message = detail["msg"].removeprefix("Value error, ")
    return setting, f": {message[0].lower()}{message[1:]}{_to_leave_out(key, detail['input'])}"


def _without_union_tags(location: list[str]) -> list[str]:
    """pydantic adds the type of a union that it tried to the location; users want the key alone."""
    tags = ("int", "str", "bool", "float", "none", "literal[", "constrained-", "function-", "tuple[")
    return [part for index, part in enumerate(location) if index == 0 or not part.startswith(tags)]
