"""The leader's judgement, case by case: reports in, orders out, no process and no clock but the one given."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from pretend import plan_for

from shardwise.plans import Plan
from shardwise.resilience import team as team_module
from shardwise.resilience.channel import LINE_BYTES, Channel
from shardwise.resilience.team import (
    FIRST_TEAM_SECONDS,
    LOST_SECONDS,
    SETTLE_SECONDS,
    Bounds,
    Fault,
    Leader,
    Member,
    Orders,
    Refusal,
    Report,
    Team,
)


def any_number(devices: int) -> Plan | None:
    return plan_for(devices) if devices else None


def even_numbers(devices: int) -> Plan | None:
    return any_number(devices // 2 * 2)


def lead(least: int, most: int, make_plan: Any = any_number, step_attempts: int = 3) -> Leader:
    return Leader(Bounds(least, most), make_plan, step_attempts, port=lambda: 5)


def host(name: str, slots: int, **facts: Any) -> Report:
    return Report(name, f"10.0.0.{ord(name) - 96}", tuple(range(slots)), **facts)


def fault(generation: int, step: int = 4, **facts: Any) -> Fault:
    return Fault(
        **{"kind": "died", "rank": 1, "cause": "it died", "at": time.time(), **facts},
        step=step,
        generation=generation,
    )


def decide(judge: Leader, now: float, *reports: Report) -> Orders:
    for report in reports:
        judge.receive_report(report, now)
    return judge.decide(now)


def team_of(orders: Orders) -> list[Member]:
    assert orders.team is not None
    return list(orders.team.members)


def test_the_first_team_starts_once_all_workers_are_there() -> None:
    judge = lead(4, 4)
    assert decide(judge, 0, host("a", 2)).team is None
    assert decide(judge, 1000, host("a", 2)).team is None
    orders = decide(judge, 1001, host("a", 2), host("b", 2))
    assert team_of(orders) == [Member("a", 0), Member("a", 1), Member("b", 0), Member("b", 1)]
    assert orders.team is not None
    assert (orders.wish, orders.team.generation, orders.team.address, orders.team.port) == (
        "work",
        1,
        "10.0.0.1",
        5,
    )


def test_an_elastic_run_waits_a_while_for_the_rest_and_then_starts_without_them() -> None:
    judge = lead(2, 4)
    assert decide(judge, 0, host("a", 2)).team is None
    assert decide(judge, FIRST_TEAM_SECONDS - 1, host("a", 2)).team is None
    assert len(team_of(decide(judge, FIRST_TEAM_SECONDS + 1, host("a", 2)))) == 2


def test_a_layout_that_leaves_fewer_workers_than_the_minimum_at_work_is_not_begun() -> None:
    judge = lead(3, 4, even_numbers)
    assert decide(judge, FIRST_TEAM_SECONDS + 1, host("a", 3)).team is None
    assert decide(judge, 3 * FIRST_TEAM_SECONDS, host("a", 3)).team is None, (
        "of three workers two would train"
    )
    assert judge.missing is not None
    assert len(team_of(decide(judge, 3 * FIRST_TEAM_SECONDS + 1, host("a", 4)))) == 4


def test_a_worker_that_died_is_replaced_at_once_in_the_next_generation() -> None:
    judge = lead(2, 2)
    decide(judge, 0, host("a", 2))
    died = fault(1)
    orders = decide(judge, 1, host("a", 2, generation=1, step=3, faults=(died,)))
    assert orders.team is not None
    assert (orders.team.generation, orders.team.fault, orders.team.reached) == (2, died, 3)
    assert decide(judge, 1.1, host("a", 2, generation=1, step=3, faults=(died,))) == orders, (
        "an old report changes nothing"
    )


def test_each_team_meets_where_the_store_is_when_it_is_formed() -> None:
    judge = lead(2, 2)
    assert (team := decide(judge, 0.0, host("a", 2)).team) is not None
    judge.port = lambda: 6
    assert decide(judge, 1.0, host("a", 2, generation=1, idle=False)).team == team
    assert (after := decide(judge, 2.0, host("a", 2, generation=1, faults=(fault(1),))).team) is not None
    assert (team.port, after.generation, after.port) == (5, 2, 6)


def test_a_peer_that_is_gone_is_no_cause_while_the_cause_may_still_come() -> None:
    judge = lead(4, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    consequence, cause = (
        fault(1, is_consequence=True, cause="a peer is gone"),
        fault(1, cause="out of memory", rank=3),
    )
    orders = decide(judge, 1, host("a", 2, generation=1, faults=(consequence,)), host("b", 2, generation=1))
    assert orders.team is not None
    assert orders.team.generation == 1
    orders = decide(judge, 1.2, host("b", 2, generation=1, faults=(cause,)))
    assert orders.team is not None
    assert (orders.team.generation, orders.team.fault) == (2, cause)


def test_a_peer_that_is_gone_with_a_host_that_fell_silent_is_not_tried_again_before_the_host_is_lost() -> (
    None
):
    judge = lead(2, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    consequence = fault(1, is_consequence=True, at=time.time() - 5)
    orders = decide(judge, 5, host("a", 2, generation=1, faults=(consequence,)))
    assert orders.team is not None
    assert orders.team.generation == 1
    orders = decide(judge, LOST_SECONDS + 1, host("a", 2, generation=1, faults=(consequence,)))
    assert orders.team is not None
    assert (orders.team.generation, len(orders.team.members)) == (2, 2)
    assert orders.team.fault is not None
    assert orders.team.fault.kind == "host lost"


def test_a_peer_that_is_gone_without_a_cause_still_leads_to_a_new_team() -> None:
    judge = lead(2, 2)
    decide(judge, 0, host("a", 2))
    consequence = fault(1, is_consequence=True, at=time.time() - 5)
    orders = decide(judge, 1, host("a", 2, generation=1, faults=(consequence,)))
    assert orders.team is not None
    assert orders.team.generation == 2


@pytest.mark.parametrize(("step", "from_the_first"), [(0, True), (5, False)])
def test_a_recovery_that_breaks_before_a_step_is_done_goes_on_from_the_first_fault(
    step: int, from_the_first: bool
) -> None:
    judge = lead(2, 2)
    decide(judge, 0, host("a", 2))
    first, second = fault(1, at=100.0), fault(2, at=103.0, cause="and its successor")
    decide(judge, 1, host("a", 2, generation=1, step=3, faults=(first,)))
    orders = decide(judge, 4, host("a", 2, generation=2, step=step, faults=(second,)))
    assert orders.team is not None
    assert orders.team.fault == replace(second, at=100.0 if from_the_first else 103.0)
    assert judge.faults == [first, second]


def test_a_silent_host_is_lost_and_the_run_goes_on_without_it() -> None:
    judge = lead(2, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    assert len(team_of(decide(judge, LOST_SECONDS - 1, host("a", 2, generation=1)))) == 4
    orders = decide(judge, LOST_SECONDS + 1, host("a", 2, generation=1, step=8))
    assert team_of(orders) == [Member("a", 0), Member("a", 1)]
    assert orders.team is not None
    assert orders.team.fault is not None
    assert (orders.team.fault.kind, orders.team.fault.rank) == ("host lost", 2)


def test_a_run_that_needs_all_waits_for_the_lost_host() -> None:
    judge = lead(4, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    orders = decide(judge, LOST_SECONDS + 1, host("a", 2, generation=1))
    assert orders.team is not None
    assert orders.team.generation == 1
    orders = decide(judge, 900, host("a", 2, generation=1), host("c", 2))
    assert orders.team is not None
    assert orders.team.generation == 2
    assert [member.host for member in team_of(orders)] == ["a", "a", "c", "c"]


def lost_and_back() -> tuple[Leader, float]:
    judge = lead(2, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    now = LOST_SECONDS + 1
    decide(judge, now, host("a", 2, generation=1, step=8))
    return judge, now


def test_a_host_that_comes_back_is_taken_in_after_a_step_and_a_save() -> None:
    judge, now = lost_and_back()
    back = host("b", 2, generation=0)
    assert decide(judge, now + 1, host("a", 2, generation=2, idle=False, step=0), back).wish == "work"
    later = now + 2 + SETTLE_SECONDS
    assert decide(judge, later, host("a", 2, generation=2, idle=False, step=0), back).wish == "work", (
        "before a step of its own"
    )
    assert decide(judge, later, host("a", 2, generation=2, idle=False, step=9), back).wish == "regroup"
    assert decide(judge, later + 1, host("a", 2, generation=2, idle=False, step=9), back).wish == "regroup"
    orders = decide(judge, later + 2, host("a", 2, generation=2, idle=True, step=10), back)
    assert (orders.wish, len(team_of(orders))) == ("work", 4)
    assert orders.team is not None
    assert (orders.team.generation, orders.team.fault) == (3, None)


def test_workers_that_no_layout_can_use_do_not_disturb_a_team() -> None:
    judge = lead(2, 4, even_numbers)
    decide(judge, 0, host("a", 2))
    decide(judge, FIRST_TEAM_SECONDS + 1, host("a", 2))
    for now in range(40, 60):
        orders = decide(judge, now, host("a", 2, generation=1, idle=False, step=now), host("b", 1))
    assert orders.wish == "work"
    assert len(team_of(orders)) == 2


def test_as_many_as_a_layout_can_use_go_on() -> None:
    judge = lead(2, 4, even_numbers)
    decide(judge, 0, host("a", 3), host("b", 1))
    orders = decide(judge, LOST_SECONDS + 1, host("a", 3, generation=1))
    assert len(team_of(orders)) == 2


def test_a_host_that_must_leave_is_let_go() -> None:
    judge = lead(2, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    working = {"generation": 1, "idle": False, "step": 5}
    assert decide(judge, 1, host("a", 2, **working), host("b", 2, **working, leaving=True)).wish == "regroup"
    parted = {"generation": 1, "idle": True, "step": 6}
    orders = decide(judge, 2, host("a", 2, **parted), host("b", 2, **parted, leaving=True))
    assert [member.host for member in team_of(orders)] == ["a", "a"]


def test_the_run_stops_if_a_host_leaves_that_it_cannot_do_without() -> None:
    judge = lead(4, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    working = {"generation": 1, "idle": False}
    assert decide(judge, 1, host("a", 2, **working), host("b", 2, **working, leaving=True)).wish == "stop"


def test_the_run_ends_when_every_host_is_done_with_the_worst_status() -> None:
    judge = lead(4, 4)
    decide(judge, 0, host("a", 2), host("b", 2))
    assert decide(judge, 1, host("a", 2, generation=1, done=0), host("b", 2, generation=1)).wish == "work"
    orders = decide(judge, 2, host("b", 2, generation=1, done=130))
    assert (orders.wish, orders.status, orders.message) == ("end", 130, "")


def test_a_failure_that_trying_again_cannot_mend_ends_the_run_at_once() -> None:
    judge = lead(2, 2)
    decide(judge, 0, host("a", 2))
    consequence, fatal = (
        fault(1, is_consequence=True),
        fault(1, kind="failed", cause="the loss is nan", status=1),
    )
    orders = decide(judge, 1, host("a", 2, generation=1, faults=(consequence, fatal)))
    assert (orders.wish, orders.status, orders.message) == ("end", 1, "the loss is nan")


@pytest.mark.parametrize("step_attempts", [1, 3])
def test_the_same_step_failing_again_and_again_ends_the_run_and_is_named(step_attempts: int) -> None:
    judge = lead(2, 2, step_attempts=step_attempts)
    decide(judge, 0, host("a", 2))
    for generation in range(1, step_attempts):
        bad = fault(generation, step=7, cause="bad row")
        assert decide(judge, generation, host("a", 2, generation=generation, faults=(bad,))).wish == "work"
    bad = fault(step_attempts, step=7, cause="bad row", reads="rows 8 to 15")
    orders = decide(judge, 99, host("a", 2, generation=step_attempts, faults=(bad,)))
    assert (orders.wish, orders.status) == ("end", 1)
    assert orders.message.startswith(f"step 7 failed {step_attempts} times in a row")
    assert "(rank 1): bad row; it had rows 8 to 15" in orders.message


def test_a_line_of_the_users_own_code_that_fails_again_is_not_tried_a_third_time() -> None:
    judge = lead(2, 2, step_attempts=5)
    decide(judge, 0, host("a", 2))
    for generation, line in ((1, "own.py, line 3"), (2, "own.py, line 4")):
        failed = fault(generation, step=7, user_code_line=line)
        assert decide(judge, generation, host("a", 2, generation=generation, faults=(failed,))).wish == "work"
    again = fault(
        3,
        step=7,
        user_code_line="own.py, line 4",
        cause="own.py, line 4: ValueError: no",
        trace="the traceback",
    )
    orders = decide(judge, 99, host("a", 2, generation=3, faults=(again,)))
    assert (orders.wish, orders.status) == ("end", 1)
    assert orders.message.startswith(
        "the traceback\n"
        "own.py, line 4: ValueError: no. It failed twice in this line at step 7, so the run stops"
    )


def test_failures_at_different_steps_never_end_the_run() -> None:
    judge = lead(2, 2)
    decide(judge, 0, host("a", 2))
    for generation in range(1, 50):
        orders = decide(
            judge,
            generation,
            host("a", 2, generation=generation, faults=(fault(generation, step=generation),)),
        )
        assert orders.wish == "work"
    assert [one.generation for one in judge.faults] == list(range(1, 50))


def test_a_run_that_gets_nowhere_ends_and_says_so() -> None:
    judge = lead(2, 2, step_attempts=2)
    decide(judge, 0, host("a", 2))
    for generation in range(1, 8):
        step = [9, 8, 9, 8, 7, 8, 6][generation - 1]
        orders = decide(
            judge, generation, host("a", 2, generation=generation, faults=(fault(generation, step=step),))
        )
    assert (orders.wish, orders.status) == ("end", 1)
    assert orders.message.startswith("6 failures in a row, and none got past step 9")


def test_everything_that_is_sent_can_be_read_again() -> None:
    team = Team(3, (Member("a", 0),), plan_for(1), "10.0.0.1", 5, "a name", 1.5, fault(2), 7)
    for orders in (Orders("regroup", team, 0, ""), Orders("end", None, 2, "no")):
        assert Orders.from_json(orders.to_json()) == orders
    report = host("a", 2, faults=(fault(1),), done=0)
    assert Report.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "x"},
        {"step": -1},
        {"slots": [0.5]},
        {"slots": 3},
        {"faults": [{}]},
        {"done": "0"},
        {"leaving": 1},
        {"host": None},
    ],
)
def test_what_is_no_report_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Report.from_json({**host("a", 2).to_json(), **wrong})
    with pytest.raises(ValueError, match="validation error"):
        Report.from_json([wrong])


@pytest.mark.parametrize(
    "wrong", [{"wish": "dance"}, {"team": {}}, {"team": {"plan": 3}}, {"status": None}, {"message": 5}]
)
def test_what_is_no_orders_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Orders.from_json({**Orders().to_json(), **wrong})


def test_orders_for_a_thousand_workers_fit_into_a_line() -> None:
    members = tuple(Member(f"gpu{number // 8:04}-abc123", number % 8) for number in range(1024))
    orders = Orders("work", Team(3, members, plan_for(8), "10.0.0.1", 5, "a name", 1.5))
    assert len(Channel(b"key", "leader").line(orders.to_json())) < LINE_BYTES


def test_a_host_that_takes_over_waits_for_the_others_and_forms_the_next_team_without_the_lost_leader() -> (
    None
):
    first = lead(2, 4)
    orders = decide(first, 0, host("a", 2), host("b", 2), host("c", 2))
    assert team_of(orders) == [Member("a", 0), Member("a", 1), Member("b", 0), Member("b", 1)]
    second = lead(2, 4)
    second.take_over(orders, "c", "a", now=100)
    assert decide(second, 100, host("c", 2)) == orders, "b has not called yet"
    orders = decide(second, 101, host("c", 2), host("b", 2, generation=1, step=7))
    assert team_of(orders) == [Member("c", 0), Member("c", 1), Member("b", 0), Member("b", 1)]
    assert orders.team is not None
    assert orders.team.fault is not None
    assert (orders.team.generation, orders.team.reached, orders.team.fault.kind) == (2, 7, "host lost")


def test_two_hosts_that_leave_one_after_the_other_end_the_run_where_too_few_are_left() -> None:
    judge = lead(4, 6)
    decide(judge, 0, host("a", 2), host("b", 2), host("c", 2))
    at_work = {"generation": 1, "step": 5}
    orders = decide(
        judge, 1, host("a", 2, **at_work), host("b", 2, **at_work, leaving=True), host("c", 2, **at_work)
    )
    assert orders.wish == "regroup"
    idle = {"generation": 1, "step": 6, "idle": True}
    leaving = [host(name, 2, **idle, leaving=True) for name in "bc"]
    orders = decide(judge, 2, host("a", 2, **idle), *leaving)
    assert (orders.wish, orders.status, orders.message) == ("end", 75, "")


def test_faults_on_other_machines_count_from_when_they_are_heard_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team_module, "present_time", lambda: 1000.0)
    judge = lead(2, 2)
    decide(judge, 0, host("a", 1), host("b", 1))
    of_a_clock_that_is_ahead = fault(1, at=5000.0)
    judge.receive_report(
        host("b", 1, generation=1, faults=(of_a_clock_that_is_ahead,)), 1, from_other_host=True
    )
    monkeypatch.setattr(team_module, "present_time", lambda: 1003.0)
    judge.receive_report(
        host("b", 1, generation=1, faults=(of_a_clock_that_is_ahead,)), 2, from_other_host=True
    )
    orders = decide(judge, 2, host("a", 1, generation=1))
    assert orders.team is not None
    assert orders.team.fault == replace(of_a_clock_that_is_ahead, at=1000.0)


def test_a_host_that_takes_over_does_not_wait_forever_for_one_that_is_lost_too() -> None:
    first = lead(2, 4)
    orders = decide(first, 0, host("a", 2), host("b", 2))
    second = lead(2, 4)
    second.take_over(orders, "c", "a", now=100)
    assert decide(second, 100 + LOST_SECONDS - 1, host("c", 2)) == orders
    assert team_of(decide(second, 100 + LOST_SECONDS + 1, host("c", 2))) == [Member("c", 0), Member("c", 1)]


def test_a_leader_that_was_started_anew_goes_on_after_the_teams_that_its_hosts_know() -> None:
    orders = decide(lead(2, 2), 0, host("b", 2, generation=5, step=31))
    assert orders.team is not None
    assert (orders.team.generation, orders.team.reached) == (6, 31)


@pytest.mark.parametrize("name", ["b", "c"])
def test_the_wait_for_a_lost_host_is_part_of_the_recovery_from_its_loss(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whether it was cut off for a while, or started again under another name."""
    judge, clock = lead(4, 4), [1000.0]
    monkeypatch.setattr("shardwise.resilience.team.present_time", lambda: clock[0])
    decide(judge, 0, host("a", 2), host("b", 2))
    for second in range(1, 101):
        clock[0] += 1
        assert decide(judge, second, host("a", 2, generation=1, step=3)).team == judge.orders.team
    lost_at = 1000.0 + LOST_SECONDS + 1
    orders = decide(judge, 101, host("a", 2, generation=1, step=3), host(name, 2))
    assert orders.team is not None
    assert orders.team.generation == 2
    assert orders.team.fault == judge.faults[0]
    assert (orders.team.fault.at, orders.team.formed) == (lost_at, 1100.0)


def seconds_of(judge: Leader, seconds: range, *reports: Report) -> Orders:
    """The last orders after these hosts, and no others, have called four times a second."""
    for quarter in range(4 * seconds.start, 4 * seconds.stop):
        orders = decide(judge, quarter / 4, *reports)
    return orders


@pytest.mark.parametrize("dead", ["b", "bc"])
@pytest.mark.parametrize("first_word", ["a consequence", "a fault", "none"])
def test_hosts_that_die_at_once_cost_one_attempt(
    monkeypatch: pytest.MonkeyPatch, dead: str, first_word: str
) -> None:
    """Whether the workers that are left lose their peers at once, die of it, or notice nothing (a cable that
    was pulled)."""
    now = [0.0]
    monkeypatch.setattr(team_module, "present_time", lambda: now[0])
    judge = lead(2, 6, step_attempts=2)
    decide(judge, 0, host("a", 2), host("b", 2), host("c", 2))
    alive = [name for name in "abc" if name not in dead]
    for quarter in range(1, 4 * 25):
        now[0] = quarter / 4
        assert judge.orders.team is not None
        generation = judge.orders.team.generation
        word = fault(1, step=8, is_consequence=first_word == "a consequence", at=5.0, rank=0)
        faults = (word,) if now[0] >= 5 and first_word != "none" and generation == 1 else ()
        # Host c calls once more than host b.
        calling = alive if now[0] > 5 else ["a", "b", "c"] if now[0] < 4.75 else ["a", "c"]
        reports = [
            host(name, 2, generation=generation, step=7, faults=faults if name == "a" else ())
            for name in calling
        ]
        orders = decide(judge, now[0], *reports)
    assert (orders.wish, orders.message) == ("work", "")
    assert orders.team is not None
    assert {member.host for member in orders.team.members} == set(alive)
    assert orders.team.generation == 2, "no team was formed with a host that was gone"
    assert len(judge.faults) == 1


def test_a_team_formed_with_a_host_that_is_gone_is_no_attempt() -> None:
    """It died between its last call and the orders: no call of it ever told that it knew the team."""
    judge = lead(2, 4, step_attempts=2)
    decide(judge, 0, host("a", 2), host("b", 2))
    died = fault(1, step=8)
    both = [host("a", 2, generation=1, step=7, faults=(died,)), host("b", 2, generation=1, step=7)]
    orders = decide(judge, 1, *both)
    assert (orders.wish, len(team_of(orders))) == ("work", 4)
    orders = seconds_of(judge, range(2, 14), host("a", 2, generation=2))
    assert orders.wish == "work", orders.message
    assert team_of(orders) == [Member("a", 0), Member("a", 1)]
    assert [one.kind for one in judge.faults] == ["died", "host lost"], "both are recorded"


def test_a_newcomer_that_is_gone_again_does_not_disturb_a_team() -> None:
    judge, now = lost_and_back()
    decide(judge, now, host("c", 2))
    orders = seconds_of(
        judge, range(int(now) + 1, int(now) + 9), host("a", 2, generation=2, idle=False, step=9)
    )
    assert orders.wish == "work"
    orders = seconds_of(
        judge, range(int(now) + 9, int(now) + 14), host("a", 2, generation=2, idle=False, step=9)
    )
    assert (orders.wish, team_of(orders)) == ("work", [Member("a", 0), Member("a", 1)])


def test_a_lost_leader_costs_one_attempt() -> None:
    first = lead(2, 6, step_attempts=2)
    orders = decide(first, 0, host("a", 2), host("b", 2), host("c", 2))
    second = lead(2, 6, step_attempts=2)
    second.take_over(orders, "b", "a", now=100)
    gone = {"generation": 1, "step": 7, "faults": (fault(1, step=8, is_consequence=True),)}
    assert decide(second, 100, host("b", 2, **gone)) == orders
    orders = seconds_of(second, range(101, 116), host("b", 2, **gone), host("c", 2, **gone))
    assert orders.wish == "work"
    assert [member.host for member in team_of(orders)] == ["b", "b", "c", "c"]
    assert len(second.faults) == 1


def with_a_newcomer(step_attempts: int = 2) -> tuple[Leader, Team]:
    """A run of two hosts that has done steps, and the team that it forms with a third."""
    judge = lead(2, 6, step_attempts=step_attempts)
    decide(judge, 0, host("a", 2), host("b", 2))
    decide(judge, FIRST_TEAM_SECONDS, host("a", 2), host("b", 2))
    at_work = [host(name, 2, generation=1, idle=False, step=7) for name in "ab"]
    orders = seconds_of(judge, range(31, 34), *at_work, host("c", 2))
    assert orders.wish == "regroup"
    idle = [host(name, 2, generation=1, idle=True, step=8) for name in "ab"]
    team = decide(judge, 35, *idle, host("c", 2)).team
    assert team is not None
    assert (team.generation, len(team.members)) == (2, 6)
    return judge, team


def test_a_host_that_fails_for_good_before_its_first_step_is_refused_alone() -> None:
    judge, team = with_a_newcomer()
    rank = team.members.index(Member("c", 1))
    fatal = fault(
        2, step=0, rank=rank, kind="failed", cause="rank 5 was started with another job than rank 0", status=2
    )
    consequence = fault(2, step=0, rank=0, is_consequence=True)
    others = [host("a", 2, generation=2, faults=(consequence,)), host("b", 2, generation=2)]
    orders = decide(judge, 36, *others, host("c", 2, generation=2, faults=(fatal,)))
    assert (orders.wish, {member.host for member in team_of(orders)}) == ("work", {"a", "b"})
    (refused,) = judge.refusals
    assert (refused.host, refused.workers, refused.status) == ("c", 2, 2)
    assert "host c failed before its first step" in refused.why
    assert "was started with another job than rank 0" in refused.why
    again = [host(name, 2, generation=3, idle=False, step=9) for name in "ab"]
    orders = seconds_of(judge, range(37, 50), *again, host("c", 2))
    assert (orders.wish, {member.host for member in team_of(orders)}) == ("work", {"a", "b"}), (
        "it is not asked again"
    )


def test_a_host_that_fails_again_and_again_before_its_first_step_costs_the_run_no_attempt() -> None:
    judge, team = with_a_newcomer(step_attempts=2)
    rank = team.members.index(Member("c", 0))
    for generation in (2, 3):
        died = fault(generation, step=0, rank=rank, cause="out of memory")
        others = [host(name, 2, generation=generation) for name in "ab"]
        orders = decide(judge, 36 + generation, *others, host("c", 2, generation=generation, faults=(died,)))
        assert orders.wish == "work"
    assert {member.host for member in team_of(orders)} == {"a", "b"}
    assert [(refused.host, refused.status) for refused in judge.refusals] == [("c", 1)]


def test_a_newcomer_that_is_lost_before_its_first_step_costs_the_run_no_attempt() -> None:
    judge, _ = with_a_newcomer(step_attempts=1)
    decide(judge, 36, *[host(name, 2, generation=2) for name in "abc"])
    orders = seconds_of(judge, range(37, 48), *[host(name, 2, generation=2) for name in "ab"])
    assert (orders.wish, {member.host for member in team_of(orders)}) == ("work", {"a", "b"})


def test_a_fault_of_a_newcomer_after_its_first_step_is_one_of_the_run() -> None:
    judge, team = with_a_newcomer()
    rank = team.members.index(Member("c", 1))
    decide(judge, 36, *[host(name, 2, generation=2, step=9) for name in "abc"])
    fatal = fault(2, step=10, rank=rank, kind="failed", cause="the loss is nan", status=1)
    reports = [host(name, 2, generation=2, step=9, faults=(fatal,) if name == "c" else ()) for name in "abc"]
    orders = decide(judge, 37, *reports)
    assert (orders.wish, orders.status, orders.message, judge.refusals) == ("end", 1, "the loss is nan", [])


def test_a_host_that_was_refused_ends_only_a_run_that_cannot_begin_without_it() -> None:
    refused = Refusal("c", 2, "host c has another job")
    fixed = lead(4, 4)
    decide(fixed, 0, host("a", 2))
    fixed.note_refused(refused)
    orders = decide(fixed, 1, host("a", 2))
    assert (orders.wish, orders.status, orders.message) == ("end", 2, "host c has another job")
    elastic, training = lead(2, 4), lead(4, 4)
    decide(training, 0, host("a", 2), host("b", 2))
    for judge in (elastic, training):
        judge.note_refused(refused)
        assert decide(judge, 1, host("a", 2, generation=1), host("b", 2, generation=1)).wish == "work"
