"""Prove a job: check it, compare its layout with one device, and show the result as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from shardwise.library.columns import aligned
from shardwise.plurals import counted, listed

if TYPE_CHECKING:
    from shardwise.proof.prove import ProofResult
    from shardwise.proof.verdict import QuantityError

SHOWN = 8
"""Number of rows of the table if all is well. Otherwise every failing row is shown, up to three times as
many."""


def prove_job(
    job: Path, overrides: Sequence[str], steps: int, dtype: str, sabotage: str | None, against: str
) -> ProofResult:
    """Check a job, and prove that its layout computes what one device computes."""
    from shardwise.config import read
    from shardwise.library.check_job import checks_of_proof
    from shardwise.library.progress import preparing
    from shardwise.library.start import with_program
    from shardwise.observe import error_console
    from shardwise.proof.proof_job import Against, Dtype, Sabotage
    from shardwise.proof.prove import prove

    given = [("--dtype", dtype, get_args(Dtype)), ("--against", against, get_args(Against))]
    given += [("--sabotage", sabotage, get_args(Sabotage))] if sabotage is not None else []
    checks = [lambda _: _unknown_choices(given), *checks_of_proof()]
    config = with_program(read(job, overrides, checks=checks))
    broken, say = cast("Sabotage | None", sabotage), error_console().print
    return prove(config, steps, cast(Dtype, dtype), broken, preparing, say, cast(Against, against))


def _unknown_choices(given: Iterable[tuple[str, str, tuple[str, ...]]]) -> Iterator[str]:
    """Yield a problem for each option whose value is not among its choices."""
    for option, value, choices in given:
        if value not in choices:
            yield f"{option} {value}: not known; use one of {', '.join(choices)}"


def proof_lines(result: ProofResult) -> list[str]:
    """Return what a proof found, as text: the worst errors, what differs and why, and the verdict."""
    lines = [
        f"shrunk: {key} from {before} to {after}" for key, (before, after) in (result.shrunk or {}).items()
    ]
    lines += _table(result)
    if result.sabotaged:
        broken = ", ".join(
            f"{key} {listed(value) if isinstance(value, list) else value}"
            for key, value in result.sabotaged.items()
        )
        lines.append(f"broken on purpose: {broken}")
    diagnosis = result.diagnosis.sentences() if result.diagnosis else []
    compressed = [verdict.sentence() for verdict in result.compressed]
    lines += [*result.verdict.faults, *diagnosis, result.reached.sentence(), *compressed]
    return lines + _conclusion(result)


def _conclusion(result: ProofResult) -> list[str]:
    """Return the last two lines: whether the proof passes, and its worst error."""
    proof, verdict, run = result.proof, result.verdict, _what_ran(result)
    reference = "plain torch" if result.against == "plain" else "one device"
    meaning = f"{'computes' if verdict.passes else 'does not compute'} what {reference} computes"
    worst, rounded = verdict.errors[0], "" if proof.dtype == "float64" else ", but for rounding"
    return [
        f"{'PASS' if verdict.passes else 'FAIL'}: {run}: {meaning}{rounded}.",
        f"worst relative error {worst.relative_error:.2g}, limit {worst.limit:.2g}; {result.seconds:.1f} s",
    ]


def _what_ran(result: ProofResult) -> str:
    """Return the layout, its processes, and the steps of a proof in words."""
    proof = result.proof
    layout = " x ".join(f"{axis} {size}" for axis, size in _axes(result).items()) or "one device"
    products = " with products in float8, delayed scales" if proof.config.train.precision == "float8" else ""
    steps = f"{counted(proof.steps, 'step')} in {proof.dtype}{products}"
    processes = f"{counted(proof.world, 'process')}{_on_gpus(result)}"
    return f"{layout}, zero {proof.plan.layout.zero}, on {processes}, {steps}"


def _on_gpus(result: ProofResult) -> str:
    """Return on which GPUs the processes of the layout ran, in words. The reference runs on the CPU."""
    if result.proof.config.run.device != "cuda":
        return ""
    from shardwise.mesh import gpus_are_shared, local_gpus

    gpus = counted(local_gpus(), "GPU")
    shared = gpus_are_shared(result.proof.world)
    return f" that share {gpus} (NCCL through sockets)" if shared else f" on {gpus}"


def _axes(result: ProofResult) -> dict[str, int]:
    from shardwise.config import AXES

    layout = result.proof.plan.layout
    return {axis: getattr(layout, axis) for axis in AXES if getattr(layout, axis) > 1}


def _table(result: ProofResult) -> list[str]:
    """Return a table of errors, the worst first."""
    errors = result.verdict.errors
    failing = sum(not error.passes for error in errors)
    shown = errors[: min(max(SHOWN, failing), 3 * SHOWN)]
    head = ["", "parameter", "quantity", "step", "relative error", "in roundings", "of one device", "ranks"]
    rows = [head, *(_row(error, result) for error in shown)]
    if result.proof.dtype == "float64":
        rows = [row[:6] + row[7:] for row in rows]
    return [f"the worst {len(shown)} of {len(errors)} quantities", *aligned(rows), ""]


def _row(error: QuantityError, result: ProofResult) -> list[str]:
    from shardwise.proof.proof_job import ROUNDING

    cost = "" if error.rounding_cost is None else f"{error.rounding_cost:.2e}"
    ranks = "all" if len(error.ranks) == result.proof.world else ", ".join(map(str, error.ranks))
    units = f"{error.relative_error / ROUNDING[result.proof.dtype]:.3g}"
    what = ["" if error.passes else "x", error.parameter or "-", error.quantity, str(error.step)]
    return [*what, f"{error.relative_error:.2e}", units, cost, ranks]
