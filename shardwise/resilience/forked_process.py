"""Processes for tasks of a few seconds: forked quickly, connected by pipes, and ended together.

They are forked from a server that has already imported torch (fork_server.py). The process that started them
handles signals that ask to stop; if it is killed, they end with it. Their output goes to a log, whose end
shows why a process died.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwise.errors import RunFailed, UserError
from shardwise.limits import limits_set
from shardwise.resilience.fork_server import ensure_server, without_main

FREE_PORTS = range(10_000, 32_768)
"""Ports that anybody may listen on, below those that Linux gives to outgoing connections."""

GRACE_SECONDS = 1.0
"""Seconds in which other processes may report their failure too. One that only lost a peer is not the
cause.
"""


@dataclass(frozen=True)
class ForkedProcess:
    """A forked process as the process that started it sees it."""

    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path

    def receive(self) -> Any:
        """Return its next message, or a `ProcessDied` if it ended without one."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            tail = self.log.read_text(errors="replace")[-2000:].strip()
            message = f"it died with exit status {self.process.exitcode}"
            return ProcessDied(self.rank, f"{message}; its last words:\n{tail}" if tail else message)


@dataclass(frozen=True)
class ProcessDied:
    """Stands for the message of a process that ended without one."""

    rank: int
    message: str


def fork_process(
    rank: int, target: Callable[..., None], arguments: Sequence[object], folder: Path
) -> ForkedProcess:
    """Start `target(pipe, *arguments)` in a process of its own, whose log is in this folder."""
    ensure_server()  # else multiprocessing would start it, and a signal to stop would end it
    context = multiprocessing.get_context("forkserver")
    parent_pipe, child_pipe = context.Pipe()
    log = folder / f"rank-{rank}.log"
    process = context.Process(
        target=_run_target, args=(target, child_pipe, str(log), *arguments), daemon=True
    )
    try:
        with without_main():
            process.start()
    except (EOFError, ConnectionError):
        limits = "; or ".join(limits_set())
        limit = f". A limit may be the cause: {limits}" if limits else ""
        raise RunFailed(f"the process that others are forked from has ended{limit}") from None
    child_pipe.close()
    return ForkedProcess(rank, process, parent_pipe, log)


def end_processes(processes: Iterable[ForkedProcess]) -> None:
    """Kill all these processes, and wait until they have ended."""
    all_processes = list(processes)
    for process in all_processes:
        process.process.kill()
    for process in all_processes:
        process.process.join()
        process.pipe.close()


def wait_for_messages(waiting: Sequence[ForkedProcess], seconds: float) -> list[ForkedProcess]:
    """Wait until a process has sent a message. Return those that have; none if no message comes in time."""
    speaking = wait([process.pipe for process in waiting], timeout=max(0.0, seconds))
    return [process for process in waiting if process.pipe in speaking]


def last_messages(waiting: Sequence[ForkedProcess], is_last: Callable[[object], bool]) -> list[Any]:
    """Return the last messages that the other processes send shortly after one has failed."""
    answers, silent, deadline = [], list(waiting), time.monotonic() + GRACE_SECONDS
    while silent and (seconds := deadline - time.monotonic()) > 0:
        for process in wait_for_messages(silent, seconds):
            message = process.receive()
            if is_last(message):
                silent.remove(process)
                answers.append(message)
    return answers


def free_port() -> int:
    """Return a port of this machine on which nothing listens.

    It lies below the range from which the system takes the ports of outgoing connections. A connection
    could otherwise take it before the caller listens.
    """
    # Programs seed `random`, and two processes with one seed would choose the same port.
    for port in random.SystemRandom().sample(FREE_PORTS, 100):
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise UserError(
        f"this machine lets nobody listen on any of 100 ports between {FREE_PORTS[0]} and {FREE_PORTS[-1]}: "
        "end programs that hold them, or allow ports of 127.0.0.1"
    )


def _run_target(target: Callable[..., None], pipe: Connection, log: str, *arguments: object) -> None:
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    # The process that asked for this one was stopped meanwhile, and has removed the folder.
    except FileNotFoundError:
        os._exit(0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    target(pipe, *arguments)
    pipe.close()
    os._exit(0)  # there is nothing left to clean up, and threads of libraries need not end first
