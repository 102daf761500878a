"""Which rows of a global batch each data-parallel device computes: as many each, or more for a faster device.

The loss is a sum over tokens that is divided by their number in the whole batch, and gradients are summed. So
it does not matter who computes a row: however uneven the shares, the gradient is that of the even split but
for the order of additions. What matters is that all devices count to the same number of micro-batches,
because sharded weights and gradients meet in each of them: a device with more rows has larger micro-batches,
not more of them.

Every rank knows how long every rank worked on an earlier step, because these numbers travel with the loss.
All deal by the same numbers and come to the same shares, so nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardwise.config import RANK_AXES, Layout

WARM_UP = 2
"""First steps of a team, whose times are ignored: devices allocate memory in them, and may compile."""
NEWEST = 0.3
"""Weight of the newest speed in the mean: one slow step in ten moves few rows, one that stays slow is met in
some steps."""
WORTH = 0.98
"""Rows move if the slowest device then needs at most this share of its time."""
MOST = 2
"""A device has at most this many times an even share, which bounds the memory for activations."""


@dataclass(frozen=True)
class RowShares:
    """The rows of a global batch, by data-parallel device: each has as many as follow on those of the device
    before it."""

    rows: tuple[int, ...]

    @classmethod
    def even(cls, rows: int, devices: int) -> RowShares:
        """The same number for each."""
        assert rows % devices == 0, "the batch divides over the devices"
        return cls((rows // devices,) * devices)

    def of(self, device: int) -> range:
        """The rows of one device."""
        ends = [0, *accumulate(self.rows)]
        return range(ends[device], ends[device + 1])


class Dealer:
    """Deals out the batches of a team, one after the other."""

    def __init__(
        self, shares: RowShares, layout: Layout, micro_batches: int, step: int, by_speed: bool
    ) -> None:
        self._shares, self._least, self._by_speed = shares, micro_batches, by_speed
        self._first = self._next = step + 1
        self._dealt: dict[int, RowShares] = {}
        """Shares of each step whose time is not known yet."""
        self._speeds: NDArray[np.float64] | None = None
        """Rows per second of each device."""
        sizes = [getattr(layout, axis) for axis in RANK_AXES]
        grid = np.arange(layout.world).reshape(sizes).transpose(1, 2, 0, 3, 4)  # replica and data outermost
        self._ranks = grid.reshape(layout.data_parallel, -1)
        """Ranks of each data-parallel device, which may be a group of ranks."""

    def deal(self) -> RowShares:
        """Return the shares of the next batch."""
        if self._by_speed and self._speeds is not None:
            self._shares = reconsidered(self._shares, self._speeds, self._least)
        self._dealt[self._next] = self._shares
        self._next += 1
        return self._shares

    def dealt(self, step: int) -> RowShares:
        """Return the shares of a step whose time is not known yet."""
        return self._dealt[step]

    def hear(self, step: int, seconds: Sequence[tuple[float, float]]) -> None:
        """Note the seconds of each rank's work (compute, data) in this step; none if they are not known."""
        dealt = self._dealt.pop(step, None)
        if not self._by_speed or dealt is None or not seconds or step < self._first + WARM_UP:
            return
        times = np.array(seconds, dtype=np.float64)
        work = times.sum(1)[self._ranks].max(1)
        if not times[:, 0].any() or not work.all():
            return
        speeds = np.array(dealt.rows) / work
        self._speeds = speeds if self._speeds is None else (1 - NEWEST) * self._speeds + NEWEST * speeds


def reconsidered(shares: RowShares, speeds: NDArray[np.float64], least: int) -> RowShares:
    """Return shares with which the slowest device ends earlier, if the gain is worth the change."""
    fitting = shares_by_speed(sum(shares.rows), speeds, least)
    slowest, before = (float((np.array(each.rows) / speeds).max()) for each in (fitting, shares))
    return fitting if slowest <= WORTH * before else shares


def shares_by_speed(rows: int, speeds: NDArray[np.float64], least: int) -> RowShares:
    """Return rows in proportion to speeds, rounded so that the last device ends as early as possible; each
    has at least `least`."""
    most = MOST * -(-rows // len(speeds))
    dealt = np.clip(np.floor(rows * speeds / speeds.sum()).astype(np.int64), least, most)
    while dealt.sum() < rows:
        dealt[np.where(dealt < most, (dealt + 1) / speeds, np.inf).argmin()] += 1
    while dealt.sum() > rows:
        dealt[np.where(dealt > least, dealt / speeds, -np.inf).argmax()] -= 1
    return RowShares(tuple(dealt.tolist()))
