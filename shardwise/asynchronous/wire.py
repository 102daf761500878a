"""A connection between a worker and a server: messages with tensors behind them, proof against strangers.

It opens as one between hosts does (resilience/channel.py): both ends show that they know the run's secret,
and draw the key of this connection from it. From then on every message, and every 4 MiB of a tensor, is
followed by a code under that key (AES-GCM over what is sent in the clear), numbered so that nothing can be
changed, left out or sent again. HMAC-SHA256, which the hosts use for their few lines, would take longer than
the network does for a gigabyte of gradients; this takes a quarter of a second. Where both ends are at a
loopback address, what follows the greeting passes through nobody's hands but the kernel's: messages carry
their codes there too, tensors do without.

    header   4 bytes: length of the text; 8 bytes: bytes of the tensor
    text     JSON, then the code of header and text
    tensor   in pieces of at most 4 MiB, each with its code; on one machine, as it is

The length is believed once its code is right, and is then held against what the receiver has room for.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Literal

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from shardwise.resilience.channel import HELLO_BYTES, Credentials, UntrustedMessage, admit, answer, greeting

TEXT_BYTES = 1 << 22
PIECE_BYTES = 4 << 20
CODE_BYTES = 16
HELLO_SECONDS = 5.0
"""How long a caller may take to show that it knows the secret."""
SEND_SECONDS = 60.0
"""How long the other end may take nothing of what is sent, or send nothing of what it has begun to send."""
_HEADER = struct.Struct("<IQ")
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": int(1000 * SEND_SECONDS),
}
"""A machine that is gone without a word is noticed within eleven seconds; where something was on its way to
it, in a minute."""

Side = Literal["server", "worker"]


class Wire:
    """One end, after the greeting. Sends and receives whole messages, one at a time each way."""

    def __init__(self, connection: socket.socket, key: bytes, side: Side) -> None:
        self._socket, self._cipher = connection, AESGCM(key)
        self._own, self._other = (b"s", b"w") if side == "server" else (b"w", b"s")
        self._sent = self._received = 0
        self._tensors_have_codes = not stays_on_this_machine(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, Any], tensor: Tensor | None = None) -> None:
        """Send a message, and the bytes of a tensor behind it."""
        self._socket.settimeout(SEND_SECONDS)
        text, content = json.dumps(message).encode(), _bytes(tensor)
        header = _HEADER.pack(len(text), len(content))
        self._socket.sendall(header + text + self._code_of(header + text))
        for piece in _pieces(content):
            self._socket.sendall(piece)
            if self._tensors_have_codes:
                self._socket.sendall(self._code_of(piece))

    def receive(self) -> tuple[dict[str, Any], int]:
        """The next message, however long it takes to come, and how many bytes of a tensor are behind it:
        `read` those next."""
        self._socket.settimeout(None)
        header = self._exactly(_HEADER.size)
        self._socket.settimeout(SEND_SECONDS)
        length, bytes_behind = _HEADER.unpack(header)
        if length > TEXT_BYTES:
            raise UntrustedMessage(f"a message of {length} bytes")
        text = self._exactly(length)
        self._check(header + text)
        try:
            message = json.loads(bytes(text))
        except (ValueError, RecursionError) as error:
            raise UntrustedMessage(f"no message: {error}") from None
        if not isinstance(message, dict):
            raise UntrustedMessage("no message")
        return message, bytes_behind

    def read(self, into: Tensor) -> None:
        """The tensor behind the message that was just received; as many bytes as were announced."""
        for piece in _pieces(_bytes(into)):
            self._fill(piece)
            if self._tensors_have_codes:
                self._check(piece)

    def close(self) -> None:
        """Close the connection; whoever waits at either end is freed."""
        with suppress(OSError):  # the other end may have been first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _code_of(self, content: bytes | memoryview) -> bytes:
        code = self._cipher.encrypt(self._own + self._sent.to_bytes(11, "big"), b"", content)
        self._sent += 1
        return code

    def _check(self, content: bytes | memoryview) -> None:
        code = self._exactly(CODE_BYTES)
        try:
            self._cipher.decrypt(self._other + self._received.to_bytes(11, "big"), bytes(code), content)
        except InvalidTag:
            raise UntrustedMessage("what came was not sent so by a worker or server of this run") from None
        self._received += 1

    def _exactly(self, count: int) -> bytes:
        content = bytearray(count)
        self._fill(memoryview(content))
        return bytes(content)

    def _fill(self, room: memoryview) -> None:
        while len(room):
            count = self._socket.recv_into(room)
            if not count:
                raise EOFError("the other end hung up")
            room = room[count:]


def stays_on_this_machine(connection: socket.socket) -> bool:
    """Whether both ends are at a loopback address."""
    return all(ip_address(end[0]).is_loopback for end in (connection.getsockname(), connection.getpeername()))


def dial(address: str, port: int, credentials: Credentials) -> Wire:
    """A worker's end of a connection to a server."""
    connection = socket.create_connection((address, port), timeout=HELLO_SECONDS)
    try:
        greeted = bytearray()
        _read_line(connection, greeted)
        answered, channel = answer(credentials, bytes(greeted))
        connection.sendall(answered)
        return Wire(connection, channel.key, "worker")
    except BaseException:
        connection.close()
        raise


class Stranger:
    """A server's end of a connection whose caller has not shown yet that it knows the secret. Nothing here
    waits for the caller, so one thread can greet many."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + HELLO_SECONDS
        self._greeted, self._answer = greeting(), bytearray()
        connection.setblocking(False)
        connection.send(self._greeted)  # the first bytes of a connection: there is room for them

    def admitted(self, credentials: Credentials) -> Wire | None:
        """The connection, once the caller has shown that it knows the secret; None: more of its answer has to
        come."""
        try:
            _read_line(self.connection, self._answer)
        except BlockingIOError:
            return None
        return Wire(self.connection, admit(credentials, self._greeted, bytes(self._answer)).key, "server")


def _read_line(connection: socket.socket, line: bytearray) -> None:
    """Read the rest of a short line. Byte by byte: what follows it is not for us to take."""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) >= HELLO_BYTES:
            raise UntrustedMessage("no greeting")
        line += byte


def _pieces(content: memoryview) -> Iterator[memoryview]:
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _bytes(tensor: Tensor | None) -> memoryview:
    if tensor is None or not tensor.numel():
        return memoryview(b"")
    assert tensor.is_contiguous(), "its bytes lie one after the other"
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
