"""One machine's part in a run: it starts workers, watches them, and puts them into the leader's team.

Workers are forked from a server that has imported torch (multiprocessing's forkserver), so a new worker
starts quickly. A worker whose peer died leaves the broken team by itself and waits for the next one, which is
faster than starting it again. A worker that does not leave within a few seconds is replaced. Nothing depends
on the cooperation of a worker: it can be killed at any time.

torch's elastic agent is not used for these reasons: it ends all workers of a node when one fails, its nodes
have a fixed number of workers, it does not distinguish life from progress, and its rendezvous waits for fixed
timeouts. The decisions are in team.py, the connections to other hosts in leader_connection.py, the messages
to workers in worker_messages.py, and the search for hangs in hangs.py.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shardwise.config import Recovery
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker
from shardwise.mesh.sockets import LOOPBACK
from shardwise.resilience import worker_messages
from shardwise.resilience.channel import Credentials
from shardwise.resilience.fork_server import wake_server
from shardwise.resilience.hangs import find_hang, record_hang
from shardwise.resilience.leadership import Leadership
from shardwise.resilience.stopping import RESUME_ME, CollectSignals, Stopped, cut_short, error_with_status
from shardwise.resilience.team import (
    LOST_SECONDS,
    Fault,
    Leader,
    Orders,
    Refusal,
    Report,
    Team,
    repeated_line_message,
)
from shardwise.resilience.worker_process import (
    WorkerProcess,
    fault_of_dead_worker,
    fault_of_lost_peer,
    fork_worker,
    write_members,
)

TICK_SECONDS = 0.05
"""Seconds between two rounds of the host's loop."""
CALL_SECONDS = 0.25
"""Seconds between two calls to a leader on another host."""
LAST_CALL_SECONDS = 5.0
"""Seconds for which the leader still answers after the end."""
LEAVE_SECONDS = 10.0
"""Seconds that workers may take to end after the run has ended."""
PARTING_SECONDS = 3.0
"""Seconds that a worker may take to leave a team that broke, before it is replaced."""
LEADER_ANSWER_SECONDS = 1.0
"""Seconds without an answer of the leader before a host prints that it waits."""
SAY_SECONDS = 5.0
"""Seconds for which a run waits for workers before it prints so."""
RETRY_SECONDS = 60.0
"""Seconds for which a slot is not used after two workers in a row failed to start in it."""
SILENT_SERVER_SECONDS = 60.0
"""Seconds without a fork by the server before that counts as a failure of the slot."""
SERVER_SECONDS = 2.0
"""Seconds that the server may take to fork a worker, or to report a dead one, before it is assumed to be
stopped.
"""

Start = Callable[[int, Connection], None]
"""Function that a worker process runs, given its slot and its pipe to the host."""


class Host:
    """Keeps the workers of this machine in the team that the leader wants, until the run ends."""

    def __init__(
        self,
        name: str,
        slots: int,
        start: Start,
        recovery: Recovery,
        logs: Path,
        leader: Leader | None,
        record: Callable[..., None],
        newest_saved: Callable[[], int | None],
        leadership: Leadership | None = None,
        loose: bool = False,
    ) -> None:
        self.name, self.start, self.recovery, self.logs = name, start, recovery, logs
        self.leader, self.leadership = leader, leadership
        self.loose = loose
        """Whether workers that are not ranks of the team work for it."""
        self._only_host = Credentials("", secrets.token_bytes(32))
        """Credentials of a run without other hosts."""
        self._record = record
        self._newest_saved = newest_saved
        """Function that returns the step of the newest complete checkpoint, if there is one."""
        self.address = leadership.address if leadership else LOOPBACK
        self.slots = dict.fromkeys(range(slots), 0.0)
        """For each slot, the time until which it is not used."""
        self._ready: set[int] = set()
        """Slots in which a worker has started at least once."""
        self._failed_starts = dict.fromkeys(self.slots, 0)
        self._lost: Fault | None = None
        """Last fault of a worker that was not a rank."""
        self._server_is_ready = False
        self._server_silent_since: float | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._generation, self._team_since = 0, 0.0
        self._faults: list[Fault] = []
        self._statuses: dict[int, int] = {}
        self._members: dict[int, int] = {}
        """Rank of each slot in the present team."""
        self._step = 0
        """Last step that the present team has completed."""
        self._signals = CollectSignals()
        self._recorded_faults = self._recorded_refusals = 0
        self._missing_since, self._printed_missing = time.monotonic(), False
        self._last_call, self._answered = 0.0, False
        """Time of the last call to the leader, and whether it was answered."""
        self._orders = Orders()

    def run(self) -> int:
        """Run until the leader says that the run has ended. Return the command's exit status."""
        with self._signals:
            try:
                return self._run()
            except Stopped as stopped:
                self._tell_other_hosts(Orders("end", self._orders.team, RESUME_ME))
                print(stopped, file=sys.stderr)
                return stopped.status
            except UserError as error:
                if self._orders.wish != "end" and not (self.leadership and self.leadership.is_lost()):
                    self._tell_other_hosts(Orders("end", self._orders.team, error.status, str(error)))
                raise
            finally:
                self._kill_all()

    def _run(self) -> int:
        while True:
            self._listen()
            self._note_ended_workers()
            self._watch_for_hangs()
            self._answer_signals()
            orders = self._consult()
            if orders is None:
                self._on_leader_unreachable()
            elif orders.wish == "end":
                return self._end(orders)
            elif self._has_left(orders):
                return RESUME_ME
            else:
                self._follow(orders)

    # Processes

    def _listen(self) -> None:
        """Wait a moment for a message or the end of a worker. Receive all messages."""
        by_pipe = {process.pipe: process for process in self._processes.values() if process.hung_up is None}
        sentinels = [process.process.sentinel for process in self._processes.values()]
        for ready in wait([*by_pipe, *sentinels], timeout=TICK_SECONDS):
            if isinstance(ready, Connection) and ready in by_pipe:
                self._receive_all(by_pipe[ready])

    def _receive_all(self, worker: WorkerProcess) -> None:
        """Receive all messages that a worker has sent."""
        try:
            while worker.pipe.poll():
                self._receive(worker, worker.pipe.recv())
        except (EOFError, OSError):
            worker.hung_up = worker.hung_up or time.monotonic()

    def _receive(self, worker: WorkerProcess, message: worker_messages.FromWorker) -> None:
        """Record a message of a worker."""
        match message:
            case worker_messages.Waiting():
                worker.state, worker.step = "waiting", 0
                self._ready.add(worker.slot)
                self._failed_starts[worker.slot] = self._failed_starts[worker.slot] if self.loose else 0
            case worker_messages.Progress(phase, step):
                self._note_progress(worker, phase, step)
            case worker_messages.Reads(rows):
                worker.reads = rows
            case worker_messages.PeerGone(reason):
                self._faults.append(fault_of_lost_peer(worker, reason))
            case worker_messages.Failed(fault):
                worker.fault = fault
            case worker_messages.Done(status):
                worker.state = "done"
                if worker.generation == self._generation:
                    self._statuses[worker.slot] = status
            case worker_messages.Signalled(number):
                self._signals.note(number)
            case worker_messages.Stacks(text):
                worker.stacks = text

    def _note_progress(self, worker: WorkerProcess, phase: worker_messages.Phase, step: int) -> None:
        """Record that a worker began a phase or completed a step."""
        now = time.monotonic()
        if step > worker.step and phase == "step":
            if worker.begun is not None:
                worker.seconds.append(now - worker.begun)
            self._failed_starts[worker.slot] = 0
            if worker.generation == self._generation and not worker.loose:
                self._step = max(self._step, step)
        worker.begun = now if phase == "step" else worker.begun if phase in ("wait", "meet") else None
        worker.phase, worker.step, worker.changed = phase, step, now
        worker.asked_for_stacks = worker.stacks = None

    def _note_ended_workers(self) -> None:
        """Record the workers that ended, and why. If the server does not report their ends, wake it."""
        hung_up = [worker.hung_up for worker in self._processes.values() if worker.hung_up]
        if hung_up and time.monotonic() - min(hung_up) > SERVER_SECONDS:
            wake_server()
        for worker in [worker for worker in self._processes.values() if not worker.process.is_alive()]:
            self._receive_all(worker)
            worker.pipe.close()
            del self._processes[worker.slot]
            if worker.state in ("working", "starting") and not worker.discarded:
                self._note_end(worker, worker.fault or fault_of_dead_worker(worker, self.logs))

    def _note_end(self, worker: WorkerProcess, fault: Fault) -> None:
        """Record the fault of a worker that ended too early."""
        if worker.state == "starting":
            self._note_failed_start(worker, fault)
        elif worker.loose:
            self._note_lost(worker, fault)
        else:
            self._faults.append(fault)

    def _note_lost(self, worker: WorkerProcess, fault: Fault) -> None:
        """Record the end of a worker that is not a rank. The others continue, and its slot is used again.

        If workers fail in a slot as often as a step may fail, and complete no step, the slot is not used for
        a while. If that holds for all slots, the run fails.
        """
        self._note("worker_lost", host=self.name, slot=worker.slot, cause=fault.cause)
        if fault.status is not None:
            raise error_with_status(fault.status, fault.cause)
        before, self._lost = self._lost, fault
        if before is not None and fault.repeats(before):
            raise RunFailed(repeated_line_message(fault))
        self._failed_starts[worker.slot] += worker.step == 0
        if self._failed_starts[worker.slot] < self.recovery.step_attempts:
            return
        self._suspend_slot(worker, fault)
        self._check_usable_slots_left(fault)

    def _check_usable_slots_left(self, fault: Fault) -> None:
        """Raise an error if workers have failed too often in all slots without a rank."""
        loose = [slot for slot in self.slots if slot not in self._members]
        if all(self._failed_starts[slot] >= self.recovery.step_attempts for slot in loose):
            workers = f"{'every' if len(loose) > 1 else 'the'} worker on {self.name}"
            times = f"{self.recovery.step_attempts} times in a row"
            raise RunFailed(f"{fault.trace_before_message}{workers} failed {times}: {fault.cause}")

    def _suspend_slot(self, worker: WorkerProcess, fault: Fault) -> None:
        """Do not use the slot of this worker for a while."""
        self.slots[worker.slot] = time.monotonic() + RETRY_SECONDS
        self._note("slot_rests", host=self.name, slot=worker.slot, cause=fault.cause)

    def _note_failed_start(self, worker: WorkerProcess, fault: Fault) -> None:
        """Record that a worker ended before it was ready.

        After the second time its slot is not used for a while. If that holds for all slots, raise an error.
        """
        if fault.status is not None:
            raise error_with_status(fault.status, fault.cause)
        if worker.slot in self._members:  # its peers are already waiting for it
            rank = self._members[worker.slot]
            self._faults.append(replace(fault, rank=rank, step=0, generation=self._generation))
        self._failed_starts[worker.slot] += 1
        if self._failed_starts[worker.slot] < 2:
            return
        self._suspend_slot(worker, fault)
        if all(count >= 2 for count in self._failed_starts.values()):
            problem = f"no worker comes up on {self.name}: {fault.cause}"
            raise RunFailed(f"{fault.trace_before_message}{problem}")

    def _start_missing_workers(self) -> None:
        """Start a worker in every usable slot that has none."""
        for slot in self._usable_slots():
            if slot not in self._processes and self._statuses.get(slot) is None and not self._fork(slot):
                return  # the host must report to the leader before it tries again

    def _fork(self, slot: int) -> bool:
        """Start a worker in this slot. Return whether that succeeded.

        Only the first call waits long, because the server is still importing.
        """
        seconds = 2 * SERVER_SECONDS if self._server_is_ready else self.recovery.start_seconds
        began = time.monotonic()
        worker, fault = fork_worker(slot, self.start, seconds, lambda: bool(self._signals.received))
        if fault is None:
            self._processes[slot], self._server_is_ready, self._server_silent_since = worker, True, None
        elif not self._signals.received:
            self._server_silent_since = self._server_silent_since or began
            # Before that, the machine may just be busy.
            if time.monotonic() - self._server_silent_since > SILENT_SERVER_SECONDS:
                self._note_failed_start(worker, fault)
        return fault is None

    def _usable_slots(self) -> list[int]:
        """Return the slots that may be used now."""
        now = time.monotonic()
        return [slot for slot, unused_until in self.slots.items() if unused_until <= now]

    def _discard(self, worker: WorkerProcess) -> None:
        """End a worker that is of no use any more. That is not a fault of the team."""
        worker.discarded = True
        worker.process.kill()

    def _kill_all(self) -> None:
        for worker in self._processes.values():
            worker.process.kill()
        wake_server()  # it reports their ends
        for worker in self._processes.values():
            worker.process.join()

    # The leader

    def _working(self) -> list[WorkerProcess]:
        """Return the workers of the present team."""
        members = [worker for worker in self._at_work() if not worker.loose]
        return [worker for worker in members if worker.generation == self._generation]

    def _at_work(self) -> list[WorkerProcess]:
        """Return the workers of any team. Some may not have left an earlier team yet."""
        return [worker for worker in self._processes.values() if worker.state == "working"]

    def _offered_slots(self) -> list[int]:
        """Return the slots that a team may use.

        A host that does not lead offers a slot once a worker has started in it, so that a training team does
        not make room for a host on which no worker ever starts.
        """
        return [slot for slot in self._usable_slots() if self.leader is not None or slot in self._ready]

    def _report(self) -> Report:
        """Return the state of this host."""
        ended = self._members and self._statuses.keys() >= self._members.keys()
        return Report(
            host=self.name,
            address=self.address,
            slots=tuple(self._offered_slots()),
            generation=self._generation,
            idle=not self._working(),
            step=self._step,
            faults=tuple(self._present_faults()),
            done=max(self._statuses.values()) if ended else None,
            leaving=self._signals.status is not None and self.leader is None,
        )

    def _present_faults(self) -> list[Fault]:
        """Return the faults of the present team. Messages of an older team may come late."""
        return [fault for fault in self._faults if fault.generation == self._generation]

    def _consult(self) -> Orders | None:
        """Return what the leader wants; None if it cannot be reached."""
        if self.leader is not None:
            return self._decide(self.leader)
        if time.monotonic() - self._last_call >= CALL_SECONDS:
            assert self.leadership is not None, "a host leads, or calls its leader"
            orders = self.leadership.call(self._report())
            self._last_call, self._answered = time.monotonic(), orders is not None
            self._orders = orders or Orders()
        return self._orders if self._answered else None

    def _decide(self, leader: Leader) -> Orders:
        """As the leader, process all reports, decide, and pass the orders on to the other hosts."""
        now = time.monotonic()
        leader_server = self.leadership.leader_server if self.leadership else None
        leader.receive_report(self._report(), now)  # the first report, so that rank 0 is on this host
        for report, arrived in leader_server.new_reports() if leader_server else []:
            leader.receive_report(report, arrived, from_other_host=True)
        for refused in leader_server.new_refusals() if leader_server else []:
            leader.note_refused(refused)
            self._record_refusal(refused)
        if self.leadership:
            self.leadership.check()
        self._orders = leader.decide(now)
        self._record_faults(leader)
        for refused in leader.refusals[self._recorded_refusals :]:
            self._record_refusal(refused)
            if leader_server:
                leader_server.refuse(refused)
        self._recorded_refusals = len(leader.refusals)
        self._print_what_is_missing(leader, now)
        if leader_server:
            leader_server.tell(self._orders)
        return self._orders

    def _note(self, event: str, **details: object) -> None:
        """Write an event to the run's records, if this host leads."""
        if self.leader is not None:
            self._record(event, **details)

    def _record_faults(self, leader: Leader) -> None:
        for fault in leader.faults[self._recorded_faults :]:
            about = {"kind": fault.kind, "rank": fault.rank, "step": fault.step, "cause": fault.cause}
            self._note("fault", **about, generation=fault.generation)
        self._recorded_faults = len(leader.faults)

    def _record_refusal(self, refused: Refusal) -> None:
        self._note("refused", host=refused.host, cause=refused.why)
        print(f"refused: {refused.why}", file=sys.stderr, flush=True)

    def _print_what_is_missing(self, leader: Leader, now: float) -> None:
        """Print once what the run waits for, if it waits long, so that it does not look like a hang."""
        if leader.missing is None:
            self._missing_since, self._printed_missing = now, False
        elif now - self._missing_since > SAY_SECONDS and not self._printed_missing:
            self._printed_missing = True
            print(leader.missing, file=sys.stderr, flush=True)

    def _on_leader_unreachable(self) -> None:
        """Become the leader if it is lost, or give up after a while.

        Workers are ended once the leader counts this host as lost, because no team uses them.
        """
        assert self.leadership is not None, "a host leads, or calls its leader"
        silence = self.leadership.silence()
        if silence > LOST_SECONDS:
            for worker in self._at_work():
                self._discard(worker)
        if silence < LEADER_ANSWER_SECONDS:
            self._printed_missing = False
        elif not self._printed_missing:
            self._printed_missing = True
            waiting = f"waiting for up to {self.leadership.patience() / 60:.0f} min"
            print(f"{self.leadership.trouble()}; {waiting}", file=sys.stderr, flush=True)
        self.leader = self.leadership.take_over()
        if self.leader is not None:
            self.address = self.leadership.address
            self._note("lead", host=self.name)
            print("the host that led this run is lost: this one leads it now", file=sys.stderr, flush=True)
            return
        if self._signals.received:
            raise self._cut_short(self.leadership.trouble())
        self.leadership.give_up_if_too_long()

    def _has_left(self, orders: Orders) -> bool:
        """Return whether this host was asked to leave, and the run continues without it."""
        takes_part = orders.team is not None and self.name in orders.team.hosts
        return self._signals.status is not None and self.leader is None and not takes_part

    def _follow(self, orders: Orders) -> None:
        """Start missing workers, and put workers into the team of these orders."""
        team = orders.team
        if team is not None and team.generation > self._generation:
            self._begin_generation(team)
        self._start_missing_workers()
        if team is None:
            return
        late = time.monotonic() - self._team_since > PARTING_SECONDS
        for worker in self._processes.values():
            if worker.state == "waiting":
                self._direct_waiting(worker, team, orders)
            elif worker.state == "working":
                self._direct_working(worker, team, orders, late)

    def _begin_generation(self, team: Team) -> None:
        """Forget the former team, and find out which slots are members of this one."""
        self._generation, self._team_since = team.generation, time.monotonic()
        self._faults, self._statuses, self._step = [], {}, 0
        ranks = {member.slot: rank for rank, member in enumerate(team.members) if member.host == self.name}
        self._members = {slot: ranks[slot] for slot in self.slots if slot in ranks}

    def _direct_waiting(self, worker: WorkerProcess, team: Team, orders: Orders) -> None:
        """Put a worker that waits into the team, if it belongs there."""
        if worker.slot in self._members:
            if worker.generation < team.generation:
                self._enlist(worker, team)
        elif self.loose and orders.wish == "work":
            self._enlist(worker, team)  # possibly again, after its connection was lost

    def _direct_working(self, worker: WorkerProcess, team: Team, orders: Orders, late: bool) -> None:
        """Let a worker leave an earlier team, replace one that stays in it, or pass on the leader's
        request."""
        if worker.generation < team.generation and not worker.loose:
            if late:
                self._discard(worker)
            elif worker.wished != "leave":
                worker.wished = "leave"
                worker.send(worker_messages.TeamBroke())
        elif orders.wish in ("regroup", "stop") and worker.wished != orders.wish:
            worker.wished = orders.wish
            worker.send(worker_messages.Regroup() if orders.wish == "regroup" else worker_messages.Stop())

    def _enlist(self, worker: WorkerProcess, team: Team) -> None:
        """Tell a worker to join the team."""
        worker.state, worker.generation = "working", team.generation
        worker.loose = worker.slot not in self._members
        worker.rank = len(team.members) + worker.slot if worker.loose else self._members[worker.slot]
        worker.phase, worker.changed, worker.wished = "build", time.monotonic(), None
        worker.seconds.clear()
        loose_slots = [slot for slot in self.slots if slot not in self._members]
        local = loose_slots if worker.loose else sorted(self._members)
        identity = Worker(
            rank=worker.rank,
            world=len(team.members),
            local_rank=local.index(worker.slot),
            local_world=len(local),
            address=team.address,
            port=team.port,
            launcher="shardwise",
            generation=team.generation,
            store_name=team.store_name,
            server_key=self._server_key(),
        )
        worker.send(worker_messages.JoinTeam(identity, team))
        write_members(self.logs, self.name, team.generation, self._at_work())

    def _server_key(self) -> bytes:
        """Return the key by which servers and workers of this run recognise each other, if there are any."""
        if not self.loose:
            return b""
        credentials = self.leadership.credentials() if self.leadership else self._only_host
        return credentials.derived_key("server")

    def _end(self, orders: Orders) -> int:
        """End this host after the run has ended, well or not. Return the exit status."""
        self._tell_other_hosts(orders)
        if orders.message and orders.status == RESUME_ME:
            raise self._cut_short(orders.message)
        if orders.message:
            raise error_with_status(orders.status, orders.message)
        workers = list(self._processes.values())
        for worker in workers:
            worker.send(worker_messages.Leave())
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline and any(worker.process.is_alive() for worker in workers):
            self._listen()
        if orders.status == RESUME_ME:
            return self._signals.status or RESUME_ME
        return orders.status

    def _cut_short(self, cause: str) -> Exception:
        return cut_short(cause, self._newest_saved(), self._step > 0, self._signals.status or RESUME_ME)

    def _tell_other_hosts(self, orders: Orders) -> None:
        """Answer with these orders until every host has called once more, or does not call any more."""
        leader_server = self.leadership.leader_server if self.leadership else None
        if leader_server is None or self.leader is None:
            return
        leader_server.tell(orders)
        other_hosts = self.leader.hosts() - {self.name}
        deadline = time.monotonic() + LAST_CALL_SECONDS
        while not leader_server.all_know(other_hosts) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)

    # Hangs and signals

    def _watch_for_hangs(self) -> None:
        """Record hangs, and end the workers that cause them."""
        for worker in [worker for worker in self._at_work() if worker.loose and not worker.discarded]:
            if hang := find_hang([worker], self.recovery, other_hosts=False):
                self._note_lost(worker, record_hang(hang, [worker], self.logs, self._generation))
                self._discard(worker)
        if self._present_faults():
            return
        working = self._working()
        if hang := find_hang(working, self.recovery, self.leadership is not None):
            self._faults.append(record_hang(hang, working, self.logs, self._generation))
            for worker in hang.culprits:
                self._discard(worker)

    def _has_begun(self) -> bool:
        """Return whether workers train or have trained, or the leader wants something else than work."""
        training = any(worker.phase not in ("build", "restore") for worker in self._at_work())
        return training or bool(self._statuses) or self._orders.wish != "work"

    def _answer_signals(self) -> None:
        """Pass a request to stop on to the workers, so that all stop after the same step and save.

        There is no time limit here: only the sender of the signal knows how long it will wait. Workers that
        make no progress count as hung.
        """
        if self.leader is None or not self._signals.received:
            return
        waits_for_workers = self.leader.missing is not None and not self._at_work()
        if waits_for_workers or not self._has_begun():  # there is nothing new to save
            raise Stopped(self._signals.status or RESUME_ME)
        if self._orders.wish == "work" and self._orders.team is not None:
            self.leader.orders = replace(self._orders, wish="stop")
