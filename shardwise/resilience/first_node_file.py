"""The file that the first node of a run writes before it leads, for the nodes that wait for it.

The other nodes wait until the first node writes its address and the secret of the run into `meeting.json`.
That can take long, because the first node may prepare the data, and it never happens if the first node fails
before. The first node therefore writes `first-node.json` when it starts, and writes there why it has ended.

A file that existed before a node started may belong to an earlier start. It counts only if it belongs to a
run of the same name, and then only after a while, because the first node may be about to replace it.
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
        sign = self.read()
        is_this_run = sign is not None and (sign != self._left_over or (sign.run == self._run != ""))
        return sign if is_this_run else None

    def is_left_over(self) -> bool:
        """Return whether the file was not written since this node started."""
        return self.read() == self._left_over

    @contextlib.contextmanager
    def report_start_and_failure(self) -> Iterator[None]:
        """Write, as the first node, that it has started, and why it ends if the `with` block fails."""
        sign = FirstNodeStatus(secrets.token_hex(8), self._run)
        self._write(sign)
        try:
            yield
        except UserError as error:
            self._write(replace(sign, ended=str(error), status=error.status))
            raise
        except BaseException as error:
            ended = f"it was stopped ({type(error).__name__})"
            self._write(replace(sign, ended=ended, status=RunFailed.status))
            raise

    def _write(self, sign: FirstNodeStatus) -> None:
        """Write the file. If that fails, ignore it: the others wait a while longer, and the first node's
        error matters.
        """
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(asdict(sign)) + "\n", lambda problem: None)
