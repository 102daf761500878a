"""Hosts and their leader, over real sockets."""

from __future__ import annotations

import socket

import pytest
from pretend import plan_for

from shardwise.errors import UserError
from shardwise.resilience.forked import free_port
from shardwise.resilience.rendezvous import Rendezvous, RendezvousClient
from shardwise.resilience.team import Member, Orders, Report, Team

REPORT = Report("b", "127.0.0.1", (0, 1), generation=3, step=7)
ORDERS = Orders("work", Team(4, (Member("a", 0), Member("b", 1)), plan_for(2), "127.0.0.1", 9, 1.0))


def test_a_report_arrives_and_orders_come_back() -> None:
    port = free_port()
    rendezvous, client = Rendezvous("127.0.0.1", port, "run"), RendezvousClient("127.0.0.1", port, "run")
    try:
        assert client.call(REPORT) == Orders()
        rendezvous.tell(ORDERS)
        assert not rendezvous.all_know({"b"})
        assert client.call(REPORT) == ORDERS
        assert rendezvous.all_know({"b"})
        assert [report for report, _ in rendezvous.new_reports()] == [REPORT], "only the newest of each host"
        assert rendezvous.new_reports() == []
        assert client.own_address() == "127.0.0.1"
    finally:
        client.close()
        rendezvous.close()


def test_a_leader_that_is_away_is_found_again() -> None:
    port = free_port()
    client = RendezvousClient("127.0.0.1", port, "run")
    assert client.call(REPORT) is None
    for _ in range(2):
        rendezvous = Rendezvous("127.0.0.1", port, "run")
        assert client.call(REPORT) is not None
        client.close()
        rendezvous.close()
        assert client.call(REPORT) is None


def test_another_run_at_the_same_place_is_named() -> None:
    port = free_port()
    rendezvous, client = Rendezvous("127.0.0.1", port, "mine"), RendezvousClient("127.0.0.1", port, "yours")
    try:
        with pytest.raises(UserError, match="here meets run 'mine', not 'yours'"):
            client.call(REPORT)
    finally:
        client.close()
        rendezvous.close()


def test_a_port_in_use_is_the_users_to_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(UserError, match="where the nodes meet, cannot be used"):
            Rendezvous("127.0.0.1", taken.getsockname()[1], "run")


def test_strangers_are_answered_and_do_no_harm() -> None:
    port = free_port()
    rendezvous = Rendezvous("127.0.0.1", port, "run")
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
            assert b"nodes of a shardwise run meet" in stranger.recv(1000)
        assert rendezvous.new_reports() == []
    finally:
        rendezvous.close()
