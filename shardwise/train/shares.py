"""Which rows of a global batch each data-parallel device computes: the same number each, or more on a faster
device.

The loss is a sum over tokens divided by their number in the whole batch, and gradients are summed. So the
device that computes a row does not matter: with uneven shares the gradient is that of equal shares except for
the order of additions. But all devices need the same number of micro-batches, because sharded weights and
gradients are exchanged in each. So a device with more rows has larger micro-batches, not more of them.

Every rank knows how long every rank worked on an earlier step, because these times are summed with the loss.
All ranks compute the same shares from them, so no further message is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardwise.config import RANK_AXES, Layout

WARM_UP = 2
"""Number of first steps of a team whose times are ignored: they include allocation and compilation."""
NEWEST = 0.3
"""Weight of the newest speed in the moving mean: a single slow step moves few rows, and a lasting change
takes effect within some steps."""
WORTH = 0.98
"""Shares change only if the slowest device then needs at most this fraction of its present time."""
MOST = 2
"""A device has at most this many times an even share, which bounds the memory for activations."""


@dataclass(frozen=True)
class RowShares:
    """The number of rows of each data-parallel device. A device's rows follow those of the device before."""

    rows: tuple[int, ...]

    @classmethod
    def even(cls, rows: int, devices: int) -> RowShares:
        """Return shares with the same number of rows for each device."""
        assert rows % devices == 0, "the batch divides over the devices"
        return cls((rows // devices,) * devices)

    def of(self, device: int) -> range:
        """Return the rows of one device."""
        ends = [0, *accumulate(self.rows)]
        return range(ends[device], ends[device + 1])


class Dealer:
    """Decides the shares of each global batch of a team."""

    def __init__(
        self, shares: RowShares, layout: Layout, micro_batches: int, step: int, by_speed: bool
    ) -> None:
        self._shares, self._least, self._by_speed = shares, micro_batches, by_speed
        self._first = self._next = step + 1
        self._dealt: dict[int, RowShares] = {}
        """Shares of the steps whose times are not known yet."""
        self._speeds: NDArray[np.float64] | None = None
        """Rows per second of each device."""
        sizes = [getattr(layout, axis) for axis in RANK_AXES]
        grid = np.arange(layout.world).reshape(sizes).transpose(1, 2, 0, 3, 4)  # replica and data outermost
        self._ranks = grid.reshape(layout.data_parallel, -1)
        """Ranks of each data-parallel device, which may be a group of ranks."""

    def deal(self) -> RowShares:
        """Return the shares of the next batch."""
        if self._by_speed and self._speeds is not None:
            self._shares = improved(self._shares, self._speeds, self._least)
        self._dealt[self._next] = self._shares
        self._next += 1
        return self._shares

    def dealt(self, step: int) -> RowShares:
        """Return the shares of a step whose time is not known yet."""
        return self._dealt[step]

    def note_seconds(self, step: int, seconds: Sequence[tuple[float, float]]) -> None:
        """Note the seconds of each rank's work (compute, data) in this step; empty if they are not known."""
        dealt = self._dealt.pop(step, None)
        if not self._by_speed or dealt is None or not seconds or step < self._first + WARM_UP:
            return
        times = np.array(seconds, dtype=np.float64)
        work = times.sum(1)[self._ranks].max(1)
        if not times[:, 0].any() or not work.all():
            return
        speeds = np.array(dealt.rows) / work
        self._speeds = speeds if self._speeds is None else (1 - NEWEST) * self._speeds + NEWEST * speeds


def improved(shares: RowShares, speeds: NDArray[np.float64], least: int) -> RowShares:
    """Return shares by speed if the slowest device then finishes sufficiently earlier, else `shares`."""
    by_speed = shares_by_speed(sum(shares.rows), speeds, least)
    after, before = (float((np.array(each.rows) / speeds).max()) for each in (by_speed, shares))
    return by_speed if after <= WORTH * before else shares


def shares_by_speed(rows: int, speeds: NDArray[np.float64], least: int) -> RowShares:
    """Return rows in proportion to speeds, rounded so that the last device finishes as early as possible.
    Each device has at least `least` rows."""
    most = MOST * -(-rows // len(speeds))
    dealt = np.clip(np.floor(rows * speeds / speeds.sum()).astype(np.int64), least, most)
    while dealt.sum() < rows:
        dealt[np.where(dealt < most, (dealt + 1) / speeds, np.inf).argmin()] += 1
    while dealt.sum() > rows:
        dealt[np.where(dealt > least, dealt / speeds, -np.inf).argmax()] -= 1
    return RowShares(tuple(dealt.tolist()))
