"""The workers of a probe on this machine: started together, and ended together whatever happens.

The first worker reports what it measures. Each worker ends with its result or its error
(resilience/forked_process.py). The first error ends all workers, because the others would wait for the failed
one. A silence longer than any measurement ends them too. No worker outlives the call.
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

from shardwise.config import Device
from shardwise.cost.cluster import Cluster
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Node, Worker, cores
from shardwise.probe.probe_budget import Budget
from shardwise.probe.probe_progress import ProgressCallback, no_progress
from shardwise.resilience.fork_server import start_server
from shardwise.resilience.forked_process import (
    ForkedProcess,
    ProcessDied,
    end_processes,
    fork_process,
    free_port,
    last_messages,
    wait_for_messages,
)

PRELOAD = ["shardwise.probe.measure_cluster"]
SILENCE_SECONDS = 150.0
"""Seconds without a message after which the workers are taken to be stuck. A collective fails earlier."""
BUSY_SHARE = 0.3
"""Fraction of the cores used by other programs above which the measurements would be wrong."""


@dataclass(frozen=True)
class _Measuring:
    """Sent by the first worker: what is measured now, and the fraction of the probe that is done."""

    what: str
    share: float


@dataclass(frozen=True)
class _Answer:
    """Last message of a worker that has finished: its result."""

    cluster: Cluster


@dataclass(frozen=True)
class _MeasurementFailed:
    """Last message of a worker that could not finish."""

    rank: int
    is_consequence: bool
    """Whether the error only says that another worker has ended."""
    message: str


def worker_count(requested: int | None, node: Node | None = None, asked: Device = "auto") -> int:
    """Return how many workers measure this machine.

    That is the number requested; else one per GPU, unless the CPU is asked for; else as many as cores, from 2
    to 4.
    """
    from shardwise.mesh import local_gpus

    gpus = 0 if asked == "cpu" else local_gpus()
    if requested is not None and 0 < gpus < requested:
        plural = "s" if gpus > 1 else ""
        raise UserError(f"--workers {requested}: this machine has {gpus} GPU{plural}; give at most {gpus}")
    return requested or (node.workers if node else None) or gpus or min(4, max(2, cores()))


def busy_warning() -> str | None:
    """Return a warning if other programs use too much of this machine for good measurements; else None."""
    share = psutil.cpu_percent(interval=0.2) / 100
    if share < BUSY_SHARE:
        return None
    return (
        f"other programs use {share:.0%} of this machine's cores, so the figures will be low; "
        "measure again when it is quiet"
    )


def measure_this_machine(
    workers: int,
    budgets: Mapping[str, Budget],
    on_progress: ProgressCallback = no_progress,
    node: Node | None = None,
    asked: Device = "auto",
) -> Cluster:
    """Measure with this number of workers on this machine, together with the other nodes if there are any.
    `asked` is the kind of device to measure (`run.device`)."""
    start_server(PRELOAD)
    with _started(_numbered(workers, node), budgets, asked) as processes:
        return _listen(processes, on_progress)


def _numbered(workers: int, node: Node | None) -> list[Worker]:
    first, nodes = (node.node_rank * workers, node.nodes) if node else (0, 1)
    address, port = (node.address, node.port) if node and nodes > 1 else ("127.0.0.1", free_port())
    return [
        Worker(first + local, nodes * workers, local, workers, address, port, "probe")
        for local in range(workers)
    ]


@contextmanager
def _started(
    workers: list[Worker], budgets: Mapping[str, Budget], asked: Device
) -> Iterator[list[ForkedProcess]]:
    processes: list[ForkedProcess] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-probe-") as folder:
        try:
            for worker in workers:
                processes.append(fork_process(worker.rank, _measured, (worker, budgets, asked), Path(folder)))
            yield processes
        finally:
            end_processes(processes)


def _listen(processes: list[ForkedProcess], on_progress: ProgressCallback) -> Cluster:
    """Receive messages until all workers have answered. Return the cluster that the first of them
    measured.
    """
    answers: dict[int, Cluster] = {}
    waiting = list(processes)
    while waiting:
        speaking = wait_for_messages(waiting, SILENCE_SECONDS)
        if not speaking:
            ranks = [process.rank for process in waiting]
            raise RunFailed(f"probe: no word from workers {ranks} for {SILENCE_SECONDS:.0f} s; try again")
        for process in speaking:
            message = process.receive()
            if isinstance(message, _Measuring):
                on_progress(message.what, message.share)
                continue
            waiting.remove(process)
            if not isinstance(message, _Answer):
                others = last_messages(waiting, lambda message: not isinstance(message, _Measuring))
                failures = [other for other in others if not isinstance(other, _Answer)]
                raise _cause([message, *failures], len(processes))
            answers[process.rank] = message.cluster
    return answers[processes[0].rank]


def _cause(failures: list[_MeasurementFailed | ProcessDied], count: int) -> RunFailed:
    # This is the earliest error that is not a consequence of another worker's end.
    first = min(
        failures, key=lambda failure: isinstance(failure, _MeasurementFailed) and failure.is_consequence
    )
    return RunFailed(f"probe: worker {first.rank} of {count} failed, nothing was written: {first.message}")


# -- inside a worker -----------------------------------------------------------------------------------------


def _measured(pipe: Connection, worker: Worker, budgets: Mapping[str, Budget], asked: Device) -> None:
    pipe.send(_answer(pipe, worker, budgets, asked))


def _answer(
    pipe: Connection, worker: Worker, budgets: Mapping[str, Budget], asked: Device
) -> _Answer | _MeasurementFailed:
    from shardwise.mesh import peer_is_gone
    from shardwise.probe.measure_cluster import measure_cluster

    def on_progress(what: str, share: float) -> None:
        pipe.send(_Measuring(what, share))

    try:
        return _Answer(
            measure_cluster(worker, budgets, on_progress if worker.local_rank == 0 else no_progress, asked)
        )
    except UserError as error:
        return _MeasurementFailed(worker.rank, False, str(error))
    except BaseException as error:  # every error is reported to the process that started the probe
        return _MeasurementFailed(
            worker.rank, peer_is_gone(error), "".join(traceback.format_exception(error))
        )
