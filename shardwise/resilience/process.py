"""A worker as its host sees it: a process in a slot, what it last said, and what can be said of it once it
has ended."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

from shardwise.config import Recovery
from shardwise.observe import present_time, write_text
from shardwise.resilience.messages import FromHost, Phase
from shardwise.resilience.server import server_pid, start_process
from shardwise.resilience.team import Fault

SAVE_SECONDS = 3600.0
"""How long a save may take before it is a hang: its size and the storage decide, and to end it would lose the
newest steps."""


@dataclass
class WorkerProcess:
    """A worker as its host sees it."""

    slot: int
    process: BaseProcess
    pipe: Connection
    state: Literal["starting", "waiting", "working", "done"] = "starting"
    generation: int = 0
    rank: int = 0
    loose: bool = False
    """Whether it works for the team and is none of its ranks."""
    step: int = 0
    phase: Phase = "build"
    reads: str = "unknown data"
    changed: float = field(default_factory=time.monotonic)
    begun: float | None = None
    """When the step that it is in began; None: it does something else."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    wished: str | None = None
    asked_for_stacks: float | None = None
    stacks: str | None = None
    """Its answer, once it was asked where it stands."""
    fault: Fault | None = None
    hung_up: float | None = None
    """Since when nobody is at the other end of its pipe."""
    discarded: bool = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def send(self, message: FromHost) -> None:
        """Tell the worker; if it is gone, that will be noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def hang_limit(self, recovery: Recovery) -> float:
        """Seconds without a step done that count as a hang now."""
        if self.phase in ("build", "restore", "meet") or not self.seconds:
            return recovery.start_seconds
        step = recovery.hang_seconds or max(60.0, 30.0 * statistics.median(self.seconds))
        if self.phase == "save":
            return max(step, SAVE_SECONDS)
        return step if self.phase == "step" else max(step, min(10 * step, recovery.start_seconds))


def fork(
    slot: int, start: Callable[[int, Connection], None], seconds: float, given_up: Callable[[], bool]
) -> tuple[WorkerProcess, Fault | None]:
    """A new worker, forked from the server; with a fault if the server does not do that within so many
    seconds."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    worker = WorkerProcess(slot, context.Process(target=start, args=(slot, theirs), daemon=True), ours)
    started = start_process(worker.process, seconds, given_up)
    theirs.close()
    if started:
        return worker, None
    ours.close()  # should it be forked yet, it finds nobody to work for, and ends
    cause = (
        f"the process that workers are forked from (pid {server_pid()}) did not answer for {seconds:.0f} s"
    )
    return worker, Fault("failed", None, 0, cause, present_time(), 0)


def died(worker: WorkerProcess, logs: Path) -> Fault:
    """What can be said of a worker that left no word."""
    code = worker.process.exitcode or 0
    log = logs / f"rank-{worker.rank}.log"
    if code < 0:
        hint = " The machine may be out of memory." if -code == signal.SIGKILL else ""
        cause = f"worker {worker.rank} was ended by {signal.Signals(-code).name}.{hint} Its log: {log}"
    else:
        cause = f"worker {worker.rank} ended with status {code}. Its log: {log}"
    step = worker.step + 1 if worker.phase != "build" else 0
    return Fault("died", worker.rank, step, cause, present_time(), worker.generation, reads=worker.reads)


def peer_gone(worker: WorkerProcess, reason: str) -> Fault:
    """What a worker says that lost a peer: some other fault is the cause."""
    cause = f"a peer is gone: {reason}"
    return Fault("failed", worker.rank, worker.step + 1, cause, present_time(), worker.generation, echo=True)


def write_members(logs: Path, host: str, generation: int, workers: Iterable[WorkerProcess]) -> None:
    """Who is who, for people and for the drill."""
    known = [
        {"rank": worker.rank, "slot": worker.slot, "pid": worker.pid, "loose": worker.loose}
        for worker in workers
    ]
    team_here = {"host": host, "generation": generation, "supervisor": os.getpid(), "workers": known}
    write_text(logs / f"workers-{host}.json", json.dumps(team_here, indent=1) + "\n")
