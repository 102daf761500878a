"""`shardwise verify JOB`: prove that the job's layout computes what one device computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.arguments import AsJson, JobFile, OnDevice, Overrides
from shardwise.cli.signals import stopped_as_interrupted
from shardwise.library.machine import with_device
from shardwise.library.prove_job import proof_lines, prove_job
from shardwise.resilience.stopping import INTERRUPTED

if TYPE_CHECKING:
    from shardwise.proof.prove import ProofResult


def verify(
    job: JobFile,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps to compare.")] = 3,
    dtype: Annotated[
        str, typer.Option("--dtype", help="float64 proves; float32 and bfloat16 tell what rounding costs.")
    ] = "float64",
    against: Annotated[
        str,
        typer.Option(
            "--against",
            help="one-device: this code without a layout; plain: plain torch, which shares no code with it.",
        ),
    ] = "one-device",
    sabotage: Annotated[
        str | None,
        typer.Option(
            "--sabotage",
            help="Break drop-all-reduce, scale-gradient, swap-chunks or misroute-token; status 0: found.",
        ),
    ] = None,
    device: OnDevice = None,
    json: AsJson = False,
) -> None:
    """Prove that a layout computes what one device computes: loss, gradients, their norm, and weights after a
    few steps."""
    try:
        with stopped_as_interrupted():
            result = prove_job(job, with_device(overrides, device), steps, dtype, sabotage, against)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _note_one_device(result)
    if json:
        from json import dumps

        print(dumps(result.to_json()))
    else:
        print("\n".join(proof_lines(result)))
    passes = result.verdict.passes
    if sabotage is None and result.sabotaged is None:
        raise typer.Exit(0 if passes else 1)
    typer.echo(f"the sabotage was {'not ' if passes else ''}found", err=True)
    raise typer.Exit(1 if passes else 0)


def _note_one_device(result: ProofResult) -> None:
    """Print a note if one device was compared with itself."""
    proof = result.proof
    if proof.world == 1 and result.against == "one-device" and proof.dtype == "float64":
        itself = "the layout is one device, so it was compared with itself, which proves nothing of a layout"
        typer.echo(f"note: {itself}; give one of several, for example layout.data=2", err=True)
