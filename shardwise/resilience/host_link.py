"""A worker's link to its host: teams and wishes come in, progress goes out (resilience/messages.py).

Progress is what is told, not life: a worker that waits forever in a collective is alive and useless, so the
host counts the time since the last step was done. A thread listens, because the main one may be stuck: it
answers "where are you?" with every thread's stack and the last collective, tells the host of a signal that
asks to stop, and ends the process should the host be gone. A process that cannot even answer is stopped, or
stuck in C code that holds Python's lock; then `faulthandler` writes its stacks to its log, on SIGQUIT.

A worker that someone else started (torchrun, srun) has no host of ours: `NoHost` gives it one team and takes
no notes. Signals reach it alone, and its peers learn of them with the next step.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Literal

from shardwise.errors import Unreadable, UserError, without_middle
from shardwise.limits import limit_reached
from shardwise.mesh import Worker
from shardwise.observe import present_time
from shardwise.plan import Plan
from shardwise.resilience.messages import (
    Done,
    Failed,
    FromHost,
    FromWorker,
    JoinTeam,
    Leave,
    PeerGone,
    Phase,
    Progress,
    Reads,
    Regroup,
    ReportStacks,
    Signalled,
    Stacks,
    Stop,
    Waiting,
)
from shardwise.resilience.own_code import own_line
from shardwise.resilience.stopping import RESUME_ME, STOP_SIGNALS, CollectSignals, stop_signals_as_bytes
from shardwise.resilience.team import Fault, Member, Team

Wish = Literal["stop", "regroup"]
LONGEST_CAUSE, LONGEST_TRACE = 2000, 8000
"""Characters of what a worker says of its end: orders to other hosts carry it, and a line between hosts has
64 KiB."""


class NoHost:
    """What stands in for the link in a worker whose launcher is not ours: one team, and nobody to tell."""

    recovers = False

    def __init__(self, worker: Worker, plan: Plan, signals: CollectSignals | None = None) -> None:
        members = tuple(Member(worker.address, rank) for rank in range(worker.world))
        team = Team(worker.generation, members, plan, worker.address, worker.port, "", present_time())
        self._only: tuple[Worker, Team] | None = (worker, team)
        self._signals = signals or CollectSignals()
        self.reached = 0
        """The last step that is done."""

    def next_team(self) -> tuple[Worker, Team] | None:
        """The team to train with next, and this worker's part in it; None: the run has ended."""
        only, self._only = self._only, None
        return only

    def progress(self, phase: Phase, step: int) -> None:
        """This phase began, or this step is done."""
        self.reached = step

    def reads(self, rows: str) -> None:
        """What of every step's data is this worker's, to be named should it die."""

    def peer_gone(self, reason: str) -> None:
        """The team is no more: a peer is gone."""

    def wish(self) -> Wish | None:
        """What is asked for: `stop`, `regroup`, or nothing."""
        return "stop" if self._signals.received else None

    def stop_status(self) -> int | None:
        """What this worker ends with if it is asked to stop; None: it is not."""
        return self._signals.status


class HostLink(NoHost):
    """The link of a worker to the host that forked it: one pipe, and one of signals, read by a thread of its
    own."""

    recovers = True

    def __init__(
        self, pipe: Connection, where: Callable[[], str], enlisted: Callable[[Worker], None]
    ) -> None:
        self._pipe, self._where, self._enlisted = pipe, where, enlisted
        self._step, self._worker = 0, Worker(0, 1, 0, 1, "", 0, "shardwise")
        self._teams: queue.SimpleQueue[JoinTeam | None] = queue.SimpleQueue()
        self._wish: Wish | None = None
        self._sending = threading.Lock()
        self._signal_bytes = stop_signals_as_bytes()
        threading.Thread(target=self._listen, name="link to the host", daemon=True).start()

    def next_team(self) -> tuple[Worker, Team] | None:
        self._send(Waiting())
        joined = self._teams.get()
        if joined is None:
            return None
        self._step, self._worker = 0, joined.worker
        self._enlisted(joined.worker)
        return joined.worker, joined.team

    def progress(self, phase: Phase, step: int) -> None:
        self._step = {"build": 0, "restore": step + 1, "step": step + 1}.get(phase, step)
        self._send(Progress(phase, step))

    def reads(self, rows: str) -> None:
        self._send(Reads(rows))

    def peer_gone(self, reason: str) -> None:
        self._send(PeerGone(reason))

    def failed(self, error: BaseException) -> None:
        """Tell the host that this worker ends, and why."""
        limit = limit_reached(error)
        ours, line = isinstance(error, UserError) or limit is not None, own_line(error)
        said = limit or (str(error) if ours else f"{type(error).__name__}: {error}")
        causes = [f"{line}: {said}" if line and not ours else said, *getattr(error, "__notes__", ())]
        trace = "" if ours else "".join(traceback.format_exception(error))
        fault = Fault(
            kind="failed",
            rank=self._worker.rank,
            step=self._step,
            cause=without_middle("; ".join(causes), LONGEST_CAUSE),
            at=present_time(),
            generation=self._worker.generation,
            status=error.status
            if isinstance(error, UserError) and not isinstance(error, Unreadable)
            else None,
            trace=without_middle(trace, LONGEST_TRACE),
            own_line="" if ours else line,
        )
        self._send(Failed(fault))

    def done(self, status: int) -> None:
        """Tell the host that this worker ends, having done what was asked."""
        self._send(Done(status))

    def wish(self) -> Wish | None:
        return self._wish

    def stop_status(self) -> int | None:
        return RESUME_ME if self._wish == "stop" else None  # the host knows whether it was Ctrl-C

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            try:
                self._pipe.send(message)
            except OSError:
                os._exit(1)  # nobody is left to train for

    def _listen(self) -> None:
        while True:
            ready = wait([self._pipe, self._signal_bytes])
            if self._signal_bytes in ready:
                for number in set(os.read(self._signal_bytes, 4096)) & set(
                    STOP_SIGNALS
                ):  # a module may handle others
                    self._send(Signalled(number))
            if self._pipe in ready:
                self._hear()

    def _hear(self) -> None:
        try:
            message: FromHost = self._pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        match message:
            case JoinTeam():
                self._wish = None
                self._teams.put(message)
            case ReportStacks():
                self._send(Stacks(f"last collective: {self._where()}\n{stacks()}"))
            case Regroup():
                self._wish = "regroup"
            case Stop():
                self._wish = "stop"
            case Leave():
                self._teams.put(None)


def stacks() -> str:
    """Where every thread of this process stands."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            texts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)
