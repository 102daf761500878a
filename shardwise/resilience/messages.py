"""What a host and its workers say to each other, over the pipe that the host made: one frozen value for each
message.

Both ends are ours and on one machine, so messages are pickled. What hosts say to each other (`Report` and
`Orders` in team.py) crosses a network and is JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.mesh import Worker
from shardwise.resilience.team import Fault, Team

Phase = Literal["build", "restore", "step", "wait", "meet", "evaluate", "save", "end"]
"""`wait` and `meet` are within a step: for gradients of others, and for other groups."""


@dataclass(frozen=True)
class Waiting:
    """A worker is ready for a team."""


@dataclass(frozen=True)
class Progress:
    """A worker began a phase, or did a step."""

    phase: Phase
    step: int


@dataclass(frozen=True)
class Reads:
    """Which rows of every global batch are the worker's, to be named should it die."""

    rows: str


@dataclass(frozen=True)
class PeerGone:
    """A worker's team is no more, because a peer is gone."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """A worker ends, and why."""

    fault: Fault


@dataclass(frozen=True)
class Done:
    """A worker ends, having done what was asked."""

    status: int


@dataclass(frozen=True)
class Signalled:
    """A worker got a signal that asks to stop: the host answers for the run."""

    number: int


@dataclass(frozen=True)
class Stacks:
    """Where every thread of a worker stands: the answer to `ReportStacks`."""

    text: str


FromWorker = Waiting | Progress | Reads | PeerGone | Failed | Done | Signalled | Stacks


@dataclass(frozen=True)
class JoinTeam:
    """Train with this team, as this worker of it."""

    worker: Worker
    team: Team


@dataclass(frozen=True)
class ReportStacks:
    """Answer with your stacks: no step was done for too long."""


@dataclass(frozen=True)
class Regroup:
    """Finish the step, save, and wait for the next team."""


@dataclass(frozen=True)
class Stop:
    """Finish the step, save, and end."""


@dataclass(frozen=True)
class Leave:
    """The run has ended: there will be no next team."""


FromHost = JoinTeam | ReportStacks | Regroup | Stop | Leave
