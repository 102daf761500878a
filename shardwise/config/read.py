"""Read a job: from TOML and command-line overrides to one valid `Config`, or a list of all problems.

Each table is validated separately, so that a mistake in one does not hide a mistake in another. Then the
rules between tables (config/check.py) run. Wrong values are removed from their tables first: a rule that
needs one ends there, and every other rule still runs.

The caller may add checks that look elsewhere, such as at the files of the data (`Check`), so that all
mistakes are in one list.

An override `section.key=value` replaces a value of the file. With nothing after the sign (`section.key=`, or
`section=` for a whole table) the job is read as if the file did not have the key.

`Origins` records where each value comes from: the file, an override, or a preset or folder. All others are
defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.command_name import command_name
from shardwise.config.check import MODEL_SOURCES, problems_across, run_check, sources_of_model
from shardwise.config.compression import AUTO
from shardwise.config.layout import Layout
from shardwise.config.layouts import problems_of_layout
from shardwise.config.model import PROGRAM, Model
from shardwise.config.module_file import PICKLED
from shardwise.config.other_names import did_you_mean, dtype_suggestion, job_key, suggestion
from shardwise.config.presets import PRESETS
from shardwise.config.pretrained_folder import Tables, with_pretrained
from shardwise.config.schema import SECTIONS, SPELLINGS, Config, Data, TextSource, Train, keys_of
from shardwise.errors import ConfigError, RunFailed, UserError, shown
from shardwise.files import Json, parse_toml, read_bytes
from shardwise.optimizers import kind_of
from shardwise.section import Section

Origins = dict[str, str]
"""Where the value of each section.key comes from; a key that is not in it has its default."""
Sections = Mapping[str, Section]
"""The tables of a job by name, without wrong values (`Section.without`)."""
Check = Callable[[Sections], Iterable[str]]
"""A function that returns the problems of a job, or raises one as a `UserError`."""

PROGRAM_FILE = ".py:"
"""Part of the address of a program, `file.py:function`, which stands for a job that has only this program."""
UNSET_WORDS = ("none", "None", "null", "nil", "unset")
"""Words that users write to leave a key out."""

PLANNED_LAYOUTS: Tables = {"auto": {}, "auto+lossy": {"compression": AUTO}}
"""Values of `layout` that leave it to the planner: exact, or with compression if that is faster."""


def read(
    path: str | Path, overrides: Sequence[str] = (), devices: int | None = None, checks: Sequence[Check] = ()
) -> Config:
    """Return the job in a TOML file, or of a program `file.py:function`, changed by `section.key=value`
    overrides.

    `devices`, if known, is the number of devices that advice about the layout is for.
    """
    return read_with_origins(path, overrides, devices, checks)[0]


def read_with_origins(
    path: str | Path, overrides: Sequence[str] = (), devices: int | None = None, checks: Sequence[Check] = ()
) -> tuple[Config, Origins]:
    """Return the job like `read`, and where each of its values comes from."""
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
    """Fill in the values of the preset, the pretrained folder and the program, and return where they come
    from."""
    if tables.get("run", {}).get("program") and not tables.get("model"):
        tables["model"] = {"module": PROGRAM}
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


def from_tables(given: Mapping[str, Mapping[str, object]], source: str = "configuration") -> Config:
    """Return the job in a dictionary of tables, checked like a file."""
    problems: list[str] = []
    tables = {name: dict(table) for name, table in given.items()}
    _fill(tables, problems)
    return _validate(tables, source, problems)


def _load(path: Path) -> Json:
    if PROGRAM_FILE in str(path) or path.suffix == PICKLED:
        return {"run": {"program": str(path)}}
    if path.suffix == ".py":
        raise UserError(f"{path}: a program is named with its function, for example {path}:program")
    advice = f"Give the path of a TOML job file; `{command_name()} new demo` writes one to begin with."
    try:
        return parse_toml(read_bytes(path, advice), path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file. {advice}") from None


def _tables(raw: Json, problems: list[str]) -> Tables:
    tables: Tables = {}
    for name, table in raw.items():
        if name == "layout" and isinstance(table, str) and table in PLANNED_LAYOUTS:
            tables[name] = dict(PLANNED_LAYOUTS[table])
        elif not isinstance(table, dict) and name not in SECTIONS and (meant := job_key(name)):
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
    """Change the tables by an override, and return the names of the keys that it sets or removes."""
    key, equals, text = (part.strip() for part in override.partition("="))
    if key == "layout" and (word := text.strip("\"'")) in PLANNED_LAYOUTS:
        before, tables["layout"] = tables.get("layout", {}), dict(PLANNED_LAYOUTS[word])
        return [_name("layout", field) for field in {*before, *tables["layout"]}]
    section, dot, field = key.partition(".")
    if equals and not text and section and (field or not dot):
        return _leave_out(section, field, tables, problems)
    if not equals or not section or not field:
        problems.append(f"override {shown(override)}: {_how_to_override(key, equals, text)}")
        return []
    return [_set(section, field, text, tables, origins)]


def _set(section: str, field: str, text: str, tables: Tables, origins: Origins) -> str:
    """Set a key to the value of an override, and return the key's name.

    The key replaces other spellings of it in the file. Two overrides with different spellings are both kept,
    and refused later.
    """
    table, name = tables.setdefault(section, {}), _name(section, field)
    if not origins.get(name, "").startswith("override "):
        for other in [key for key in table if key != field and _name(section, key) == name]:
            del table[other]
    table[field] = _parse(text, section, field)
    return name


def _how_to_override(key: str, equals: str, text: str) -> str:
    """Return what to write instead of an override that is not section.key=value."""
    is_word = equals and "." not in key and (key not in SECTIONS or key == "optimizer")
    meant = job_key(key) if is_word else None
    example = f"here {meant.setting(text)}" if meant and meant.key else "for example train.steps=100"
    note = f"; {meant.note}" if meant and not meant.key else ""
    return f"write it as section.key=value, {example}{note}"


def _leave_out(section: str, field: str, tables: Tables, problems: list[str]) -> list[str]:
    """Remove a key from its table, or all keys if `field` is empty, and return the names of the keys."""
    if section not in SECTIONS:
        problems.append(f"[{section}]: unknown section{did_you_mean(section, SECTIONS)}")
        return []
    name, table = _name(section, field), tables.get(section, {})
    if not field:
        names = [_name(section, key) for key in table]
        table.clear()
        return names
    if field not in table and name.partition(".")[2] not in keys_of(section):
        problems.append(f"{section}.{field}: unknown key{suggestion(field, section)}")
        return []
    for key in [key for key in table if _name(section, key) == name]:
        del table[key]
    return [name]


def _parse(text: str, section: str, field: str) -> object:
    """Return the value of an override: TOML, or plain text if the key is text or it is no TOML."""
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
    """Return the job of the tables, or raise all problems as one error."""
    problems.extend(_unknown_section(name, tables[name]) for name in tables.keys() - SECTIONS.keys())
    read_tables = {name: _read_table(name, tables.get(name, {}), problems) for name in SECTIONS}
    sections = {name: section for name, section in read_tables.items() if section is not None}
    if isinstance(model := sections.get("model"), Model) and len(sources_of_model(model.__dict__)) > 1:
        # It is not known which of the sources has the right shape.
        sections["model"] = model.without(Model.model_fields.keys() - set(MODEL_SOURCES))
    problems.extend(problems_across(sections))
    problems.extend(_layout_problems(sections, devices))
    for check in checks:
        problems.extend(_problems_of_check(check, sections, problems))
    if problems:
        raise ConfigError(source, list(dict.fromkeys(problems)))
    return Config.model_validate(sections)


def _unknown_section(name: str, table: Json) -> str:
    advice, meant = did_you_mean(name, SECTIONS), "; ".join(_keys_meant(name, table))
    also = f"{' ' if advice.endswith('?') else '; '}{meant}" if meant else ""
    return f"[{name}]: unknown section{advice}{also}"


def _layout_problems(sections: Sections, devices: int | None) -> list[str]:
    """Return what is wrong with the layout, if all tables that this depends on could be read."""
    match [sections.get(name) for name in ("model", "data", "train", "layout")]:
        case [Model() as model, Data() as data, Train() as train, Layout() as layout]:
            return problems_of_layout(model, data, train, layout, devices)
    return []


def _read_table(name: str, table: Json, problems: list[str]) -> Section | None:
    """Return a table without its unknown keys and wrong values; None if the rest is wrong too."""
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
    except (ValidationError, UserError):
        return None


def _problems_of_check(check: Check, sections: Sections, known: Sequence[str]) -> list[str]:
    """Return the problems that a caller's check returns or raises, without those that are known."""
    try:
        return list(run_check(check, sections))
    except RunFailed:  # not a mistake of the job: it may succeed later
        raise
    except ConfigError as error:
        return [f"{error.source}: {problem}" for problem in error.problems if problem not in known]
    except UserError as error:
        return [str(error)]


def complete_config(sections: Sections) -> Config | None:
    """Return the job if no table and no value is missing, else None."""
    sound = sections.keys() >= SECTIONS.keys() and all(section.is_whole for section in sections.values())
    return Config.model_validate(sections) if sound else None


def _with_preset(table: Json, problems: list[str]) -> Json:
    preset = table.get("preset")
    if not isinstance(preset, str):
        return table
    if preset not in PRESETS:
        meant = _to_leave_out("model.preset", preset) or did_you_mean(preset, PRESETS)
        problems.append(f"model.preset = {shown(preset)}: unknown preset{meant}")
        return table
    return {**PRESETS[preset], **table}


def _to_leave_out(key: str, value: object) -> str:
    """Return the end of a message about a word that was meant to leave a key out; empty for other values."""
    section, _, name = key.partition(".")
    field = keys_of(section).get(name)
    meant = isinstance(value, str) and value in UNSET_WORDS and field is not None and field.default is None
    return f"; write {key}= with nothing after it to leave it out" if meant else ""


def _keys_meant(section: str, table: Json) -> list[str]:
    """Return the keys of a job that keys of an unknown section mean, if known."""
    meant = {key: ours.key for key in table if (ours := job_key(key)) and ours.key}
    return [f"{section}.{key} is {ours} here" for key, ours in meant.items()]


def _explain(section: str, kind: type[Section], details: Sequence[ErrorDetails]) -> list[str]:
    """Return one message per wrong key of a table. pydantic has an error for every type of a union."""
    messages: dict[str, list[str]] = {}
    given: dict[str, object] = {}
    for detail in details:
        setting, message = _explain_one(section, kind, detail)
        messages.setdefault(setting, []).append(message)
        given[setting] = detail["input"]
    joined = {setting: _joined(parts) for setting, parts in messages.items()}
    return [
        setting + text + dtype_suggestion(setting.partition(" = ")[0], given[setting], text)
        for setting, text in joined.items()
    ]


def _joined(messages: Sequence[str]) -> str:
    """Return several reasons against one value as one: "should be at least 0, or 'unbounded'"."""
    first, *others = dict.fromkeys(messages)
    return ", or ".join([first, *(message.removeprefix(": input should be ") for message in others)])


def _explain_one(section: str, kind: type[Section], detail: ErrorDetails) -> tuple[str, str]:
    """Return the setting that is wrong, and what is wrong with it."""
    location, given = _without_union_tags([str(part) for part in detail["loc"]]), detail["input"]
    key = ".".join([section, *location])
    setting = f"{key} = {shown(list(given) if isinstance(given, tuple) else given)}"  # TOML has lists
    match detail["type"]:
        case "extra_forbidden" if len(location) == 1:
            return setting, f": unknown key{suggestion(location[0], section, kind.model_fields)}"
        case "extra_forbidden":  # [[data.sources]] is the only table in a table
            return setting, f": unknown key{did_you_mean(location[-1], TextSource.model_fields)}"
        case "missing" if isinstance(index := detail["loc"][-1], int):  # of a list that is too short
            setting = f"{key.rpartition('.')[0]} = {shown(list(given))}"
            return setting, f": too few values; at least {index + 1}"
        case "missing":
            return key, ": missing"
        case "tuple_type" if len(location) == 1 and (field := kind.model_fields.get(location[0])):
            example = (field.examples or [list(field.default)])[0]
            return setting, f": input should be a list in brackets, such as {shown(example)}"
    message = detail["msg"].removeprefix("Value error, ")
    return setting, f": {message[0].lower()}{message[1:]}{_to_leave_out(key, given)}"


def _without_union_tags(location: list[str]) -> list[str]:
    """Return a location without the types of unions, which pydantic adds to the key."""
    tags = ("int", "str", "bool", "float", "none", "literal[", "constrained-", "function-", "tuple[")
    return [part for index, part in enumerate(location) if index == 0 or not part.startswith(tags)]
