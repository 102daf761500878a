"""Local processes for a proof: started in a moment, ended together, whatever happens.

A proof runs seconds, and a process that imports torch takes as long. So one server imports it once and every
worker is forked from there, which takes milliseconds each (resilience/forked_process.py); this process need
not import torch at all. Workers stay for the few tasks of a proof. A task is a function `task(worker,
*arguments)`, given as "module:function" (so that it need not be imported here), which meets its peers at a
fresh port, and whose answers come back in rank order.

However many workers there are, each computes with one thread: sixteen on two cores take turns.

The first failure ends all of them, since the others would wait for the failed one in a collective: the cause
is raised here, and no process outlives the `with` block.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.errors import RunFailed, UserError
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

PRELOAD = ["shardwise.verify.measure", "shardwise.verify.localise", "shardwise.verify.sums"]
SECONDS = 600.0
"""After this long without an answer the workers are taken to wait for each other in vain."""


@dataclass(frozen=True)
class _TaskFailed:
    rank: int
    at: float
    message: str
    trace: str
    status: int | None
    """Of an error that is the user's to mend."""


class Workers:
    """So many local processes, for as long as the `with` block lasts."""

    def __init__(self, count: int, seconds: float = SECONDS, longest_delay: float = 0.0) -> None:
        """`longest_delay` is in seconds, for transfers between workers that share a GPU
        (mesh/host_memory_group.py)."""
        self.count, self.seconds, self.longest_delay = count, seconds, longest_delay
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-verify-")
        self._started: list[ForkedProcess] = []

    @property
    def folder(self) -> Path:
        """A folder that lasts as long as the workers."""
        return Path(self._folder.name)

    def __enter__(self) -> Workers:
        start_server(PRELOAD)
        try:
            for rank in range(self.count):
                self._started.append(fork_process(rank, _serve, (rank, self.longest_delay), self.folder))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, task: str, *arguments: Any, on: int | None = None) -> list[Any]:
        """Run a task on the first `on` workers (all of them) as one world; what each returned, in rank
        order."""
        chosen = self._started[:on]
        port = free_port()
        for process in chosen:
            process.pipe.send((task, arguments, len(chosen), port, self.seconds))
        answers: dict[int, Any] = {}
        deadline, waiting = time.monotonic() + self.seconds, list(chosen)
        while waiting:
            speaking = wait_for_messages(waiting, deadline - time.monotonic())
            if not speaking:
                raise RunFailed(self._no_answer([process.rank for process in waiting]))
            for process in speaking:
                waiting.remove(process)
                answer = process.receive()
                if isinstance(answer, _TaskFailed | ProcessDied):
                    others = last_messages(waiting, lambda word: True)
                    raise self._cause(
                        [answer, *(other for other in others if isinstance(other, _TaskFailed | ProcessDied))]
                    )
                answers[process.rank] = answer
        return [answers[process.rank] for process in chosen]

    def _end(self) -> None:
        end_processes(self._started)
        self._folder.cleanup()

    def _cause(self, failures: Sequence[_TaskFailed | ProcessDied]) -> Exception:
        """The user's to mend before all else; then a death, then the first to fail."""
        for failure in failures:
            if isinstance(failure, _TaskFailed) and failure.status is not None:
                return (
                    RunFailed(failure.message)
                    if failure.status == RunFailed.status
                    else UserError(failure.message)
                )
        dead = [failure for failure in failures if isinstance(failure, ProcessDied)]
        if dead:
            return RunFailed(f"rank {dead[0].rank} of {self.count} failed:\n{dead[0].message}")
        first = min(
            (failure for failure in failures if isinstance(failure, _TaskFailed)),
            key=lambda failure: failure.at,
        )
        return RunFailed(f"rank {first.rank} of {self.count} failed:\n{first.trace}")

    def _no_answer(self, ranks: list[int]) -> str:
        """Nobody failed and nobody answers: show where the first of them stands."""
        stack = self._started[ranks[0]].log.read_text(errors="replace")[-3000:]
        waited = f"no answer from ranks {ranks} within {self.seconds:.0f} s: they wait for each other"
        return f"{waited}. Rank {ranks[0]} is here:\n{stack}"


def _serve(pipe: Connection, rank: int, longest_delay: float) -> None:
    """What a worker does: task after task, until the pipe closes."""
    import torch

    from shardwise.mesh import host_memory_group

    torch.set_num_threads(1)
    host_memory_group.longest_delay = longest_delay
    while True:
        try:
            task, arguments, world, port, seconds = pipe.recv()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(seconds * 0.95, file=sys.stderr)
        answer = _answer(rank, world, port, task, arguments)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _answer(rank: int, world: int, port: int, task: str, arguments: Sequence[Any]) -> Any:
    from shardwise.mesh import leave

    try:
        module, _, function = task.partition(":")
        return getattr(importlib.import_module(module), function)(_worker(rank, world, port), *arguments)
    except BaseException as error:  # whatever it is, it belongs to whoever asked
        trace = "".join(traceback.format_exception(error))
        status = error.status if isinstance(error, UserError) else None
        return _TaskFailed(rank, time.time(), str(error), trace, status)
    finally:
        leave()  # peers that wait for this rank then fail at once


def _worker(rank: int, world: int, port: int) -> Any:
    from shardwise.mesh import Worker

    # As if it shared its machine with very many: then it gets one thread, and a GPU only where it is asked to
    # share one.
    return Worker(rank, world, rank, 2**20, "127.0.0.1", port, "verify")
