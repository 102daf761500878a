"""A worker's link to its host: it receives teams and requests, and reports progress (worker_messages.py).

A worker reports progress, because being alive proves nothing: a worker that waits forever in a collective is
alive. The host measures the time since the last completed step. A thread receives messages, because the main
thread may be stuck. It answers a request for stacks with the stack of every thread and the last collective,
reports signals that ask to stop, and ends the process if the host is gone. A process that cannot answer is
stopped, or stuck in C code that holds Python's lock; then `faulthandler` writes its stacks to its log on
SIGQUIT.

A worker of another launcher (torchrun, srun) has no host of shardwise. `WorkerLink`, the base class, gives it
one team and reports nothing. Only this worker receives its signals, and its peers learn of them in the next
step.
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
from shardwise.mesh import Worker, nccl
from shardwise.observe import present_time
from shardwise.plans import Plan
from shardwise.resilience.stopping import RESUME_ME, STOP_SIGNALS, CollectSignals, stop_signals_as_bytes
from shardwise.resilience.team import Fault, Member, Team
from shardwise.resilience.user_code import line_in_user_code, trace_of_user_code
from shardwise.resilience.worker_messages import (
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
    TeamBroke,
    Waiting,
)

Wish = Literal["stop", "regroup"]
"""What a worker may be asked to do after its present step."""
LONGEST_CAUSE, LONGEST_TRACE = 2000, 8000
"""Maximum numbers of characters of a fault's cause and trace. They are sent between hosts in lines of
64 KiB.
"""


class WorkerLink:
    """The link of a worker that another launcher started. It has one team, and reports to nobody."""

    recovers = False
    """Whether another team is formed after a fault."""

    def __init__(self, worker: Worker, plan: Plan, signals: CollectSignals | None = None) -> None:
        members = tuple(Member(worker.address, rank) for rank in range(worker.world))
        team = Team(worker.generation, members, plan, worker.address, worker.port, "", present_time())
        self._single_team: tuple[Worker, Team] | None = (worker, team)
        self._signals = signals or CollectSignals()
        self.reached = 0
        """Number of the last completed step."""

    def next_team(self) -> tuple[Worker, Team] | None:
        """Return the next team to train with, and this worker's place in it; None if the run has ended."""
        team, self._single_team = self._single_team, None
        return team

    def progress(self, phase: Phase, step: int) -> None:
        """Report that this phase began, or that this step is completed."""
        self.reached = step

    def reads(self, rows: str) -> None:
        """Report which rows of every step this worker reads, so that they can be named if it dies."""

    def peer_gone(self, reason: str) -> None:
        """Report that the team has broken because a peer is gone."""

    def wish(self) -> Wish | None:
        """Return what this worker is asked to do: `stop`, `regroup`, or None."""
        return "stop" if self._signals.received else None

    def stop_status(self) -> int | None:
        """Return the exit status of this worker if it is asked to stop, else None."""
        return self._signals.status


class HostLink(WorkerLink):
    """The link of a worker to the host that forked it.

    It uses a pipe to the host and a pipe of signals, which a thread reads.
    """

    recovers = True

    def __init__(
        self, pipe: Connection, last_collective: Callable[[], str], enlisted: Callable[[Worker], None]
    ) -> None:
        self._pipe, self._last_collective, self._enlisted = pipe, last_collective, enlisted
        self._step, self._worker = 0, Worker(0, 1, 0, 1, "", 0, "shardwise")
        self._steps_begun = 0
        """Number of steps that this worker has begun in its team."""
        self._teams: queue.SimpleQueue[JoinTeam | None] = queue.SimpleQueue()
        self._wish: Wish | None = None
        self._sending = threading.Lock()
        self._signal_bytes = stop_signals_as_bytes()
        threading.Thread(target=self._listen, name="link to the host", daemon=True).start()

    def next_team(self) -> tuple[Worker, Team] | None:
        """Wait for the next team from the host."""
        self._send(Waiting())
        joined = self._teams.get()
        if joined is None:
            return None
        self._step, self._steps_begun, self._worker = 0, 0, joined.worker
        self._enlisted(joined.worker)
        return joined.worker, joined.team

    def progress(self, phase: Phase, step: int) -> None:
        """Send the progress to the host."""
        self._steps_begun += phase == "step"
        self._step = {"build": 0, "restore": step + 1, "step": step + 1}.get(phase, step)
        self._send(Progress(phase, step))

    def reads(self, rows: str) -> None:
        """Send the rows to the host."""
        self._send(Reads(rows))

    def peer_gone(self, reason: str) -> None:
        """Send the reason to the host."""
        self._send(PeerGone(reason))

    def failed(self, error: BaseException) -> None:
        """Tell the host that this worker ends because of an error."""
        limit = limit_reached(error)
        explained, line = isinstance(error, UserError) or limit is not None, line_in_user_code(error)
        text = limit or (str(error) if explained else f"{type(error).__name__}: {error}")
        causes = [f"{line}: {text}" if line and not explained else text, *getattr(error, "__notes__", ())]
        trace = "" if explained else trace_of_user_code(error)
        status = error.status if isinstance(error, UserError) and not isinstance(error, Unreadable) else None
        if limit is not None and self._is_first_attempt():
            causes, status = [limit], UserError.status
        fault = Fault(
            kind="failed",
            rank=self._worker.rank,
            step=self._step,
            cause=without_middle("; ".join(causes), LONGEST_CAUSE),
            at=present_time(),
            generation=self._worker.generation,
            status=status,
            trace=without_middle(trace, LONGEST_TRACE),
            user_code_line="" if explained else line,
        )
        self._send(Failed(fault))

    def _is_first_attempt(self) -> bool:
        """Return whether a rank fails in its first step in the run's first team. Another attempt would reach
        the same limit, and nothing is lost. Later the limit may be reached for a reason that passes."""
        is_rank = self._worker.rank < self._worker.world
        return is_rank and self._worker.generation <= 1 and self._steps_begun <= 1

    def done(self, status: int) -> None:
        """Tell the host that this worker ends because its work is done."""
        self._send(Done(status))

    def wish(self) -> Wish | None:
        """Return what the host asks this worker to do, or None."""
        return self._wish

    def stop_status(self) -> int | None:
        """Return the exit status if the host asks to stop. The host knows whether it was Ctrl-C."""
        return RESUME_ME if self._wish == "stop" else None

    def _send(self, message: FromWorker) -> None:
        with self._sending:
            try:
                self._pipe.send(message)
            except OSError:
                os._exit(1)  # the host is gone

    def _listen(self) -> None:
        while True:
            ready = wait([self._pipe, self._signal_bytes])
            if self._signal_bytes in ready:
                # Other modules may handle other signals.
                for number in set(os.read(self._signal_bytes, 4096)) & set(STOP_SIGNALS):
                    self._send(Signalled(number))
            if self._pipe in ready:
                self._receive()

    def _receive(self) -> None:
        """Receive and handle one message of the host."""
        try:
            message: FromHost = self._pipe.recv()
        except (EOFError, OSError):
            os._exit(1)
        match message:
            case JoinTeam():
                nccl.forget_interruption()
                self._wish = None
                self._teams.put(message)
            case ReportStacks():
                self._send(Stacks(f"last collective: {self._last_collective()}\n{stacks()}"))
            case Regroup():
                self._wish = "regroup"
            case Stop():
                self._wish = "stop"
            case TeamBroke():
                # In a thread of its own, because aborting a communicator may take long.
                threading.Thread(target=nccl.interrupt, name="interrupt", daemon=True).start()
            case Leave():
                self._teams.put(None)


def stacks() -> str:
    """Return the stacks of all other threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            texts.append(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)
