"""Find the fewest devices that train a job in time, and the fewest that hold it in memory.

The search finds the best layout on a given number of devices. Finding the number of devices takes many
searches, which are made cheap in three ways. To know whether anything fits, only memory is predicted
(search/fits.py). The time of a step is first estimated by closed forms, and only the answer is searched in
full, with simulated schedules. Numbers of devices that would be too slow even at the devices' peak are not
tried.

More devices do not always help: 17 nodes divide few batches and few numbers of blocks. So a bisection over
whole nodes finds a number that works, and then the numbers right below are tried, which the bisection may
have missed. Within a node only powers of two are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np

from shardwise.config import Config
from shardwise.cost.cluster import Cluster
from shardwise.cost.predict import predict
from shardwise.cost.software import SHARDWISE
from shardwise.errors import UserError
from shardwise.plans.flops import flops_per_token
from shardwise.plurals import counted
from shardwise.search.candidates import candidates, fixed_fields, may_divide
from shardwise.search.fits import any_fits, any_fits_resident
from shardwise.search.reasons import best_layout, nothing_fits
from shardwise.search.search import SearchResult, limit, offloads, search, within_limits, workload_of
from shardwise.units import GIB

MOST = 16_384
"""Largest number of devices that is tried, unless more are asked for."""
_LOOK_BELOW = 4
"""How many counts right below the result of a bisection are tried."""
_DAY = 86_400.0


# -- the fewest devices that are quick enough ----------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A number of devices that was tried, and the days of training there; None where it does not work."""

    devices: int
    days: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Fewest:
    """The smallest number of devices that trains in time, or the quickest if none does."""

    devices: int | None
    """The number of devices; None if no number up to the largest allowed is enough."""
    wanted_days: float
    days: float | None
    """Days of training on these devices, or on the quickest number tried if none is enough."""
    layout: str | None
    sentence: str
    tried: tuple[Tried, ...]
    """All numbers of devices that were tried, in ascending order."""
    result: SearchResult | None = field(default=None, repr=False)
    """The search on these devices, or on the quickest number tried."""


def fewest_devices(
    config: Config, cluster: Cluster, days: float, tokens: float | None = None, most: int = MOST
) -> Fewest:  # fmt: skip
    """Return the fewest devices on which all steps of the job (or this many tokens) take at most this many
    days."""
    if not (days > 0 and math.isfinite(days)) or (tokens is not None and not tokens > 0):
        raise UserError(f"--days {days:g}: give a number of days above 0")
    steps = float(config.train.steps)
    if tokens is not None:
        steps = tokens / (config.train.global_batch * config.data.sequence_length)
    attempts = _Attempts(config, cluster, days, steps)
    doubling = _doubling(cluster, most)
    for devices in _ascending(attempts, doubling):
        if attempts.in_time(devices) and (result := attempts.searched(devices)) is not None:
            return _in_time(attempts, devices, result)
    return _too_slow(attempts, doubling[-1])


def _ascending(attempts: _Attempts, doubling: Sequence[int]) -> Iterator[int]:
    """Yield the counts in ascending order, from the first that seems to be in time."""
    index = next((index for index, devices in enumerate(doubling) if attempts.in_time(devices)), None)
    if index is None:
        return
    config, cluster = attempts.config, attempts.cluster
    between = _between(config, cluster, doubling[index - 1] if index else 0, doubling[index])
    least = _least(between, attempts.in_time)
    yield from (count for count in between if count >= least)
    for low, high in pairwise(doubling[index:]):
        yield from _between(config, cluster, low, high)


class _Attempts:
    """The numbers of devices tried so far, and how long each takes. Each is judged once."""

    def __init__(self, config: Config, cluster: Cluster, days: float, steps: float) -> None:
        self.config, self.cluster, self.days, self.steps = config, cluster, days, steps
        self.tried: dict[int, Tried] = {}

    def in_time(self, devices: int) -> bool:
        """Return whether training ends in time on these devices, by the best estimate so far."""
        if devices not in self.tried:
            self.tried[devices] = self._judged(devices)
        days = self.tried[devices].days
        return days is not None and days <= self.days

    def _judged(self, devices: int) -> Tried:
        ideal_days = self.steps * _ideal_seconds(self.config, self.cluster, devices) / _DAY
        if ideal_days > self.days:
            return Tried(devices, None, f"at the devices' peak it would take {_days(ideal_days)}")
        seconds = _rough_seconds(self.config, self.cluster.with_devices(devices), devices)
        if seconds is None:
            return Tried(devices, None, "no layout fits")
        return Tried(devices, self.steps * seconds / _DAY)

    def searched(self, devices: int, even_if_late: bool = False) -> SearchResult | None:
        """Return the full search if its layout is in time too, or with `even_if_late`, if a layout fits."""
        result = search(self.config, self.cluster.with_devices(devices), devices)
        if not len(result.order):
            self.tried[devices] = Tried(devices, None, nothing_fits(self.config, result)[0])
            return None
        days = self.steps * float(result.total[result.order[0]]) / _DAY
        self.tried[devices] = Tried(devices, days)
        return result if even_if_late or days <= self.days else None

    def all(self) -> tuple[Tried, ...]:
        """Return what was tried, in ascending order of devices."""
        return tuple(self.tried[devices] for devices in sorted(self.tried))


def _in_time(attempts: _Attempts, devices: int, result: SearchResult) -> Fewest:
    days, layout = attempts.tried[devices].days or 0.0, best_layout(result)
    asked = f"{attempts.days:g} days were asked for"
    sentence = f"{counted(devices, 'device')} train this in {_days(days)} ({layout}); {asked}"
    return Fewest(devices, attempts.days, days, layout, sentence, attempts.all(), result)


def _too_slow(attempts: _Attempts, most: int) -> Fewest:
    """Return the answer if nothing is enough: the quickest number tried, searched in full."""
    timed = [attempt for attempt in attempts.all() if attempt.days is not None]
    quickest = min(timed, key=lambda attempt: attempt.days or 0.0).devices if timed else most
    result = attempts.searched(quickest, even_if_late=True)
    if result is None:
        sentence = f"no number of devices up to {most:,} trains this: {attempts.tried[quickest].reason}"
        return Fewest(None, attempts.days, None, None, sentence, attempts.all())
    days = attempts.tried[quickest].days or 0.0
    best = f"the best is {_days(days)} on {quickest:,}"
    sentence = f"up to {counted(most, 'device')} cannot train this in {attempts.days:g} days: {best}"
    return Fewest(None, attempts.days, days, best_layout(result), sentence, attempts.all(), result)


def _days(number: float) -> str:
    return f"{number:,.1f} days" if number >= 1 else f"{number:.3g} days"


def _ideal_seconds(config: Config, cluster: Cluster, devices: int) -> float:
    """Return the seconds of a step if every device computed at its peak and did nothing else. No layout is
    quicker."""
    work = workload_of(config)
    workers = -(-devices // cluster.devices_per_node) if cluster.shared else devices
    peaks = cluster.device.peak
    peak = peaks.get(work.precision, max(peaks.values())) / min([1.0, *cluster.corrections.values()])
    return work.tokens * flops_per_token(config.model, work.sequence_length) / (workers * peak)


def _rough_seconds(config: Config, cluster: Cluster, devices: int) -> float | None:
    """Return the seconds of a step in the quickest layout that fits, by closed forms; None if none fits."""
    work, margin, quickest = workload_of(config), config.cluster.margin, np.inf
    for part in candidates(config, devices, fixed_fields(config), offloads(cluster)).space.parts():
        prediction = predict(work, part, cluster, SHARDWISE)
        fits = within_limits(prediction.peak, prediction.host, cluster, margin, devices)
        quickest = min(quickest, float(np.min(prediction.total[fits], initial=np.inf)))
    return float(quickest) if np.isfinite(quickest) else None


# -- the fewest devices that hold it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Smallest:
    """The fewest devices on which a layout fits."""

    devices: int | None
    """The number of devices; None if nothing fits on any number up to the largest allowed."""
    without_offload: int | None
    """The number of devices with all states in the devices' own memory."""
    layout: str | None
    peak_gib: float | None
    limit_gib: float
    sentence: str
    result: SearchResult | None = field(default=None, repr=False)


def smallest_that_fits(config: Config, cluster: Cluster, most: int = MOST) -> Smallest:
    """Return the fewest devices on which any layout fits, with states in the host's memory where that
    helps."""
    devices = resident = _smallest(config, cluster, most, any_fits)
    if devices is None:
        sentence = f"nothing fits on up to {counted(_doubling(cluster, most)[-1], 'device')}"
        return Smallest(None, None, None, None, limit(cluster, config.cluster.margin, most) / GIB, sentence)
    result = search(config, cluster.with_devices(devices), devices)
    best = int(result.order[0])
    peak, sentence = float(result.peak[best]), f"fits on {counted(devices, 'device')} ({best_layout(result)})"
    if result.space.offload[best]:
        resident = _smallest(config, cluster, most, any_fits_resident)
        sentence += f" with {float(result.host[best]) / GIB:,.0f} GiB of each node's own memory"
        without = f"without offloading it takes {counted(resident, 'device')}" if resident else ""
        sentence += f"; {without or 'only by offloading'}"
    return Smallest(devices, resident, best_layout(result), peak / GIB, result.limit / GIB, sentence, result)


def _smallest(
    config: Config, cluster: Cluster, most: int, fits: Callable[[Config, Cluster, int], bool]
) -> int | None:
    """Return the fewest devices on which the job fits; None if it fits on none."""

    @cache
    def works(devices: int) -> bool:
        return fits(config, cluster.with_devices(devices), devices)

    doubling = _doubling(cluster, most)
    index = next((index for index, devices in enumerate(doubling) if works(devices)), None)
    if index is None:
        return None
    return _least(_between(config, cluster, doubling[index - 1] if index else 0, doubling[index]), works)


# -- counts --------------------------------------------------------------------------------------------------


def _doubling(cluster: Cluster, most: int) -> list[int]:
    """Return 1, 2, 4, … devices in a node, then 1, 2, 4, … nodes, up to `most`, and the largest number of
    whole nodes within it."""
    if most < 1:
        raise UserError(f"at most {most} devices: give a number from 1")
    node = cluster.devices_per_node
    inside = [2**power for power in range(node.bit_length()) if 2**power < node]
    nodes = [node * 2**power for power in range(max(0, most // node).bit_length())]
    last = most // node * node
    return sorted({devices for devices in [*inside, *nodes, last] if 1 <= devices <= most})


def _between(config: Config, cluster: Cluster, low: int, high: int) -> list[int]:
    """Return the numbers of whole nodes' devices above `low` and up to `high` over which the job can be
    divided at all; the last is `high`."""
    node = cluster.devices_per_node
    counts = range(low // node * node + node, high, node) if high > node else ()
    return [*(devices for devices in counts if devices > low and may_divide(config, devices)), high]


def _least(counts: Sequence[int], works: Callable[[int], bool]) -> int:
    """Return the least of ascending counts that works, if the last does: by bisection, then by trying those
    right below."""
    low, high = -1, len(counts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(counts[middle]) else (middle, high)
    below = counts[max(0, high - _LOOK_BELOW) : high]
    return next((devices for devices in below if works(devices)), counts[high])
