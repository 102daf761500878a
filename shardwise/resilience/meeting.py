"""Where the hosts of a run find their leader, and the secret by which they know each other: a file in the
run's folder.

The first host makes a secret, a new one every time, and writes it with its address into `meeting.json`, which
only this user can read. Other hosts read it there. Where they share no folder, SHARDWISE_SECRET gives the
secret and the launcher the address.

Who leads is who holds the lock of the run's folder. The system lets go of it when the leader dies, and a host
that finds it free takes over and writes its own address. Not every file system's locks are seen by all hosts,
so the leader also counts up a number in the file, and nobody takes over while it moves: no clocks are
compared.

A leader that ends the run removes the file. One that dies leaves it behind, so what it says may be of a run
that is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.errors import UserError
from shardwise.files import parse_as, read_bytes
from shardwise.resilience.channel import Credentials

FILE = "meeting.json"
BEAT_SECONDS = 2.0
"""Between two signs of life of the leader in the file."""
SILENT_SECONDS = 15.0
"""How long a leader gives no sign of life, neither by answering nor in the file, before another host takes
over."""


@dataclass(frozen=True)
class Meeting:
    """What the file says."""

    leader: str
    address: str
    port: int
    secret: str
    """Empty where the environment gives it."""
    beat: int = 0


class MeetingFile:
    """The file, as one host sees it. `given` is the secret of the environment, `first` the place that the
    launcher names."""

    def __init__(
        self, folder: Path, own_name: str, run: str, given: str | None, first: tuple[str, int]
    ) -> None:
        self.path = folder / FILE
        self._own_name, self._run, self.given, self._first = own_name, run, given, first
        self._secret = ""
        """Of a run that this host began."""
        self._written: Meeting | None = None
        self._written_at = 0.0
        self._seen: Meeting | None = None
        self._seen_at = time.monotonic()
        self._left_over = self.read()
        """What was there before this host: perhaps of a run that is over."""

    def read(self) -> Meeting | None:
        """What it says now; None where there is none, or none that is whole."""
        try:
            meeting = parse_as(Meeting, read_bytes(self.path), self.path)
        except (FileNotFoundError, UserError):
            return None
        if meeting != self._seen:
            self._seen, self._seen_at = meeting, time.monotonic()
        return meeting

    def find(self, attempt: int = 0) -> tuple[str, int, Credentials | None]:
        """Where the leader is, and what it will ask for, as far as that is known. Hosts with a given secret
        may share no folder, and what they find in their own may be of an earlier run: every second attempt of
        theirs goes where the launcher says.
        """
        meeting = self.read() or self._seen
        address, port = self._first
        if meeting and not (self.given and attempt % 2):
            address, port = meeting.address, meeting.port
        secret = self.given or (meeting.secret if meeting else "")
        return address, port, Credentials(self._run, secret.encode()) if secret else None

    def begin(self) -> Credentials:
        """Of a new run: with a new secret, which others will read here."""
        self._secret = self.given or secrets.token_hex(32)
        return Credentials(self._run, self._secret.encode())

    def announce(self, address: str, port: int) -> None:
        """Lead the run from now on, at this place: hosts that look for their leader find us."""
        before = self.read() or self._seen
        secret = "" if self.given else self._secret or (before.secret if before else "")
        self._write(Meeting(self._own_name, address, port, secret, before.beat + 1 if before else 0))

    def has_news(self) -> bool:
        """Whether a host has said here that it leads since this host began."""
        return self.read() not in (None, self._left_over)

    def leader_is_silent(self) -> bool:
        """Whether nothing was written here for so long that the leader must be gone."""
        return self.has_news() and time.monotonic() - self._seen_at > SILENT_SECONDS

    def still_leads(self, on_deleted: Callable[[], None] = lambda: None) -> bool:
        """Give a sign of life, if it is time to; False if another host has taken over meanwhile. Where the
        file was deleted, with the run's folder perhaps, it is written again, after a call of `on_deleted`.
        """
        now = time.monotonic()
        if now - self._written_at < BEAT_SECONDS:
            return True
        meeting = self.read()
        if meeting is not None and meeting.leader != self._own_name:
            return False
        if meeting is None and self._written is not None:
            on_deleted()
        if (last := meeting or self._written) is not None:
            with contextlib.suppress(OSError):  # a full disk: the lock still tells that we lead
                self._write(replace(last, beat=last.beat + 1))
        self._written_at = now
        return True

    def remove(self) -> None:
        """The run is over: whoever comes next need not look for its leader."""
        meeting = self.read()
        if meeting is not None and meeting.leader == self._own_name:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _write(self, meeting: Meeting) -> None:
        """Whole or not at all, and for this user's eyes only."""
        part = self.path.with_name(f".{FILE}.{self._own_name}")
        part.unlink(missing_ok=True)
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(asdict(meeting), stream)
        part.replace(self.path)
        self._written = meeting
        self._written_at = time.monotonic()
