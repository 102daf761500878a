"""The command line. Words in, words out: each command lives in its own file and imports what is heavy only when it runs.

A user's mistake ends in one message on standard error and the error's status, never in a traceback.
"""

from __future__ import annotations

import os
import sys

import typer

from shardwise import __version__
from shardwise.cli.checkpoint import checkpoint
from shardwise.cli.config import config
from shardwise.cli.data import data
from shardwise.cli.doctor import doctor
from shardwise.cli.drill import drill
from shardwise.cli.generate import generate
from shardwise.cli.job_command import JobCommand
from shardwise.cli.new import new
from shardwise.cli.plan import plan
from shardwise.cli.probe import probe
from shardwise.cli.report import report
from shardwise.cli.train import train
from shardwise.cli.verify import verify
from shardwise.errors import UserError

app = typer.Typer(
    name="shardwise",
    help="Plan, prove and run distributed training of transformer models on PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it takes [model] for a style
)
app.command()(new)
app.command(cls=JobCommand)(plan)
app.command(cls=JobCommand)(verify)
app.command(cls=JobCommand)(drill)
app.command()(probe)
app.command()(report)
app.command()(generate)
app.command()(doctor)
app.add_typer(checkpoint, name="checkpoint")
app.add_typer(data, name="data")
app.add_typer(config, name="config")


def _train_help() -> str:
    from shardwise.config.reference import help_text

    return "\b\n" + help_text().replace("\n\n", "\n\n\b\n")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


app.command(cls=JobCommand, epilog=_train_help() if {"train", "--help"} <= set(sys.argv) else None)(train)


def main() -> None:
    """Run a command; turn a user's mistake into one message. Mistakes in the words of the command are typer's to answer."""
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except OSError as error:
        if (mistake := _mistake_of_place(error)) is None:
            raise
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(UserError.status)


def _mistake_of_place(error: OSError) -> str | None:
    """What is wrong with where the command is run, if that is why it failed."""
    try:
        os.getcwd()
    except OSError:
        return "the folder that this shell is in was removed; change to another, with cd"
    if "--install-completion" in sys.argv:
        return f"{error.filename}: cannot be written ({error.strerror}); --show-completion prints what belongs there"
    return None
