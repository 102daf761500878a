"""Synchronous training: all devices make every step together.

Each device computes the gradient of its own rows of the global batch. The gradients are summed, and all make
the same update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.drivers.driver import Driver, RankDriver

if TYPE_CHECKING:
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.train.build import Training
    from shardwise.train.sources import Source


class Synchronous(Driver):
    """All devices in lockstep, each with the same number of rows."""

    name = "synchronous"
    summary = "all devices in lockstep"

    def on_rank(self, training: Training) -> OwnRowsRank:
        """Return a rank that computes the gradient of its own rows."""
        return OwnRowsRank()


class OwnRowsRank(RankDriver):
    """A rank that computes the gradient of its own rows."""

    def source(self, training: Training, link: WorkerLink | None = None) -> Source:
        """Return the source of gradients of this rank's own rows."""
        from shardwise.train.program import Program
        from shardwise.train.program_source import ProgramSource
        from shardwise.train.sources import RankRows

        if isinstance(training.program, Program):
            return ProgramSource(training, training.program, link)
        return RankRows(training)
