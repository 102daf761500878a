"""The configuration in words, made from the definitions: for `shardwise train --help` and
docs/configuration.md."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.config.presets import PRESETS
from shardwise.config.schema import Config, Source
from shardwise.optimizers import BUILT_IN, DEFAULT


def help_text() -> str:
    """Every key, its default and its meaning, in plain text."""
    blocks = [
        "Any key of the job file can be given as section.key=value. "
        "section.key= with nothing after it leaves the key out, section= the whole table:"
    ]
    for name, section in _sections():
        lines = [
            f"  {name}.{key} = {_default(field)}\n      {field.description}"
            for key, field in section.model_fields.items()
        ]
        blocks.append("\n".join([f"{name}: {_summary(section)}", *lines]))
    return "\n\n".join([*blocks, *_where_docs_are()])


def _where_docs_are() -> list[str]:
    """An installed package has no docs/ beside it; its metadata name the address."""
    with suppress(PackageNotFoundError):
        for entry in metadata("shardwise").get_all("Project-URL") or ():
            name, _, address = entry.partition(", ")
            if name == "Documentation":
                return [f"The pages named docs/ are at {address.rpartition('/')[0]}"]
    return []


def markdown() -> str:
    """docs/configuration.md."""
    blocks = [
        "# Configuration",
        "A job is one TOML file; any value can be overridden on the command line as `section.key=value`, and "
        "left out as "
        "`section.key=`. "
        "This page is made from the definitions in `shardwise/config/schema.py` by `python -m "
        "shardwise.config.reference`.",
    ]
    sections: list[tuple[str, type[BaseModel]]] = [*_sections(), ("data.sources", Source)]
    for name, section in sections:
        rows = [
            f"| `{key}` | {_type(field)} | `{_default(field)}` | {field.description} |"
            for key, field in _fields(section)
        ]
        blocks.append("\n".join([f"## {_heading(name, section)}", "", _summary(section), "", *_HEAD, *rows]))
    keys = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocabulary")
    shapes = [
        f"| `{name}` | " + " | ".join(str(shape[key]) for key in keys) + " |"
        for name, shape in PRESETS.items()
    ]
    head = [
        "| preset | layers | hidden | heads | kv heads | ffn | vocabulary |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    blocks.append("\n".join(["## Presets", "", *head, *shapes]))
    return "\n\n".join(blocks) + "\n"


_HEAD = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]


def _sections() -> list[tuple[str, type[BaseModel]]]:
    """The tables of a job, by name; [optimizer] once for each of our optimizers, the default first."""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in Config.model_fields.items():
        if name == "optimizer":
            sections += [(name, BUILT_IN[DEFAULT])]
            sections += [(name, kind) for other, kind in BUILT_IN.items() if other != DEFAULT]
        elif isinstance(field.annotation, type):
            sections.append((name, field.annotation))
    return sections


def _heading(name: str, section: type[BaseModel]) -> str:
    """The name of a table; of [optimizer] also which optimizer has these keys."""
    which = f", name = {_default(section.model_fields['name'])}" if name == "optimizer" else ""
    return f"[{name}]{which}"


def _fields(section: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return list(section.model_fields.items())


def _summary(section: type[BaseModel]) -> str:
    """The docstring of a section on one line, however it is wrapped in the source."""
    return " ".join((section.__doc__ or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: Any = field.default
    if value is None or value == ():
        return "unset"
    return (
        {True: "true", False: "false"}.get(value, repr(value))
        if isinstance(value, bool)
        else repr(value).replace("'", '"')
    )


def _type(field: FieldInfo) -> str:
    return " or ".join(_type_names(field.annotation)) + _range(field)


def _type_names(annotation: Any) -> list[str]:
    """An annotation in words: the names of types, and allowed values in quotes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_names(arguments[0])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
    if origin in (Union, UnionType):
        return [word for argument in arguments if argument is not NoneType for word in _type_names(argument)]
    if origin is tuple:
        return [
            "list of "
            + " or ".join(
                dict.fromkeys(word for item in arguments if item is not ... for word in _type_names(item))
            )
        ]
    return [_TYPES.get(annotation, getattr(annotation, "__name__", str(annotation)))]


_TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def _range(field: FieldInfo) -> str:
    bounds = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    inner = [
        item for argument in get_args(field.annotation) for item in getattr(argument, "__metadata__", ())
    ]
    rules = [*field.metadata, *(rule for item in inner for rule in getattr(item, "metadata", ()))]
    known = [
        (sign, getattr(rule, name)) for rule in rules for name, sign in bounds.items() if hasattr(rule, name)
    ]
    limits = [
        f"{sign} {limit}" for sign, limit in known if limit < 2**16
    ]  # above are those that nobody meets
    return ", " + ", ".join(limits) if limits else ""


if __name__ == "__main__":
    print(markdown(), end="")
