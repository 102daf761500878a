"""The profile: what a site needs in every submitted file, written once in one TOML file of the user.

It has one table per scheduler. A key that is left out leaves the choice to the cluster.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from shardwise.errors import ConfigError, UserError, shown
from shardwise.files import parse_toml, problems_of, read_bytes
from shardwise.mesh.environment import config_folder
from shardwise.section import Section
from shardwise.submit.registry import SCHEDULERS, scheduler_named


def default_profile() -> Path:
    """Return the path of the profile if the command names none."""
    return config_folder() / "site.toml"


def read_profile(path: Path | None, scheduler: str) -> Section:
    """Return a scheduler's table of the profile. Raise one error with all problems of the table.

    If the user named no file and has no profile, all keys are left out.
    """
    kind, source = scheduler_named(scheduler).settings, path or default_profile()
    try:
        tables = parse_toml(read_bytes(source), source)
    except FileNotFoundError:
        if path is None:
            return kind()
        raise UserError(f"{source}: no such file; shardwise submit --new-profile writes one") from None
    unknown = tables.keys() - SCHEDULERS.keys()
    problems = [f"[{name}]: unknown table; tables are {', '.join(SCHEDULERS)}" for name in sorted(unknown)]
    try:
        settings = kind.model_validate(tables.get(scheduler, {}))
    except ValidationError as error:
        problems += [f"{scheduler}.{problem}" for problem in problems_of(error)]
    if problems:
        raise ConfigError(str(source), problems)
    return settings


def write_profile() -> Path:
    """Write a profile with every key as a comment, and return its path. An existing one is left as it is."""
    path, text = default_profile(), "\n".join(_new_profile())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise UserError(f"{path}: is there already; change it with an editor") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    return path


def _new_profile() -> Iterator[str]:
    yield "# What this site needs in every file that `shardwise submit` writes."
    yield "# Remove the # before a key to set it."
    for name in SCHEDULERS:
        yield f"\n[{name}]"
        for key, field in scheduler_named(name).settings.model_fields.items():
            yield f"# {field.description}"
            yield f"# {key} = {_toml(field.examples or [])}"
    yield ""


def _toml(examples: Sequence[object]) -> str:
    """Return the first example of a key as TOML. Texts, numbers and lists of texts are written as in JSON."""
    assert examples, f"{shown(examples)}: every key of a profile has an example"
    return json.dumps(examples[0])
