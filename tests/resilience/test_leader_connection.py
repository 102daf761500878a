"""Hosts and their leader, over real sockets."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
from pretend import plan_for

from shardwise.errors import UserError
from shardwise.resilience.channel import Credentials, answer, greeting
from shardwise.resilience.forked_process import free_port
from shardwise.resilience.host_description import MAX_DIFFERENCES, HostDescription, refusal_reason
from shardwise.resilience.leader_connection import MAX_UNKNOWN_CALLERS, LeaderClient, LeaderServer
from shardwise.resilience.team import Fault, Member, Orders, Refusal, Report, Team

REPORT = Report("b", "127.0.0.1", (0, 1), generation=3, step=7)
ORDERS = Orders("work", Team(4, (Member("a", 0), Member("b", 1)), plan_for(2), "127.0.0.1", 9, "a name", 1.0))
OURS = Credentials("run", b"a secret of this run")
HERE = "127.0.0.1"
LEADER = HostDescription(
    "a",
    "0.1.0",
    "2.13.0+cpu",
    2,
    {"train.steps": "100", "data.source": '"text.txt"'},
    "1,000 tokens (checksum 00)",
)
MEMBER = replace(LEADER, host="b")


def calling(port: int, credentials: Credentials | None = OURS, who: HostDescription = MEMBER) -> LeaderClient:
    return LeaderClient(lambda: (HERE, port, credentials), who)


@pytest.fixture
def leader() -> Iterator[LeaderServer]:
    leader_server = LeaderServer(HERE, 0, OURS, LEADER)
    yield leader_server
    leader_server.close()


def test_a_report_arrives_and_orders_come_back(leader: LeaderServer) -> None:
    client = calling(leader.port)
    assert client.call(REPORT) == Orders()
    leader.tell(ORDERS)
    assert not leader.all_know({"b"})
    assert client.call(REPORT) == ORDERS
    assert leader.all_know({"b"})
    assert [report for report, _ in leader.new_reports()] == [REPORT], "only the newest of each host"
    assert leader.new_reports() == []
    client.close()


def test_a_leader_that_is_away_is_found_again() -> None:
    port = free_port()
    client = calling(port)
    assert client.call(REPORT) is None
    for _ in range(2):
        leader_server = LeaderServer(HERE, port, OURS, LEADER)
        assert client.call(REPORT) is not None
        leader_server.close()
        assert client.call(REPORT) is None
        assert not client.refused
    client.close()


def test_a_host_without_the_secret_of_the_run_is_refused(leader: LeaderServer) -> None:
    for credentials in (Credentials("run", b"another secret"), Credentials("another run", OURS.secret)):
        client = calling(leader.port, credentials)
        assert client.call(REPORT) is None
        assert client.refused
        client.close()
    early = calling(leader.port, None)
    assert early.call(REPORT) is None
    assert not early.refused, "it does not know any secret yet, and does not dial"
    assert leader.new_reports() == []


def test_a_report_with_traces_that_are_too_long_is_sent_without_them(leader: LeaderServer) -> None:
    noise = random.Random(0).randbytes(60_000).hex()
    fault = Fault("failed", 0, 3, "bad row", 1.0, 3, trace=noise)
    client = calling(leader.port)
    assert client.call(Report("b", HERE, (0,), faults=(fault,) * 3)) is not None
    (report, _), *_ = leader.new_reports()
    assert [(known.cause, known.trace) for known in report.faults] == [("bad row", "")] * 3
    client.close()


def test_a_port_in_use_is_the_users_to_mend() -> None:
    with socket.socket() as taken:
        taken.bind((HERE, 0))
        taken.listen()
        with pytest.raises(UserError, match="where the nodes meet, cannot be used"):
            LeaderServer(HERE, taken.getsockname()[1], OURS, LEADER)


def dialled(leader: LeaderServer) -> socket.socket:
    return socket.create_connection((HERE, leader.port), timeout=5)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n\r\n", b"\n", b'{"run": "run", "report": {}}\n', b"\xff" * 1000 + b"\n"]
)
def test_a_stranger_is_refused_and_told_nothing_of_the_run(leader: LeaderServer, said: bytes) -> None:
    with dialled(leader) as stranger:
        stranger.sendall(said)
        heard = b""
        while part := stranger.recv(1000):
            heard += part
    greeted, refused = heard.splitlines()
    assert greeted.startswith(b"shardwise-1 ")
    assert refused == b"refused"
    assert leader.new_reports() == []


def test_a_line_without_end_is_cut_off(leader: LeaderServer) -> None:
    with dialled(leader) as stranger, pytest.raises(ConnectionError):
        stranger.sendall(b"x" * (1 << 26))


@pytest.mark.parametrize(
    "message", [{**REPORT.to_json(), "step": "x"}, {"newcomer": {"host": "c"}}, {"newcomer": None}, [], 3]
)
def test_a_host_that_sends_no_report_is_cut_off_and_harms_nobody(
    leader: LeaderServer, message: object
) -> None:
    with dialled(leader) as wrong:
        hello, channel = answer(OURS, wrong.makefile("rb").readline())
        wrong.sendall(hello + channel.line(message))
        assert wrong.recv(1000) == b"", "hung up"
    assert leader.new_reports() == []
    client = calling(leader.port)
    assert client.call(REPORT) is not None
    client.close()


def test_strangers_who_only_wait_keep_no_host_out(leader: LeaderServer) -> None:
    member = calling(leader.port)
    assert member.call(REPORT) is not None
    waiting = [dialled(leader) for _ in range(3 * MAX_UNKNOWN_CALLERS)]
    newcomer = calling(leader.port)
    assert newcomer.call(Report("c", HERE, (0,))) is not None
    assert member.call(REPORT) is not None
    assert len(leader._unknown_callers) <= MAX_UNKNOWN_CALLERS
    for connection in [*waiting, member, newcomer]:
        connection.close()


WRONG = {
    "another job": (
        replace(
            MEMBER, host="c", job={"train.steps": "50", "data.source": '"text.txt"', "train.clip": "1.0"}
        ),
        "host c was started with another job than the run: train.clip is 1.0 on c and not set in the run; "
        "train.steps is 50 on c and 100 in the run. Give every host the same job file and overrides; "
        "--workers may differ",
    ),
    "other data": (
        replace(MEMBER, host="c", data="999 tokens (checksum 11)"),
        "host c has other data than the run: 999 tokens (checksum 11) there, 1,000 tokens (checksum 00) in "
        'the run. Give every host the same files at "text.txt"',
    ),
    "another version": (
        replace(MEMBER, host="c", version="0.2.0", job={"of": "another schema"}),
        "host c has shardwise 0.2.0, and the run has shardwise 0.1.0: install the same version on every host",
    ),
    "another torch": (
        replace(MEMBER, host="c", torch="2.12.0+cpu"),
        "host c has torch 2.12.0+cpu, and the run has torch 2.13.0+cpu: install the same version on "
        "every host",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_host_that_does_not_fit_is_told_why_and_the_run_never_hears_its_reports(
    leader: LeaderServer, kind: str
) -> None:
    newcomer, why = WRONG[kind]
    member, stranger = calling(leader.port), calling(leader.port, who=newcomer)
    leader.tell(ORDERS)
    assert member.call(REPORT) == ORDERS
    for _ in range(2):
        assert stranger.call(Report("c", HERE, (0, 1))) == Orders("end", None, 2, why)
        stranger.close()
    assert member.call(REPORT) == ORDERS
    assert [report.host for report, _ in leader.new_reports()] == ["b"]
    assert [(refused.host, refused.workers, refused.why) for refused in leader.new_refusals()] == [
        ("c", 2, why)
    ] * 2
    assert leader.new_refusals() == []
    member.close()


def test_other_numbers_of_workers_and_builds_for_other_devices_fit() -> None:
    assert refusal_reason(LEADER, replace(MEMBER, workers=7, torch="2.13.0+cu128")) is None


def test_a_refusal_lists_some_differences_and_counts_the_rest() -> None:
    many = {f"train.key_{number:02}": "1" for number in range(MAX_DIFFERENCES + 3)}
    why = refusal_reason(LEADER, replace(MEMBER, job={**MEMBER.job, **many}))
    assert why is not None
    assert why.count(" is 1 on b and not set in the run") == MAX_DIFFERENCES
    assert "; 3 settings more. Give" in why


def test_a_host_of_an_older_version_which_says_none_is_refused_in_words(leader: LeaderServer) -> None:
    """As hosts called before they said their version: the first message is a report, and the answer is read
    as orders."""
    with dialled(leader) as older:
        lines = older.makefile("rb")
        hello, channel = answer(OURS, lines.readline())
        older.sendall(hello + channel.line(REPORT.to_json()))
        orders = Orders.from_json(channel.message(lines.readline()))
    assert (orders.wish, orders.status) == ("end", 2)
    assert orders.message.startswith(
        "host b has shardwise of an older version, which does not say its number, and the run has "
    )
    assert "shardwise 0.1.0" in orders.message
    assert leader.new_reports() == []


def test_a_leader_of_an_older_version_which_says_none_is_not_joined(
    leader: LeaderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.resilience.leader_connection.greeting", lambda version: greeting())
    client = calling(leader.port)
    assert client.call(REPORT) is None
    assert (client.refused, client.older) == (True, True)
    assert leader.new_reports() == []
    client.close()


def test_a_host_that_the_leader_wants_no_more_is_told_to_end(leader: LeaderServer) -> None:
    client = calling(leader.port)
    assert client.call(REPORT) == Orders()
    leader.refuse(Refusal("b", 2, "it fails", 1))
    assert client.call(REPORT) == Orders("end", None, 1, "it fails")
    assert leader.new_reports() == []
    client.close()
