"""The file in the run's folder with the address of the leader and the secret of the run.

The first host creates a new secret for every run and writes it with its address into `meeting.json`, which
only this user can read. Other hosts read it there. If hosts do not share a folder, SHARDWISE_SECRET contains
the secret, and the launcher gives the address.

The host that holds the lock of the run's folder is the leader. The system releases the lock when the leader
dies. A host that finds it free takes over and writes its own address. The locks of some file systems are not
visible to all hosts, so the leader also increases a number in the file, and no host takes over while the
number changes. Clocks are not compared.

A leader that ends the run removes the file. A leader that dies leaves it, so the file may belong to a run
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
"""Name of the file in the run's folder."""
BEAT_SECONDS = 2.0
"""Seconds between two heartbeats of the leader in the file."""
SILENT_SECONDS = 15.0
"""Seconds without an answer of the leader and without a heartbeat in the file, before another host takes
over.
"""


@dataclass(frozen=True)
class LeaderRecord:
    """The contents of the file."""

    leader: str
    """Name of the host that leads."""
    address: str
    port: int
    secret: str
    """Secret of the run; empty if the environment contains it."""
    beat: int = 0
    """Number that the leader increases while it lives."""


class LeaderFile:
    """The file as one host sees it.

    `given` is the secret from the environment, if there is one. `first` is the address and the port of the
    first node, which the launcher names.
    """

    def __init__(self, folder: Path, host: str, run: str, given: str | None, first: tuple[str, int]) -> None:
        self.path = folder / FILE
        self._host, self._run, self.given, self._first = host, run, given, first
        self._secret = ""
        """Secret of a run that this host started."""
        self._written: LeaderRecord | None = None
        self._written_at = 0.0
        self._seen: LeaderRecord | None = None
        self._seen_at = time.monotonic()
        self._left_over = self.read()
        """Contents when this host started. They may belong to a run that is over."""

    def read(self) -> LeaderRecord | None:
        """Return the contents now; None if there is no complete file."""
        try:
            record = parse_as(LeaderRecord, read_bytes(self.path), self.path)
        except (FileNotFoundError, UserError):
            return None
        if record != self._seen:
            self._seen, self._seen_at = record, time.monotonic()
        return record

    def find(self, attempt: int = 0) -> tuple[str, int, Credentials | None]:
        """Return the address and port of the leader, and the credentials for it if they are known.

        Hosts with a given secret may not share a folder, and the file in their folder may belong to an
        earlier run. For every second attempt, such a host therefore gets the address that the launcher names.
        """
        record = self.read() or self._seen
        address, port = self._first
        if record and not (self.given and attempt % 2):
            address, port = record.address, record.port
        secret = self.given or (record.secret if record else self._secret)
        return address, port, Credentials(self._run, secret.encode()) if secret else None

    def begin(self) -> Credentials:
        """Return the credentials of a new run, with a new secret that other hosts will read here."""
        self._secret = self.given or secrets.token_hex(32)
        return Credentials(self._run, self._secret.encode())

    def announce(self, address: str, port: int) -> None:
        """Write that this host leads the run, at this address."""
        before = self.read() or self._seen
        secret = "" if self.given else self._secret or (before.secret if before else "")
        self._write(LeaderRecord(self._host, address, port, secret, before.beat + 1 if before else 0))

    def has_news(self) -> bool:
        """Return whether a leader has written the file since this host started."""
        return self.read() not in (None, self._left_over)

    def leader_is_silent(self) -> bool:
        """Return whether the file has not changed for `SILENT_SECONDS`, so that the leader counts as lost."""
        return self.has_news() and time.monotonic() - self._seen_at > SILENT_SECONDS

    def still_leads(self, on_deleted: Callable[[], None] = lambda: None) -> bool:
        """Write a heartbeat if it is time. Return False if another host has taken over meanwhile.

        If the file was deleted, for example with the run's folder, `on_deleted` is called and the file is
        written again.
        """
        now = time.monotonic()
        if now - self._written_at < BEAT_SECONDS:
            return True
        record = self.read()
        if record is not None and record.leader != self._host:
            return False
        if record is None and self._written is not None:
            on_deleted()
        if (last := record or self._written) is not None:
            with contextlib.suppress(OSError):  # on a full disk, the lock still shows that this host leads
                self._write(replace(last, beat=last.beat + 1))
        self._written_at = now
        return True

    def remove(self) -> None:
        """Remove the file, because the run is over."""
        record = self.read()
        if record is not None and record.leader == self._host:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _write(self, record: LeaderRecord) -> None:
        """Write the file completely or not at all, readable by this user only."""
        partial = self.path.with_name(f".{FILE}.{self._host}")
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(asdict(record), stream)
        partial.replace(self.path)
        self._written = record
        self._written_at = time.monotonic()
