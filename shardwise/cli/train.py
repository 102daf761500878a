"""`shardwise train JOB`: check everything that can be checked, then start the workers, or be one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from shardwise.config import Config, Layout
    from shardwise.mesh import Launched, Worker


def train(
    job: Annotated[Path, typer.Argument(help="The job: a TOML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, as section.key=value.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Local workers; left out: one a GPU, or as many as the layout needs."),
    ] = None,
) -> None:
    """Train a model. Starts its own local workers, or joins those that torchrun, srun or a PET_* operator started."""
    try:
        raise typer.Exit(_train(job, overrides or [], workers))
    except KeyboardInterrupt:
        typer.echo("stopped before the first step", err=True)
        raise typer.Exit(130) from None


def _train(job: Path, overrides: list[str], workers: int | None) -> int:
    from shardwise.cli.doctor import torch_problem
    from shardwise.config import read
    from shardwise.errors import UserError

    config = read(job, overrides, workers)
    if problem := torch_problem():
        raise UserError(problem)
    from shardwise.mesh.launched import Worker, launched

    how = launched()
    with _holding(Path(config.run.folder)) if _leads(how) else nullcontext():
        if isinstance(how, Worker):
            return _be_worker(config, how)
        _check_data(config)
        return _start(config, [str(job), *overrides], how, workers)


def _leads(how: Launched) -> bool:
    """Whether this process answers for the run: the command itself, the first of several nodes, or a launcher's first worker."""
    from shardwise.mesh import Node, Worker

    if isinstance(how, Node):
        return how.node_rank == 0
    return not isinstance(how, Worker) or (how.rank == 0 and how.launcher != "shardwise")


@contextmanager
def _holding(folder: Path) -> Iterator[None]:
    """Make the run folder, and keep any other run out of it while this one lasts."""
    import fcntl

    from shardwise.errors import UserError

    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise UserError(
            f"run.folder = {str(folder)!r}: cannot be written ({error.strerror}). Give another, for example run.folder=runs/mine"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"run.folder = {str(folder)!r}: another run is writing there now; give another run.folder") from None
        except OSError:
            pass  # a file system without locks: nothing can be known
        yield


def _check_data(config: Config) -> None:
    """Prepare the data and check what the job says against it, before any worker starts."""
    from shardwise.checkpoint import to_resume
    from shardwise.cli.progress import preparing
    from shardwise.data import Dataset, check_vocabulary
    from shardwise.observe.sinks import check_extras

    check_extras(config.observe)
    with preparing() as progress:
        dataset = Dataset.open(config.data, config.train.seed, progress)
    check_vocabulary(dataset, config.model.vocabulary)
    to_resume(config)


def _start(config: Config, arguments: list[str], how: Launched, workers: int | None) -> int:
    from shardwise.config import fewest_devices
    from shardwise.errors import UserError
    from shardwise.mesh import Node, Worker, device_memory, local_gpus
    from shardwise.plan import choose
    from shardwise.train.launch import launch

    node = how if isinstance(how, Node) else None
    nodes = node.nodes if node else 1
    layout = config.layout
    asked = workers or (node.workers if node else None)
    if asked is None and layout.data > 0:
        if layout.world % nodes:
            raise UserError(f"layout: {layout.world} devices do not divide over {nodes} nodes; give --workers, or layout.data=-1")
        asked = layout.world // nodes
    here = asked or local_gpus() or fewest_devices(layout)
    plan = choose(config, here * nodes, device_memory(here))
    if config.model.module is not None:
        _check_module(config, plan.layout)
    if here * nodes == 1:
        return _be_worker(config, Worker(0, 1, 0, 1, "localhost", 0, "this process"))
    return launch(["train", *arguments], here, node, Path(config.run.folder) / "logs")


def _check_module(config: Config, layout: Layout) -> None:
    """Only a job with a module of the user's own needs torch before the workers do."""
    from shardwise.parallel import check_module

    check_module(config, layout)


def _be_worker(config: Config, worker: Worker) -> int:
    from shardwise.train.launch import log_to, tell_failure
    from shardwise.train.run import run

    ours = worker.launcher == "shardwise"
    logs = Path(config.run.folder) / "logs"
    log_to(logs, worker.rank, redirect=ours and worker.rank != 0)
    try:
        return run(config, worker)
    except Exception as error:
        if not ours:
            raise
        # The launcher prints the first cause once; here it only needs to be known, with a status, and to end now: peers may
        # be waiting inside a collective that will never complete.
        tell_failure(logs, worker.rank, error)
        sys.stderr.flush()
        os._exit(getattr(error, "status", 1))
