"""`shardwise train JOB`: check the job, then start its workers, or be one of another launcher's."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.arguments import JobFile, Overrides
from shardwise.cli.signals import stopped_as_interrupted
from shardwise.library.start import start
from shardwise.resilience.stopping import AT_ONCE, Stopped, status_after

MOST_WORKERS = 4096
"""Largest number of workers on one machine. A larger number is probably a typing mistake."""


def train(
    job: JobFile,
    overrides: Overrides = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            min=1,
            max=MOST_WORKERS,
            help="Local workers; left out: one a GPU, or as many as the layout needs.",
        ),
    ] = None,
    min_workers: Annotated[
        int | None,
        typer.Option(
            "--min-workers",
            min=1,
            help="Go on with as few as this when workers are lost; left out: all are needed.",
        ),
    ] = None,
    max_workers: Annotated[
        int | None,
        typer.Option(
            "--max-workers",
            min=1,
            help="Take in as many as this, over all nodes; left out: those of every node.",
        ),
    ] = None,
) -> None:
    """Train a model. Starts its own local workers, or joins those that torchrun, srun or a PET_* operator
    started."""
    try:
        with stopped_as_interrupted() as received:
            raise typer.Exit(start(job, overrides or [], workers, (min_workers, max_workers)))
    except Stopped as stopped:
        typer.echo(stopped, err=True)
        raise typer.Exit(stopped.status) from None
    except KeyboardInterrupt:
        typer.echo(AT_ONCE, err=True)
        raise typer.Exit(status_after(received)) from None
