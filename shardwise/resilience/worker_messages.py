"""Messages between a host and its workers: one frozen value each, sent through a pipe.

Both ends belong to shardwise and are on one machine, so messages are pickled. Messages between hosts
(`Report` and `Orders` in team.py) cross a network and are JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.mesh import Worker
from shardwise.resilience.team import Fault, Team

Phase = Literal["build", "restore", "step", "wait", "meet", "evaluate", "save", "end"]
"""What a worker is doing. `wait` (for gradients) and `meet` (other groups) are parts of a step."""


@dataclass(frozen=True)
class Waiting:
    """A worker is ready for a team."""


@dataclass(frozen=True)
class Progress:
    """A worker began a phase, or completed a step."""

    phase: Phase
    step: int


@dataclass(frozen=True)
class Reads:
    """The rows of every global batch that a worker reads. They are named in the message if it dies."""

    rows: str


@dataclass(frozen=True)
class PeerGone:
    """A worker has left its team because a peer is gone."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A worker ends because of a fault."""

    fault: Fault


@dataclass(frozen=True)
class Done:
    """A worker ends because its work is done."""

    status: int


@dataclass(frozen=True)
class Signalled:
    """A worker received a signal that asks to stop. The host decides for the run."""

    number: int


@dataclass(frozen=True)
class Stacks:
    """Stacks of all threads of a worker: the answer to `ReportStacks`."""

    text: str


FromWorker = Waiting | Progress | Reads | PeerGone | Failed | Done | Signalled | Stacks
"""Any message that a worker sends to its host."""


@dataclass(frozen=True)
class JoinTeam:
    """Train with this team, as this worker of it."""

    worker: Worker
    team: Team


@dataclass(frozen=True)
class ReportStacks:
    """Send the stacks of all threads, because no step was completed for too long."""


@dataclass(frozen=True)
class Regroup:
    """Finish the step, save, and wait for the next team."""


@dataclass(frozen=True)
class Stop:
    """Finish the step, save, and end."""


@dataclass(frozen=True)
class TeamBroke:
    """A peer is gone. Leave the team, and wait for the next one."""


@dataclass(frozen=True)
class Leave:
    """The run has ended; there will be no next team."""


FromHost = JoinTeam | ReportStacks | Regroup | Stop | TeamBroke | Leave
"""Any message that a host sends to its worker."""
