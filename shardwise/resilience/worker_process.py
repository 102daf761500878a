"""A worker as its host sees it: a process in a slot, its last messages, and the fault after it has ended."""

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
from shardwise.limits import limits_set
from shardwise.observe import present_time, write_text
from shardwise.resilience.fork_server import server_pid, start_process
from shardwise.resilience.team import Fault
from shardwise.resilience.worker_messages import FromHost, Phase

SAVE_SECONDS = 3600.0
"""Seconds that a save may take before it counts as a hang.

Its duration depends on its size and the storage, and ending it would lose the newest steps.
"""


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
    """Whether it works for the team without being one of its ranks."""
    step: int = 0
    phase: Phase = "build"
    reads: str = "unknown data"
    """Rows of every global batch that it reads."""
    changed: float = field(default_factory=time.monotonic)
    """Time of its last message about progress."""
    begun: float | None = None
    """Time at which its current step began; None if it is not in a step."""
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    """Durations of its last steps."""
    wished: str | None = None
    """Last request that was sent to it."""
    asked_for_stacks: float | None = None
    stacks: str | None = None
    """Its stacks, after it was asked for them."""
    fault: Fault | None = None
    hung_up: float | None = None
    """Time since which its end of the pipe is closed."""
    discarded: bool = False
    """Whether the host has ended it because it is no longer needed."""

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def send(self, message: FromHost) -> None:
        """Send a message to the worker. A worker that is gone is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def hang_limit(self, recovery: Recovery) -> float:
        """Return the number of seconds without a completed step that count as a hang in the present phase."""
        if self.phase in ("build", "restore", "meet") or not self.seconds:
            return recovery.start_seconds
        step = recovery.hang_seconds or max(60.0, 30.0 * statistics.median(self.seconds))
        if self.phase == "save":
            return max(step, SAVE_SECONDS)
        return step if self.phase == "step" else max(step, min(10 * step, recovery.start_seconds))


def fork_worker(
    slot: int, start: Callable[[int, Connection], None], seconds: float, given_up: Callable[[], bool]
) -> tuple[WorkerProcess, Fault | None]:
    """Fork a new worker from the fork server. Return a fault too if the server does not answer in time."""
    context = multiprocessing.get_context("forkserver")
    host_pipe, worker_pipe = context.Pipe()
    worker = WorkerProcess(
        slot, context.Process(target=start, args=(slot, worker_pipe), daemon=True), host_pipe
    )
    started = start_process(worker.process, seconds, given_up)
    worker_pipe.close()
    if started:
        return worker, None
    host_pipe.close()  # if the worker is forked later, it finds the pipe closed and ends
    server = f"the process that workers are forked from (pid {server_pid()})"
    cause = f"{server} did not answer for {seconds:.0f} s"
    return worker, Fault("failed", None, 0, cause, present_time(), 0)


def fault_of_dead_worker(worker: WorkerProcess, logs: Path) -> Fault:
    """Return the fault of a worker that ended without a message."""
    code = worker.process.exitcode or 0
    log = logs / f"rank-{worker.rank}.log"
    if code < 0:
        hint = " The machine may be out of memory." if -code == signal.SIGKILL else ""
        names = {number.value: number.name for number in signal.Signals}  # most real-time signals have none
        ended_by = names.get(-code, f"signal {-code}")
        cause = f"worker {worker.rank} was ended by {ended_by}.{hint} Its log: {log}"
    else:
        cause = f"worker {worker.rank} ended with status {code}. Its log: {log}"
    if code != -signal.SIGKILL and (limits := limits_set()):
        cause += f". A limit may be the cause: {'; or '.join(limits)}"
    step = worker.step + 1 if worker.phase != "build" else 0
    return Fault("died", worker.rank, step, cause, present_time(), worker.generation, reads=worker.reads)


def fault_of_lost_peer(worker: WorkerProcess, reason: str) -> Fault:
    """Return the fault of a worker that lost a peer. Some other fault is the cause."""
    cause = f"a peer is gone: {reason}"
    return Fault(
        "failed", worker.rank, worker.step + 1, cause, present_time(), worker.generation, is_consequence=True
    )


def write_members(logs: Path, host: str, generation: int, workers: Iterable[WorkerProcess]) -> None:
    """Write the rank and the process id of each worker to a file, for people and for the drill."""
    entries = [
        {"rank": worker.rank, "slot": worker.slot, "pid": worker.pid, "loose": worker.loose}
        for worker in workers
    ]
    team_here = {"host": host, "generation": generation, "supervisor": os.getpid(), "workers": entries}
    write_text(logs / f"workers-{host}.json", json.dumps(team_here, indent=1) + "\n")
