"""A connection between two hosts of a run, proof against strangers: what is said on it is known to come from
the other host.

Both ends know the run's secret, which is never sent. The leader greets with a random number, the host answers
with one of its own and shows that it knows the secret; both draw the key of this connection from the two
numbers, the run's name and the secret. Every line after that carries an HMAC-SHA256 under that key of who
speaks, of how many lines went before, and of the text. So a message cannot be made or changed without the
secret, and cannot be sent again on this connection or any other.

    leader  shardwise-1 NUMBER [VERSION]
    host    NUMBER HMAC
    either  HMAC TEXT          (TEXT: JSON, compressed, in base64)

VERSION is that of the leader's shardwise, so that a host can tell a leader of an older one, which does not
say it. A line has at most 64 KiB. Nothing is hidden: whoever can listen on the network can read.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import zlib
from dataclasses import dataclass
from typing import Any, Literal

LINE_BYTES = 1 << 16
HELLO_BYTES = 256
TEXT_BYTES = 1 << 22
"""Of a message when it is not compressed."""
_GREETING = b"shardwise-1"

Speaker = Literal["leader", "host"]


class NotOurs(Exception):
    """What came was not sent by a host of this run."""


class TooLong(Exception):
    """A message that does not fit into a line."""


@dataclass(frozen=True)
class Credentials:
    """What makes a host one of a run's."""

    run: str
    secret: bytes

    def _keyed(self, purpose: bytes, *numbers: bytes) -> bytes:
        parts = [purpose, hashlib.sha256(self.run.encode()).digest(), *numbers]
        return hmac.digest(self.secret, b" ".join(parts), "sha256")


class Channel:
    """One end of a connection, after the greeting: puts messages into lines, and takes them out."""

    def __init__(self, key: bytes, speaker: Speaker) -> None:
        self.key, self._speaker = key, speaker
        self._sent = self._received = 0

    def line(self, message: Any) -> bytes:
        """A message as it is sent."""
        text = base64.b64encode(zlib.compress(json.dumps(message).encode()))
        line = self._code(self._speaker, self._sent, text) + b" " + text + b"\n"
        if len(line) > LINE_BYTES:
            raise TooLong(f"a message of {len(line)} bytes")
        self._sent += 1
        return line

    def message(self, line: bytes) -> Any:
        """The message in a line that came, if the other end has sent it just so, and now."""
        code, _, text = line.rstrip(b"\n").partition(b" ")
        other: Speaker = "host" if self._speaker == "leader" else "leader"
        if not hmac.compare_digest(code, self._code(other, self._received, text)):
            raise NotOurs("a line that no host of this run has sent")
        self._received += 1
        try:
            unpacking = zlib.decompressobj()
            return json.loads(unpacking.decompress(base64.b64decode(text), TEXT_BYTES))
        except (ValueError, zlib.error, RecursionError) as error:
            raise NotOurs(f"a line that is no message: {error}") from None

    def _code(self, speaker: Speaker, count: int, text: bytes) -> bytes:
        return hmac.digest(self.key, b"%s %d %s" % (speaker.encode(), count, text), "sha256").hex().encode()


def greeting(version: str = "") -> bytes:
    """The leader's first line, another one every time."""
    return b" ".join([_GREETING, secrets.token_hex(16).encode(), *version.encode().split()]) + b"\n"


def greeted_version(greeted: bytes) -> str:
    """The version in the leader's first line; empty where it is of a shardwise that did not say it yet."""
    return b" ".join(greeted.split()[2:]).decode(errors="replace")


def answer(credentials: Credentials, greeted: bytes) -> tuple[bytes, Channel]:
    """A host's first line, and its end of the channel."""
    if not greeted.startswith(_GREETING + b" "):
        raise NotOurs("no host of a run greets like this")
    number = secrets.token_hex(16).encode()
    code = credentials._keyed(b"hello", greeted.strip(), number).hex().encode()
    return number + b" " + code + b"\n", Channel(credentials._keyed(b"key", greeted.strip(), number), "host")


def admit(credentials: Credentials, greeted: bytes, answered: bytes) -> Channel:
    """The leader's end of the channel, if the other one knows the secret."""
    number, _, code = answered.strip().partition(b" ")
    if not hmac.compare_digest(code, credentials._keyed(b"hello", greeted.strip(), number).hex().encode()):
        raise NotOurs("the wrong secret")
    return Channel(credentials._keyed(b"key", greeted.strip(), number), "leader")
