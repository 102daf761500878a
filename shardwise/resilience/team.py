"""Decide which workers train together.

A *host* is one machine with a few *slots*, each for one worker. A *team* is a set of slots that train
together under one layout; its number is its *generation*. When a team breaks (a worker died or hung, or a
host was lost) or can grow, the next generation is formed from the slots that are available, and continues
from the newest state.

One host leads, and the others call it. `Leader` contains only its decisions: from the reports of the hosts
and the time, it decides which team there should be. It starts no process and opens no socket, so every case
can be tested. A run has one leader so that it cannot split into two: hosts that cannot reach the leader do
not train.

If the leader is lost, another host takes over (leader_file.py). Its `Leader` begins with the last orders that
all hosts received, waits until the hosts of that team have called or are lost, and forms the next team.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PlainValidator, TypeAdapter

from shardwise.errors import RunFailed, UserError
from shardwise.files import Json
from shardwise.observe import present_time
from shardwise.plans import Plan
from shardwise.resilience.stopping import RESUME_ME

LOST_SECONDS = 10.0
"""Seconds without a report after which a host is lost."""
ROUNDS_WITHOUT_PROGRESS = 3
"""How many times `step_attempts` faults at various steps may follow each other without progress."""
QUIET_SECONDS = 1.0
"""Seconds without a report after which a host may be lost, so that no team is formed with it. Hosts call four
times a second.
"""
FIRST_TEAM_SECONDS = 30.0
"""Seconds for which the first team waits for workers beyond the minimum."""
CAUSE_SECONDS = 1.0
"""Seconds to wait for the cause after a worker has reported that a peer is gone."""
SETTLE_SECONDS = 1.0
"""Seconds for which more workers must be available before a working team makes room for them."""


@dataclass(frozen=True)
class Member:
    """One slot of one host."""

    host: str
    slot: int


@dataclass(frozen=True)
class Fault:
    """Why a team broke, and which worker caused it."""

    kind: Literal["died", "failed", "hung", "host lost"]
    rank: int | None
    step: int
    cause: str
    at: float
    generation: int
    status: int | None = None
    """Exit status of the command, if another attempt cannot help; else None."""
    trace: str = ""
    """Traceback of the exception, if there was one."""
    reads: str = ""
    """Rows that the worker read, if it could not report the fault itself."""
    is_consequence: bool = False
    """Whether the fault only says that a peer is gone, which another fault explains."""
    user_code_line: str = ""
    """Line of the user's code in which the exception was raised, if it was raised there (user_code.py)."""

    @property
    def trace_before_message(self) -> str:
        """The traceback and a line end, to be printed before a message; empty if there is no traceback."""
        return f"{self.trace.rstrip()}\n" if self.trace else ""

    def repeats(self, other: Fault) -> bool:
        """Return whether the same line of the user's code failed in the same step, so that it will fail
        again.
        """
        return bool(self.user_code_line) and (self.user_code_line, self.step) == (
            other.user_code_line,
            other.step,
        )


def _plan_from_json(value: Json) -> Plan:
    """Return the plan of a received message. Raise a ValueError if it is none."""
    try:
        return Plan.from_json(value)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no plan: {error!r}") from None


@dataclass(frozen=True)
class Team:
    """Workers that train together, with `members` in the order of their ranks."""

    generation: int
    members: tuple[Member, ...]
    plan: Annotated[Plan, PlainValidator(_plan_from_json)]
    """Plan that they train by."""
    address: str
    port: int
    store_name: str
    """Secret prefix under which the workers find each other in the store at that address and port."""
    formed: float
    """Time at which the team was formed."""
    fault: Fault | None = None
    """Fault of the former team from which this one recovers."""
    reached: int = 0
    """Last step that any earlier team had completed."""

    @property
    def hosts(self) -> set[str]:
        """Names of the hosts of its members."""
        return {member.host for member in self.members}

    def to_json(self) -> Json:
        """Return the value that is sent to the hosts."""
        members = [asdict(member) for member in self.members]
        fault = asdict(self.fault) if self.fault else None
        return {**vars(self), "members": members, "plan": self.plan.to_json(), "fault": fault}


@dataclass(frozen=True)
class Report:
    """The state of a host, which it sends to the leader several times a second."""

    host: str
    address: str
    slots: tuple[NonNegativeInt, ...]
    generation: NonNegativeInt = 0
    """Newest team that its workers know."""
    idle: bool = True
    """Whether none of its workers is in that team now."""
    step: NonNegativeInt = 0
    """Last step that this team has completed; 0 if none."""
    faults: tuple[Fault, ...] = ()
    done: int | None = None
    """Exit status of its workers, once all of the team's workers here have ended well."""
    leaving: bool = False
    """Whether the host was asked to stop and leaves the run."""

    def to_json(self) -> Json:
        """Return the value that is sent to the leader."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Report:
        """Return a received report. Raise a ValueError if it is none."""
        return _REPORT.validate_json(json.dumps(value), strict=True)

    def without_traces(self) -> Report:
        """Return a shorter report, with only the kind, the place and the beginning of the cause of each
        fault.
        """
        faults = (replace(fault, trace="", cause=fault.cause[:500]) for fault in self.faults[:16])
        return replace(self, faults=tuple(faults))


@dataclass(frozen=True)
class Orders:
    """What the leader wants from every host. `regroup` means: finish the step, save, and wait for the next
    team.
    """

    wish: Literal["work", "regroup", "stop", "end"] = "work"
    team: Team | None = None
    status: int = 0
    message: str = ""

    def to_json(self) -> Json:
        """Return the value that is sent to the hosts."""
        return {**vars(self), "team": self.team.to_json() if self.team else None}

    @classmethod
    def from_json(cls, value: object) -> Orders:
        """Return received orders. Raise a ValueError if they are none."""
        return _ORDERS.validate_json(json.dumps(value), strict=True)


@dataclass(frozen=True)
class Refusal:
    """A host that may not take part in the run, and why. The run continues without it."""

    host: str
    workers: int
    why: str
    status: int = UserError.status

    def orders(self) -> Orders:
        """Return the orders that the host receives."""
        return Orders("end", None, self.status, self.why)


_REPORT, _ORDERS = TypeAdapter(Report), TypeAdapter(Orders)
"""Adapters that check every field of a message from another host."""


@dataclass(frozen=True)
class Bounds:
    """Minimum and maximum number of workers of a run."""

    minimum: int
    maximum: int


MakePlan = Callable[[int], Plan | None]
"""Function that returns the plan for at most this number of workers; None if no layout is possible."""


class Leader:
    """The decisions of the leader: it receives the reports of all hosts, and gives orders to all."""

    def __init__(
        self, bounds: Bounds, make_plan: MakePlan, step_attempts: int, port: Callable[[], int]
    ) -> None:
        self.bounds, self.make_plan, self.step_attempts = bounds, make_plan, step_attempts
        self.port = port
        """Function that returns the port of the workers' store. It is called for each team, because a store
        can be lost."""
        self.orders = Orders()
        self._store_name = secrets.token_hex(16)
        self.faults: list[Fault] = []
        """All faults so far, one for each team that broke: its first cause."""
        self._failed_attempts: list[Fault] = []
        """Faults that count as a failed attempt at their step."""
        self._noticed = (0, 0.0)
        """Generation that broke last, and the time at which the leader first learned of it."""
        self._known_generations: dict[str, int] = {}
        """Newest generation that each host has reported."""
        self.missing: str | None = None
        """What prevents the next team from being formed."""
        self._reports: dict[str, tuple[Report, float]] = {}
        self._enough_since: float | None = None
        self._reached = 0
        self._furthest, self._without_progress = 0, 0
        """Furthest step of any fault, and the number of later faults that came no further."""
        self._heard_at: dict[tuple[str, int, int | None], float] = {}
        """Time at which a fault of a host, a generation and a rank was first reported."""
        self.refusals: list[Refusal] = []
        """Hosts that failed before their first step in a run that trains. The run continues without them."""
        self._proven: set[str] = set()
        """Hosts of any team that completed a step."""
        self._new_host_faults: dict[str, int] = {}
        """For each host without such a team, the number of its faults."""
        self._refused_workers = 0
        """Number of workers of hosts that were refused before the first team was formed."""
        self._awaited: dict[str, float] = {}
        """Hosts that must report before the next team is formed, and until when."""

    def take_over(self, orders: Orders, this_host: str, former_leader: str, now: float) -> None:
        """Lead a run whose leader is lost.

        Continue from its last orders, as soon as the other hosts have called or are lost too.
        """
        self.orders = replace(orders, wish="work") if orders.wish in ("work", "regroup") else orders
        hosts = orders.team.hosts if orders.team else set()
        self._awaited = dict.fromkeys(hosts - {this_host, former_leader}, now + LOST_SECONDS)
        self._reached = orders.team.reached if orders.team else 0

    def receive_report(self, report: Report, now: float, from_other_host: bool = False) -> None:
        """Record a report of a host.

        Faults on another machine count from the time at which they arrive here, because its clock may differ.
        """
        if any(refused.host == report.host for refused in self.refusals):
            return
        if from_other_host:
            faults = (self._stamped(report.host, fault) for fault in report.faults)
            report = replace(report, faults=tuple(faults))
        self._reports[report.host] = (report, now)
        self._known_generations[report.host] = report.generation
        self._awaited.pop(report.host, None)
        self._reached = max(self._reached, report.step)

    def note_refused(self, refused: Refusal) -> None:
        """Record that a host called which does not fit this run.

        Before the first team this ends the run if it cannot begin without the host's workers: if every host
        was started once, no other host would take its place.
        """
        if self.orders.team is None and self.orders.wish != "end":
            self._refused_workers += refused.workers
            if self.bounds.maximum - self._refused_workers < self.bounds.minimum:
                self.orders = refused.orders()

    def _stamped(self, host: str, fault: Fault) -> Fault:
        """Return the fault with the time at which it was first reported."""
        at = self._heard_at.setdefault((host, fault.generation, fault.rank), present_time())
        return replace(fault, at=at)

    def hosts(self) -> set[str]:
        """Return the hosts that have reported lately."""
        return set(self._reports)

    def decide(self, now: float) -> Orders:
        """Return the orders for all hosts, given the reports so far."""
        self._awaited = {host: until for host, until in self._awaited.items() if now < until}
        if self.orders.wish != "end" and not self._awaited:
            team = self.orders.team
            for name in [name for name, (_, seen) in self._reports.items() if now - seen > LOST_SECONDS]:
                del self._reports[name]
            if team is None:
                self._form(now, None)
            else:
                self._supervise(team, now)
        return self.orders

    def _supervise(self, team: Team, now: float) -> None:
        """Decide what follows from the state of the present team: broken, done, idle, or at work."""
        hosts = team.hosts
        if self._has_stepped(team):
            self._proven |= hosts
        present = self._reports_of(team)
        done = [report.done for report in present if report.done is not None]
        if faults := self._faults_of(team):
            self._handle_faults(team, faults, now)
        elif len(done) == len(hosts):
            self.orders = replace(self.orders, wish="end", status=max(done))
        elif self.orders.wish == "regroup":
            if len(present) == len(hosts) and all(report.idle for report in present):
                self._regroup(present, now)
        elif self.orders.wish == "work":
            self._reconsider(team, now)

    def _reports_of(self, team: Team) -> list[Report]:
        reports = (self._reports[name][0] for name in team.hosts & self._reports.keys())
        return [report for report in reports if report.generation == team.generation]

    def _faults_of(self, team: Team) -> list[Fault]:
        """Return the faults of this team: those reported, and those of lost hosts."""
        reported = [fault for report, _ in self._reports.values() for fault in report.faults]
        faults = [fault for fault in reported if fault.generation == team.generation]
        faults += [_lost(team, name, self._reached) for name in team.hosts - self._reports.keys()]
        # A team that broke stays broken.
        return faults or [fault for fault in self.faults[-1:] if fault.generation == team.generation]

    def _regroup(self, present: list[Report], now: float) -> None:
        """Form the next team. If a host leaves and too few workers remain, end the run."""
        self._form(now, None)
        if self.missing is not None and any(report.leaving for report in present):
            self.orders = replace(self.orders, wish="end", status=RESUME_ME)

    def _handle_faults(self, team: Team, faults: list[Fault], now: float) -> None:
        """After a team broke, wait for the cause, refuse a new host, end the run, or form the next team."""
        if self._noticed[0] != team.generation:
            self._noticed = (team.generation, now)
        if all(fault.is_consequence for fault in faults) and self._cause_may_come(faults, now):
            return
        if new_host_faults := self._faults_of_new_hosts(team, faults):
            self._handle_fault_of_new_host(team, new_host_faults[0], now)
            return
        fatal = [fault for fault in faults if fault.status is not None]
        first = min(
            fatal or faults, key=lambda fault: (fault.is_consequence, fault.kind == "host lost", fault.at)
        )
        self._count_fault(team, first)
        reason = self._reason_to_end(first)
        if reason is None:
            self._form(now, self._with_start_of_recovery(self.faults[-1]))
        else:
            status, message = reason
            self.orders = replace(self.orders, wish="end", status=status, message=message)

    def _count_fault(self, team: Team, fault: Fault) -> None:
        """Record the fault of a team, once per team."""
        if self.faults and self.faults[-1].generation == fault.generation:
            return
        self.faults.append(fault)
        if self._is_failed_attempt(team, fault):
            self._failed_attempts.append(fault)
            self._without_progress = 0 if fault.step > self._furthest else self._without_progress + 1
            self._furthest = max(self._furthest, fault.step)

    def _reason_to_end(self, fault: Fault) -> tuple[int, str] | None:
        """Return the exit status and the message if the run must end after this fault, else None."""
        same_step = [each for each in self._failed_attempts[-self.step_attempts :] if each.step == fault.step]
        if fault.status is not None:
            return fault.status or 1, fault.cause
        if self.orders.wish == "stop":  # each host adds which checkpoint is saved
            return RESUME_ME, f"a worker was lost while the run was stopping: {fault.cause}"
        if len(self.faults) > 1 and fault.repeats(self.faults[-2]):
            return 1, repeated_line_message(fault)
        if len(same_step) == self.step_attempts:
            return 1, _failed_attempts_message(same_step)
        if self._without_progress == ROUNDS_WITHOUT_PROGRESS * self.step_attempts:
            return 1, (
                f"{self._without_progress} failures in a row, and none got past step {self._furthest}: is "
                "checkpoint.every small enough for how often workers are lost? "
                f"The last one: {fault.cause}"
            )
        return None

    def _faults_of_new_hosts(self, team: Team, faults: list[Fault]) -> list[Fault]:
        """Return the faults that began on new hosts. Those that another attempt cannot mend come first."""
        new_hosts = self._new_hosts(team)
        matching = [
            fault for fault in faults if not fault.is_consequence and _host_of(team, fault) in new_hosts
        ]
        return sorted(matching, key=lambda fault: (fault.status is None, fault.at))

    def _new_hosts(self, team: Team) -> set[str]:
        """Return the hosts of a team that are new to the run, if the team has not completed a step.

        A host is new if none of its teams has completed a step. If all hosts are new, the set is empty. A
        failure of a new host does not count as a failure of the run.
        """
        hosts = team.hosts
        return hosts - self._proven if hosts & self._proven and not self._has_stepped(team) else set()

    def _handle_fault_of_new_host(self, team: Team, fault: Fault, now: float) -> None:
        """Continue after a fault of a host that is new to the run.

        The host is refused if another attempt cannot help, or if it has failed as often as a step may.
        """
        host = _host_of(team, fault)
        if not self.faults or self.faults[-1].generation != fault.generation:
            self.faults.append(fault)
            self._new_host_faults[host] = self._new_host_faults.get(host, 0) + 1
            if fault.status is not None or self._new_host_faults[host] >= self.step_attempts:
                workers = sum(member.host == host for member in team.members)
                problem = f"host {host} failed before its first step in this run, which goes on without it"
                why = f"{problem}: {fault.cause}"
                self.refusals.append(Refusal(host, workers, why, fault.status or RunFailed.status))
                self._reports.pop(host, None)
        self._form(now, self._with_start_of_recovery(self.faults[-1]))

    def _is_failed_attempt(self, team: Team, fault: Fault) -> bool:
        """Return whether the fault counts as a failed attempt at its step.

        The loss of a host that did not know of the team yet does not count: the team had not really started,
        and the fault for which it was formed has already been counted.
        """
        if fault.kind != "host lost":
            return True
        return self._known_generations.get(_host_of(team, fault), 0) >= team.generation

    def _with_start_of_recovery(self, fault: Fault) -> Fault:
        """Return the fault with the time at which recovery began.

        Waiting for workers is part of the recovery, and so is a team that was formed to recover from an
        earlier fault and broke before it completed a step.
        """
        team = self.orders.team
        if team is not None and team.fault is not None and not self._has_stepped(team):
            return replace(fault, at=min(fault.at, team.fault.at))
        return fault

    def _cause_may_come(self, faults: list[Fault], now: float) -> bool:
        """Return whether some host may still report why a peer is gone, or turn out to be lost."""
        return (
            self._may_be_lost(now, since=self._noticed[1])
            or present_time() - min(fault.at for fault in faults) < CAUSE_SECONDS
        )

    def _may_be_lost(self, now: float, since: float = 0.0) -> bool:
        """Return whether some host has not called lately, or not since this time."""
        return any(seen < since or now - seen >= QUIET_SECONDS for _, seen in self._reports.values())

    def _form(self, now: float, fault: Fault | None) -> None:
        """Form the next team if there are enough workers. The first team waits for more workers for a while.

        After a fault each host must have called again: a host that died with the former team would otherwise
        be put into the next one, which would fail for the same reason.
        """
        if self._may_be_lost(now, since=self._noticed[1] if fault is not None else 0.0):
            return
        before, slots = self.orders.team, self._slots()
        plan = (
            self.make_plan(min(len(slots), self.bounds.maximum))
            if len(slots) >= self.bounds.minimum
            else None
        )
        if plan is None or plan.world < self.bounds.minimum:
            self._enough_since = None
            self.missing = self._missing_workers(len(slots))
            return
        self.missing = None
        self._enough_since = now if self._enough_since is None else self._enough_since
        waited = now - self._enough_since
        if before is None and len(slots) < self.bounds.maximum and waited < FIRST_TEAM_SECONDS:
            return
        team = Team(
            generation=self._newest_generation() + 1,
            members=tuple(slots[: plan.world]),
            plan=plan,
            address=self._reports[slots[0].host][0].address,
            port=self.port(),
            store_name=self._store_name,
            formed=present_time(),
            fault=fault,
            reached=self._reached,
        )
        self.orders, self._enough_since = Orders("work", team), None

    def _newest_generation(self) -> int:
        """Return the newest generation that the leader or any host knows."""
        present = self.orders.team.generation if self.orders.team else 0
        return max([present, *(report.generation for report, _ in self._reports.values())])

    def _missing_workers(self, count: int) -> str:
        """Return why no team can be formed from this number of workers."""
        if count < self.bounds.minimum:
            why = f"at least {self.bounds.minimum} are needed"
        else:
            why = "but the job has no layout for that number"
        return f"waiting for workers: {count} {'is' if count == 1 else 'are'} available, {why}"

    def _reconsider(self, team: Team, now: float) -> None:
        """Decide whether a working team should make room for more workers, or let a host go."""
        leaving = {name for name, (report, _) in self._reports.items() if report.leaving}
        slots = self._slots()
        if leaving & team.hosts:
            self._let_hosts_go(len(slots))
            return
        grows = len(slots) > len(team.members) and not self._may_be_lost(now)
        plan = self.make_plan(min(len(slots), self.bounds.maximum)) if grows else None
        if plan is None or plan.world <= len(team.members):
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        elif now - self._enough_since >= SETTLE_SECONDS and self._has_stepped(team):
            self.orders, self._enough_since = replace(self.orders, wish="regroup"), None

    def _let_hosts_go(self, left: int) -> None:
        """Regroup if the workers that are left are enough for a team; otherwise stop the run."""
        enough = left >= self.bounds.minimum and self.make_plan(left) is not None
        self.orders = replace(self.orders, wish="regroup" if enough else "stop")

    def _has_stepped(self, team: Team) -> bool:
        """Return whether this team has completed a step. Interrupting it earlier would waste its start."""
        reports = (report for report, _ in self._reports.values())
        return any(report.step > 0 for report in reports if report.generation == team.generation)

    def _slots(self) -> list[Member]:
        """Return the slots that can be used, those of the leader's host first.

        The order of hosts is that of their first reports.
        """
        reports = [report for report, _ in self._reports.values() if not report.leaving]
        return [Member(report.host, slot) for report in reports for slot in report.slots]


def _host_of(team: Team, fault: Fault) -> str:
    """Return the host of the worker that failed; empty if no worker did."""
    return team.members[fault.rank].host if fault.rank is not None and fault.rank < len(team.members) else ""


def _lost(team: Team, host: str, step: int) -> Fault:
    """Return the fault of a host that is lost."""
    rank = next(rank for rank, member in enumerate(team.members) if member.host == host)
    cause = f"the leader has not heard from host {host} for {LOST_SECONDS:g} s"
    return Fault("host lost", rank, step + 1, cause, present_time(), team.generation)


def repeated_line_message(fault: Fault) -> str:
    """Return the message about a line of the user's code that failed twice, after the traceback."""
    where = f"at step {fault.step}" if fault.step else "before the first step"
    told = f"{fault.cause}. It failed twice in this line {where}, so the run stops"
    log = "" if fault.rank is None else f"; logs/rank-{fault.rank}.log of the run has all frames"
    return f"{fault.trace_before_message}{told}{log}"


def _failed_attempts_message(faults: list[Fault]) -> str:
    """Return the message about a step that failed in all attempts."""
    last = faults[-1]
    who = "" if last.rank is None else f" (rank {last.rank})"
    where = f"step {last.step}" if last.step else "the start, before the first step,"
    data = f"; it had {last.reads}" if last.reads else ""
    return (
        f"{last.trace_before_message}{where} failed {len(faults)} times in a row, so the run stops instead "
        f"of trying it forever. The last time{who}: {last.cause}{data}"
    )
