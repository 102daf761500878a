"""Which address of a machine others are told."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import UserError
from shardwise.mesh import sockets
from shardwise.mesh.sockets import LOOPBACK, address_for_other_machines

OUTSIDE = "10.0.0.5"


def names(monkeypatch: pytest.MonkeyPatch, *answers: str) -> None:
    """Every name has these addresses."""

    def answer(*_: Any, **__: Any) -> list[Any]:
        if not answers:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in answers]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def network(monkeypatch: pytest.MonkeyPatch, default_route: bool, *addresses: str) -> None:
    """This machine has these addresses beside its loopback address."""
    entries = {
        f"eth{number}": [SimpleNamespace(family=socket.AF_INET, address=one)]
        for number, one in enumerate(addresses)
    }
    lo = [
        SimpleNamespace(family=socket.AF_INET, address=LOOPBACK),
        SimpleNamespace(family=socket.AF_PACKET, address="00:00"),
    ]
    monkeypatch.setattr(sockets.psutil, "net_if_addrs", lambda: {"lo": lo, **entries})
    monkeypatch.setattr(
        sockets, "address_towards", lambda address, port: addresses[0] if default_route else LOOPBACK
    )


@pytest.mark.parametrize(
    "name", ["localhost", "ip6-localhost", "localhost.localdomain", "127.0.1.1", "10.9.9.9", "::1"]
)
def test_what_says_itself_which_address_it_is_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    names(monkeypatch, "127.0.0.1")
    network(monkeypatch, True, OUTSIDE)
    assert address_for_other_machines(name) == name


@pytest.mark.parametrize("answers", [(), ("10.9.9.9",), ("10.9.9.9", "127.0.1.1")])
def test_a_name_that_leads_outside_or_is_not_known_yet_stays(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...]
) -> None:
    names(monkeypatch, *answers)
    network(monkeypatch, True, OUTSIDE)
    assert address_for_other_machines("node-1") == "node-1"


@pytest.mark.parametrize(
    ("answers", "default_route", "addresses"),
    [
        (("127.0.1.1",), True, (OUTSIDE, "172.17.0.1")),
        (("127.0.1.1",), False, (OUTSIDE,)),
        (("127.0.1.1", OUTSIDE), True, ("192.168.0.1", OUTSIDE)),
    ],
)
def test_a_name_that_only_this_machine_takes_for_itself_is_told_as_an_address(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[str, ...], default_route: bool, addresses: tuple[str, ...]
) -> None:
    """As Debian has it: a machine's own name leads to 127.0.1.1."""
    names(monkeypatch, *answers)
    network(monkeypatch, default_route, *addresses)
    assert address_for_other_machines("node-1") == OUTSIDE


@pytest.mark.parametrize("addresses", [(), (OUTSIDE, "172.17.0.1")])
def test_a_machine_of_which_nobody_knows_the_address_outside_is_refused(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...]
) -> None:
    names(monkeypatch, "127.0.1.1")
    network(monkeypatch, False, *addresses)
    with pytest.raises(
        UserError, match=r"node-1 leads to 127.0.1.1 here, .*name the first node by its address"
    ):
        address_for_other_machines("node-1")


def test_a_name_that_cannot_be_resolved_is_named_with_what_to_set_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch)
    network(monkeypatch, True, OUTSIDE)
    with pytest.raises(UserError) as refused:
        sockets.listen("n1", 20001)
    told = str(refused.value)
    assert told.startswith("the name n1, which the launcher gives the first node, cannot be resolved on ")
    assert "(Temporary failure in name resolution)" in told
    assert (
        "MASTER_ADDR=ADDRESS under Slurm (export it before srun), PET_RDZV_ENDPOINT=ADDRESS:PORT elsewhere"
        in told
    )
    assert told.endswith(f"The address of {socket.gethostname()} is {OUTSIDE}")
