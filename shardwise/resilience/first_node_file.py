"""The file that the first node of a run writes before it leads, for the nodes that wait for it.

The other nodes wait until the first node writes its address and the secret of the run into `meeting.json`.
That can take long, because the first node may prepare the data. If the first node fails before, it never
happens. The first node therefore writes `first-node.json` when it starts, and adds the reason if it fails.

A file that existed before a node started may belong to an earlier start. It counts only if it belongs to a
run of the same name, and then only after a while, because the first node may still replace it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardwise.errors import RunFailed, UserError
from shardwise.files import parse_as, read_bytes
from shardwise.observe import write_text

FILE = "first-node.json"
"""Name of the file in the run's folder."""


@dataclass(frozen=True)
class FirstNodeStatus:
    """The contents of the file."""

    start: str
    """Random text, new for each start."""
    run: str
    """Name that the launcher gave the run; empty if it gave none."""
    ended: str = ""
    """Why the first node has ended; empty while it runs."""
    status: int = 0
    """Exit status with which the first node ended."""


class FirstNodeFile:
    """The file as one node sees it."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path, self._run = folder / FILE, run
        self._left_over = self.read()

    def read(self) -> FirstNodeStatus | None:
        """Return the contents now; None if there is no complete file."""
        try:
            return parse_as(FirstNodeStatus, read_bytes(self._path), self._path)
        except (FileNotFoundError, UserError):
            return None

    def status_of_this_run(self) -> FirstNodeStatus | None:
        """Return the contents if the first node of this run has written them, else None."""
        status = self.read()
        if status is None:
            return None
        is_of_this_run = status != self._left_over or status.run == self._run != ""
        return status if is_of_this_run else None

    def is_left_over(self) -> bool:
        """Return whether the file was not written since this node started."""
        return self.read() == self._left_over

    @contextlib.contextmanager
    def report_start_and_failure(self) -> Iterator[None]:
        """Write, as the first node, that it has started, and why it ends if the `with` block fails."""
        status = FirstNodeStatus(secrets.token_hex(8), self._run)
        self._write(status)
        try:
            yield
        except UserError as error:
            self._write(replace(status, ended=str(error), status=error.status))
            raise
        except BaseException as error:
            ended = f"it was stopped ({type(error).__name__})"
            self._write(replace(status, ended=ended, status=RunFailed.status))
            raise

    def _write(self, status: FirstNodeStatus) -> None:
        """Write the file. A failure is ignored: other nodes then only wait longer, and an error of the first
        node must not be hidden by it.
        """
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(asdict(status)) + "\n", lambda problem: None)
