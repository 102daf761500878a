"""One machine's part in a run: its workers, kept alive, watched, and matched to the team that the leader wants.

Workers are forked from a server that has torch imported (multiprocessing's forkserver), so a new one is there in a moment. A
worker whose peer died lets go of the broken team by itself and waits for the next one, which saves starting it anew; one that
does not within a few seconds is replaced. Nothing rests on the good will of a worker: it can be killed at any time.

Why not torch's elastic agent: it ends every worker of a node when one fails, its nodes have a fixed number of workers, it takes
life for progress, and its rendezvous waits out fixed timeouts. What is needed is small and is here: the judgement in team.py,
the messages in meeting.py, the processes below.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType

from shardwise.config import Recovery
from shardwise.errors import RunFailed, UserError
from shardwise.mesh import Worker
from shardwise.resilience.meeting import Caller, Meeting
from shardwise.resilience.process import Process, died
from shardwise.resilience.team import LOST_SECONDS, Fault, Lead, Member, Orders, Report, Team

INTERRUPTED = 130
"""Exit status after Ctrl-C: the state is saved, and the same command goes on from it."""
RESUME_ME = 75
"""Exit status after SIGTERM (a scheduler wants the machine back): saved; start the same command again. EX_TEMPFAIL."""

TICK_SECONDS = 0.05
CALL_SECONDS = 0.25
"""Between two calls to a leader elsewhere."""
LAST_CALL_SECONDS = 5.0
"""How long the leader answers after the end."""
PARTING_SECONDS = 3.0
"""How long a worker may take to let go of a team that broke, before it is replaced."""
ANSWER_SECONDS = 2.0
"""How long a worker may take to say where it stands."""
OTHERS_SECONDS = 5.0
"""How long to wait, in a hang without a culprit here, for another host to find one."""
SAY_SECONDS = 5.0
"""How long a run waits for workers before it says so."""
RETRY_SECONDS = 60.0
"""How long a slot rests after two workers in a row did not come up in it."""
SHUTDOWN_SECONDS = 300.0
"""How long workers may take to save after a signal before they are killed."""
GIVE_UP_SECONDS = 1800.0
"""How long a host looks for its leader."""


class Stopped(Exception):
    """The run was asked to stop when there was nothing to save, or asked twice."""

    def __init__(self, status: int) -> None:
        super().__init__("stopped at once; what was saved is kept")
        self.status = status


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
        lead: tuple[Lead, Meeting | None] | None,
        caller: Caller | None,
        record: Callable[..., None],
    ) -> None:
        self.name, self.start, self.recovery, self.logs, self.record = name, start, recovery, logs, record
        self.lead: Lead | None = lead[0] if lead else None
        self.meeting: Meeting | None = lead[1] if lead else None
        self.caller = caller
        self.address = caller.own_address() if caller else "127.0.0.1"
        self.slots = dict.fromkeys(range(slots), 0.0)
        """Each slot, and until when it rests."""
        self._stillborn = dict.fromkeys(self.slots, 0)
        self._processes: dict[int, Process] = {}
        self._generation, self._seen = 0, 0.0
        self._faults: list[Fault] = []
        self._statuses: dict[int, int] = {}
        self._members: dict[int, int] = {}
        """Of the present team: rank by slot."""
        self._step = 0
        """The last step that the present team has done itself."""
        self._signals: list[int] = []
        self._signalled = 0.0
        self._told = 0
        self._lacking_since, self._said_lacking = time.monotonic(), False
        self._called, self._heard = 0.0, time.monotonic()
        """When the leader was last called, and when it last answered."""
        self._orders = Orders()

    def run(self) -> int:
        """Until the leader says that the run has ended; the command's exit status."""
        with _Signals(self._signals):
            try:
                return self._run()
            except Stopped as stopped:
                print(stopped, file=sys.stderr)
                return stopped.status
            finally:
                self._kill_all()

    def _run(self) -> int:
        while True:
            self._listen()
            self._bury()
            self._watch_for_hangs()
            self._answer_signals()
            orders = self._consult()
            if orders is None:
                self._out_of_reach()
            elif orders.wish == "end":
                return self._end(orders)
            elif self._gone(orders):
                return RESUME_ME
            else:
                self._obey(orders)

    # Processes

    def _listen(self) -> None:
        """Take what workers say, or notice that one ended; wait a moment for it."""
        by_pipe = {process.pipe: process for process in self._processes.values()}
        sentinels = [process.process.sentinel for process in self._processes.values()]
        for ready in wait([*by_pipe, *sentinels], timeout=TICK_SECONDS):
            if isinstance(ready, Connection) and ready in by_pipe:
                self._take(by_pipe[ready])

    def _take(self, one: Process) -> None:
        try:
            while one.pipe.poll():
                kind, value = one.pipe.recv()
                getattr(self, f"_on_{kind}")(one, value)
        except (EOFError, OSError):
            pass

    def _on_waiting(self, one: Process, _: None) -> None:
        one.state, one.step, self._stillborn[one.slot] = "waiting", 0, 0

    def _on_progress(self, one: Process, value: tuple[str, int]) -> None:
        phase, step = value
        now = time.monotonic()
        if step > one.step and one.phase == phase == "step":
            one.seconds.append(now - one.changed)
            self._step = max(self._step, step) if one.generation == self._generation else self._step
        one.phase, one.step, one.changed, one.asked_where, one.where = phase, step, now, None, None

    def _on_reads(self, one: Process, rows: str) -> None:
        one.reads = rows

    def _on_broke(self, one: Process, words: str) -> None:
        fault = Fault("failed", one.rank, one.step + 1, f"a peer is gone: {words}", time.time(), one.generation, echo=True)
        self._faults.append(fault)

    def _on_failed(self, one: Process, fault: Fault) -> None:
        one.fault = fault

    def _on_done(self, one: Process, status: int) -> None:
        one.state = "done"
        if one.generation == self._generation:
            self._statuses[one.slot] = status

    def _on_where(self, one: Process, where: str) -> None:
        one.where = where

    def _bury(self) -> None:
        """Take note of workers that ended, and why."""
        for one in [one for one in self._processes.values() if not one.process.is_alive()]:
            self._take(one)
            one.pipe.close()
            del self._processes[one.slot]
            if one.state == "working" and not one.discarded:
                self._faults.append(one.fault or died(one, self.logs))
            elif one.state == "starting" and not one.discarded:
                self._not_up(one, one.fault or died(one, self.logs))

    def _not_up(self, one: Process, fault: Fault) -> None:
        """A worker ended before it was ready: the second time, its slot rests; if all do, so does the host."""
        if fault.status is not None:
            raise UserError(fault.cause) if fault.status == UserError.status else RunFailed(fault.cause)
        if one.slot in self._members:  # its peers wait for it already
            self._faults.append(replace(fault, rank=self._members[one.slot], step=0, generation=self._generation))
        self._stillborn[one.slot] += 1
        if self._stillborn[one.slot] < 2:
            return
        self.slots[one.slot] = time.monotonic() + RETRY_SECONDS
        self.record("slot_rests", host=self.name, slot=one.slot, cause=fault.cause)
        if all(count >= 2 for count in self._stillborn.values()):
            trace = f"{fault.trace.rstrip()}\n" if fault.trace else ""
            raise RunFailed(f"{trace}no worker comes up on {self.name}: {fault.cause}")

    def _fill(self) -> None:
        """A process for every slot that does not rest."""
        for slot in self._fit():
            if slot not in self._processes and self._statuses.get(slot) is None:
                self._processes[slot] = self._fork(slot)

    def _fork(self, slot: int) -> Process:
        context = multiprocessing.get_context("forkserver")
        ours, theirs = context.Pipe()
        process = context.Process(target=self.start, args=(slot, theirs), daemon=True)
        process.start()
        theirs.close()
        return Process(slot, process, ours)

    def _fit(self) -> list[int]:
        now = time.monotonic()
        return [slot for slot, rests_until in self.slots.items() if rests_until <= now]

    def _discard(self, one: Process) -> None:
        """End a worker that is of no use any more: that is no fault of the team's."""
        one.discarded = True
        one.process.kill()

    def _kill_all(self) -> None:
        for one in self._processes.values():
            one.process.kill()
        for one in self._processes.values():
            one.process.join()

    # The leader

    def _report(self) -> Report:
        working = [one for one in self._processes.values() if one.state == "working" and one.generation == self._generation]
        ended = self._members and self._statuses.keys() >= self._members.keys()
        return Report(
            host=self.name,
            address=self.address,
            slots=tuple(self._fit()),
            generation=self._generation,
            idle=not working,
            step=self._step,
            faults=tuple(self._present_faults()),
            done=max(self._statuses.values()) if ended else None,
            leaving=bool(self._signals) and self.lead is None,
        )

    def _present_faults(self) -> list[Fault]:
        """Of the present team; word of an older one may come late."""
        return [fault for fault in self._faults if fault.generation == self._generation]

    def _consult(self) -> Orders | None:
        """What the leader wants; None if it cannot be reached."""
        now = time.monotonic()
        if self.lead is not None:
            self.lead.hear(self._report(), now)  # first of all: rank 0 is to be here
            for report, heard in self.meeting.heard() if self.meeting else []:
                self.lead.hear(report, heard)
            self._orders = self.lead.decide(now)
            self._tell_faults(self.lead)
            self._say_what_lacks(self.lead, now)
            if self.meeting:
                self.meeting.tell(self._orders)
            return self._orders
        if now - self._called >= CALL_SECONDS:
            assert self.caller is not None, "a host leads, or calls its leader"
            orders = self.caller.call(self._report())
            self._called = time.monotonic()
            self._heard = self._heard if orders is None else self._called
            self._orders = orders or Orders()
        return self._orders if self._heard == self._called else None

    def _tell_faults(self, lead: Lead) -> None:
        for fault in lead.faults[self._told :]:
            facts = {"kind": fault.kind, "rank": fault.rank, "step": fault.step, "cause": fault.cause}
            self.record("fault", **facts, generation=fault.generation)
        self._told = len(lead.faults)

    def _say_what_lacks(self, lead: Lead, now: float) -> None:
        """Once, if it lasts: a run that waits should not look like one that hangs."""
        if lead.lacks is None:
            self._lacking_since, self._said_lacking = now, False
        elif now - self._lacking_since > SAY_SECONDS and not self._said_lacking:
            self._said_lacking = True
            print(lead.lacks, file=sys.stderr, flush=True)

    def _out_of_reach(self) -> None:
        """Workers that the leader takes for lost are of no use: the run goes on without them until it is found again."""
        silence = time.monotonic() - self._heard
        if silence > LOST_SECONDS:
            for one in self._processes.values():
                if one.state == "working":
                    self._discard(one)
        if silence > GIVE_UP_SECONDS or self._signals:
            assert self.caller is not None, "a host leads, or calls its leader"
            raise RunFailed(f"the run's first node, {self.caller.address}:{self.caller.port}, cannot be reached")

    def _gone(self, orders: Orders) -> bool:
        """Whether this host was asked to leave, and the run goes on without it."""
        here = orders.team is not None and any(member.host == self.name for member in orders.team.members)
        return bool(self._signals) and self.lead is None and not here

    def _obey(self, orders: Orders) -> None:
        team = orders.team
        if team is None:
            return self._fill()
        if team.generation > self._generation:
            self._generation, self._seen = team.generation, time.monotonic()
            self._faults, self._statuses, self._step = [], {}, 0
            ranks = {member: rank for rank, member in enumerate(team.members)}
            self._members = {slot: ranks[Member(self.name, slot)] for slot in self.slots if Member(self.name, slot) in ranks}
        self._fill()
        late = time.monotonic() - self._seen > PARTING_SECONDS
        for one in self._processes.values():
            if one.state == "waiting" and one.generation < team.generation and one.slot in self._members:
                self._enlist(one, team)
            elif one.state == "working" and one.generation < team.generation and late:
                self._discard(one)
            elif one.state == "working" and orders.wish in ("regroup", "stop") and one.wished != orders.wish:
                one.wished = orders.wish
                one.send(orders.wish)
        return None

    def _enlist(self, one: Process, team: Team) -> None:
        one.state, one.generation, one.rank = "working", team.generation, self._members[one.slot]
        one.phase, one.changed, one.wished = "build", time.monotonic(), None
        one.seconds.clear()
        local = sorted(self._members)
        worker = Worker(
            rank=one.rank,
            world=len(team.members),
            local_rank=local.index(one.slot),
            local_world=len(local),
            address=team.address,
            port=team.port,
            launcher="shardwise",
            generation=team.generation,
        )
        one.send("team", (worker, team))
        self._write_down(team)

    def _write_down(self, team: Team) -> None:
        """Who is who, for people and for the drill."""
        here = [
            {"rank": one.rank, "slot": one.slot, "pid": one.pid} for one in self._processes.values() if one.state == "working"
        ]
        known = {"host": self.name, "generation": team.generation, "supervisor": os.getpid(), "workers": here}
        path = self.logs / f"workers-{self.name}.json"
        path.with_suffix(".part").write_text(json.dumps(known, indent=1) + "\n")
        path.with_suffix(".part").rename(path)

    def _end(self, orders: Orders) -> int:
        """The run has ended, well or not."""
        self._let_others_know(orders)
        if not orders.message:
            for one in self._processes.values():
                one.send("go")
            deadline = time.monotonic() + 10.0
            while time.monotonic() < deadline and any(one.process.is_alive() for one in self._processes.values()):
                self._listen()
            stopped = orders.status in (INTERRUPTED, RESUME_ME) and signal.SIGINT not in self._signals
            return RESUME_ME if stopped else orders.status
        raise UserError(orders.message) if orders.status == UserError.status else RunFailed(orders.message)

    def _let_others_know(self, orders: Orders) -> None:
        """Answer until every host of the team has called once more, or does not call any more."""
        if self.meeting is None or orders.team is None:
            return
        self.meeting.tell(orders)
        others = {member.host for member in orders.team.members} - {self.name}
        deadline = time.monotonic() + LAST_CALL_SECONDS
        while not self.meeting.all_know(others) and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)

    # Hangs and signals

    def _watch_for_hangs(self) -> None:
        now = time.monotonic()
        working = [one for one in self._processes.values() if one.state == "working" and one.generation == self._generation]
        late = [one for one in working if now - one.changed > one.hang_limit(self.recovery)]
        if not late or self._present_faults():
            return
        if late[0].asked_where is None:
            for one in working:
                one.asked_where, one.where = now, None
                one.send("where")
            return
        waited = now - late[0].asked_where
        silent = [one for one in working if one.where is None]
        if waited < ANSWER_SECONDS and silent:
            return
        elsewhere = self.lead is None or self.meeting is not None
        if not silent and elsewhere and waited < ANSWER_SECONDS + OTHERS_SECONDS:
            return
        self._end_hang(working, silent or working, now - late[0].changed)

    def _end_hang(self, working: list[Process], culprits: list[Process], seconds: float) -> None:
        """Keep what every worker said, and end those that cannot go on."""
        told = self.logs / f"hang-{self._generation}.txt"
        silence = "does not answer: it is stopped, or stuck in code that holds Python's lock\n"
        told.write_text("\n".join(f"rank {one.rank}, step {one.step + 1}: {one.where or silence}" for one in working))
        silent = [one for one in culprits if one.where is None]
        for one in silent:
            os.kill(one.pid, signal.SIGUSR1)  # its stacks go to its log, should it be able to
        ranks = ", ".join(str(one.rank) for one in culprits)
        who = f"rank {ranks} does not answer" if silent else "every worker waits for another"
        cause = f"no step was done for {seconds:.0f} s, and {who}; the stacks are in {told}"
        rank = culprits[0].rank if silent else None
        fault = Fault("hung", rank, culprits[0].step + 1, cause, time.time(), self._generation, reads=culprits[0].reads)
        self._faults.append(fault)
        if silent:
            time.sleep(0.1)
        for one in culprits:
            self._discard(one)

    def _answer_signals(self) -> None:
        """Pass a wish to stop on to the workers: all stop after the same step, and save."""
        if not self._signals:
            self._signalled = time.monotonic()
            return
        if time.monotonic() - self._signalled > SHUTDOWN_SECONDS:
            raise RunFailed(
                f"the workers did not stop within {SHUTDOWN_SECONDS:.0f} s and were ended; older checkpoints are kept"
            )
        working = [one for one in self._processes.values() if one.state == "working" and one.phase not in ("build", "restore")]
        again = len(self._signals) > 1 and signal.SIGINT in self._signals[1:]
        begun = working or self._statuses or self._orders.wish != "work"
        if again or (not begun and self.lead is not None):  # nothing has been trained that is not saved
            raise Stopped(INTERRUPTED if signal.SIGINT in self._signals else RESUME_ME)
        if self.lead is not None and self._orders.wish == "work" and self._orders.team is not None:
            self.lead.orders = replace(self._orders, wish="stop")


class _Signals:
    """Collects Ctrl-C and SIGTERM while it lasts."""

    def __init__(self, received: list[int]) -> None:
        self._received = received

    def __enter__(self) -> None:
        def note(number: int, _: FrameType | None) -> None:
            self._received.append(number)

        self._before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
