"""Who trains together, and who decides it.

A *host* is one machine with a few *slots*, each fit for one worker. A *team* is a set of slots that train
together under one layout; its number is its *generation*. When a team breaks (a worker died, hung, or a host
was lost) or can grow, the next generation is formed from the slots that are there, and goes on from the
newest state.

One host leads: the one at whose address the others meet. `Lead` is its judgement and nothing else: it is told
what each host reports and what time it is, and says which team there should be. It starts no process and
opens no socket, so every case can be tried in a test. That one host leads is also what keeps a run from
becoming two: hosts that cannot reach it train nothing.

Should the leader be lost, another host takes over (resilience/meeting.py): its `Lead` begins with the orders
that all hosts have last heard, waits until the hosts of that team have called or are lost, and forms the next
team.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import NonNegativeInt, PlainValidator, TypeAdapter

from shardwise.errors import RunFailed, UserError
from shardwise.observe import present_time
from shardwise.plan import Plan
from shardwise.resilience.stopping import RESUME_ME

LOST_SECONDS = 10.0
"""A host that was not heard of for this long is lost."""
FRUITLESS = 3
"""So many times the attempts at one step may a run fail at various steps without getting on."""
QUIET_SECONDS = 1.0
"""A host that was not heard of for this long may be lost: no team is formed with it. Hosts call four times a
second."""
PATIENCE_SECONDS = 30.0
"""How long the first team waits for the workers above the minimum."""
ECHO_SECONDS = 1.0
"""How long to wait for the cause once a worker says that a peer is gone."""
SETTLE_SECONDS = 1.0
"""How long more workers must be there before a team that works makes room for them."""


@dataclass(frozen=True)
class Member:
    """One slot of one host."""

    host: str
    slot: int


@dataclass(frozen=True)
class Fault:
    """Why a team broke."""

    kind: Literal["died", "failed", "hung", "host lost"]
    rank: int | None
    step: int
    cause: str
    at: float
    generation: int
    status: int | None = None
    """Set where trying again cannot help: what the command ends with."""
    trace: str = ""
    reads: str = ""
    """What of the step's data was the worker's, where it could not say so itself."""
    echo: bool = False
    """Whether it only tells that a peer is gone, which some other fault explains."""
    own_line: str = ""
    """Of the user's own code, if it rose there (own_code.py)."""

    def repeats(self, other: Fault) -> bool:
        """Whether the same line of the user's code failed in the same step: then it will again."""
        return bool(self.own_line) and (self.own_line, self.step) == (other.own_line, other.step)


def _plan_from_json(value: Any) -> Plan:
    try:
        return Plan.from_json(value)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no plan: {error!r}") from None


@dataclass(frozen=True)
class Team:
    """Workers that train together: `members` in the order of their ranks."""

    generation: int
    members: tuple[Member, ...]
    plan: Annotated[Plan, PlainValidator(_plan_from_json)]
    """What they train by."""
    address: str
    port: int
    store_name: str
    """Under which its workers find each other in the store at that address and port: nobody else knows it."""
    formed: float
    fault: Fault | None = None
    reached: int = 0
    """The last step that any team before this one had done."""

    def to_json(self) -> dict[str, Any]:
        """As sent to the hosts."""
        members = [asdict(member) for member in self.members]
        fault = asdict(self.fault) if self.fault else None
        return {**vars(self), "members": members, "plan": self.plan.to_json(), "fault": fault}


@dataclass(frozen=True)
class Report:
    """What a host says of itself, again and again."""

    host: str
    address: str
    slots: tuple[NonNegativeInt, ...]
    generation: NonNegativeInt = 0
    """The newest team that its workers know of."""
    idle: bool = True
    """Whether all its workers have left that team."""
    step: NonNegativeInt = 0
    """The last step that the team has done itself; 0: none yet."""
    faults: tuple[Fault, ...] = ()
    done: int | None = None
    """The exit status of its workers, once all of the team's have ended well."""
    leaving: bool = False

    def to_json(self) -> dict[str, Any]:
        """As sent to the leader."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Report:
        """As received; a ValueError where it is no report."""
        return _REPORT.validate_json(json.dumps(value), strict=True)

    def without_traces(self) -> Report:
        """The same, shorter: of each fault only the kind, the place and the beginning of its cause."""
        return replace(
            self,
            faults=tuple(replace(fault, trace="", cause=fault.cause[:500]) for fault in self.faults[:16]),
        )


@dataclass(frozen=True)
class Orders:
    """What the leader wants of every host. `regroup`: finish the step, save, and wait for the next team."""

    wish: Literal["work", "regroup", "stop", "end"] = "work"
    team: Team | None = None
    status: int = 0
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """As sent to the hosts."""
        return {**vars(self), "team": self.team.to_json() if self.team else None}

    @classmethod
    def from_json(cls, value: object) -> Orders:
        """As received; a ValueError where they are no orders."""
        return _ORDERS.validate_json(json.dumps(value), strict=True)


@dataclass(frozen=True)
class Refusal:
    """A host that may not take part in the run, and why. The run goes on without it."""

    host: str
    workers: int
    why: str
    status: int = UserError.status

    def orders(self) -> Orders:
        """What the host is told."""
        return Orders("end", None, self.status, self.why)


_REPORT, _ORDERS = TypeAdapter(Report), TypeAdapter(Orders)
"""Check every field of what came from another host."""


@dataclass(frozen=True)
class Bounds:
    """How many workers a run may have."""

    least: int
    most: int


MakePlan = Callable[[int], Plan | None]
"""From a number of workers to the plan for as many of them as can be used; None where no layout works."""


class Lead:
    """What the leader decides: takes the reports of all hosts, and gives orders to all."""

    def __init__(self, bounds: Bounds, make_plan: MakePlan, attempts: int, port: Callable[[], int]) -> None:
        self.bounds, self.make_plan, self.attempts, self.port = bounds, make_plan, attempts, port
        """The port: where the store is in which workers meet, asked for each team, since a store can be
        lost."""
        self.orders = Orders()
        self._store_name = secrets.token_hex(16)
        self.faults: list[Fault] = []
        """Every fault so far, one for each team that broke: the first cause."""
        self._failed_attempts: list[Fault] = []
        """The faults of teams that really were there: each is a failed attempt at its step."""
        self._noticed = (0, 0.0)
        """The generation that broke last, and when the leader first heard of it."""
        self._known_generations: dict[str, int] = {}
        """The newest generation that each host has reported."""
        self.lacks: str | None = None
        """What keeps the next team from being formed."""
        self._reports: dict[str, tuple[Report, float]] = {}
        self._enough_since: float | None = None
        self._reached = 0
        self._furthest, self._fruitless = 0, 0
        """The furthest step of any fault, and the faults since that came no further."""
        self._heard_at: dict[tuple[str, int, int | None], float] = {}
        """When a fault of a host, a generation and a rank was first heard of."""
        self.refusals: list[Refusal] = []
        """Hosts that failed before they had ever done a step in a run that trains: it goes on without
        them."""
        self._proven: set[str] = set()
        """Hosts that were in a team that did a step."""
        self._newcomer_faults: dict[str, int] = {}
        """How often each host failed that is not among them."""
        self._refused_workers = 0
        """Workers of hosts that were refused before the first team was formed."""
        self._awaited: dict[str, float] = {}
        """Hosts that are to be heard before the next team is formed, and until when."""

    def take_over(self, orders: Orders, own_host: str, former_leader: str, now: float) -> None:
        """Lead a run whose leader is lost: from its last orders, as soon as the other hosts have called or
        are lost too."""
        self.orders = replace(orders, wish="work") if orders.wish in ("work", "regroup") else orders
        hosts = {member.host for member in orders.team.members} if orders.team else set()
        self._awaited = dict.fromkeys(hosts - {own_host, former_leader}, now + LOST_SECONDS)
        self._reached = orders.team.reached if orders.team else 0

    def hear(self, report: Report, now: float, from_afar: bool = False) -> None:
        """Take note of what a host says. Faults on another machine count from when they are heard of: its
        clock is not ours."""
        if any(refused.host == report.host for refused in self.refusals):
            return
        if from_afar:
            report = replace(
                report, faults=tuple(self._stamped(report.host, fault) for fault in report.faults)
            )
        self._reports[report.host] = (report, now)
        self._known_generations[report.host] = report.generation
        self._awaited.pop(report.host, None)
        self._reached = max(self._reached, report.step)

    def note_refused(self, refused: Refusal) -> None:
        """A host called that does not fit this run. Before the first team that ends the run if it cannot
        begin without as many workers: where every host was started once, nobody would come in its place."""
        if self.orders.team is None and self.orders.wish != "end":
            self._refused_workers += refused.workers
            if self.bounds.most - self._refused_workers < self.bounds.least:
                self.orders = refused.orders()

    def _stamped(self, host: str, fault: Fault) -> Fault:
        return replace(
            fault, at=self._heard_at.setdefault((host, fault.generation, fault.rank), present_time())
        )

    def hosts(self) -> set[str]:
        """Those that were heard of lately."""
        return set(self._reports)

    def decide(self, now: float) -> Orders:
        """The orders for everybody, given what was heard."""
        self._awaited = {host: until for host, until in self._awaited.items() if now < until}
        if self.orders.wish != "end" and not self._awaited:
            team = self.orders.team
            for name in [name for name, (_, seen) in self._reports.items() if now - seen > LOST_SECONDS]:
                del self._reports[name]
            if team is None:
                self._form(now, None)
            else:
                self._look_after(team, now)
        return self.orders

    def _look_after(self, team: Team, now: float) -> None:
        reports = {name: report for name, (report, _) in self._reports.items()}
        hosts = {member.host for member in team.members}
        if self._has_stepped(team):
            self._proven |= hosts
        faults = [
            fault
            for report in reports.values()
            for fault in report.faults
            if fault.generation == team.generation
        ]
        faults += [_lost(team, name, self._reached) for name in hosts - reports.keys()]
        present = [
            reports[name] for name in hosts & reports.keys() if reports[name].generation == team.generation
        ]
        done = [report.done for report in present if report.done is not None]
        faults = faults or [
            fault for fault in self.faults[-1:] if fault.generation == team.generation
        ]  # it stays broken
        if faults:
            self._broken(team, faults, now)
        elif len(done) == len(hosts):
            self.orders = replace(self.orders, wish="end", status=max(done))
        elif self.orders.wish == "regroup":
            if len(present) == len(hosts) and all(report.idle for report in present):
                self._form(now, None)
                if self.lacks is not None and any(
                    report.leaving for report in present
                ):  # too few are left to go on
                    self.orders = replace(self.orders, wish="end", status=RESUME_ME)
        elif self.orders.wish == "work":
            self._reconsider(team, now)

    def _broken(self, team: Team, faults: list[Fault], now: float) -> None:
        if self._noticed[0] != team.generation:
            self._noticed = (team.generation, now)
        if all(fault.echo for fault in faults) and self._cause_may_come(faults, now):
            return
        newcomers = self._newcomers(team)
        theirs = [fault for fault in faults if not fault.echo and _host_of(team, fault) in newcomers]
        if theirs:
            self._blame_newcomer(team, min(theirs, key=lambda fault: (fault.status is None, fault.at)), now)
            return
        fatal = [fault for fault in faults if fault.status is not None]
        first = min(fatal or faults, key=lambda fault: (fault.echo, fault.kind == "host lost", fault.at))
        if not self.faults or self.faults[-1].generation != first.generation:
            self.faults.append(first)
            if self._was_attempt(team, first):
                self._failed_attempts.append(first)
                self._fruitless = 0 if first.step > self._furthest else self._fruitless + 1
                self._furthest = max(self._furthest, first.step)
        alike = [fault for fault in self._failed_attempts[-self.attempts :] if fault.step == first.step]
        if fatal:
            self.orders = replace(self.orders, wish="end", status=first.status or 1, message=first.cause)
        elif self.orders.wish == "stop":
            message = f"a worker was lost while the run was stopping: {first.cause}"
            self.orders = replace(
                self.orders, wish="end", status=RESUME_ME, message=message
            )  # each host looks what is saved
        elif len(self.faults) > 1 and first.repeats(self.faults[-2]):
            self.orders = replace(self.orders, wish="end", status=1, message=in_own_code(first))
        elif len(alike) == self.attempts:
            self.orders = replace(self.orders, wish="end", status=1, message=_in_vain(alike))
        elif self._fruitless == FRUITLESS * self.attempts:
            message = (
                f"{self._fruitless} failures in a row, and none got past step {self._furthest}: is "
                f"checkpoint.every small enough "
                f"for how often workers are lost? The last one: {first.cause}"
            )
            self.orders = replace(self.orders, wish="end", status=1, message=message)
        else:
            self._form(now, self._to_recover_from(self.faults[-1]))

    def _newcomers(self, team: Team) -> set[str]:
        """Hosts of a team that has not done a step yet which were in no team that did, where the other hosts
        were: what goes wrong on one of them is no failure of the run."""
        hosts = {member.host for member in team.members}
        return hosts - self._proven if hosts & self._proven and not self._has_stepped(team) else set()

    def _blame_newcomer(self, team: Team, fault: Fault, now: float) -> None:
        """Go on after a fault of a host that is new to the run. It is refused where trying again cannot help,
        or where it has failed as often as a step may."""
        host = _host_of(team, fault)
        if not self.faults or self.faults[-1].generation != fault.generation:
            self.faults.append(fault)
            self._newcomer_faults[host] = self._newcomer_faults.get(host, 0) + 1
            if fault.status is not None or self._newcomer_faults[host] >= self.attempts:
                workers = sum(member.host == host for member in team.members)
                why = (
                    f"host {host} failed before its first step in this run, which goes on without it: "
                    f"{fault.cause}"
                )
                self.refusals.append(Refusal(host, workers, why, fault.status or RunFailed.status))
                self._reports.pop(host, None)
        self._form(now, self._to_recover_from(self.faults[-1]))

    def _was_attempt(self, team: Team, fault: Fault) -> bool:
        """Whether the team really was there when it broke. If not, a host of it was gone before it knew of
        the team: that is no second failure after the one for which the team was formed."""
        if fault.kind != "host lost":
            return True
        return self._known_generations.get(_host_of(team, fault), 0) >= team.generation

    def _to_recover_from(self, fault: Fault) -> Fault:
        """The fault as it was when it was noticed: a wait for workers is part of the recovery. So is a team
        that was formed to recover from an earlier one and broke before it did a step."""
        team = self.orders.team
        if team is not None and team.fault is not None and not self._has_stepped(team):
            return replace(fault, at=min(fault.at, team.fault.at))
        return fault

    def _cause_may_come(self, faults: list[Fault], now: float) -> bool:
        """Whether some host may still say why a peer is gone, or turn out to be lost."""
        return (
            self._may_be_lost(now, since=self._noticed[1])
            or present_time() - min(fault.at for fault in faults) < ECHO_SECONDS
        )

    def _may_be_lost(self, now: float, since: float = 0.0) -> bool:
        """Whether some host has not called lately, or not since this time. It will call in a moment, or it is
        lost."""
        return any(seen < since or now - seen >= QUIET_SECONDS for _, seen in self._reports.values())

    def _form(self, now: float, fault: Fault | None) -> None:
        """The next team, if there are enough workers; the first waits a while for all of them. After a fault
        each host must have called again: one that died with the team it was in would be put into the next
        one, which would fail for the same loss.
        """
        if self._may_be_lost(now, since=self._noticed[1] if fault is not None else 0.0):
            return
        before, slots = self.orders.team, self._slots()
        plan = self.make_plan(min(len(slots), self.bounds.most)) if len(slots) >= self.bounds.least else None
        if plan is None or plan.world < self.bounds.least:
            self._enough_since = None
            if len(slots) < self.bounds.least:
                need = f"at least {self.bounds.least} are needed"
            else:
                need = "a number that the job's layout cannot be made of"
            self.lacks = (
                f"waiting for workers: {len(slots)} {'is' if len(slots) == 1 else 'are'} there, {need}"
            )
            return
        self.lacks = None
        self._enough_since = now if self._enough_since is None else self._enough_since
        if before is None and len(slots) < self.bounds.most and now - self._enough_since < PATIENCE_SECONDS:
            return
        team = Team(
            generation=max(
                [
                    before.generation if before else 0,
                    *(report.generation for report, _ in self._reports.values()),
                ]
            )
            + 1,
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

    def _reconsider(self, team: Team, now: float) -> None:
        """Whether a team that works should make room for more workers, or let a host go."""
        leaving = {name for name, (report, _) in self._reports.items() if report.leaving}
        slots = self._slots()
        if leaving & {member.host for member in team.members}:
            enough = len(slots) >= self.bounds.least and self.make_plan(len(slots)) is not None
            self.orders = replace(self.orders, wish="regroup" if enough else "stop")
            return
        grows = len(slots) > len(team.members) and not self._may_be_lost(now)
        plan = self.make_plan(min(len(slots), self.bounds.most)) if grows else None
        if plan is None or plan.world <= len(team.members):
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        elif now - self._enough_since >= SETTLE_SECONDS and self._has_stepped(team):
            self.orders, self._enough_since = replace(self.orders, wish="regroup"), None

    def _has_stepped(self, team: Team) -> bool:
        """Whether this team has done a step: it would be disturbed for nothing before."""
        return any(
            report.step > 0 for report, _ in self._reports.values() if report.generation == team.generation
        )

    def _slots(self) -> list[Member]:
        """Slots fit for work, the leader's host first: hosts are heard of in the order in which they came."""
        reports = [report for report, _ in self._reports.values() if not report.leaving]
        return [Member(report.host, slot) for report in reports for slot in report.slots]


def _host_of(team: Team, fault: Fault) -> str:
    """The host of the worker that failed; empty where no worker did."""
    return team.members[fault.rank].host if fault.rank is not None and fault.rank < len(team.members) else ""


def _lost(team: Team, host: str, step: int) -> Fault:
    rank = next(rank for rank, member in enumerate(team.members) if member.host == host)
    cause = f"host {host} was not heard of for {LOST_SECONDS:g} s"
    return Fault("host lost", rank, step + 1, cause, present_time(), team.generation)


def in_own_code(fault: Fault) -> str:
    """What to say of a line of the user's that fails again: that line, not the way to it."""
    where = f"at step {fault.step}" if fault.step else "before the first step"
    log = (
        f"the traceback is in logs/rank-{fault.rank}.log of the run"
        if fault.rank is not None
        else "the logs have the traceback"
    )
    return f"{fault.cause}. It failed twice in this line {where}, so the run stops; {log}"


def _in_vain(alike: list[Fault]) -> str:
    last = alike[-1]
    who = "" if last.rank is None else f" (rank {last.rank})"
    where = f"step {last.step}" if last.step else "the start, before the first step,"
    trace = f"{last.trace.rstrip()}\n" if last.trace else ""
    return (
        f"{trace}{where} failed {len(alike)} times in a row, so the run stops instead of trying it forever. "
        f"The last time{who}: {last.cause}{f'; it had {last.reads}' if last.reads else ''}"
    )
