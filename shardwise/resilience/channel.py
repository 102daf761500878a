"""An authenticated connection between two hosts of a run: messages are known to come from the other host.

Both ends know the run's secret, which is never sent. The leader greets with a random number. The host answers
with a random number of its own and proves that it knows the secret. Both derive the key of this connection
from the two numbers, the run's name and the secret. Every later line carries an HMAC-SHA256 under that key
over the sender, the number of earlier lines, and the text. A message can therefore not be forged or changed
without the secret, and cannot be replayed on this or any other connection.

    leader  shardwise-1 NUMBER [VERSION]
    host    NUMBER HMAC
    either  HMAC TEXT          (TEXT: JSON, compressed, in base64)

VERSION is that of the leader's shardwise, so that a host can detect an older leader, which does not send it.
A line has at most 64 KiB. Messages are not encrypted: anyone who can listen on the network can read them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import zlib
from dataclasses import dataclass
from typing import Literal

LINE_BYTES = 1 << 16
"""Maximum number of bytes of a line."""
HELLO_BYTES = 256
"""Maximum number of bytes of a host's first line."""
TEXT_BYTES = 1 << 22
"""Maximum number of bytes of a message before compression."""
_GREETING = b"shardwise-1"

Sender = Literal["leader", "host"]
"""The end of a connection that sends a line."""


class UntrustedMessage(Exception):
    """The line was not sent by a host of this run."""


class MessageTooLong(Exception):
    """The message does not fit into a line."""


@dataclass(frozen=True)
class Credentials:
    """The name and the secret of a run, which its hosts know."""

    run: str
    secret: bytes

    def derived_key(self, purpose: str) -> bytes:
        """Return a key for another purpose, which every host of the run can compute and nobody else."""
        return self._keyed(purpose.encode())

    def _keyed(self, purpose: bytes, *numbers: bytes) -> bytes:
        parts = [purpose, hashlib.sha256(self.run.encode()).digest(), *numbers]
        return hmac.digest(self.secret, b" ".join(parts), "sha256")


class Channel:
    """One end of a connection after the greeting. It converts messages to lines and back."""

    def __init__(self, key: bytes, sender: Sender) -> None:
        self.key, self._sender = key, sender
        self._sent = self._received = 0

    def line(self, message: object) -> bytes:
        """Return the line that sends a message."""
        text = base64.b64encode(zlib.compress(json.dumps(message).encode()))
        line = self._code(self._sender, self._sent, text) + b" " + text + b"\n"
        if len(line) > LINE_BYTES:
            raise MessageTooLong(f"a message of {len(line)} bytes")
        self._sent += 1
        return line

    def message(self, line: bytes) -> object:
        """Return the message of a received line, if the other end sent exactly this line as its next one."""
        code, _, text = line.rstrip(b"\n").partition(b" ")
        other: Sender = "host" if self._sender == "leader" else "leader"
        if not hmac.compare_digest(code, self._code(other, self._received, text)):
            raise UntrustedMessage("a line that no host of this run has sent")
        self._received += 1
        try:
            unpacking = zlib.decompressobj()
            message: object = json.loads(unpacking.decompress(base64.b64decode(text), TEXT_BYTES))
        except (ValueError, zlib.error, RecursionError) as error:
            raise UntrustedMessage(f"a line that is no message: {error}") from None
        return message

    def _code(self, sender: Sender, count: int, text: bytes) -> bytes:
        return hmac.digest(self.key, b"%s %d %s" % (sender.encode(), count, text), "sha256").hex().encode()


def greeting(version: str = "") -> bytes:
    """Return the leader's first line, which contains a new random number every time."""
    return b" ".join([_GREETING, secrets.token_hex(16).encode(), *version.encode().split()]) + b"\n"


def greeted_version(greeted: bytes) -> str:
    """Return the version in the leader's first line; empty if an older shardwise did not send it."""
    return b" ".join(greeted.split()[2:]).decode(errors="replace")


def answer(credentials: Credentials, greeted: bytes) -> tuple[bytes, Channel]:
    """Return a host's first line, and its end of the channel."""
    if not greeted.startswith(_GREETING + b" "):
        raise UntrustedMessage("no host of a run greets like this")
    number = secrets.token_hex(16).encode()
    code = credentials._keyed(b"hello", greeted.strip(), number).hex().encode()
    return number + b" " + code + b"\n", Channel(credentials._keyed(b"key", greeted.strip(), number), "host")


def admit(credentials: Credentials, greeted: bytes, answered: bytes) -> Channel:
    """Return the leader's end of the channel, if the host knows the secret."""
    number, _, code = answered.strip().partition(b" ")
    if not hmac.compare_digest(code, credentials._keyed(b"hello", greeted.strip(), number).hex().encode()):
        raise UntrustedMessage("the wrong secret")
    return Channel(credentials._keyed(b"key", greeted.strip(), number), "leader")
