"""What `shardwise submit` needs to know of a scheduler.

Another scheduler is one more file with a class like `Scheduler`, and a line in registry.py.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import UserError
from shardwise.section import Section


@dataclass(frozen=True)
class Request:
    """A training command, and the nodes that it asks for."""

    name: str
    """Name of the job, for the scheduler's lists."""
    folder: Path
    """Folder in which the command runs. Relative paths of the job start there."""
    run_folder: Path
    arguments: tuple[str, ...]
    """Arguments of the program shardwise: train, the job, its changes, and the numbers of workers."""
    nodes: int
    """Number of nodes that train."""
    spares: int
    """Number of further nodes, which replace nodes that fail."""


class Scheduler(Protocol):
    """A scheduler that starts one process on each node of a job."""

    settings: type[Section]
    """The scheduler's table of the profile."""

    def workers_of_node(self, settings: Any) -> int | None:
        """Return the number of workers of a node according to the profile; None if it does not say."""
        ...

    def problems(self, request: Request) -> Iterator[str]:
        """Yield why this scheduler cannot submit the command."""
        ...

    def file(self, request: Request, settings: Any) -> tuple[Path, str]:
        """Return the path and the text of the file to submit."""
        ...

    def command(self, file: Path) -> list[str]:
        """Return the command of the scheduler's own client that submits the file."""
        ...

    def submit(self, file: Path) -> str:
        """Submit the file, and return the id that the scheduler gave the job."""
        ...

    def follow(self, job: str, request: Request) -> Mapping[str, str]:
        """Return the commands that watch a submitted job, cancel it, and read its log."""
        ...


def call_client(command: Sequence[str], where: str) -> str:
    """Run a command of a scheduler's client, and return what it printed. A refusal is raised as one line;
    `where` says on which machine the command can be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: no such command here; submit {where}, or leave out --yes") from None
    except OSError as error:
        raise UserError(f"{command[0]}: cannot be run ({error.strerror})") from None
    if done.returncode:
        lines = [line.removeprefix(f"{command[0]}: error: ") for line in done.stderr.splitlines() if line]
        said = "; ".join(dict.fromkeys(lines)) or f"it ended with status {done.returncode}"
        raise UserError(f"{command[0]} refused the job: {said}")
    return done.stdout.strip()
