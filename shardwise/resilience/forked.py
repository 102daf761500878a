"""Processes for a task of seconds: forked in a moment, heard through pipes, ended together whatever happens.

They are forked from a server that has torch imported already (resilience/server.py). Ctrl-C is this process's to answer; should
it be killed, they see it and end. What they print goes to a log, whose end tells why one died.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE = 1.0
"""Seconds in which others that failed may still say so: a worker that only misses another is not the cause."""


@dataclass(frozen=True)
class Forked:
    """One of them, as the process that started it sees it."""

    rank: int
    process: BaseProcess
    pipe: Connection
    log: Path

    def hear(self) -> Any:
        """Its next word; that it died, where it can say no more."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            last = self.log.read_text(errors="replace")[-2000:].strip()
            died = f"it died with exit status {self.process.exitcode}"
            return Died(self.rank, f"{died}; its last words:\n{last}" if last else died)


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
    process.start()
    theirs.close()
    return Forked(rank, process, ours, log)


def end(processes: Iterable[Forked]) -> None:
    """End them all, and wait until they are gone."""
    everyone = list(processes)
    for one in everyone:
        one.process.kill()
    for one in everyone:
        one.process.join()
        one.pipe.close()


def ready(waiting: Sequence[Forked], seconds: float) -> list[Forked]:
    """Those that have something to say, as soon as one has; none if nobody says a word for so long."""
    speaking = wait([one.pipe for one in waiting], timeout=max(0.0, seconds))
    return [one for one in waiting if one.pipe in speaking]


def last_words(waiting: Sequence[Forked], are_last: Callable[[Any], bool]) -> list[Any]:
    """What the others say within the grace, after one has failed; each is heard until a word that is its last."""
    found, left, deadline = [], list(waiting), time.monotonic() + GRACE
    while left and (seconds := deadline - time.monotonic()) > 0:
        for one in ready(left, seconds):
            word = one.hear()
            if are_last(word):
                left.remove(one)
                found.append(word)
    return found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _inside(target: Callable[..., None], pipe: Connection, log: str, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with open(log, "w", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        target(pipe, *arguments)
        pipe.close()
    os._exit(0)  # there is nothing left to tidy up, and libraries' threads need not be waited for


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "these processes are started by multiprocessing"
    wait([parent.sentinel])
    os._exit(1)
