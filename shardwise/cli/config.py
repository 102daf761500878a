"""`shardwise config schema | show`: the settings that a job may have, and those of one job with the origin of
every value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypedDict

import typer

from shardwise.cli.arguments import AsJson, JobFile, Overrides
from shardwise.cli.job_command import JobCommand

if TYPE_CHECKING:
    from shardwise.config import Config, Origins

config = typer.Typer(no_args_is_help=True, help="What a job may say (schema), and what this one says (show).")
DEFAULT = "default"


@config.command()
def schema() -> None:
    """Print the JSON Schema of the job file, for editors that complete and check TOML."""
    from json import dumps

    from shardwise.config.json_schema import job_schema

    print(dumps(job_schema(), indent=2))


@config.command(cls=JobCommand)
def show(
    job: JobFile,
    overrides: Overrides = None,
    json: AsJson = False,
) -> None:
    """Show every value of a job, and where it comes from: a default, the job file, an override, or what
    filled it in."""
    from shardwise.config import read_with_origins

    values, origins = read_with_origins(job, overrides or [])
    if json:
        from json import dumps

        tables = {name: dict(_table(values, name, origins)) for name in type(values).model_fields}
        print(dumps(tables, indent=2))
    else:
        print("\n".join(_lines(values, origins)))


class _Entry(TypedDict):
    """A value of a job, and where it comes from."""

    value: object
    origin: str


def _table(values: Config, section: str, origins: Origins) -> Iterator[tuple[str, _Entry]]:
    for key, value in getattr(values, section).model_dump(mode="json").items():
        yield key, {"value": value, "origin": origins.get(f"{section}.{key}", DEFAULT)}


def _lines(values: Config, origins: Origins) -> Iterator[str]:
    """Yield the lines of a job file with all settings, and their origins as comments. A setting without a
    value is a comment too."""
    from shardwise.errors import printable

    for section in type(values).model_fields:
        yield f"[{section}]"
        for key, entry in _table(values, section, origins):
            no_clip = (section, key) == ("train", "clip") and entry["value"] is None
            value = False if no_clip else entry["value"]
            text = f"# {key} is not set" if value is None or value == [] else f"{key} = {_toml(value)}"
            yield f"{text:<44}  # {printable(entry['origin'])}"
        yield ""


def _toml(value: object) -> str:
    """Return a value as TOML on one line."""
    import tomli_w

    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(part)}' for key, part in value.items())} }}"
    return tomli_w.dumps({"value": value}).removeprefix("value = ").strip()
