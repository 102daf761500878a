"""A training job as a value: a TOML file, and changes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.config import Config

Tables = Mapping[str, object]
"""Values of one table of a job, by key."""


@dataclass(frozen=True)
class Job:
    """A training job: a TOML file and changes to it. Make one with `Job.read`."""

    path: Path
    """The TOML file."""
    overrides: tuple[str, ...] = ()
    """Changes to the file, as on the command line: `section.key=value`."""

    @classmethod
    def read(cls, path: str | Path, *overrides: str, **tables: Tables) -> Job:
        """Return the job in a TOML file, after checking it.

        Changes are written as on the command line, or as one argument for each table:
        `Job.read("job.toml", "train.steps=20", layout={"tensor": 2})`. None leaves a key out. All problems of
        the job are raised together, as one `UserError`.
        """
        return cls(Path(path)).changed(*overrides, **tables)

    def changed(self, *overrides: str, **tables: Tables) -> Job:
        """Return this job with more changes, after checking it."""
        given = (*self.overrides, *overrides, *_as_overrides(tables))
        job = Job(self.path, given)
        job.config  # noqa: B018 - reading it is the check
        return job

    @classmethod
    def of(cls, what: Job | str | Path | Callable[[Any], object], **tables: Tables) -> Job:
        """Return a job: itself, that of a file, or that of a program, a function of an engine; with changes,
        as in `read`."""
        if isinstance(what, Job):
            return what.changed(**tables) if tables else what
        if isinstance(what, str | Path):
            return cls.read(what, **tables)
        from shardwise.library.program_address import address_of

        return cls.read(address_of(what), **tables)

    @property
    def config(self) -> Config:
        """All settings of the job, with defaults."""
        from shardwise.config import read

        return read(self.path, self.overrides)

    def __str__(self) -> str:
        """Return the whole job as TOML."""
        from shardwise.config import to_toml

        return to_toml(self.config)


def _as_overrides(tables: Mapping[str, Tables]) -> list[str]:
    """Return changes of tables as overrides of the command line."""
    overrides = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise UserError(f"{name} = {table!r}: expected a dictionary, for example {name}={{'key': value}}")
        overrides += [f"{name}.{key}={_as_toml(f'{name}.{key}', value)}" for key, value in table.items()]
    return overrides


def _as_toml(setting: str, value: object) -> str:
    """Return a value as it is written in TOML on one line; nothing for None."""
    import tomli_w

    if value is None:
        return ""
    try:
        text = tomli_w.dumps({"value": [[value]]})  # a table in a list of lists is written on one line
    except TypeError:
        raise UserError(
            f"{setting} = {value!r}: a {type(value).__name__} cannot be a setting; give a number, a text, "
            f"true or false, or a list or table of them"
        ) from None
    for _ in range(2):
        text = text.partition("[")[2].strip().removesuffix("]").strip().removesuffix(",")
    return text
