"""The workers of a probe on this machine: started together, heard, and ended together, whatever happens.

They are forked from a server that has torch imported already (resilience/server.py). Each has a pipe to this process: the
first one tells what it measures, each ends with its answer or its failure. The first failure ends all, since the others would
wait for the failed one; so does a silence that no measurement takes. No worker outlives the call, and should this process be
killed, they see it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Node, Worker, cores
from shardwise.plan.cluster import Cluster
from shardwise.probe.budget import Budget
from shardwise.probe.progress import Tell, silent
from shardwise.resilience.server import start_server

PRELOAD = ["shardwise.probe.measure"]
SILENCE = 150.0
"""Seconds without a word, longer than a collective may take to fail: then the workers wait for each other in vain."""
GRACE = 1.0
"""Seconds in which others that failed may say so too: a worker that only misses another is not the cause."""

BUSY = 0.3
"""Share of the cores in others' use above which figures would be theirs as much as the machine's."""


@dataclass(frozen=True)
class _Told:
    what: str
    share: float


@dataclass(frozen=True)
class _Answer:
    cluster: Cluster


@dataclass(frozen=True)
class _Failure:
    rank: int
    echo: bool
    """Whether it only tells that another worker is gone."""
    message: str


@dataclass(frozen=True)
class _Process:
    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path


def local_workers(asked: int | None, node: Node | None = None) -> int:
    """How many workers this machine is measured with: as asked, or one a GPU, or as many as cores, from 2 to 4."""
    from shardwise.mesh import local_gpus

    gpus = local_gpus()
    if asked is not None and 0 < gpus < asked:
        raise UserError(f"--workers {asked}: this machine has {gpus} GPU{'s'[: gpus > 1]}; give at most {gpus}")
    return asked or (node.workers if node else None) or gpus or min(4, max(2, cores()))


def others_busy() -> str | None:
    """Whether other programs keep this machine from showing what it can do, in words."""
    share = psutil.cpu_percent(interval=0.2) / 100
    if share < BUSY:
        return None
    return f"other programs use {share:.0%} of this machine's cores, so the figures will be low; measure again when it is quiet"


def measure_here(workers: int, budgets: Mapping[str, Budget], tell: Tell = silent, node: Node | None = None) -> Cluster:
    """Measure with so many workers on this machine, and those of the other nodes where there are several."""
    start_server(PRELOAD)
    with _started(_numbered(workers, node), budgets) as processes:
        return _heard(processes, tell)


def _numbered(workers: int, node: Node | None) -> list[Worker]:
    first, nodes = (node.node_rank * workers, node.nodes) if node else (0, 1)
    address, port = (node.address, node.port) if node and nodes > 1 else ("127.0.0.1", _free_port())
    return [Worker(first + local, nodes * workers, local, workers, address, port, "probe") for local in range(workers)]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextmanager
def _started(workers: list[Worker], budgets: Mapping[str, Budget]) -> Iterator[list[_Process]]:
    processes: list[_Process] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-probe-") as folder:
        try:
            for worker in workers:
                processes.append(_start(worker, budgets, Path(folder) / f"rank-{worker.rank}.log"))
            yield processes
        finally:
            for one in processes:
                one.process.kill()
            for one in processes:
                one.process.join()
                one.pipe.close()


def _start(worker: Worker, budgets: Mapping[str, Budget], log: Path) -> _Process:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(worker, budgets, theirs, str(log)), daemon=True)
    process.start()
    theirs.close()
    return _Process(worker.rank, process, ours, log)


def _heard(processes: list[_Process], tell: Tell) -> Cluster:
    """Listen until all have answered; what the first of them found."""
    answers: dict[int, Cluster] = {}
    waiting = list(processes)
    while waiting:
        ready = wait([one.pipe for one in waiting], timeout=SILENCE)
        if not ready:
            raise RunFailed(f"probe: no word from workers {[one.rank for one in waiting]} for {SILENCE:.0f} s; try again")
        for one in [one for one in waiting if one.pipe in ready]:
            word = _receive(one)
            if isinstance(word, _Told):
                tell(word.what, word.share)
                continue
            waiting.remove(one)
            if isinstance(word, _Failure):
                raise _cause([word, *_others_that_failed(waiting)], len(processes))
            answers[one.rank] = word.cluster
    return answers[processes[0].rank]


def _receive(one: _Process) -> Any:
    try:
        return one.pipe.recv()
    except (EOFError, OSError):
        one.process.join()
        last = one.log.read_text(errors="replace")[-2000:].strip()
        died = f"it died with exit status {one.process.exitcode}"
        return _Failure(one.rank, False, f"{died}; its last words:\n{last}" if last else died)


def _others_that_failed(waiting: list[_Process]) -> list[_Failure]:
    found, left, deadline = [], list(waiting), time.monotonic() + GRACE
    while left and (seconds := deadline - time.monotonic()) > 0:
        for pipe in wait([one.pipe for one in left], timeout=seconds):
            one = next(one for one in left if one.pipe is pipe)
            word = _receive(one)
            if not isinstance(word, _Told):
                left.remove(one)
            if isinstance(word, _Failure):
                found.append(word)
    return found


def _cause(failures: list[_Failure], count: int) -> RunFailed:
    first = min(failures, key=lambda failure: failure.echo)  # the earliest of those that are no echo
    return RunFailed(f"probe: worker {first.rank} of {count} failed, nothing was written: {first.message}")


# -- inside a worker ----------------------------------------------------------------------------------------------------


def _serve(worker: Worker, budgets: Mapping[str, Budget], pipe: Connection, log: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        pipe.send(_measured(worker, budgets, pipe))
        pipe.close()
        os._exit(0)  # there is nothing left to tidy up, and libraries' threads need not be waited for


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by multiprocessing"
    wait([parent.sentinel])
    os._exit(1)


def _measured(worker: Worker, budgets: Mapping[str, Budget], pipe: Connection) -> _Answer | _Failure:
    from shardwise.mesh import peer_is_gone
    from shardwise.probe.measure import measure

    def tell(what: str, share: float) -> None:
        pipe.send(_Told(what, share))

    try:
        return _Answer(measure(worker, budgets, tell if worker.local_rank == 0 else silent))
    except UserError as error:
        return _Failure(worker.rank, False, str(error))
    except BaseException as error:  # whatever it is, it belongs to whoever asked
        return _Failure(worker.rank, peer_is_gone(error), "".join(traceback.format_exception(error)))
