"""What the first node of a run writes into the run's folder before it leads, for the nodes that wait for it.

The others wait until the first node says in `meeting.json` where it is and which secret the run has. That can
take long, because the first node may prepare the data, and it never comes if the first node fails before. So
the first node writes `first-node.json` when it starts, and says there why it has ended.

A file that was there before a node started may be of an earlier start. It counts only if it is of the same
run by name, and then only after a while, because the first node may be about to replace it.
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


@dataclass(frozen=True)
class Sign:
    """The contents of the file."""

    start: str
    """Drawn anew for each start."""
    run: str
    """As the launcher names the run; empty where it does not."""
    ended: str = ""
    """Why the first node has ended; empty while it has not."""
    status: int = 0


class FirstNodeFile:
    """The file, as one node sees it."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path, self._run = folder / FILE, run
        self._left_over = self.read()

    def read(self) -> Sign | None:
        """What it says now; None where there is none, or none that is whole."""
        try:
            return parse_as(Sign, read_bytes(self._path), self._path)
        except (FileNotFoundError, UserError):
            return None

    def heard(self) -> Sign | None:
        """What the first node of this run says; None if it has said nothing."""
        sign = self.read()
        known = sign is not None and (sign != self._left_over or (sign.run == self._run != ""))
        return sign if known else None

    def is_left_over(self) -> bool:
        """Whether nothing was written since this node started."""
        return self.read() == self._left_over

    @contextlib.contextmanager
    def tell(self) -> Iterator[None]:
        """As the first node: say that it has started, and why it ends if it fails."""
        sign = Sign(secrets.token_hex(8), self._run)
        self._write(sign)
        try:
            yield
        except UserError as error:
            self._write(replace(sign, ended=str(error), status=error.status))
            raise
        except BaseException as error:
            self._write(
                replace(sign, ended=f"it was stopped ({type(error).__name__})", status=RunFailed.status)
            )
            raise

    def _write(self, sign: Sign) -> None:
        """Where that fails the others wait a while in vain, and the first node has more to say than that."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(asdict(sign)) + "\n", lambda problem: None)
