"""`shardwise new NAME`: a folder to begin with, made from the templates that are part of the package.

A template is a folder beside this file: a commented job, a README, and what they need. Each is a job that
runs as it is, on two CPU cores too, so that the first change is made to something that works. In its text
`NAME` is the name that was given, and in commands `JOB_FILE` and `RUN_FOLDER` are the paths of the job and of
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
"""What templates are trained on, but the one that has conversations of its own."""


class Template(StrEnum):
    """What there is to begin with."""

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
            help="A first run; a model from scratch; one that goes on from Hugging Face; a module of "
            "your own.",
        ),
    ] = Template.QUICKSTART,
) -> None:
    """Write a commented job, something small to learn, and a README to begin with."""
    from shardwise.command_name import command_name
    from shardwise.errors import UserError, shown

    job = name.resolve().name
    if not job.isprintable():  # half a character, or a line break that would end the comment it is written in
        raise UserError(f"{shown(job)}: not a name that can be shown; give one of letters and digits")
    _write(name, _contents(job, template))
    typer.echo(f"{name}: {', '.join(sorted(path.name for path in name.iterdir()))}", err=True)
    typer.echo(f"next: cd {_quoted(str(name))} && {command_name()} train {_quoted(f'{job}.toml')}", err=True)


def _quoted(path: str) -> str:
    """As a shell takes it for a path, whatever is in it."""
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def _contents(name: str, template: Template) -> dict[str, str]:
    """What the folder will hold: text by file name. The job has the folder's name, which is that of its runs
    too."""
    files = {
        path.name: path.read_text(encoding="utf-8")
        for path in (TEMPLATES / template).iterdir()
        if path.is_file()
    }
    words = {"NAME": name, "JOB_FILE": _quoted(f"{name}.toml"), "RUN_FOLDER": _quoted(f"runs/{name}")}

    def filled(text: str) -> str:
        return re.sub("|".join(words), lambda found: words[found[0]], text)

    files = {f"{name}.toml" if file == "job.toml" else file: filled(text) for file, text in files.items()}
    return (
        files
        if template == Template.FINE_TUNE
        else {**files, TEXT: (TEMPLATES / TEXT).read_text(encoding="utf-8")}
    )


def _write(folder: Path, contents: dict[str, str]) -> None:
    """All of it, or nothing: folders that were made on the way go too."""
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
