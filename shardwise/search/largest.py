"""Find the longest sequence, and the largest batch without accumulation, that fit on this many devices.

Both are found by bisection. To know whether anything fits, only memory is predicted (search/fits.py); only
the answer is searched or costed in full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.config import Config, divisors
from shardwise.config.schedules import DEFAULT_SCHEDULE, SCHEDULES
from shardwise.cost.cluster import Cluster
from shardwise.cost.predict import predict
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import RECOMPUTE, Bools, Ints, Space, Workload
from shardwise.plurals import counted
from shardwise.search.candidates import candidates, fixed_fields
from shardwise.search.fits import any_fits, any_fits_resident, fitting
from shardwise.search.reasons import best_layout, describe_layout, nothing_fits
from shardwise.search.search import SearchResult, search, simulate_pipelines, workload_of
from shardwise.units import GIB

_LONGEST = 2**30


# -- the longest sequence ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and the job with it."""

    length: int
    """Number of tokens; 0 if not even a short sequence fits."""
    global_batch: int
    step_seconds: float | None
    tokens_per_second: float | None
    layout: str | None
    sentence: str
    job: Config = field(repr=False)
    result: SearchResult | None = field(default=None, repr=False)


def longest_sequence(config: Config, cluster: Cluster, devices: int) -> Longest:
    """Return the longest data.sequence_length for which a layout fits, at about the same number of tokens per
    step.

    The batch shrinks to the largest divisor of the job's batch that has no more tokens, so that it still
    divides as before. model.max_positions is raised if the sequence is longer. States are offloaded only if
    the job needs that at its own length.
    """
    cluster = cluster.with_devices(devices)
    job_fits = any_fits_resident if any_fits_resident(config, cluster, devices) else any_fits

    def fits(length: int) -> bool:
        return job_fits(_with_length(config, length), cluster, devices)

    low = config.data.sequence_length
    while low >= 1 and not fits(low):
        low //= 2
    if low < 1:
        result = search(config, cluster, devices)
        sentence = nothing_fits(config, result)[0]
        return Longest(0, config.train.global_batch, None, None, None, sentence, config, result)
    high = 2 * low
    while high < _LONGEST and low >= config.data.sequence_length and fits(high):
        low, high = high, 2 * high
    length = _greatest(low, high, 1024 if high > 2048 else 128, fits)
    return _longest(_with_length(config, length), cluster, devices)


def _longest(job: Config, cluster: Cluster, devices: int) -> Longest:
    result = search(job, cluster, devices)
    best, length, batch = int(result.order[0]), job.data.sequence_length, job.train.global_batch
    seconds = float(result.total[best])
    sentence = f"sequences of {length:,} tokens fit ({best_layout(result)}), {batch} of them a step"
    return Longest(
        length, batch, seconds, result.work.tokens / seconds, best_layout(result), sentence, job, result
    )


def _with_length(config: Config, length: int) -> Config:
    """Return the job with sequences of another length, and about as many tokens per step."""
    batch, tokens = config.train.global_batch, config.train.global_batch * config.data.sequence_length
    smaller = max([size for size in divisors(batch) if size * length <= tokens], default=1)
    changes = {
        "data": config.data.model_copy(update={"sequence_length": length}),
        "train": config.train.model_copy(update={"global_batch": smaller}),
        "model": config.model.model_copy(update={"max_positions": max(length, config.model.max_positions)}),
    }
    return config.model_copy(update=changes)


def _greatest(low: int, high: int, step: int, works: Callable[[int], bool]) -> int:
    """Return the greatest multiple of `step` between two numbers that works, or `low`. `low` works, and
    `high` does not."""
    first, last = low // step, -(-high // step)
    while last - first > 1:
        middle = (first + last) // 2
        first, last = (middle, last) if works(middle * step) else (first, middle)
    return max(low, first * step)


# -- the largest batch ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Largest:
    """The largest number of sequences in one forward and backward, and the job with them."""

    global_batch: int
    """Number of sequences per step; 0 if not even one sequence per device fits."""
    micro_batch: int
    data_parallel: int
    step_seconds: float | None
    tokens_per_second: float | None
    peak_gib: float | None
    layout: str | None
    sentence: str
    job: Config = field(repr=False)
    """The job with this batch and this layout."""


def largest_batch(config: Config, cluster: Cluster, devices: int) -> Largest:
    """Return the largest number of sequences per step that fits without accumulation, over all layouts; of
    equal ones the quickest.

    In one layout memory grows with the micro-batch, so each layout has a largest one; all are bisected at
    once. A train.micro_batch in the job is ignored.
    """
    cluster, work, margin = cluster.with_devices(devices), workload_of(config), config.cluster.margin
    space = _without_accumulation(config, devices)

    def fits(sizes: Ints) -> Bools:
        return fitting(work, replace(space, micro_batch=sizes), cluster, margin, devices)

    sizes = _largest_sizes(fits, len(space))
    batches = sizes * space.replica * space.data
    if not len(space) or not batches.max():
        sentence = f"not one sequence a device fits without accumulation on {counted(devices, 'device')}"
        return Largest(0, 0, 0, None, None, None, None, sentence, config)
    equal = np.flatnonzero(batches == batches.max())
    tied = replace(space, micro_batch=sizes).take(equal)
    batch = int(batches.max())
    larger = replace(work, global_batch=batch)
    quickest = int(np.argmin(predict(larger, tied, cluster, SHARDWISE).total))
    return _largest(config, larger, tied.take([quickest]), cluster, batch)


def _without_accumulation(config: Config, devices: int) -> Space:
    """Return every layout once, with one sequence per device. Such a batch divides by every data axis."""
    fixed = {**fixed_fields(config), "micro_batch": 1}
    job = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": devices})})
    space = candidates(job, devices, fixed).space
    # With a single micro-batch no schedule fills a pipeline, and the plain one holds least.
    space = space.take((space.pipeline == 1) | (space.schedule == SCHEDULES.index(DEFAULT_SCHEDULE)))
    return replace(space, accumulation=np.ones_like(space.accumulation))


def _largest_sizes(fits: Callable[[Ints], Bools], layouts: int) -> Ints:
    """Return, for each layout, the largest micro-batch that fits, and 0 where none does. Sizes are doubled
    while any fits, then bisected."""
    low, high = np.zeros(layouts, np.int64), np.ones(layouts, np.int64)
    while layouts and int(high.max()) < _LONGEST and (good := fits(high)).any():
        low, high = np.where(good, high, low), np.where(good, 2 * high, high)
    while layouts and (high - low).max() > 1:
        middle = np.maximum((low + high) // 2, 1)
        good = fits(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return low


def _largest(config: Config, work: Workload, space: Space, cluster: Cluster, batch: int) -> Largest:
    prediction, row = simulate_pipelines(work, space, cluster), space.row(0)
    seconds, copies, layout = float(prediction.total[0]), row["replica"] * row["data"], describe_layout(row)
    changes = {
        "global_batch": batch,
        "micro_batch": row["micro_batch"],
        "recompute": RECOMPUTE[row["recompute"]],
    }
    train = config.train.model_copy(update=changes)
    sizes = f"micro-batches of {row['micro_batch']:,} ({layout})"
    return Largest(
        global_batch=batch,
        micro_batch=row["micro_batch"],
        data_parallel=copies,
        step_seconds=seconds,
        tokens_per_second=work.tokens / seconds,
        peak_gib=float(prediction.peak[0]) / GIB,
        layout=layout,
        sentence=f"{batch:,} sequences a step fit without accumulation, in {sizes}",
        job=config.model_copy(update={"layout": space.layout(0), "train": train}),
    )
