"""One machine's part in a run: its workers, kept alive, watched, and matched to the team that the leader
wants.

Workers are forked from a server that has torch imported (multiprocessing's forkserver), so a new worker is
there in a moment. A worker whose peer died lets go of the broken team by itself and waits for the next one,
which saves starting it anew; one that does not within a few seconds is replaced. Nothing rests on the good
will of a worker: it can be killed at any time.

Why not torch's elastic agent: it ends every worker of a node when one fails, its nodes have a fixed number of
workers, it takes life for progress, and its rendezvous waits out fixed timeouts. What is needed is small and
is here: the judgement in team.py, the messages to other hosts in rendezvous.py and to workers in messages.py,
hangs in hangs.py, the processes below.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from shardwise.config import Recovery
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker
from shardwise.mesh.sockets import LOOPBACK
from shardwise.resilience import messages
from shardwise.resilience.hangs import find_hang, record_hang
from shardwise.resilience.other_hosts import OtherHosts
from shardwise.resilience.process import WorkerProcess, died, fork, peer_gone, write_members
from shardwise.resilience.server import wake_server
from shardwise.resilience.stopping import RESUME_ME, CollectSignals, Stopped, cut_short
from shardwise.resilience.team import (
    LOST_SECONDS,
    Fault,
    Lead,
    Member,
    Orders,
    Refusal,
    Report,
    Team,
    in_own_code,
)

TICK_SECONDS = 0.05
CALL_SECONDS = 0.25
"""Between two calls to a leader elsewhere."""
LAST_CALL_SECONDS = 5.0
"""How long the leader answers after the end."""
PARTING_SECONDS = 3.0
"""How long a worker may take to let go of a team that broke, before it is replaced."""
ANSWER_SECONDS = 1.0
"""How long the leader may be silent before a host says that it waits for it."""
SAY_SECONDS = 5.0
"""How long a run waits for workers before it says so."""
RETRY_SECONDS = 60.0
"""How long a slot rests after two workers in a row did not come up in it."""
SILENT_SERVER_SECONDS = 60.0
"""How long the server may fork nobody before that is a failure of the slot."""
SERVER_SECONDS = 2.0
"""How long the server may take to fork a worker, or to tell that one has ended, before it is taken for
stopped."""

Start = Callable[[int, Connection], None]


class Host:
    """Keeps the workers of this machine in the team that the leader wants, until the run ends."""

    def __init__(
        self,
        name: str,
        slots: int,
        start: Start,
        recovery: Recovery,
        logs: Path,
        lead: Lead | None,
        record: Callable[..., None],
        newest_saved: Callable[[], int | None],
        others: OtherHosts | None = None,
        loose: bool = False,
    ) -> None:
        self.name, self.start, self.recovery, self.logs, self.lead, self.others = (
            name,
            start,
            recovery,
            logs,
            lead,
            others,
        )
        self.loose = loose
        """Whether workers that are no ranks of the team work for it."""
        self._record = record
        self._newest_saved = newest_saved
        """The step of the newest whole checkpoint, if there is one."""
        self.address = others.address if others else LOOPBACK
        self.slots = dict.fromkeys(range(slots), 0.0)
        """Each slot, and until when it rests."""
        self._ready: set[int] = set()
        """Slots in which a worker has come up at least once."""
        self._failed_starts = dict.fromkeys(self.slots, 0)
        self._lost: Fault | None = None
        """Why the last worker ended that was no rank."""
        self._server_is_ready = False
        self._server_silent_since: float | None = None
        self._processes: dict[int, WorkerProcess] = {}
        self._generation, self._team_since = 0, 0.0
        self._faults: list[Fault] = []
        self._statuses: dict[int, int] = {}
        self._members: dict[int, int] = {}
        """Of the present team: rank by slot."""
        self._step = 0
        """The last step that the present team has done itself."""
        self._signals = CollectSignals()
        self._recorded_faults = self._recorded_refusals = 0
        self._missing_since, self._said_missing = time.monotonic(), False
        self._last_call, self._answered = 0.0, False
        """When the leader was last called, and whether it answered."""
        self._orders = Orders()

    def run(self) -> int:
        """Until the leader says that the run has ended; the command's exit status."""
        with self._signals:
            try:
                return self._run()
            except Stopped as stopped:
                self._tell_other_hosts(Orders("end", self._orders.team, RESUME_ME))
                print(stopped, file=sys.stderr)
                return stopped.status
            except UserError as error:
                if self._orders.wish != "end" and not (self.others and self.others.lost_lead()):
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
        """Take what workers say, or notice that one of them ended; wait a moment for it."""
        by_pipe = {process.pipe: process for process in self._processes.values() if process.hung_up is None}
        sentinels = [process.process.sentinel for process in self._processes.values()]
        for ready in wait([*by_pipe, *sentinels], timeout=TICK_SECONDS):
            if isinstance(ready, Connection) and ready in by_pipe:
                self._take(by_pipe[ready])

    def _take(self, worker: WorkerProcess) -> None:
        try:
            while worker.pipe.poll():
                self._hear(worker, worker.pipe.recv())
        except (EOFError, OSError):
            worker.hung_up = worker.hung_up or time.monotonic()

    def _hear(self, worker: WorkerProcess, message: messages.FromWorker) -> None:
        """Take note of what a worker says."""
        match message:
            case messages.Waiting():
                worker.state, worker.step = "waiting", 0
                self._ready.add(worker.slot)
                self._failed_starts[worker.slot] = self._failed_starts[worker.slot] if self.loose else 0
            case messages.Progress(phase, step):
                self._note_progress(worker, phase, step)
            case messages.Reads(rows):
                worker.reads = rows
            case messages.PeerGone(reason):
                self._faults.append(peer_gone(worker, reason))
            case messages.Failed(fault):
                worker.fault = fault
            case messages.Done(status):
                worker.state = "done"
                if worker.generation == self._generation:
                    self._statuses[worker.slot] = status
            case messages.Signalled(number):
                self._signals.note(number)
            case messages.Stacks(text):
                worker.stacks = text

    def _note_progress(self, worker: WorkerProcess, phase: messages.Phase, step: int) -> None:
        now = time.monotonic()
        if step > worker.step and phase == "step":
            if worker.begun is not None:
                worker.seconds.append(now - worker.begun)
            self._failed_starts[worker.slot] = 0
            if worker.generation == self._generation and not worker.loose:
                self._step = max(self._step, step)
        worker.begun = now if phase == "step" else worker.begun if phase in ("wait", "meet") else None
        worker.phase, worker.step, worker.changed, worker.asked_for_stacks, worker.stacks = (
            phase,
            step,
            now,
            None,
            None,
        )

    def _note_ended_workers(self) -> None:
        """Take note of workers that ended, and why. The server tells that; if it does not, it was stopped."""
        if any(
            worker.hung_up and time.monotonic() - worker.hung_up > SERVER_SECONDS
            for worker in self._processes.values()
        ):
            wake_server()
        for worker in [worker for worker in self._processes.values() if not worker.process.is_alive()]:
            self._take(worker)
            worker.pipe.close()
            del self._processes[worker.slot]
            if worker.loose and worker.state == "working" and not worker.discarded:
                self._note_lost(worker, worker.fault or died(worker, self.logs))
            elif worker.state == "working" and not worker.discarded:
                self._faults.append(worker.fault or died(worker, self.logs))
            elif worker.state == "starting" and not worker.discarded:
                self._note_failed_start(worker, worker.fault or died(worker, self.logs))

    def _note_lost(self, worker: WorkerProcess, fault: Fault) -> None:
        """A worker that is no rank ended: the others go on, and so does its slot. One that never gets
        anything done, as often as a step may fail, rests; if none of them does, that is a fault of the
        run."""
        self._note("worker_lost", host=self.name, slot=worker.slot, cause=fault.cause)
        if fault.status is not None:
            raise UserError(fault.cause) if fault.status == UserError.status else RunFailed(fault.cause)
        before, self._lost = self._lost, fault
        if before is not None and fault.repeats(before):
            raise RunFailed(in_own_code(fault))
        self._failed_starts[worker.slot] += worker.step == 0
        if self._failed_starts[worker.slot] < self.recovery.attempts:
            return
        self._let_rest(worker, fault)
        loose = [slot for slot in self.slots if slot not in self._members]
        if all(self._failed_starts[slot] >= self.recovery.attempts for slot in loose):
            trace = f"{fault.trace.rstrip()}\n" if fault.trace else ""
            often = f"failed {self.recovery.attempts} times in a row"
            raise RunFailed(
                f"{trace}{'every' if len(loose) > 1 else 'the'} worker on {self.name} {often}: {fault.cause}"
            )

    def _let_rest(self, worker: WorkerProcess, fault: Fault) -> None:
        self.slots[worker.slot] = time.monotonic() + RETRY_SECONDS
        self._note("slot_rests", host=self.name, slot=worker.slot, cause=fault.cause)

    def _note_failed_start(self, worker: WorkerProcess, fault: Fault) -> None:
        """A worker ended before it was ready: the second time, its slot rests; if all do, so does the
        host."""
        if fault.status is not None:
            raise UserError(fault.cause) if fault.status == UserError.status else RunFailed(fault.cause)
        if worker.slot in self._members:  # its peers wait for it already
            self._faults.append(
                replace(fault, rank=self._members[worker.slot], step=0, generation=self._generation)
            )
        self._failed_starts[worker.slot] += 1
        if self._failed_starts[worker.slot] < 2:
            return
        self._let_rest(worker, fault)
        if all(count >= 2 for count in self._failed_starts.values()):
            trace = f"{fault.trace.rstrip()}\n" if fault.trace else ""
            raise RunFailed(f"{trace}no worker comes up on {self.name}: {fault.cause}")

    def _start_missing_workers(self) -> None:
        """A process for every slot that does not rest."""
        for slot in self._usable_slots():
            if slot not in self._processes and self._statuses.get(slot) is None and not self._fork(slot):
                return  # one at a time: the leader is to be told in between

    def _fork(self, slot: int) -> bool:
        """Start a worker in this slot. The first one waits for the server's imports, no other for long."""
        seconds = 2 * SERVER_SECONDS if self._server_is_ready else self.recovery.start_seconds
        began = time.monotonic()
        worker, fault = fork(slot, self.start, seconds, lambda: bool(self._signals.received))
        if fault is None:
            self._processes[slot], self._server_is_ready, self._server_silent_since = worker, True, None
        elif not self._signals.received:
            self._server_silent_since = self._server_silent_since or began
            if (
                time.monotonic() - self._server_silent_since > SILENT_SERVER_SECONDS
            ):  # till then the machine may be busy
                self._note_failed_start(worker, fault)
        return fault is None

    def _usable_slots(self) -> list[int]:
        now = time.monotonic()
        return [slot for slot, rests_until in self.slots.items() if rests_until <= now]

    def _discard(self, worker: WorkerProcess) -> None:
        """End a worker that is of no use any more: that is no fault of the team's."""
        worker.discarded = True
        worker.process.kill()

    def _kill_all(self) -> None:
        for worker in self._processes.values():
            worker.process.kill()
        wake_server()  # it tells that they have ended
        for worker in self._processes.values():
            worker.process.join()

    # The leader

    def _working(self) -> list[WorkerProcess]:
        """Workers of the present team."""
        return [
            worker for worker in self._at_work() if worker.generation == self._generation and not worker.loose
        ]

    def _at_work(self) -> list[WorkerProcess]:
        """Workers of any team: some may not have let go of an earlier one yet."""
        return [worker for worker in self._processes.values() if worker.state == "working"]

    def _offered_slots(self) -> list[int]:
        """Slots that a team may use. A host that does not lead offers a slot once a worker has come up in it:
        a team that trains must not make room for a host on which none ever does."""
        return [slot for slot in self._usable_slots() if self.lead is not None or slot in self._ready]

    def _report(self) -> Report:
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
            leaving=self._signals.status is not None and self.lead is None,
        )

    def _present_faults(self) -> list[Fault]:
        """Of the present team; word of an older team may come late."""
        return [fault for fault in self._faults if fault.generation == self._generation]

    def _consult(self) -> Orders | None:
        """What the leader wants; None if it cannot be reached."""
        now = time.monotonic()
        rendezvous = self.others.rendezvous if self.others else None
        if self.lead is not None:
            self.lead.hear(self._report(), now)  # first of all: rank 0 is to be here
            for report, arrived in rendezvous.new_reports() if rendezvous else []:
                self.lead.hear(report, arrived, from_afar=True)
            for refused in rendezvous.new_refusals() if rendezvous else []:
                self.lead.note_refused(refused)
                self._record_refusal(refused)
            if self.others:
                self.others.check_lead()
            self._orders = self.lead.decide(now)
            self._record_faults(self.lead)
            for refused in self.lead.refusals[self._recorded_refusals :]:
                self._record_refusal(refused)
                if rendezvous:
                    rendezvous.refuse(refused)
            self._recorded_refusals = len(self.lead.refusals)
            self._say_what_is_missing(self.lead, now)
            if rendezvous:
                rendezvous.tell(self._orders)
            return self._orders
        if now - self._last_call >= CALL_SECONDS:
            assert self.others is not None, "a host leads, or calls its leader"
            orders = self.others.call(self._report())
            self._last_call, self._answered = time.monotonic(), orders is not None
            self._orders = orders or Orders()
        return self._orders if self._answered else None

    def _note(self, event: str, **details: Any) -> None:
        """Only the leader keeps the run's records."""
        if self.lead is not None:
            self._record(event, **details)

    def _record_faults(self, lead: Lead) -> None:
        for fault in lead.faults[self._recorded_faults :]:
            about = {"kind": fault.kind, "rank": fault.rank, "step": fault.step, "cause": fault.cause}
            self._note("fault", **about, generation=fault.generation)
        self._recorded_faults = len(lead.faults)

    def _record_refusal(self, refused: Refusal) -> None:
        self._note("refused", host=refused.host, cause=refused.why)
        print(f"refused: {refused.why}", file=sys.stderr, flush=True)

    def _say_what_is_missing(self, lead: Lead, now: float) -> None:
        """Once, if it lasts: a run that waits should not look like one that hangs."""
        if lead.lacks is None:
            self._missing_since, self._said_missing = now, False
        elif now - self._missing_since > SAY_SECONDS and not self._said_missing:
            self._said_missing = True
            print(lead.lacks, file=sys.stderr, flush=True)

    def _on_leader_unreachable(self) -> None:
        """Look for the leader, or become it. Workers that the leader takes for lost are of no use until it is
        found again."""
        assert self.others is not None, "a host leads, or calls its leader"
        silence = self.others.silence()
        if silence > LOST_SECONDS:
            for worker in self._at_work():
                self._discard(worker)
        if silence < ANSWER_SECONDS:
            self._said_missing = False
        elif not self._said_missing:
            self._said_missing = True
            minutes = self.others.patience() / 60
            print(
                f"{self.others.trouble()}; waiting for up to {minutes:.0f} min", file=sys.stderr, flush=True
            )
        self.lead = self.others.take_over()
        if self.lead is not None:
            self.address = self.others.address
            self._note("lead", host=self.name)
            print("the host that led this run is lost: this one leads it now", file=sys.stderr, flush=True)
            return
        if self._signals.received:
            raise self._cut_short(self.others.trouble())
        self.others.give_up_if_too_long()

    def _has_left(self, orders: Orders) -> bool:
        """Whether this host was asked to leave, and the run goes on without it."""
        takes_part = orders.team is not None and any(
            member.host == self.name for member in orders.team.members
        )
        return self._signals.status is not None and self.lead is None and not takes_part

    def _follow(self, orders: Orders) -> None:
        team = orders.team
        if team is None:
            return self._start_missing_workers()
        if team.generation > self._generation:
            self._generation, self._team_since = team.generation, time.monotonic()
            self._faults, self._statuses, self._step = [], {}, 0
            ranks = {member: rank for rank, member in enumerate(team.members)}
            self._members = {
                slot: ranks[Member(self.name, slot)]
                for slot in self.slots
                if Member(self.name, slot) in ranks
            }
        self._start_missing_workers()
        late = time.monotonic() - self._team_since > PARTING_SECONDS
        for worker in self._processes.values():
            if (
                worker.state == "waiting"
                and worker.generation < team.generation
                and worker.slot in self._members
            ):
                self._enlist(worker, team)
            elif (
                worker.state == "waiting"
                and self.loose
                and worker.slot not in self._members
                and orders.wish == "work"
            ):
                self._enlist(worker, team)  # again, too: its connection may have been cut
            elif (
                worker.state == "working"
                and worker.generation < team.generation
                and late
                and not worker.loose
            ):
                self._discard(worker)
            elif (
                worker.state == "working"
                and orders.wish in ("regroup", "stop")
                and worker.wished != orders.wish
            ):
                worker.wished = orders.wish
                worker.send(messages.Regroup() if orders.wish == "regroup" else messages.Stop())
        return None

    def _enlist(self, worker: WorkerProcess, team: Team) -> None:
        worker.state, worker.generation, worker.loose = (
            "working",
            team.generation,
            worker.slot not in self._members,
        )
        worker.rank = len(team.members) + worker.slot if worker.loose else self._members[worker.slot]
        worker.phase, worker.changed, worker.wished = "build", time.monotonic(), None
        worker.seconds.clear()
        local = (
            [slot for slot in self.slots if slot not in self._members]
            if worker.loose
            else sorted(self._members)
        )
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
        )
        worker.send(messages.JoinTeam(identity, team))
        write_members(self.logs, self.name, team.generation, self._at_work())

    def _end(self, orders: Orders) -> int:
        """The run has ended, well or not."""
        self._tell_other_hosts(orders)
        if not orders.message:
            for worker in self._processes.values():
                worker.send(messages.Leave())
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline and any(
                worker.process.is_alive() for worker in self._processes.values()
            ):
                self._listen()
            return self._signals.status or RESUME_ME if orders.status == RESUME_ME else orders.status
        if orders.status == RESUME_ME:
            raise self._cut_short(orders.message)
        raise UserError(orders.message) if orders.status == UserError.status else RunFailed(orders.message)

    def _cut_short(self, cause: str) -> Exception:
        return cut_short(cause, self._newest_saved(), self._step > 0, self._signals.status or RESUME_ME)

    def _tell_other_hosts(self, orders: Orders) -> None:
        """Answer until every host has called once more, or does not call any more."""
        rendezvous = self.others.rendezvous if self.others else None
        if rendezvous is None or self.lead is None:
            return
        rendezvous.tell(orders)
        others = self.lead.hosts() - {self.name}
        deadline = time.monotonic() + LAST_CALL_SECONDS
        while not rendezvous.all_know(others) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)

    # Hangs and signals

    def _watch_for_hangs(self) -> None:
        for worker in [worker for worker in self._at_work() if worker.loose and not worker.discarded]:
            if alone := find_hang([worker], self.recovery, other_hosts=False):
                self._note_lost(worker, record_hang(alone, [worker], self.logs, self._generation))
                self._discard(worker)
        working = self._working()
        hang = None if self._present_faults() else find_hang(working, self.recovery, self.others is not None)
        if hang is None:
            return
        self._faults.append(record_hang(hang, working, self.logs, self._generation))
        for worker in hang.culprits:
            self._discard(worker)

    def _answer_signals(self) -> None:
        """Pass a wish to stop on to the workers: all stop after the same step, and save. They have the time
        that they need, which only the sender knows; workers that make no progress are a hang."""
        if not self._signals.received:
            return
        training = [worker for worker in self._at_work() if worker.phase not in ("build", "restore")]
        begun = training or self._statuses or self._orders.wish != "work"
        waits = self.lead is not None and self.lead.lacks is not None and not self._at_work()
        if self.lead is not None and (waits or not begun):  # nothing has been trained that is not saved
            raise Stopped(self._signals.status or RESUME_ME)
        if self.lead is not None and self._orders.wish == "work" and self._orders.team is not None:
            self.lead.orders = replace(self._orders, wish="stop")
