"""Turning the search round: the fewest devices, the longest sequence, the largest batch.

The search answers what is best on so many devices. Here the number of devices, the length or the batch is what is looked for, so
one question is many searches. They are kept cheap in three ways: whether anything fits needs only the model of memory; how long
a step takes is first judged by the closed forms alone, and only the answer is searched in full, schedules played through; and
counts on which even the devices' peak would be too slow are not tried at all.

More devices do not always help: 17 nodes divide few batches and few stacks of blocks. So among whole nodes a bisection finds
where it starts to work, and then looks at the counts right below, which a bisection may have jumped over. Within a node only
powers of two are tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from shardwise.config import Config, divisors
from shardwise.cost.cluster import GIB, Cluster
from shardwise.cost.footprint import footprint, hold
from shardwise.cost.predict import predict
from shardwise.cost.space import RECOMPUTE, Array, Ints, Space, Work
from shardwise.cost.stack import SHARDWISE
from shardwise.errors import UserError
from shardwise.plan.dtypes import BYTES
from shardwise.plan.flops import flops_per_token
from shardwise.plan.parameters import count
from shardwise.plan.schedule import SCHEDULES
from shardwise.search.answer import nothing_fits, words
from shardwise.search.candidates import candidates, fixed_fields
from shardwise.search.search import MARGIN, Result, limit, play, search, work_of

MOST = 16_384
"""Devices that are tried at most, unless more are asked for."""
_LOOK_BELOW = 4
_CHUNK = 200_000
_LONGEST = 2**30
_DAY = 86_400.0


# -- the fewest devices that are quick enough ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    """A number of devices that was looked at, and the days of training there; None where it does not work."""

    devices: int
    days: float | None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"devices": self.devices, "days": self.days, "reason": self.reason}


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
    result: Result | None = field(default=None, repr=False)
    """The search on these devices, or on those of the quickest tried."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the search."""
        return {
            "devices": self.devices,
            "wanted_days": self.wanted_days,
            "days": self.days,
            "layout": self.layout,
            "sentence": self.sentence,
            "tried": [one.to_json() for one in self.tried],
        }


def fewest_devices(
    config: Config, cluster: Cluster, days: float, tokens: float | None = None, most: int = MOST
) -> Fewest:  # fmt: skip
    """The fewest devices on which all the job's steps (or so many tokens) take at most so many days."""
    if not (days > 0 and math.isfinite(days)) or (tokens is not None and not tokens > 0):
        raise UserError(f"--days {days:g}: give a number of days above 0")
    steps = config.train.steps if tokens is None else tokens / (config.train.global_batch * config.data.sequence_length)
    attempts = _Attempts(config, cluster, days, steps)
    doubling = _doubling(cluster, most)
    place = next((place for place, devices in enumerate(doubling) if attempts.in_time(devices)), None)
    if place is None:
        return _too_slow(attempts, doubling[-1])
    between = _between(config, cluster, doubling[place - 1] if place else 0, doubling[place])
    least = _least(between, attempts.in_time)
    later = (each for low, high in pairwise(doubling[place:]) for each in _between(config, cluster, low, high))
    for devices in chain((each for each in between if each >= least), later):
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

    def searched(self, devices: int, whatever: bool = False) -> Result | None:
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


def _in_time(attempts: _Attempts, devices: int, result: Result) -> Fewest:
    days, layout = attempts.tried[devices].days or 0.0, _layout(result)
    sentence = f"{_devices(devices)} train this in {_days(days)} ({layout}); {attempts.days:g} days were asked for"
    return Fewest(devices, attempts.days, days, layout, sentence, attempts.all(), result)


def _too_slow(attempts: _Attempts, most: int) -> Fewest:
    """Nothing is enough: the quickest of what was tried, searched in full."""
    timed = [one for one in attempts.all() if one.days is not None]
    quickest = min(timed, key=lambda one: one.days or 0.0).devices if timed else most
    result = attempts.searched(quickest, whatever=True)
    if result is None:
        sentence = f"no number of devices up to {most:,} trains this: {attempts.tried[quickest].reason}"
        return Fewest(None, attempts.days, None, None, sentence, attempts.all())
    days = attempts.tried[quickest].days or 0.0
    sentence = f"up to {_devices(most)} cannot train this in {attempts.days:g} days: the best is {_days(days)} on {quickest:,}"
    return Fewest(None, attempts.days, days, _layout(result), sentence, attempts.all(), result)


def _devices(number: int) -> str:
    return "1 device" if number == 1 else f"{number:,} devices"


def _days(number: float) -> str:
    return f"{number:,.1f} days" if number >= 1 else f"{number:.3g} days"


def _layout(result: Result) -> str:
    return words(result.space.row(int(result.order[0])))


def _ideal_seconds(config: Config, cluster: Cluster, devices: int) -> float:
    """Of a step if every device computed at its peak and did nothing else: no layout is quicker."""
    work = work_of(config)
    workers = -(-devices // cluster.devices_per_node) if cluster.shared else devices
    peaks, precision = cluster.device.peak, work.precision.split()[0]
    peak = peaks.get(precision, max(peaks.values())) / min([1.0, *cluster.corrections.values()])
    return work.tokens * flops_per_token(config.model, work.sequence_length) / (workers * peak)


def _rough_seconds(config: Config, cluster: Cluster, devices: int) -> float | None:
    """Of a step in the quickest layout that fits, by the closed forms."""
    work, allowed = work_of(config), limit(cluster, MARGIN, devices)
    for space in _spaces(config, cluster, devices):
        quickest = np.inf
        for part in _parts(space):
            prediction = predict(work, part, cluster, SHARDWISE)
            quickest = min(quickest, float(np.min(prediction.total[prediction.peak <= allowed], initial=np.inf)))
        if np.isfinite(quickest):
            return float(quickest)
    return None


# -- the fewest devices that hold it ---------------------------------------------------------------------------------------


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
    result: Result | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the search."""
        names = ("devices", "without_offload", "layout", "peak_gib", "limit_gib", "sentence")
        return {name: getattr(self, name) for name in names}


def smallest_that_fits(config: Config, cluster: Cluster, most: int = MOST) -> Smallest:
    """The fewest devices on which any layout fits; states go to the host's memory only where nothing else does."""
    devices = resident = _smallest(config, cluster, most, _fits)
    if devices is None:
        sentence = f"nothing fits on up to {_devices(_doubling(cluster, most)[-1])}"
        return Smallest(None, None, None, None, limit(cluster, MARGIN, most) / GIB, sentence)
    result = search(config, cluster.of(devices), devices)
    best = int(result.order[0])
    peak, sentence = float(result.peak[best]), f"fits on {_devices(devices)} ({_layout(result)})"
    if result.space.offload[best]:
        resident = _smallest(config, cluster, most, _fits_resident)
        sentence += f" with {_host_gib(config, cluster.of(devices)):,.0f} GiB of each node's own memory"
        sentence += f"; without offloading it takes {_devices(resident)}" if resident else "; only by offloading"
    return Smallest(devices, resident, _layout(result), peak / GIB, result.limit / GIB, sentence, result)


def _host_gib(config: Config, cluster: Cluster) -> float:
    """Of a node's own memory that offloaded weights, gradients and moments take."""
    return 4 * BYTES[work_of(config).state_dtype] * count(config.model) / cluster.nodes / GIB


def _smallest(config: Config, cluster: Cluster, most: int, fits: Callable[[Config, Cluster, int], bool]) -> int | None:
    known: dict[int, bool] = {}

    def works(devices: int) -> bool:
        if devices not in known:
            known[devices] = fits(config, cluster.of(devices), devices)
        return known[devices]

    doubling = _doubling(cluster, most)
    place = next((place for place, devices in enumerate(doubling) if works(devices)), None)
    if place is None:
        return None
    return _least(_between(config, cluster, doubling[place - 1] if place else 0, doubling[place]), works)


def _fits(config: Config, cluster: Cluster, devices: int) -> bool:
    """Whether any layout of the job fits on these devices."""
    return any(_any_fits(config, cluster, devices, space) for space in _spaces(config, cluster, devices))


def _fits_resident(config: Config, cluster: Cluster, devices: int) -> bool:
    space = next(_spaces(config, cluster, devices))
    return not space.offload.any() and _any_fits(config, cluster, devices, space)


def _any_fits(config: Config, cluster: Cluster, devices: int, space: Space) -> bool:
    work, allowed = work_of(config), limit(cluster, MARGIN, devices)
    return any(bool((_peak(work, part, cluster) <= allowed).any()) for part in _parts(space))


def _peak(work: Work, space: Space, cluster: Cluster) -> Array:
    """Bytes of the fullest device; memory alone is much quicker than the whole prediction."""
    memory = footprint(work, space, cluster, SHARDWISE, hold(work, space, SHARDWISE))
    return sum(memory.values(), np.zeros(len(space)))


def _spaces(config: Config, cluster: Cluster, devices: int) -> Iterator[Space]:
    """The candidates, and then, as a search would, those that offload."""
    fixed = fixed_fields(config)
    yield candidates(config, devices, fixed, bool(fixed.get("offload"))).space
    if "offload" not in fixed and cluster.device.overlap:
        yield candidates(config, devices, fixed, offload=True).space


def _parts(space: Space) -> Iterator[Space]:
    """A space in pieces that fit in memory beside what is computed from them."""
    for start in range(0, len(space), _CHUNK):
        yield space.take(slice(start, start + _CHUNK))


# -- counts ----------------------------------------------------------------------------------------------------------------


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
    """Whole nodes above `low` and up to `high` over which the job can be divided at all; the last is `high`."""
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
    """The least of ascending counts that works, when the last does: by bisection, then by trying those right below."""
    low, high = -1, len(counts) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(counts[middle]) else (middle, high)
    below = counts[max(0, high - _LOOK_BELOW) : high]
    return next((devices for devices in below if works(devices)), counts[high])


# -- the longest sequence --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and the job with it."""

    length: int
    """0 where not even a short one fits."""
    global_batch: int
    step_seconds: float | None
    tokens_per_second: float | None
    layout: str | None
    sentence: str
    job: Config = field(repr=False)
    result: Result | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the job and the search."""
        names = ("length", "global_batch", "step_seconds", "tokens_per_second", "layout", "sentence")
        return {name: getattr(self, name) for name in names}


def longest_sequence(config: Config, cluster: Cluster, devices: int) -> Longest:
    """The longest data.sequence_length for which a layout fits, at about the same tokens a step.

    The batch shrinks to the largest divisor of the job's that has no more tokens, so that it still divides as the job's does;
    model.max_positions is raised where the sequence is longer. States are offloaded only where the job needs that as it is.
    """
    cluster = cluster.of(devices)
    enough = _fits_resident if _fits_resident(config, cluster, devices) else _fits

    def fits(length: int) -> bool:
        return enough(_with_length(config, length), cluster, devices)

    low = config.data.sequence_length
    while low >= 1 and not fits(low):
        low //= 2
    if low < 1:
        result = search(config, cluster, devices)
        return Longest(0, config.train.global_batch, None, None, None, nothing_fits(config, result)[0], config, result)
    high = 2 * low
    while high < _LONGEST and low >= config.data.sequence_length and fits(high):
        low, high = high, 2 * high
    return _longest(_with_length(config, _greatest(low, high, 1024 if high > 2048 else 128, fits)), cluster, devices)


def _longest(job: Config, cluster: Cluster, devices: int) -> Longest:
    result = search(job, cluster, devices)
    best, length, batch = int(result.order[0]), job.data.sequence_length, job.train.global_batch
    seconds = float(result.total[best])
    sentence = f"sequences of {length:,} tokens fit ({_layout(result)}), {batch} of them a step"
    return Longest(length, batch, seconds, result.work.tokens / seconds, _layout(result), sentence, job, result)


def _with_length(config: Config, length: int) -> Config:
    """The job with sequences of another length, and about as many tokens a step."""
    batch, tokens = config.train.global_batch, config.train.global_batch * config.data.sequence_length
    fewer = max([size for size in divisors(batch) if size * length <= tokens], default=1)
    changes = {
        "data": config.data.model_copy(update={"sequence_length": length}),
        "train": config.train.model_copy(update={"global_batch": fewer}),
        "model": config.model.model_copy(update={"max_positions": max(length, config.model.max_positions)}),
    }
    return config.model_copy(update=changes)


def _greatest(low: int, high: int, step: int, works: Callable[[int], bool]) -> int:
    """The greatest multiple of `step` between two numbers that works, or `low`, which does; `high` does not."""
    first, last = low // step, -(-high // step)
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if works(middle * step) else (first, middle)
    return max(low, first * step)


# -- the largest batch -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Largest:
    """The most sequences that go through in one forward and backward, and the job with them."""

    global_batch: int
    """0 where not one sequence a device fits."""
    micro_batch: int
    data_parallel: int
    step_seconds: float | None
    tokens_per_second: float | None
    peak_gib: float | None
    layout: str | None
    sentence: str
    job: Config = field(repr=False)
    """With this batch, and the layout put in."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the job."""
        names = (
            "global_batch",
            "micro_batch",
            "data_parallel",
            "step_seconds",
            "tokens_per_second",
            "peak_gib",
            "layout",
            "sentence",
        )
        return {name: getattr(self, name) for name in names}


def largest_batch(config: Config, cluster: Cluster, devices: int) -> Largest:
    """The most sequences a step that fit without accumulation, over all layouts; of equals the quickest.

    In one layout memory grows with the micro-batch, so each has a largest; all are bisected at once. A train.micro_batch that the
    job gives is put aside.
    """
    cluster, work, allowed = cluster.of(devices), work_of(config), limit(cluster.of(devices), MARGIN, devices)
    space = _without_accumulation(config, devices)
    sizes = _largest_sizes(lambda tried: _peak(work, replace(space, micro_batch=tried), cluster) <= allowed, len(space))
    batches = sizes * space.replica * space.data
    if not len(space) or not batches.max():
        sentence = f"not one sequence a device fits without accumulation on {_devices(devices)}"
        return Largest(0, 0, 0, None, None, None, None, sentence, config)
    equal = np.flatnonzero(batches == batches.max())
    tied = replace(space, micro_batch=sizes).take(equal)
    batch = int(batches.max())
    work = replace(work, global_batch=batch)
    quickest = int(np.argmin(predict(work, tied, cluster, SHARDWISE).total))
    return _largest(config, work, tied.take([quickest]), cluster, batch)


def _without_accumulation(config: Config, devices: int) -> Space:
    """Every layout once, one sequence a device. A batch of one sequence a device divides over every data axis there is."""
    fixed = {**fixed_fields(config), "micro_batch": 1}
    job = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": devices})})
    space = candidates(job, devices, fixed, bool(fixed.get("offload"))).space
    # With a single micro-batch no schedule fills a pipeline, and the plain one holds least.
    space = space.take((space.pipeline == 1) | (space.schedule == SCHEDULES.index("1f1b")))
    return replace(space, accumulation=np.ones_like(space.accumulation))


def _largest_sizes(fits: Callable[[Ints], Any], layouts: int) -> Ints:
    """For each layout the largest micro-batch that fits, 0 where none does: doubled while any fits, then bisected."""
    low, high = np.zeros(layouts, np.int64), np.ones(layouts, np.int64)
    while layouts and int(high.max()) < _LONGEST and (good := fits(high)).any():
        low, high = np.where(good, high, low), np.where(good, 2 * high, high)
    while layouts and (high - low).max() > 1:
        middle = np.maximum((low + high) // 2, 1)
        good = fits(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low


def _largest(config: Config, work: Work, one: Space, cluster: Cluster, batch: int) -> Largest:
    found, row = play(work, one, cluster), one.row(0)
    seconds, copies, layout = float(found.total[0]), row["replica"] * row["data"], words(row)
    changes = {"global_batch": batch, "micro_batch": row["micro_batch"], "recompute": RECOMPUTE[row["recompute"]]}
    job = config.model_copy(update={"layout": one.layout(0), "train": config.train.model_copy(update=changes)})
    sentence = f"{batch:,} sequences a step fit without accumulation, in micro-batches of {row['micro_batch']:,} ({layout})"
    return Largest(
        batch, row["micro_batch"], copies, seconds, work.tokens / seconds, float(found.peak[0]) / GIB, layout, sentence, job
    )  # fmt: skip
