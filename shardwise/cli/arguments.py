"""Arguments and options that several commands have, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(help="The job: a TOML file, or a program as file.py:function.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Changes to it, as section.key=value; section.key= leaves a key out."),
]
OnDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        help="cuda: compute on this machine's GPUs, shared where there are too few (run.device).",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
