"""Local processes for a proof: started in a moment, ended together, whatever happens.

A proof runs seconds, and a process that imports torch takes as long. So one server imports it once and every worker is forked
from there, which takes milliseconds each (multiprocessing's forkserver); this process need not import torch at all. Workers
stay for the few tasks of a proof. A task is a function `task(worker, *arguments)`, given as "module:function" (so that it need
not be imported here), which meets its peers at a fresh port, and whose answers come back in rank order.

However many workers there are, each computes with one thread: sixteen on two cores take turns.

The first failure ends all of them, since the others would wait for the failed one in a collective: the cause is raised here,
and no process outlives the `with` block. Ctrl-C is this process's to answer; should it be killed, the workers see it and end.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.errors import RunFailed, UserError
from shardwise.resilience.server import start_server

PRELOAD = ["shardwise.verify.measure", "shardwise.verify.localise"]
SECONDS = 600.0
"""After this long without an answer the workers are taken to wait for each other in vain."""
GRACE = 1.0
"""Seconds in which others that failed may still say so: the first to fail is the cause, the rest its echo."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    at: float
    message: str
    trace: str
    status: int | None
    """Of an error that is the user's to mend."""


@dataclass(frozen=True)
class _Process:
    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path


class Workers:
    """So many local processes, for as long as the `with` block lasts."""

    def __init__(self, count: int, seconds: float = SECONDS) -> None:
        self.count, self.seconds = count, seconds
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-verify-")
        self._started: list[_Process] = []

    @property
    def folder(self) -> Path:
        """A folder that lasts as long as the workers."""
        return Path(self._folder.name)

    def __enter__(self) -> Workers:
        start_server(PRELOAD)
        try:
            for rank in range(self.count):
                self._started.append(self._start(rank))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def run(self, task: str, *arguments: Any, on: int | None = None) -> list[Any]:
        """Run a task on the first `on` workers (all of them) as one world; what each returned, in rank order."""
        chosen = self._started[:on]
        port = _free_port()
        for one in chosen:
            one.pipe.send((task, arguments, len(chosen), port, self.seconds))
        answers: dict[int, Any] = {}
        deadline, waiting = time.monotonic() + self.seconds, list(chosen)
        while waiting:
            ready = set(wait([one.pipe for one in waiting], timeout=max(0.0, deadline - time.monotonic())))
            if not ready:
                raise RunFailed(self._silence([one.rank for one in waiting]))
            for one in [one for one in waiting if one.pipe in ready]:
                waiting.remove(one)
                answer = _receive(one)
                if isinstance(answer, _Failure):
                    raise self._cause([answer, *_echoes(waiting)])
                answers[one.rank] = answer
        return [answers[one.rank] for one in chosen]

    def _start(self, rank: int) -> _Process:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        log = self.folder / f"rank-{rank}.log"
        process = context.Process(target=_serve, args=(rank, theirs, str(log)), daemon=True)
        process.start()
        theirs.close()
        return _Process(rank, process, ours, log)

    def _end(self) -> None:
        for one in self._started:
            one.process.kill()
        for one in self._started:
            one.process.join()
            one.pipe.close()
        self._folder.cleanup()

    def _cause(self, failures: Sequence[_Failure]) -> Exception:
        first = min(failures, key=lambda failure: (failure.status is None, failure.at))
        if first.status is not None:
            return RunFailed(first.message) if first.status == RunFailed.status else UserError(first.message)
        return RunFailed(f"rank {first.rank} of {self.count} failed:\n{first.trace or first.message}")

    def _silence(self, ranks: list[int]) -> str:
        """Nobody failed and nobody answers: show where the first of them stands."""
        stack = self._started[ranks[0]].log.read_text(errors="replace")[-3000:]
        waited = f"no answer from ranks {ranks} within {self.seconds:.0f} s: they wait for each other"
        return f"{waited}. Rank {ranks[0]} is here:\n{stack}"


def _receive(one: _Process) -> Any:
    try:
        return one.pipe.recv()
    except (EOFError, OSError):
        one.process.join()
        last = one.log.read_text(errors="replace")[-2000:]
        message = f"the process died with exit status {one.process.exitcode}; its last words:\n{last}"
        return _Failure(one.rank, time.time(), message, "", None)


def _echoes(waiting: Sequence[_Process]) -> list[_Failure]:
    """Others that fail within the grace."""
    found, left, deadline = [], list(waiting), time.monotonic() + GRACE
    while left and (seconds := deadline - time.monotonic()) > 0:
        for pipe in wait([one.pipe for one in left], timeout=seconds):
            one = next(one for one in left if one.pipe is pipe)
            left.remove(one)
            answer = _receive(one)
            if isinstance(answer, _Failure):
                found.append(answer)
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, pipe: Connection, log: str) -> None:
    """What a worker does: task after task, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        import torch

        torch.set_num_threads(1)
        while True:
            try:
                task, arguments, world, port, seconds = pipe.recv()
            except (EOFError, OSError):
                return
            faulthandler.dump_traceback_later(seconds * 0.95, file=stream)
            answer = _answer(rank, world, port, task, arguments)
            faulthandler.cancel_dump_traceback_later()
            pipe.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by multiprocessing"
    wait([parent.sentinel])
    os._exit(1)


def _answer(rank: int, world: int, port: int, task: str, arguments: Sequence[Any]) -> Any:
    from shardwise.mesh import leave

    try:
        module, _, function = task.partition(":")
        return getattr(importlib.import_module(module), function)(_worker(rank, world, port), *arguments)
    except BaseException as error:  # whatever it is, it belongs to whoever asked
        trace = "".join(traceback.format_exception(error))
        status = error.status if isinstance(error, UserError) else None
        return _Failure(rank, time.time(), str(error), trace, status)
    finally:
        leave()  # peers that wait for this rank then fail at once


def _worker(rank: int, world: int, port: int) -> Any:
    from shardwise.mesh import Worker

    # As if it shared its machine with very many: then it gets no GPU and one thread.
    return Worker(rank, world, rank, 2**20, "127.0.0.1", port, "verify")
