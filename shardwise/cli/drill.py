"""`shardwise drill JOB`: train undisturbed, then with faults, and prove that both runs are the same."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.arguments import AsJson, JobFile, OnDevice, Overrides
from shardwise.cli.signals import stopped_as_interrupted
from shardwise.library.drill_job import drill_job, drill_lines
from shardwise.library.machine import with_device
from shardwise.resilience.stopping import INTERRUPTED


def drill(
    job: JobFile,
    overrides: Overrides = None,
    faults: Annotated[
        str,
        typer.Option(
            "--faults", help="Kinds, with commas between: kill, hang, error, corrupt, full, term, lose."
        ),
    ] = "kill,hang,corrupt,full,term",
    count: Annotated[int, typer.Option("--count", min=1, help="Faults in all; kinds take turns.")] = 5,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Decides steps, ranks, files and bytes.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, help="Local workers; left out: one a GPU, or as many as the layout needs."
        ),
    ] = None,
    device: OnDevice = None,
    json: AsJson = False,
) -> None:
    """Train a job undisturbed, then again while faults are injected, and prove that nothing was lost."""
    try:
        with stopped_as_interrupted():
            result = drill_job(job, with_device(overrides, device), faults, count, seed, workers)
    except KeyboardInterrupt:
        typer.echo("stopped; nothing is left running", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if json:
        from json import dumps

        print(dumps(result.to_json()))
    else:
        print("\n".join(drill_lines(result)))
    if result.failure:
        typer.echo(result.failure, err=True)
    raise typer.Exit(0 if result.passes else 1)
