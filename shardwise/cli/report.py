"""`shardwise report RUN`: what happened in a run, for people or, with `--json`, for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="The run folder: run.folder of the job, for example runs/default.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """What happened in a run: loss, speed, MFU, memory, where the time went, communication, goodput, faults, checkpoints."""
    from shardwise.observe.files import to_json
    from shardwise.observe.report import render, summarise
    from shardwise.plan.interval import advise

    summary = summarise(run, advise)
    if json:
        print(to_json(summary, indent=2))
        return
    from rich.console import Console

    render(summary, Console(highlight=False))
