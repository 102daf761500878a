"""Local processes for a proof, which start within milliseconds and always end together.

A proof takes seconds, and so does importing torch in a process. So one server imports torch once, and every
worker is forked from it, which takes milliseconds each (resilience/forked_process.py). The process of the
proof need not import torch at all. Workers stay for the few tasks of a proof. A task is a function
`task(worker, *arguments)`, given as "module:function" so that it need not be imported here. The workers of a
task connect to each other at a new port, and their results are returned in rank order.

Each worker computes with one thread, whatever their number: sixteen workers on two cores take turns.

The first failure ends all workers, because the others would wait for the failed one in a collective. The
cause is raised here, and no process outlives the `with` block.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from shardwise.mesh import Worker

PRELOAD = ["shardwise.proof.compare_layout", "shardwise.proof.trace_modules", "shardwise.proof.sum_dtypes"]
SECONDS = 600.0
"""Seconds without an answer after which the workers are considered to wait for each other forever."""
STACK_SECONDS = 10.0
"""Longest wait for the stack that a silent worker writes into its log; on a busy machine it may come late."""


@dataclass(frozen=True)
class _TaskFailed:
    """A failure of a task in one worker, as it is sent through the pipe."""

    rank: int
    at: float
    message: str
    trace: str
    status: int | None
    """Exit status of an error that the user can correct; None for any other error."""


class Workers:
    """A number of local processes, which live as long as the `with` block."""

    def __init__(self, count: int, seconds: float = SECONDS, longest_delay: float = 0.0) -> None:
        """Prepare `count` workers. `longest_delay` is the longest delay of collectives on GPUs, in seconds
        (proof/delays.py)."""
        self.count, self.seconds, self.longest_delay = count, seconds, longest_delay
        self._folder = tempfile.TemporaryDirectory(prefix="shardwise-verify-")
        self._started: list[ForkedProcess] = []

    @property
    def folder(self) -> Path:
        """A temporary folder that is deleted when the workers end."""
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

    def run(self, task: str, *arguments: object, on: int | None = None) -> list[Any]:
        """Run a task on the first `on` workers (default: all) as one world, and return their results in rank
        order."""
        chosen = self._started[:on]
        port = free_port()
        for process in chosen:
            process.pipe.send((task, arguments, len(chosen), port, self.seconds))
        answers: dict[int, object] = {}
        deadline, waiting = time.monotonic() + self.seconds, list(chosen)
        while waiting:
            answering = wait_for_messages(waiting, deadline - time.monotonic())
            if not answering:
                raise RunFailed(self._no_answer([process.rank for process in waiting]))
            for process in answering:
                waiting.remove(process)
                answer = process.receive()
                if isinstance(answer, _TaskFailed | ProcessDied):
                    others = last_messages(waiting, lambda message: True)
                    failures = [other for other in others if isinstance(other, _TaskFailed | ProcessDied)]
                    raise self._cause([answer, *failures])
                answers[process.rank] = answer
        return [answers[process.rank] for process in chosen]

    def _end(self) -> None:
        end_processes(self._started)
        self._folder.cleanup()

    def _cause(self, failures: Sequence[_TaskFailed | ProcessDied]) -> Exception:
        """Return the exception to raise: an error that the user can correct, else the death of a process,
        else the earliest failure."""
        for failure in failures:
            if isinstance(failure, _TaskFailed) and failure.status is not None:
                kind = RunFailed if failure.status == RunFailed.status else UserError
                return kind(failure.message)
        dead = [failure for failure in failures if isinstance(failure, ProcessDied)]
        if dead:
            return RunFailed(f"rank {dead[0].rank} of {self.count} failed:\n{dead[0].message}")
        failed = [failure for failure in failures if isinstance(failure, _TaskFailed)]
        first = min(failed, key=lambda failure: failure.at)
        return RunFailed(f"rank {first.rank} of {self.count} failed:\n{first.trace}")

    def _no_answer(self, ranks: list[int]) -> str:
        """Return a message about workers that do not answer, with the stack of the first of them."""
        log, deadline = self._started[ranks[0]].log, time.monotonic() + STACK_SECONDS
        while not (stack := log.read_text(errors="replace")[-3000:]) and time.monotonic() < deadline:
            time.sleep(0.1)
        waited = f"no answer from ranks {ranks} within {self.seconds:.0f} s: they wait for each other"
        return f"{waited}. Rank {ranks[0]} is here:\n{stack}"


def _serve(pipe: Connection, rank: int, longest_delay: float) -> None:
    """Run task after task in a worker, until the pipe closes."""
    import torch

    from shardwise.proof.delays import DelayedCollectives

    torch.set_num_threads(1)
    while True:
        try:
            task, arguments, world, port, seconds = pipe.recv()
        except (EOFError, OSError):
            return
        faulthandler.dump_traceback_later(seconds * 0.95, file=sys.stderr)
        with DelayedCollectives(longest_delay) if longest_delay else nullcontext():
            answer = _answer(rank, world, port, task, arguments)
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


def _answer(rank: int, world: int, port: int, task: str, arguments: Sequence[object]) -> object:
    """Run a task, and return its result or a description of its failure."""
    from shardwise.mesh import leave

    try:
        module, _, function = task.partition(":")
        return getattr(importlib.import_module(module), function)(_worker(rank, world, port), *arguments)
    except BaseException as error:  # any failure is reported to the process that gave the task
        trace = "".join(traceback.format_exception(error))
        status = error.status if isinstance(error, UserError) else None
        return _TaskFailed(rank, time.time(), str(error), trace, status)
    finally:
        leave()  # peers that wait for this rank then fail at once


def _worker(rank: int, world: int, port: int) -> Worker:
    from shardwise.mesh import Worker

    # The number of local workers is very large, so that a worker gets one thread, and a GPU only if it is
    # told to share one.
    return Worker(rank, world, rank, 2**20, "127.0.0.1", port, "verify")
