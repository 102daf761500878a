"""The commands of the command line. Each command is in its own file and imports heavy modules only when it
runs."""

from __future__ import annotations

import inspect
import shutil
import sys

import typer

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
from shardwise.cli.submit import submit
from shardwise.cli.train import train
from shardwise.cli.verify import verify
from shardwise.version import __version__

app = typer.Typer(
    name="shardwise",
    help="Plan, prove and run distributed training of transformer models on PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would read [model] as a style
    context_settings={"max_content_width": shutil.get_terminal_size().columns},  # the default is 80
)


def _train_help() -> str:
    from shardwise.config.reference import help_text

    return "\b\n" + help_text().replace("\n\n", "\n\n\b\n")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    pass


app.command()(new)
app.command(cls=JobCommand, epilog=_train_help() if {"train", "--help"} <= set(sys.argv) else None)(train)
app.command(name="run", cls=JobCommand, help="Train a program, file.py:function: `train` by another name.")(
    train
)
app.command()(report)
app.command()(generate)
for command in (plan, verify, drill, submit):
    app.command(cls=JobCommand)(command)
app.command()(probe)
app.command()(doctor)
for name, group in (("checkpoint", checkpoint), ("data", data), ("config", config)):
    app.add_typer(group, name=name)


def _describe_whole(commands: typer.Typer) -> None:
    """Let the list of commands show descriptions in full. By default typer shortens them."""
    for command in commands.registered_commands:
        command.short_help = inspect.getdoc(command.callback)
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            group.short_help = group.typer_instance.info.help
            _describe_whole(group.typer_instance)


_describe_whole(app)
