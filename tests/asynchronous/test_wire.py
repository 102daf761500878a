"""Connections between workers and servers: what arrives is what was sent, and nobody else can say
anything."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardwise.asynchronous import wire as wire_module
from shardwise.asynchronous.wire import PIECE_BYTES, Stranger, Wire, dial, stays_on_this_machine
from shardwise.mesh.sockets import LOOPBACK, listen
from shardwise.resilience.channel import Credentials, UntrustedMessage

OURS = Credentials("server", b"a secret of the run")


class Meeting:
    """A listener that greets one caller in a thread."""

    def __init__(self) -> None:
        self.listener = listen(LOOPBACK)
        self.port = self.listener.getsockname()[1]
        self.greeted: list[Wire | Exception] = []
        self.thread = threading.Thread(target=self._greet)
        self.thread.start()

    def _greet(self) -> None:
        connection, _ = self.listener.accept()
        try:
            stranger = Stranger(connection)
            while (wire := stranger.admitted(OURS)) is None:
                select.select([connection], [], [], 10)
            self.greeted.append(wire)
        except (UntrustedMessage, OSError) as error:
            connection.close()
            self.greeted.append(error)

    def server(self) -> Any:
        self.thread.join(10)
        return self.greeted[0]


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    meeting = Meeting()
    yield meeting
    meeting.listener.close()
    if meeting.greeted and isinstance(meeting.greeted[0], Wire):
        meeting.greeted[0].close()


def connected(meeting: Meeting) -> tuple[Wire, Wire]:
    worker = dial(LOOPBACK, meeting.port, OURS)
    return worker, meeting.server()


@pytest.fixture
def over_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two machines: tensors have codes."""
    monkeypatch.setattr(wire_module, "stays_on_this_machine", lambda _: False)


def test_tensors_have_codes_unless_they_stay_on_this_machine(meeting: Meeting) -> None:
    worker, server = connected(meeting)
    assert not worker._tensors_have_codes
    assert not server._tensors_have_codes

    class Elsewhere:
        def getsockname(self) -> tuple[str, int]:
            return "10.0.0.1", 1

        def getpeername(self) -> tuple[str, int]:
            return "10.0.0.2", 1

    assert not stays_on_this_machine(Elsewhere())  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("numbers", [0, 1, 1000, PIECE_BYTES // 4, PIECE_BYTES // 2 + 3])
def test_messages_and_tensors_arrive_as_they_were_sent(
    meeting: Meeting, numbers: int, network: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "stays_on_this_machine", lambda _: not network)
    worker, server = connected(meeting)
    sent = torch.randn(numbers)
    for here, there in ((worker, server), (server, worker), (worker, server)):
        sending = threading.Thread(target=here.send, args=({"what": "ü", "number": 2**60}, sent))
        sending.start()
        assert there.receive() == ({"what": "ü", "number": 2**60}, 4 * numbers)
        received = torch.empty(numbers)
        there.read(received)
        sending.join()
        assert torch.equal(received, sent)
    worker.close()
    with pytest.raises(EOFError):
        server.receive()


def test_without_the_secret_nobody_is_greeted(meeting: Meeting) -> None:
    worker = dial(LOOPBACK, meeting.port, Credentials("server", b"another secret"))
    assert isinstance(meeting.server(), UntrustedMessage)
    with pytest.raises((EOFError, OSError)):
        worker.receive()


@pytest.mark.parametrize("hello", [b"", b"x" * 10_000, b"\n", b"GET / HTTP/1.1\r\n\r\n", b"00 11\n"])
def test_garbage_instead_of_a_greeting(meeting: Meeting, hello: bytes) -> None:
    with socket.create_connection((LOOPBACK, meeting.port)) as stranger:
        stranger.sendall(hello)
        with contextlib.suppress(OSError):  # refused already, and the connection with it
            stranger.shutdown(socket.SHUT_WR)
        assert isinstance(meeting.server(), UntrustedMessage)


class Tampering:
    """A socket that changes what passes through it."""

    def __init__(self, inner: socket.socket, place: int) -> None:
        self.inner, self.place, self.passed = inner, place, 0

    def sendall(self, content: bytes) -> None:
        changed = bytearray(content)
        where = self.place - self.passed
        if 0 <= where < len(changed):
            changed[where] ^= 1
        self.passed += len(changed)
        self.inner.sendall(changed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("place", [0, 3, 5, 14, 20, 40, 60, 200, 430, 441])
@pytest.mark.usefixtures("over_a_network")
def test_a_single_changed_bit_is_noticed_wherever_it_is(
    meeting: Meeting, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_module, "SEND_SECONDS", 1.0)
    worker, server = connected(meeting)
    worker._socket = Tampering(worker._socket, place)  # type: ignore[assignment]
    worker.send({"portion": 1}, torch.ones(96))
    worker.close()
    with pytest.raises((UntrustedMessage, EOFError)):
        received(server)


def received(wire: Wire) -> None:
    wire.receive()
    wire.read(torch.empty(96))


def test_what_was_recorded_cannot_be_sent_again(meeting: Meeting) -> None:
    worker, server = connected(meeting)
    recorded: list[bytes] = []
    original = worker._socket
    worker._socket = type("Recording", (), {"sendall": recorded.append, "settimeout": lambda *_: None})()
    worker.send({"portion": 1})
    worker._socket = original
    original.sendall(recorded[0])
    assert server.receive() == ({"portion": 1}, 0)
    original.sendall(recorded[0])
    with pytest.raises(UntrustedMessage):
        server.receive()
