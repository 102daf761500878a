"""Synchronous training in which a faster device gets more rows of the global batch.

All ranks know how long each of them computed in earlier steps, so all compute the same shares
(train/shares.py). The loss is a sum over the tokens of the whole batch, so the device that computes a row
affects only rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from shardwise.drivers.driver import Driver, RankDriver

if TYPE_CHECKING:
    from shardwise.resilience.worker_link import WorkerLink
    from shardwise.train.build import Training
    from shardwise.train.sources import Source


class BySpeed(Driver):
    """All devices in lockstep, with rows in proportion to their speed."""

    name = "by-speed"
    summary = "all devices in lockstep, and a faster one gets more rows, which changes only rounding"
    refused_axes: ClassVar[Mapping[str, str]] = {
        "pipeline": "the stages of a pipeline send each other messages of one size"
    }
    varies_rows = True
    runs_programs = False

    def settings_without_effect(self, training: Training) -> list[str]:
        """Return a note if the speed of devices cannot be measured with this layout."""
        if training.plan.waits_are_known(training.mesh.device.type):
            return []
        return [
            "train.driver = 'by-speed': on GPUs a device's work can be told from its waiting only with data "
            "alone, zero = 0 and no experts"
        ]

    def on_rank(self, training: Training) -> RowsBySpeedRank:
        """Return a rank whose number of rows changes with its speed."""
        return RowsBySpeedRank()


class RowsBySpeedRank(RankDriver):
    """A rank whose number of rows changes with its speed."""

    def source(self, training: Training, link: WorkerLink | None = None) -> Source:
        """Return gradients of this rank's rows, whose number follows its speed."""
        from shardwise.train.sources import RankRows

        return RankRows(training, by_speed=True)

    def rows(self, training: Training) -> str:
        """Return a phrase for rows that change from step to step."""
        return "its share of the global batch"
