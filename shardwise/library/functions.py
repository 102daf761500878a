"""The functions of the library. Each is what a command of the same name does, and returns what it prints."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from shardwise.errors import UserError
from shardwise.library.job import Job, Tables
from shardwise.library.results import Drill, PlanAnswer, Proof, Run
from shardwise.user_file import being_loaded

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float64", "float32", "bfloat16"]
Reference = Literal["one-device", "plain"]


Trained = Job | str | Path | Callable[[Any], object]
"""A job, the path of a job file, or a program: a function of an engine."""


def plan(job: Trained, cluster: str | None = None, everything: bool = False, **tables: Tables) -> PlanAnswer:
    """Return the best layout of a job, what it costs, and why it wins. This imports no torch if the job, or
    `cluster`, names a cluster.

    `cluster` is a preset such as "h100x64", or the path of a cluster file. With `everything` the answer has
    every candidate, not each layout in its best form.
    """
    from shardwise.config import read
    from shardwise.library.check_job import float8_problems
    from shardwise.library.plan_job import cluster_of, plan_answer, problems_of_cluster
    from shardwise.search.search import check_countable

    job = _job(job, tables)
    if cluster is not None:
        kind, other = ("file", "preset") if cluster.endswith(".toml") else ("preset", "file")
        job = job.changed(cluster={kind: cluster, other: None})
    config = read(job.path, job.overrides, checks=[problems_of_cluster, float8_problems])
    check_countable(config)
    answer = plan_answer(config, cluster_of(config), str(job.path), everything, 20.0, None)
    return PlanAnswer(dict(answer))


def launch(
    job: Trained,
    workers: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    **tables: Tables,
) -> Run:
    """Train a job or a program, and return the run when it has ended.

    `tables` are settings of the job, as in `Job.read`: `layout={"tensor": 2}`.

    This starts local workers: `workers` of them, by default one per GPU or as many as the layout has devices.
    In a process that torchrun, srun or a PET_* operator has started, it joins the others instead. A run that
    was interrupted continues from its newest checkpoint. Ctrl-C saves and stops the run.
    """
    from shardwise.library.start import start
    from shardwise.resilience.stopping import Stopped

    _check_count("workers", workers)
    _check_count("min_workers", min_workers)
    _check_count("max_workers", max_workers)
    job = _job(job, tables)
    if threading.current_thread() is not threading.main_thread():
        raise UserError("launch: call it in the main thread, which receives the signals that stop a run")
    with _signal_handlers_kept():
        try:
            status = start(job.path, job.overrides, workers, (min_workers, max_workers))
        except Stopped as stopped:
            status = stopped.status
    return Run(Path(job.config.run.folder), status)


def verify(
    job: Trained,
    steps: int = 3,
    dtype: Dtype = "float64",
    against: Reference = "one-device",
    device: Device | None = None,
    **tables: Tables,
) -> Proof:
    """Prove that the layout of a job or a program computes what one device computes: loss, gradients, their
    norm, and weights after a few steps.

    `against` is the reference: "one-device" is the same code without a layout, "plain" is plain torch, which
    shares no code with it. `device` is short for the job's `run.device`.
    """
    from shardwise.library.prove_job import prove_job

    _check_count("steps", steps)
    _check_choice("dtype", dtype, get_args(Dtype))
    _check_choice("against", against, get_args(Reference))
    job = _on_device(_job(job, tables), device)
    return Proof(prove_job(job.path, job.overrides, steps, dtype, None, against))


def drill(
    job: Trained,
    faults: str = "kill,hang,corrupt,full,term",
    count: int = 5,
    seed: int = 0,
    workers: int | None = None,
    device: Device | None = None,
    **tables: Tables,
) -> Drill:
    """Train a job or a program undisturbed, then again while faults are injected, and prove that nothing was
    lost.

    `faults` names kinds of faults, which take turns: kill, hang, error, corrupt, full, term, lose. `seed`
    decides steps, ranks, files and bytes. `device` is short for the job's `run.device`.
    """
    from shardwise.library.drill_job import drill_job

    _check_count("count", count)
    _check_count("workers", workers)
    job = _on_device(_job(job, tables), device)
    return Drill(drill_job(job.path, job.overrides, faults, count, seed, workers))


def _job(what: Trained, tables: Mapping[str, Tables]) -> Job:
    """Return the job to work on. Refuse a call that is made while workers import the script that makes it."""
    if being_loaded():
        raise UserError(
            f"{being_loaded()[-1]} calls shardwise when it is imported, and workers import it to find the "
            f"program. "
            'Put the call below `if __name__ == "__main__":`'
        )
    return Job.of(what, **tables)


def _on_device(job: Job, device: Device | None) -> Job:
    return job if device is None else job.changed(run={"device": device})


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or value < 1):
        raise UserError(f"{name} = {value!r}: give a whole number of at least 1, or leave it out")


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} = {value!r}: not known; use one of {', '.join(choices)}")


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Set the handlers of signals afterwards as they were. A run leaves them ignored, because the command
    ends with it; a notebook goes on."""
    from shardwise.resilience.stopping import STOP_SIGNALS

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
