"""Find out which worker hangs when a team makes no progress, and what every worker was doing.

The time since the last completed step counts, and not whether a process is alive: a worker that waits forever
in a collective is alive. When a worker is late, all workers are asked for their stacks. Those that do not
answer are stopped, or stuck in C code that holds Python's lock, and are the culprits. If all answer, they
wait for each other or for a worker of another host, and that host gets time to name it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.config import Recovery
from shardwise.observe import present_time, write_text
from shardwise.resilience.team import Fault
from shardwise.resilience.worker_messages import ReportStacks
from shardwise.resilience.worker_process import WorkerProcess

ANSWER_SECONDS = 2.0
"""Seconds within which a worker must send its stacks."""
OTHERS_SECONDS = 5.0
"""Seconds for which another host may find the culprit of a hang, if this host has none."""


@dataclass(frozen=True)
class Hang:
    """A team that is stuck: the workers that must end, and the seconds since a step was completed."""

    culprits: Sequence[WorkerProcess]
    seconds: float


def find_hang(working: Sequence[WorkerProcess], recovery: Recovery, other_hosts: bool) -> Hang | None:
    """Return the hang of these workers, if there is one. Once a worker is late, ask all for their stacks."""
    now = time.monotonic()
    late = [worker for worker in working if now - worker.changed > worker.hang_limit(recovery)]
    if not late:
        return None
    if late[0].asked_for_stacks is None:
        _ask_for_stacks(working, now)
        return None
    waited = now - late[0].asked_for_stacks
    silent = [worker for worker in working if worker.stacks is None]
    if waited < _seconds_to_wait(bool(silent), other_hosts):
        return None
    return Hang(silent or working, now - late[0].changed)


def _ask_for_stacks(working: Sequence[WorkerProcess], now: float) -> None:
    for worker in working:
        worker.asked_for_stacks, worker.stacks = now, None
        worker.send(ReportStacks())


def _seconds_to_wait(some_are_silent: bool, other_hosts: bool) -> float:
    """Return how long to wait for the answers of workers here, or for another host to find the cause."""
    if some_are_silent:
        return ANSWER_SECONDS
    return ANSWER_SECONDS + OTHERS_SECONDS if other_hosts else 0.0


def record_hang(hang: Hang, working: Sequence[WorkerProcess], logs: Path, generation: int) -> Fault:
    """Write the stacks of all workers to a file. Return the fault of the hang."""
    path = logs / f"hang-{generation}.txt"
    silence = "does not answer: it is stopped, or stuck in code that holds Python's lock\n"
    lines = [f"rank {worker.rank}, step {worker.step + 1}: {worker.stacks or silence}" for worker in working]
    write_text(path, "\n".join(lines))
    silent = [worker for worker in hang.culprits if worker.stacks is None]
    for worker in silent:
        os.kill(worker.pid, signal.SIGQUIT)  # if it can, it writes its stacks to its log
    if silent:
        time.sleep(0.1)
    first = hang.culprits[0]
    ranks = ", ".join(str(worker.rank) for worker in hang.culprits)
    described = f"rank {ranks} does not answer" if silent else "every worker waits for another"
    cause = f"no step was done for {hang.seconds:.0f} s, and {described}; the stacks are in {path}"
    rank = first.rank if silent else None
    return Fault("hung", rank, first.step + 1, cause, present_time(), generation, reads=first.reads)
