"""`shardwise new NAME`: make a first folder from a template of the package.

A template is a folder beside this file: a commented job, a README, and what they need. Each job runs without
changes, even on two CPU cores, so that users start from something that works. In its text, `NAME` is replaced
by the given name, and in commands, `JOB_FILE` and `RUN_FOLDER` are replaced by the paths of the job and of
its run, quoted for a shell.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

TEMPLATES = Path(__file__).parent / "templates"
TEXT = "text.txt"
"""Training data of all templates except `fine-tune`, which has conversations."""


class Template(StrEnum):
    """The templates to choose from."""

    QUICKSTART = "quickstart"
    PRETRAIN = "pretrain"
    FINE_TUNE = "fine-tune"
    OWN_MODULE = "own-module"


def new(
    name: Annotated[Path, typer.Argument(help="The folder to make.")],
    template: Annotated[
        Template,
        typer.Option(
            "--template",
            help="A first run; a model from scratch; one that starts from Hugging Face; your own module.",
        ),
    ] = Template.QUICKSTART,
) -> None:
    """Write a commented job, something small to learn, and a README to begin with."""
    from shardwise.command_name import command_name
    from shardwise.errors import UserError, shown

    job = name.resolve().name
    if not job.isprintable():  # for example a line break, which would end a comment in the job file
        raise UserError(f"{shown(job)}: not a name that can be shown; give one of letters and digits")
    _write(name, _contents(job, template))
    typer.echo(f"{name}: {', '.join(sorted(path.name for path in name.iterdir()))}", err=True)
    typer.echo(f"next: cd {_quoted(str(name))} && {command_name()} train {_quoted(f'{job}.toml')}", err=True)


def _quoted(path: str) -> str:
    """Return the path quoted for a shell, whatever characters it contains."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _contents(name: str, template: Template) -> dict[str, str]:
    """Return the text of each file in the new folder, by file name. The job has the name of the folder, and
    so have its runs."""
    files = {
        path.name: path.read_text(encoding="utf-8")
        for path in (TEMPLATES / template).iterdir()
        if path.is_file()
    }
    words = {"NAME": name, "JOB_FILE": _quoted(f"{name}.toml"), "RUN_FOLDER": _quoted(f"runs/{name}")}

    def filled(text: str) -> str:
        return re.sub("|".join(words), lambda match: words[match[0]], text)

    files = {f"{name}.toml" if file == "job.toml" else file: filled(text) for file, text in files.items()}
    if template != Template.FINE_TUNE:
        files[TEXT] = (TEMPLATES / TEXT).read_text(encoding="utf-8")
    return files


def _write(folder: Path, contents: dict[str, str]) -> None:
    """Write all files, or none: if one fails, folders that were made are removed again."""
    from shardwise.errors import UserError

    advice = {
        errno.ENOSPC: "free some space there",
        errno.EDQUOT: "free some space there",
        errno.ENAMETOOLONG: "shorten the name",
    }
    try:
        if os.path.lexists(folder):
            raise UserError(f"{folder}: is there already; give another name, or remove it")
        made = next(path for path in reversed([folder, *folder.parents]) if not os.path.lexists(path))
        try:
            folder.mkdir(parents=True)
            for file, text in contents.items():
                (folder / file).write_text(text, encoding="utf-8")
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    except OSError as error:
        otherwise = advice.get(error.errno or 0, "give a path in a folder of yours")
        raise UserError(f"{folder}: cannot be written ({error.strerror}); {otherwise}") from None
