"""The workers of a probe on this machine: started together, heard, and ended together, whatever happens.

The first one tells what it measures, each ends with its answer or its failure (resilience/forked.py). The
first failure ends all, since the others would wait for the failed one; so does a silence that no measurement
takes. No worker outlives the call.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from shardwise.cost.cluster import Cluster
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Node, Worker, cores
from shardwise.probe.budget import Budget
from shardwise.probe.progress import Tell, silent
from shardwise.resilience.forked import Died, Forked, end, fork, free_port, last_messages, ready
from shardwise.resilience.server import start_server

PRELOAD = ["shardwise.probe.measure"]
SILENCE = 150.0
"""Seconds without a word, longer than a collective may take to fail: then the workers wait for each other in
vain."""
BUSY = 0.3
"""Share of the cores in others' use above which figures would be theirs as much as the machine's."""


@dataclass(frozen=True)
class _Measuring:
    """Sent by the first worker: what is being timed, and the share of the probe that is done."""

    what: str
    share: float


@dataclass(frozen=True)
class _Answer:
    """Sent by a worker that has measured all: the last of its messages."""

    cluster: Cluster


@dataclass(frozen=True)
class _MeasurementFailed:
    """Sent by a worker that could not: the last of its messages."""

    rank: int
    echo: bool
    """Whether it only tells that another worker is gone."""
    message: str


def local_workers(requested: int | None, node: Node | None = None) -> int:
    """How many workers this machine is measured with: as asked, or one a GPU, or as many as cores, from 2 to
    4."""
    from shardwise.mesh import local_gpus

    gpus = local_gpus()
    if requested is not None and 0 < gpus < requested:
        raise UserError(
            f"--workers {requested}: this machine has {gpus} GPU{'s'[: gpus > 1]}; give at most {gpus}"
        )
    return requested or (node.workers if node else None) or gpus or min(4, max(2, cores()))


def others_busy() -> str | None:
    """Whether other programs keep this machine from showing what it can do, in words."""
    share = psutil.cpu_percent(interval=0.2) / 100
    if share < BUSY:
        return None
    return (
        f"other programs use {share:.0%} of this machine's cores, so the figures will be low; measure again "
        f"when it is quiet"
    )


def measure_here(
    workers: int, budgets: Mapping[str, Budget], tell: Tell = silent, node: Node | None = None
) -> Cluster:
    """Measure with so many workers on this machine, and those of the other nodes where there are several."""
    start_server(PRELOAD)
    with _started(_numbered(workers, node), budgets) as processes:
        return _listen(processes, tell)


def _numbered(workers: int, node: Node | None) -> list[Worker]:
    first, nodes = (node.node_rank * workers, node.nodes) if node else (0, 1)
    address, port = (node.address, node.port) if node and nodes > 1 else ("127.0.0.1", free_port())
    return [
        Worker(first + local, nodes * workers, local, workers, address, port, "probe")
        for local in range(workers)
    ]


@contextmanager
def _started(workers: list[Worker], budgets: Mapping[str, Budget]) -> Iterator[list[Forked]]:
    processes: list[Forked] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-probe-") as folder:
        try:
            for worker in workers:
                processes.append(fork(worker.rank, _measured, (worker, budgets), Path(folder)))
            yield processes
        finally:
            end(processes)


def _listen(processes: list[Forked], tell: Tell) -> Cluster:
    """Take messages until all workers have answered; the cluster as the first of them measured it."""
    answers: dict[int, Cluster] = {}
    waiting = list(processes)
    while waiting:
        speaking = ready(waiting, SILENCE)
        if not speaking:
            raise RunFailed(
                f"probe: no word from workers {[process.rank for process in waiting]} for {SILENCE:.0f} s; "
                f"try again"
            )
        for process in speaking:
            message = process.hear()
            if isinstance(message, _Measuring):
                tell(message.what, message.share)
                continue
            waiting.remove(process)
            if not isinstance(message, _Answer):
                others = last_messages(waiting, lambda message: not isinstance(message, _Measuring))
                raise _cause(
                    [message, *(other for other in others if not isinstance(other, _Answer))], len(processes)
                )
            answers[process.rank] = message.cluster
    return answers[processes[0].rank]


def _cause(failures: list[_MeasurementFailed | Died], count: int) -> RunFailed:
    # The earliest that is no echo.
    first = min(failures, key=lambda failure: isinstance(failure, _MeasurementFailed) and failure.echo)
    return RunFailed(f"probe: worker {first.rank} of {count} failed, nothing was written: {first.message}")


# -- inside a worker -----------------------------------------------------------------------------------------


def _measured(pipe: Connection, worker: Worker, budgets: Mapping[str, Budget]) -> None:
    pipe.send(_answer(pipe, worker, budgets))


def _answer(pipe: Connection, worker: Worker, budgets: Mapping[str, Budget]) -> _Answer | _MeasurementFailed:
    from shardwise.mesh import peer_is_gone
    from shardwise.probe.measure import measure

    def tell(what: str, share: float) -> None:
        pipe.send(_Measuring(what, share))

    try:
        return _Answer(measure(worker, budgets, tell if worker.local_rank == 0 else silent))
    except UserError as error:
        return _MeasurementFailed(worker.rank, False, str(error))
    except BaseException as error:  # whatever it is, it belongs to whoever asked
        return _MeasurementFailed(
            worker.rank, peer_is_gone(error), "".join(traceback.format_exception(error))
        )
