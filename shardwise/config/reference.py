"""The text of `shardwise train --help` and docs/configuration.md, made from the definitions of the tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.config.presets import PRESETS
from shardwise.config.schema import Config, TextSource
from shardwise.optimizers import BUILT_IN, DEFAULT, TorchClass


def help_text() -> str:
    """Return every key with its default and its meaning in plain text."""
    blocks = [
        "Any key of the job file can be given as section.key=value. section.key= with nothing after it "
        "leaves the key out, section= the whole table:"
    ]
    for name, section in _sections():
        lines = [
            f"  {name}.{key} = {_default(field)}\n      {field.description}"
            for key, field in section.model_fields.items()
        ]
        blocks.append("\n".join([f"{name}: {_summary(section)}", *lines]))
    return "\n\n".join([*blocks, *_where_docs_are()])


def _where_docs_are() -> list[str]:
    """Return the address of the documentation, which an installed package has in its metadata."""
    with suppress(PackageNotFoundError):
        for entry in metadata("shardwise").get_all("Project-URL") or ():
            name, _, address = entry.partition(", ")
            if name == "Documentation":
                return [f"The pages named docs/ are at {address.rpartition('/')[0]}"]
    return []


def markdown() -> str:
    """Return the text of docs/configuration.md."""
    blocks = [
        "# Configuration",
        "A job is one TOML file; any value can be overridden on the command line as `section.key=value`, and "
        "left out as `section.key=`. This page is made from the definitions in `shardwise/config/schema.py` "
        "by `python -m shardwise.config.reference`.",
    ]
    sections: list[tuple[str, type[BaseModel]]] = [*_sections(), ("data.sources", TextSource)]
    for name, section in sections:
        rows = [
            f"| `{key}` | {_type(field)} | `{_default(field)}` | {field.description} |"
            for key, field in section.model_fields.items()
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
    """Return the tables of a job by name; [optimizer] once for each of our optimizers, the default first."""
    sections: list[tuple[str, type[BaseModel]]] = []
    for name, field in Config.model_fields.items():
        if name == "optimizer":
            sections += [(name, BUILT_IN[DEFAULT])]
            sections += [(name, kind) for other, kind in BUILT_IN.items() if other != DEFAULT]
            sections += [(name, TorchClass)]
        elif isinstance(field.annotation, type):
            sections.append((name, field.annotation))
    return sections


def _heading(name: str, section: type[BaseModel]) -> str:
    """Return the name of a table, and for [optimizer] the name of the optimizer that has these keys."""
    if name != "optimizer":
        return f"[{name}]"
    field = section.model_fields["name"]
    value = f'"{field.examples[0]}"' if field.examples else _default(field)
    return f"[{name}], name = {value}"


def _summary(section: type[BaseModel]) -> str:
    """Return the docstring of a section on one line."""
    return " ".join((section.__doc__ or "").split())


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value: object = field.default
    if value is None or value in ((), {}):
        return "unset"
    if isinstance(value, tuple):
        value = list(value)  # as TOML writes it
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def _type(field: FieldInfo) -> str:
    return " or ".join(_type_names(field.annotation)) + _range(field)


def _type_names(annotation: object) -> list[str]:
    """Return the types of an annotation in words, and allowed values in quotes."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_names(arguments[0])
    if origin is Literal:
        return [f"`{value}`" for value in arguments]
    if origin in (Union, UnionType):
        return _names_of_all(arguments)
    if origin is dict:
        return ["tables by pattern"]
    if origin is tuple:
        return ["list of " + " or ".join(dict.fromkeys(_names_of_all(arguments)))]
    return [_TYPES.get(annotation, getattr(annotation, "__name__", str(annotation)))]


def _names_of_all(annotations: Iterable[object]) -> list[str]:
    names = [_type_names(part) for part in annotations if part is not NoneType and part is not ...]
    return list(chain.from_iterable(names))


_TYPES: dict[object, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    TextSource: "tables `[[data.sources]]`",
}


def _range(field: FieldInfo) -> str:
    """Return the bounds of a number, without those that are so large that nobody reaches them."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    rules = [*field.metadata, *_rules_of_parts(field)]
    bounds = [(sign, getattr(rule, name, None)) for rule in rules for name, sign in signs.items()]
    limits = [f"{sign} {limit}" for sign, limit in bounds if limit is not None and limit < 2**16]
    return ", " + ", ".join(limits) if limits else ""


def _rules_of_parts(field: FieldInfo) -> Iterator[object]:
    """Yield the rules of the parts of a union such as `Positive | None`."""
    for part in get_args(field.annotation):
        for item in getattr(part, "__metadata__", ()):
            yield from getattr(item, "metadata", ())


if __name__ == "__main__":
    print(markdown(), end="")
