"""An authenticated connection between a worker and a server, for messages that may be followed by a tensor.

It opens like a connection between hosts (resilience/channel.py): both ends prove that they know the run's
secret, and derive the key of this connection from it. From then on every message, and every 4 MiB of a
tensor, is followed by a code under that key (AES-GCM; the content is not encrypted), numbered so that nothing
can be changed, left out or sent again. For a gigabyte of gradients this takes a quarter of a second;
HMAC-SHA256, which the hosts use for their few lines, would take longer than the network. If both ends have a
loopback address, the data never leave the machine: messages have their codes there too, tensors have none.

    header   4 bytes: length of the text; 8 bytes: bytes of the tensor
    text     JSON, then the code of header and text
    tensor   in pieces of at most 4 MiB, each with its code; on one machine without codes

The length of a tensor is used only after its code is checked, and compared with the size that the receiver
expects.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from typing import Literal

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from torch import Tensor

from shardwise.resilience.channel import HELLO_BYTES, Credentials, UntrustedMessage, admit, answer, greeting

TEXT_BYTES = 1 << 22
PIECE_BYTES = 4 << 20
CODE_BYTES = 16
HELLO_SECONDS = 5.0
"""Seconds in which a caller must prove that it knows the secret."""
SEND_SECONDS = 60.0
"""Seconds without progress, while a message is sent or received, after which the connection ends."""
_HEADER = struct.Struct("<IQ")
_KEEPALIVE = {
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": int(1000 * SEND_SECONDS),
}
"""Socket options that detect a machine which disappears: within eleven seconds, or within a minute if data
were being sent to it."""

Side = Literal["server", "worker"]


class Wire:
    """One end of a connection after the greeting. It sends and receives whole messages, one at a time in each
    direction."""

    def __init__(self, connection: socket.socket, key: bytes, side: Side) -> None:
        self._socket, self._cipher = connection, AESGCM(key)
        self._send_prefix, self._receive_prefix = (b"s", b"w") if side == "server" else (b"w", b"s")
        self._sent = self._received = 0
        self._tensors_have_codes = not stays_on_this_machine(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, message: dict[str, object], tensor: Tensor | None = None) -> None:
        """Send a message, followed by the bytes of a tensor."""
        self._socket.settimeout(SEND_SECONDS)
        text, content = json.dumps(message).encode(), _bytes(tensor)
        header = _HEADER.pack(len(text), len(content))
        self._socket.sendall(header + text + self._code_of(header + text))
        for piece in _pieces(content):
            self._socket.sendall(piece)
            if self._tensors_have_codes:
                self._socket.sendall(self._code_of(piece))

    def receive(self) -> tuple[dict[str, object], int]:
        """Wait for the next message. Return it, and the number of bytes of the tensor that follows. If this
        is not 0, call `read` next."""
        self._socket.settimeout(None)
        header = self._read_bytes(_HEADER.size)
        self._socket.settimeout(SEND_SECONDS)
        length, tensor_bytes = _HEADER.unpack(header)
        if length > TEXT_BYTES:
            raise UntrustedMessage(f"a message of {length} bytes")
        text = self._read_bytes(length)
        self._check(header + text)
        try:
            message = json.loads(bytes(text))
        except (ValueError, RecursionError) as error:
            raise UntrustedMessage(f"no message: {error}") from None
        if not isinstance(message, dict):
            raise UntrustedMessage("no message")
        return message, tensor_bytes

    def read(self, into: Tensor) -> None:
        """Read the tensor that follows the message that was just received."""
        for piece in _pieces(_bytes(into)):
            self._fill(piece)
            if self._tensors_have_codes:
                self._check(piece)

    def close(self) -> None:
        """Close the connection, which ends all waits at both ends."""
        with suppress(OSError):  # the other end may have closed it first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _code_of(self, content: bytes | memoryview) -> bytes:
        code = self._cipher.encrypt(self._send_prefix + self._sent.to_bytes(11, "big"), b"", content)
        self._sent += 1
        return code

    def _check(self, content: bytes | memoryview) -> None:
        code = self._read_bytes(CODE_BYTES)
        nonce = self._receive_prefix + self._received.to_bytes(11, "big")
        try:
            self._cipher.decrypt(nonce, bytes(code), content)
        except InvalidTag:
            raise UntrustedMessage("the data were not sent by a worker or server of this run") from None
        self._received += 1

    def _read_bytes(self, count: int) -> bytes:
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
    """Return whether both ends have a loopback address."""
    return all(ip_address(end[0]).is_loopback for end in (connection.getsockname(), connection.getpeername()))


def dial(address: str, port: int, credentials: Credentials) -> Wire:
    """Connect a worker to a server."""
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
    """A server's end of a connection whose caller has not proved yet that it knows the secret. Nothing here
    waits for the caller, so one thread can serve many."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + HELLO_SECONDS
        self._greeted, self._answer = greeting(), bytearray()
        connection.setblocking(False)
        connection.send(self._greeted)  # cannot block: the buffer of a new connection is empty

    def admitted(self, credentials: Credentials) -> Wire | None:
        """Return the connection if the caller has proved that it knows the secret; None: its answer is not
        complete yet."""
        try:
            _read_line(self.connection, self._answer)
        except BlockingIOError:
            return None
        return Wire(self.connection, admit(credentials, self._greeted, bytes(self._answer)).key, "server")


def _read_line(connection: socket.socket, line: bytearray) -> None:
    """Read the rest of a short line, byte by byte, so that nothing after it is consumed."""
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
    assert tensor.is_contiguous(), "only a contiguous tensor can be sent"
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
