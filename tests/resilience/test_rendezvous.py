"""Hosts and their leader, over real sockets."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
from pretend import plan_for

from shardwise.errors import UserError
from shardwise.resilience.channel import Credentials, answer
from shardwise.resilience.forked import free_port
from shardwise.resilience.rendezvous import MOST_STRANGERS, Rendezvous, RendezvousClient
from shardwise.resilience.team import Fault, Member, Orders, Report, Team

REPORT = Report("b", "127.0.0.1", (0, 1), generation=3, step=7)
ORDERS = Orders("work", Team(4, (Member("a", 0), Member("b", 1)), plan_for(2), "127.0.0.1", 9, "a name", 1.0))
OURS = Credentials("run", b"a secret of this run")
HERE = "127.0.0.1"


def calling(port: int, credentials: Credentials | None = OURS) -> RendezvousClient:
    return RendezvousClient(lambda: (HERE, port, credentials))


@pytest.fixture
def leader() -> Iterator[Rendezvous]:
    rendezvous = Rendezvous(HERE, 0, OURS)
    yield rendezvous
    rendezvous.close()


def test_a_report_arrives_and_orders_come_back(leader: Rendezvous) -> None:
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
        rendezvous = Rendezvous(HERE, port, OURS)
        assert client.call(REPORT) is not None
        rendezvous.close()
        assert client.call(REPORT) is None
        assert not client.refused
    client.close()


def test_a_host_without_the_secret_of_the_run_is_refused(leader: Rendezvous) -> None:
    for credentials in (Credentials("run", b"another secret"), Credentials("another run", OURS.secret)):
        client = calling(leader.port, credentials)
        assert client.call(REPORT) is None
        assert client.refused
        client.close()
    early = calling(leader.port, None)
    assert early.call(REPORT) is None
    assert not early.refused, "it does not know any secret yet, and does not dial"
    assert leader.new_reports() == []


def test_a_report_with_traces_that_are_too_long_is_sent_without_them(leader: Rendezvous) -> None:
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
            Rendezvous(HERE, taken.getsockname()[1], OURS)


def dialled(leader: Rendezvous) -> socket.socket:
    return socket.create_connection((HERE, leader.port), timeout=5)


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\n\r\n", b"\n", b'{"run": "run", "report": {}}\n', b"\xff" * 1000 + b"\n"])
def test_a_stranger_is_refused_and_told_nothing_of_the_run(leader: Rendezvous, said: bytes) -> None:
    with dialled(leader) as stranger:
        stranger.sendall(said)
        heard = b""
        while part := stranger.recv(1000):
            heard += part
    greeted, refused = heard.splitlines()
    assert greeted.startswith(b"shardwise-1 ")
    assert refused == b"refused"
    assert leader.new_reports() == []


def test_a_line_without_end_is_cut_off(leader: Rendezvous) -> None:
    with dialled(leader) as stranger, pytest.raises(ConnectionError):
        stranger.sendall(b"x" * (1 << 26))


def test_a_host_that_sends_no_report_is_cut_off_and_harms_nobody(leader: Rendezvous) -> None:
    with dialled(leader) as wrong:
        hello, channel = answer(OURS, wrong.makefile("rb").readline())
        wrong.sendall(hello + channel.line({**REPORT.to_json(), "step": "x"}))
        assert wrong.recv(1000) == b"", "hung up"
    assert leader.new_reports() == []
    client = calling(leader.port)
    assert client.call(REPORT) is not None
    client.close()


def test_strangers_who_only_wait_keep_no_host_out(leader: Rendezvous) -> None:
    member = calling(leader.port)
    assert member.call(REPORT) is not None
    waiting = [dialled(leader) for _ in range(3 * MOST_STRANGERS)]
    newcomer = calling(leader.port)
    assert newcomer.call(Report("c", HERE, (0,))) is not None
    assert member.call(REPORT) is not None
    assert len(leader._strangers) <= MOST_STRANGERS
    for connection in [*waiting, member, newcomer]:
        connection.close()
