"""`shardwise submit JOB --on slurm`: write the file that a scheduler takes, or submit it."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.arguments import JobFile, Overrides
from shardwise.cli.train import MOST_WORKERS


class SchedulerName(StrEnum):
    """The schedulers of shardwise/submit/registry.py."""

    SLURM = "slurm"


def _new_profile(wanted: bool) -> None:
    if wanted:
        from shardwise.submit.profile import write_profile

        print(write_profile())
        raise typer.Exit


def submit(
    job: JobFile,
    overrides: Overrides = None,
    on: Annotated[SchedulerName, typer.Option("--on", help="The scheduler.")] = SchedulerName.SLURM,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes that train.")] = 1,
    spares: Annotated[
        int, typer.Option("--spares", min=0, help="More nodes, which replace nodes that fail.")
    ] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=MOST_WORKERS,
            help="Workers of each node; left out: as the profile or the layout says, or one a GPU.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", help="What the site needs; left out: ~/.config/shardwise/site.toml."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--print", help="Print the file on standard output, and write nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Submit it, and print the job's id.")] = False,
    new_profile: Annotated[
        bool,
        typer.Option(
            "--new-profile",
            callback=_new_profile,
            is_eager=True,
            help="Write a commented profile to fill in, and end.",
        ),
    ] = False,
) -> None:
    """Write the file that submits a training job to a scheduler; with --yes submit it."""
    from shardwise.errors import UserError
    from shardwise.library.submit_job import Nodes, prepare

    if show and yes:
        raise UserError("--print --yes: --print writes and submits nothing; leave one of them out")
    prepared = prepare(job, overrides or [], on, Nodes(nodes, spares, workers), profile)
    if show:
        print(prepared.text, end="")
    elif yes:
        number, follow = prepared.submit()
        print(number)
        typer.echo("\n".join(f"{what:<7} {command}" for what, command in follow.items()), err=True)
    else:
        prepared.write()
        print(prepared.file)
        typer.echo(f"next: {shlex.join(prepared.command)}", err=True)
