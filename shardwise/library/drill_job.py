"""Drill a job: check it, train it undisturbed and with faults, and show the result as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from shardwise.library.columns import aligned
from shardwise.library.machine import sharing
from shardwise.plurals import counted

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.proof.drill import DrillResult
    from shardwise.proof.drill_faults import Kind


def drill_job(
    job: Path, overrides: Sequence[str], faults: str, count: int, seed: int, workers: int | None
) -> DrillResult:
    """Check a job, train it undisturbed and with faults, and compare the runs."""
    from shardwise.config import read
    from shardwise.drivers.driver import WorkerCounts
    from shardwise.library.check_job import checks_of_run
    from shardwise.library.start import with_program

    def counts(config: Config) -> WorkerCounts:
        return WorkerCounts(*[_workers(config, workers)] * 3)

    config = read(job, overrides, workers, [lambda _: _unknown(faults), *checks_of_run(counts)])
    config = with_program(config)
    from shardwise.plans import choose
    from shardwise.proof.drill import drill as run

    kinds, devices = _kinds(faults), _workers(config, workers)
    choose(config, devices)
    for line in sharing(devices) if config.run.device == "cuda" else ():
        print(line, file=sys.stderr)
    with _DrillBar(config.train.steps, count) as progress:
        return run(config, devices, kinds, count, seed, progress)


def _kinds(faults: str) -> list[Kind]:
    return cast("list[Kind]", list(dict.fromkeys(word.strip() for word in faults.split(",") if word.strip())))


def _unknown(faults: str) -> Iterator[str]:
    from shardwise.proof.drill_faults import KINDS

    unknown = [word for word in _kinds(faults) if word not in KINDS]
    if unknown or not _kinds(faults):
        wrong = f"{', '.join(unknown)} is not known" if unknown else "names none"
        yield f"--faults {faults}: {wrong}; use some of {', '.join(KINDS)}"


def _workers(config: Config, workers: int | None) -> int:
    """Return the number of workers that `shardwise train` would start."""
    from shardwise.library.start import workers_here

    return workers or workers_here(config)


class _DrillBar:
    """Shows a drill on standard error: a progress bar that is redrawn on a terminal, and above it what
    happened."""

    def __init__(self, steps: int, faults: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        from shardwise.observe import error_console

        self._console = error_console()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(30),
            MofNCompleteColumn(),
            TextColumn("steps, {task.fields[faults]} faults survived"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(
            *columns, console=self._console, transient=True, disable=not self._console.is_terminal
        )
        self._task = self._bar.add_task("starting", total=steps, faults=f"0 of {faults}")
        self._count, self._phase = faults, ""

    def __enter__(self) -> _DrillBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def at(self, phase: str, step: int, faults: int) -> None:
        """Show which phase the drill is in, at which step, and how many faults were survived."""
        self._bar.update(self._task, description=phase, completed=step, faults=f"{faults} of {self._count}")
        if phase != self._phase and not self._console.is_terminal:
            self._console.print(f"{phase} (step {step})", markup=False, soft_wrap=True)
        self._phase = phase

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)


def drill_lines(result: DrillResult) -> list[str]:
    """Return what a drill found, as text: each fault, what differs, and the verdict."""
    lines = [*_table(result), *(result.comparison.sentences() if result.comparison else ())]
    lines += [f"more faults than the drill injected: {event}" for event in result.unexpected]
    undisturbed, drilled = f"{result.baseline.training:.1f} s", f"{result.drilled_seconds:.1f} s"
    steps = f"the steps took {undisturbed} undisturbed, {drilled} with faults"
    lines.append(
        f"goodput {result.goodput:.2f}: {steps}, from the beginning of the first to the end of the last"
    )
    return [*lines, f"{'PASS' if result.passes else 'FAIL'}: {_verdict(result)}"]


def _verdict(result: DrillResult) -> str:
    compared, planned = result.comparison, len(result.planned)
    survived = counted(len(result.faults), "fault")
    if compared is None:
        return f"{len(result.faults)} of {planned} faults were survived; the run did not reach its end"
    precision = "to the last bit"
    if compared.tolerance is not None:
        precision = f"to rounding (relative {compared.tolerance:g}: the layout changed)"
    if not result.passes:
        return f"{survived} survived, but the run is not the undisturbed one {precision}"
    steps, tensors = counted(compared.steps, "step"), counted(compared.tensors, "tensor")
    parts = f"the losses of {steps}, their data and {tensors} at the end"
    workers = counted(result.workers, "worker")
    return f"{survived} on {workers}; {parts} equal the undisturbed run's {precision}"


def _table(result: DrillResult) -> list[str]:
    """Return a table with one line per fault."""
    rows = [["fault", "step", "seconds to recover", "steps lost", "what happened"]]
    for fault in result.faults:
        seconds = f"{fault.seconds_to_recover:.1f}"
        rows.append([fault.kind, str(fault.step), seconds, str(fault.steps_lost), fault.happened])
    for missed in result.planned[len(result.faults) :]:
        rows.append([missed.kind, "-", "-", "-", "not survived, or not reached"])
    return [*aligned(rows), ""]
