"""Processes for a task of seconds: forked in a moment, answering through pipes, ended together whatever
happens.

They are forked from a server that has torch imported already (resilience/server.py). Signals that ask to stop
are this process's to answer; should it be killed, they end with it. What they print goes to a log, whose end
tells why one died.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwise.resilience.server import without_main

GRACE = 1.0
"""Seconds in which others that failed may still say so: a worker that only misses another is not the
cause."""


@dataclass(frozen=True)
class Forked:
    """One of them, as the process that started it sees it."""

    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path

    def hear(self) -> Any:
        """Its next message; a `Died` where it ended without one."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            tail = self.log.read_text(errors="replace")[-2000:].strip()
            died = f"it died with exit status {self.process.exitcode}"
            return Died(self.rank, f"{died}; its last words:\n{tail}" if tail else died)


@dataclass(frozen=True)
class Died:
    """What is heard of a process that ended without an answer."""

    rank: int
    message: str


def fork(rank: int, target: Callable[..., None], arguments: Sequence[Any], folder: Path) -> Forked:
    """Start `target(pipe, *arguments)` in a process of its own, whose log lies in this folder."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    log = folder / f"rank-{rank}.log"
    process = context.Process(target=_inside, args=(target, theirs, str(log), *arguments), daemon=True)
    with without_main():
        process.start()
    theirs.close()
    return Forked(rank, process, ours, log)


def end(processes: Iterable[Forked]) -> None:
    """End them all, and wait until they are gone."""
    everyone = list(processes)
    for process in everyone:
        process.process.kill()
    for process in everyone:
        process.process.join()
        process.pipe.close()


def ready(waiting: Sequence[Forked], seconds: float) -> list[Forked]:
    """Those that have sent a message, as soon as one has; none if no message comes for so long."""
    speaking = wait([process.pipe for process in waiting], timeout=max(0.0, seconds))
    return [process for process in waiting if process.pipe in speaking]


def last_messages(waiting: Sequence[Forked], is_last: Callable[[Any], bool]) -> list[Any]:
    """The last messages that the others send within the grace, after one has failed."""
    answers, silent, deadline = [], list(waiting), time.monotonic() + GRACE
    while silent and (seconds := deadline - time.monotonic()) > 0:
        for process in ready(silent, seconds):
            message = process.hear()
            if is_last(message):
                silent.remove(process)
                answers.append(message)
    return answers


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _inside(target: Callable[..., None], pipe: Connection, log: str, *arguments: Any) -> None:
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except (
        FileNotFoundError
    ):  # whoever asked for this process was stopped before it was there, and took the folder along
        os._exit(0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    target(pipe, *arguments)
    pipe.close()
    os._exit(0)  # there is nothing left to tidy up, and libraries' threads need not be waited for
