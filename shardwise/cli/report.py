"""`shardwise report RUN`: show what happened in a run, for people or, with `--json`, for programs.

With `--calibrate` the planner learns from the run: the measurements correct the cluster file that the next
plan uses.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from shardwise.cli.arguments import AsJson

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.config import Config
    from shardwise.cost.cluster import Cluster
    from shardwise.files import Json
    from shardwise.observe.summary import Summary


class _Change(TypedDict):
    """A factor of the cluster file that was corrected."""

    term: str
    ratio: float
    before: float
    after: float
    held: bool


class _Calibration(TypedDict):
    """What `--calibrate` corrected, as `--json` prints it."""

    file: str
    changes: list[_Change]
    step_seconds: dict[str, float]


def report(
    run: Annotated[
        Path, typer.Argument(help="The run folder: run.folder of the job, for example runs/quickstart.")
    ],
    json: AsJson = False,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate", help="Correct the run's cluster file by what was measured, for the next plan."
        ),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            help="With --calibrate: the cluster file to correct or create; needed if the job names a preset.",
        ),
    ] = None,
) -> None:
    """Show what happened in a run: loss, speed, MFU, memory, time, communication, goodput, faults, and what
    had been predicted."""
    from shardwise.cli.checkpoint import kept_steps
    from shardwise.errors import UserError, printable
    from shardwise.observe.records import to_json
    from shardwise.observe.render_report import render, summarise
    from shardwise.observe.trace import merge
    from shardwise.search.interval import advise

    if cluster is not None and not calibrate:
        raise UserError(f"--cluster {cluster}: goes with --calibrate, which writes it")
    summary = summarise(run, advise, kept_steps(run))
    learned = _calibrate(run, summary, cluster) if calibrate else None
    trace = merge(run)
    if json:
        more: Json = {"trace": None if trace is None else str(trace)}
        if learned is not None:
            more["calibration"] = learned
        print(to_json({**summary, **more}, indent=2))
        return
    from rich.console import Console

    render(summary, Console(highlight=False))
    if trace is not None:
        print(f"\ntimeline of all ranks: {printable(str(trace))}; open it at https://ui.perfetto.dev")
    if learned is not None:
        print("\n".join(["", *_as_text(learned)]))


def _calibrate(run: Path, summary: Summary, asked: Path | None) -> _Calibration:
    """Correct a cluster file by what was measured, and return what changed."""
    from shardwise.config import read
    from shardwise.errors import UserError
    from shardwise.plurals import counted
    from shardwise.search.calibrate import LEAST_STEPS, calibrate

    rows = summary["predicted_and_measured"]
    if not rows and summary["measured_steps"]:
        why = "A run keeps one if its job names a cluster: a preset, or a file as `shardwise probe` writes it"
        raise UserError(f"--calibrate: {run} has no prediction. {why}")
    if summary["measured_steps"] < LEAST_STEPS:
        steps = counted(summary["measured_steps"], "step")
        few = f"{steps} of {run} can be compared with the plan (the first two warm up)"
        raise UserError(f"--calibrate: {few}; it takes {LEAST_STEPS} or more. Train for longer")
    config = _as_planned(read(run / "config.toml"), summary)
    path = _file(config, asked)
    old = _described(config, path, asked)
    new, changes = calibrate(old, _step_seconds(config, summary, old), rows)
    if not changes:
        raise UserError(f"--calibrate: {run} measured none of the predicted terms apart; {path} is as it was")
    _write(path, new)
    return {
        "file": str(path),
        "changes": [
            {"term": name, "ratio": change.ratio, "before": before, "after": after, "held": change.held}
            for change in changes
            for name, before, after in zip(change.terms, change.before, change.after, strict=True)
        ],
        "step_seconds": {
            "predicted": _step_seconds(config, summary, new)["total"],
            "measured": rows[0]["measured"],
        },
    }


def _as_planned(config: Config, summary: Summary) -> Config:
    """Return the run's job with the parts of its plan that a prediction depends on: the layout with its
    codecs, recomputation and the cluster."""
    from shardwise.config import Layout

    update: Json = {"layout": Layout.model_validate(summary["layout"], strict=False)}
    if summary["recompute"] is not None:
        update["train"] = config.train.model_copy(update={"recompute": summary["recompute"]})
    if summary["cluster_file"] is not None:
        update["cluster"] = config.cluster.model_copy(update={"file": summary["cluster_file"]})
    return config.model_copy(update=update)


def _file(config: Config, asked: Path | None) -> Path:
    from shardwise.errors import UserError

    if asked is not None:
        return asked
    if config.cluster.file is None:
        preset = f"the preset {config.cluster.preset}" if config.cluster.preset else "no cluster"
        raise UserError(
            f"--calibrate: the job names {preset}, which cannot be changed; give a file to write with "
            f"--cluster FILE"
        )
    return Path(config.cluster.file)


def _described(config: Config, path: Path, asked: Path | None) -> Cluster:
    """Return the cluster to correct: from the file, or for a new file, the cluster that the run was planned
    with."""
    from shardwise.cost.cluster_file import read_cluster
    from shardwise.cost.clusters import CLUSTERS, requested_cluster
    from shardwise.errors import UserError
    from shardwise.files import reading

    with reading(path, "Give another file with --cluster FILE."):
        exists = path.exists()
    if exists:
        return read_cluster(path, CLUSTERS)
    if asked is None:
        raise UserError(
            f"--calibrate: cluster.file = '{path}' of the run is not there; give a file with --cluster FILE"
        )
    named = requested_cluster(config.cluster)
    if named is None:
        raise UserError(f"--cluster {path}: is not there, and the job names no cluster to make it from")
    return named


def _step_seconds(config: Config, summary: Summary, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of a step that this cluster predicts for the job as it ran."""
    from shardwise.errors import UserError
    from shardwise.search.forecast import forecast

    layout = config.layout
    try:
        choices = layout, summary["micro_batch"], summary["accumulation"]
        predicted = forecast(config, *choices, cluster.with_devices(layout.world), summary["bucket_bytes"])
    except (KeyError, ValueError) as error:
        raise UserError(
            f"--calibrate: no prediction for this job on the cluster {cluster.name} ({error})"
        ) from None
    return dict(predicted["step_seconds"])


def _write(path: Path, cluster: Cluster) -> None:
    """Write the file atomically, and only if it can be read again: there is always a valid file, the old one
    or the new."""
    from shardwise.cost.cluster_file import read_cluster, write_cluster
    from shardwise.cost.clusters import CLUSTERS
    from shardwise.errors import UserError
    from shardwise.search.calibrate import corrected_text

    aside = path.with_name(f".{path.name}.new")
    try:
        if path.exists():
            text = corrected_text(path.read_text(encoding="utf-8"), cluster)
        else:
            text = write_cluster(cluster)
        aside.write_text(text, encoding="utf-8")
        read_cluster(aside, CLUSTERS)
        aside.replace(path)
    except OSError as error:
        reason = f"cannot be written ({error.strerror}); give another file with --cluster FILE"
        raise UserError(f"--calibrate: {path} {reason}") from None
    finally:
        with suppress(OSError):
            aside.unlink()


def _numbers(change: _Change) -> tuple[float, float, float, bool]:
    """Return the numbers of a change, which are the same for terms that were corrected together."""
    return change["ratio"], change["before"], change["after"], change["held"]


def _as_text(learned: _Calibration) -> Iterator[str]:
    yield f"{learned['file']} corrected; factors on predicted seconds:"
    groups = groupby(learned["changes"], _numbers)
    for (ratio, before, after, stopped), changes in groups:
        limited = f"; held there, though the run took {ratio:.3g} times what was predicted" if stopped else ""
        yield f"  {before:.3g} to {after:.3g} on {', '.join(change['term'] for change in changes)}{limited}"
    step = learned["step_seconds"]
    predicted, measured = f"{step['predicted']:.3g} s", f"{step['measured']:.3g} s"
    yield f"the same step is now predicted to take {predicted}; it took {measured}"
