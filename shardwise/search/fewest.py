"""The fewest devices that train a job in time, and the fewest that hold it.

The search answers what is best on so many devices; here the number of devices is what is looked for, so one
question is many searches. They are kept cheap in three ways: whether anything fits needs only the model of
memory (search/fits.py); how long a step takes is first judged by the closed forms alone, and only the answer
is searched in full, schedules played through; and counts on which even the devices' peak would be too slow
are not tried at all.

More devices do not always help: 17 nodes divide few batches and few stacks of blocks. So among whole nodes a
bisection finds where it starts to work, and then looks at the counts right below, which a bisection may have
jumped over. Within a node only powers of two are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, pairwise

import numpy as np

from shardwise.config import Config, divisors
from shardwise.cost.cluster import Cluster
from shardwise.cost.predict import predict
from shardwise.cost.stack import SHARDWISE
from shardwise.errors import UserError
from shardwise.plan.flops import flops_per_token
from shardwise.search.candidates import candidates, fixed_fields
from shardwise.search.fits import any_fits, any_fits_resident
from shardwise.search.reasons import best_layout, count_devices, nothing_fits
from shardwise.search.search import SearchResult, host_limit, limit, offloads, search, work_of
from shardwise.units import GIB

MOST = 16_384
"""Devices that are tried at most, unless more are asked for."""
_LOOK_BELOW = 4
_DAY = 86_400.0


# -- the fewest devices that are quick enough ----------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A number of devices that was looked at, and the days of training there; None where it does not work."""

    devices: int
    days: float | None
    reason: str | None = None


@dataclass(frozen=True)
class Fewest:
    """The smallest number of devices that trains in time, or the best there is."""

    devices: int | None
    """None where no number up to the most allowed is enough."""
    wanted_days: float
    days: float | None
    """Of training on these devices; where none is enough, of the quickest tried."""
    layout: str | None
    sentence: str
    tried: tuple[Tried, ...]
    """Ascending by devices."""
    result: SearchResult | None = field(default=None, repr=False)
    """The search on these devices, or on those of the quickest tried."""


def fewest_devices(
    config: Config, cluster: Cluster, days: float, tokens: float | None = None, most: int = MOST
) -> Fewest:  # fmt: skip
    """The fewest devices on which all the job's steps (or so many tokens) take at most so many days."""
    if not (days > 0 and math.isfinite(days)) or (tokens is not None and not tokens > 0):
        raise UserError(f"--days {days:g}: give a number of days above 0")
    steps = (
        config.train.steps
        if tokens is None
        else tokens / (config.train.global_batch * config.data.sequence_length)
    )
    attempts = _Attempts(config, cluster, days, steps)
    doubling = _doubling(cluster, most)
    index = next((index for index, devices in enumerate(doubling) if attempts.in_time(devices)), None)
    if index is None:
        return _too_slow(attempts, doubling[-1])
    between = _between(config, cluster, doubling[index - 1] if index else 0, doubling[index])
    least = _least(between, attempts.in_time)
    later = (
        count for low, high in pairwise(doubling[index:]) for count in _between(config, cluster, low, high)
    )
    for devices in chain((count for count in between if count >= least), later):
        if attempts.in_time(devices) and (result := attempts.searched(devices)) is not None:
            return _in_time(attempts, devices, result)
    return _too_slow(attempts, doubling[-1])


class _Attempts:
    """The counts tried so far, and what each takes: each is judged once."""

    def __init__(self, config: Config, cluster: Cluster, days: float, steps: float) -> None:
        self.config, self.cluster, self.days, self.steps = config, cluster, days, steps
        self.tried: dict[int, Tried] = {}

    def in_time(self, devices: int) -> bool:
        """Whether training ends in time on these devices, by what is known of them."""
        if devices not in self.tried:
            self.tried[devices] = self._judged(devices)
        days = self.tried[devices].days
        return days is not None and days <= self.days

    def _judged(self, devices: int) -> Tried:
        least = self.steps * _ideal_seconds(self.config, self.cluster, devices) / _DAY
        if least > self.days:
            return Tried(devices, None, f"at the devices' peak it would take {_days(least)}")
        seconds = _rough_seconds(self.config, self.cluster.of(devices), devices)
        if seconds is None:
            return Tried(devices, None, "no layout fits")
        return Tried(devices, self.steps * seconds / _DAY)

    def searched(self, devices: int, whatever: bool = False) -> SearchResult | None:
        """The full search, if it is in time too (or `whatever` it says)."""
        result = search(self.config, self.cluster.of(devices), devices)
        if not len(result.order):
            self.tried[devices] = Tried(devices, None, nothing_fits(self.config, result)[0])
            return None
        days = self.steps * float(result.total[result.order[0]]) / _DAY
        self.tried[devices] = Tried(devices, days)
        return result if whatever or days <= self.days else None

    def all(self) -> tuple[Tried, ...]:
        """What was tried, ascending."""
        return tuple(self.tried[devices] for devices in sorted(self.tried))


def _in_time(attempts: _Attempts, devices: int, result: SearchResult) -> Fewest:
    days, layout = attempts.tried[devices].days or 0.0, best_layout(result)
    sentence = (
        f"{count_devices(devices)} train this in {_days(days)} ({layout}); {attempts.days:g} days were "
        f"asked for"
    )
    return Fewest(devices, attempts.days, days, layout, sentence, attempts.all(), result)


def _too_slow(attempts: _Attempts, most: int) -> Fewest:
    """Nothing is enough: the quickest of what was tried, searched in full."""
    timed = [attempt for attempt in attempts.all() if attempt.days is not None]
    quickest = min(timed, key=lambda attempt: attempt.days or 0.0).devices if timed else most
    result = attempts.searched(quickest, whatever=True)
    if result is None:
        sentence = f"no number of devices up to {most:,} trains this: {attempts.tried[quickest].reason}"
        return Fewest(None, attempts.days, None, None, sentence, attempts.all())
    days = attempts.tried[quickest].days or 0.0
    sentence = (
        f"up to {count_devices(most)} cannot train this in {attempts.days:g} days: the best is {_days(days)} "
        f"on {quickest:,}"
    )
    return Fewest(None, attempts.days, days, best_layout(result), sentence, attempts.all(), result)


def _days(number: float) -> str:
    return f"{number:,.1f} days" if number >= 1 else f"{number:.3g} days"


def _ideal_seconds(config: Config, cluster: Cluster, devices: int) -> float:
    """Of a step if every device computed at its peak and did nothing else: no layout is quicker."""
    work = work_of(config)
    workers = -(-devices // cluster.devices_per_node) if cluster.shared else devices
    peaks, precision = cluster.device.peak, work.precision.split()[0]
    peak = peaks.get(precision, max(peaks.values())) / min([1.0, *cluster.corrections.values()])
    return work.tokens * flops_per_token(config.model, work.sequence_length) / (workers * peak)


def _rough_seconds(config: Config, cluster: Cluster, devices: int) -> float | None:
    """Of a step in the quickest layout that fits, by the closed forms."""
    work, margin, quickest = work_of(config), config.cluster.margin, np.inf
    for part in candidates(config, devices, fixed_fields(config), offloads(cluster)).space.parts():
        prediction = predict(work, part, cluster, SHARDWISE)
        fits = (prediction.peak <= limit(cluster, margin, devices)) & (
            prediction.host <= host_limit(cluster, margin)
        )
        quickest = min(quickest, float(np.min(prediction.total[fits], initial=np.inf)))
    return float(quickest) if np.isfinite(quickest) else None


# -- the fewest devices that hold it -------------------------------------------------------------------------


@dataclass(frozen=True)
class Smallest:
    """The fewest devices on which a layout fits."""

    devices: int | None
    """None where nothing fits on any number up to the most allowed."""
    without_offload: int | None
    """The same with all states in the devices' own memory."""
    layout: str | None
    peak_gib: float | None
    limit_gib: float
    sentence: str
    result: SearchResult | None = field(default=None, repr=False)


def smallest_that_fits(config: Config, cluster: Cluster, most: int = MOST) -> Smallest:
    """The fewest devices on which any layout fits, with states in the host's memory where that helps."""
    devices = resident = _smallest(config, cluster, most, any_fits)
    if devices is None:
        sentence = f"nothing fits on up to {count_devices(_doubling(cluster, most)[-1])}"
        return Smallest(None, None, None, None, limit(cluster, config.cluster.margin, most) / GIB, sentence)
    result = search(config, cluster.of(devices), devices)
    best = int(result.order[0])
    peak, sentence = float(result.peak[best]), f"fits on {count_devices(devices)} ({best_layout(result)})"
    if result.space.offload[best]:
        resident = _smallest(config, cluster, most, any_fits_resident)
        sentence += f" with {float(result.host[best]) / GIB:,.0f} GiB of each node's own memory"
        sentence += (
            f"; without offloading it takes {count_devices(resident)}" if resident else "; only by offloading"
        )
    return Smallest(devices, resident, best_layout(result), peak / GIB, result.limit / GIB, sentence, result)


def _smallest(
    config: Config, cluster: Cluster, most: int, fits: Callable[[Config, Cluster, int], bool]
) -> int | None:
    @cache
    def works(devices: int) -> bool:
        return fits(config, cluster.of(devices), devices)

    doubling = _doubling(cluster, most)
    index = next((index for index, devices in enumerate(doubling) if works(devices)), None)
    if index is None:
        return None
    return _least(_between(config, cluster, doubling[index - 1] if index else 0, doubling[index]), works)


# -- counts --------------------------------------------------------------------------------------------------


def _doubling(cluster: Cluster, most: int) -> list[int]:
    """1, 2, 4, … in a node, then 1, 2, 4, … nodes, up to `most`, and as many whole nodes as that is."""
    if most < 1:
        raise UserError(f"at most {most} devices: give a number from 1")
    node = cluster.devices_per_node
    inside = [2**power for power in range(node.bit_length()) if 2**power < node]
    nodes = [node * 2**power for power in range(max(0, most // node).bit_length())]
    last = most // node * node
    return sorted({devices for devices in [*inside, *nodes, last] if 1 <= devices <= most})


def _between(config: Config, cluster: Cluster, low: int, high: int) -> list[int]:
    """Whole nodes above `low` and up to `high` over which the job can be divided at all; the last is
    `high`."""
    node = cluster.devices_per_node
    counts = range(low // node * node + node, high, node) if high > node else ()
    return [*(devices for devices in counts if devices > low and _divides(config, devices)), high]


def _divides(config: Config, devices: int) -> bool:
    """Whether the devices are a product of degrees that blocks, batch, and heads and sequence allow."""
    model, length, batch = config.model, config.data.sequence_length, config.train.global_batch
    for pipeline in divisors(devices):
        if pipeline > model.layers:
            break
        for data in divisors(devices // pipeline):
            if batch % data == 0 and length % (devices // pipeline // data) == 0:
                return True
    return False


def _least(counts: Sequence[int], works: Callable[[int], bool]) -> int:
    """The least of ascending counts that works, when the last does: by bisection, then by trying those right
    below."""
    low, high = -1, len(counts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(counts[middle]) else (middle, high)
    below = counts[max(0, high - _LOOK_BELOW) : high]
    return next((devices for devices in below if works(devices)), counts[high])
