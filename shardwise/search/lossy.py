"""`layout = "auto+lossy"`: a search that may choose a codec for gradients too, where that pays.

Compression changes the numbers, so no search chooses it unless the job says so. Then every codec that is
proposed (search/slow_links.py) is searched for by itself, over all layouts: on a slow link the best layout
without compression may be one that hardly uses the data axis, and the best with it one that does. That takes
as many searches as there are codecs. The quickest is taken if it makes the step at least a tenth quicker than
the best without.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.config import Config, Layout
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.cost.cluster import Cluster
from shardwise.search.search import SearchResult, search
from shardwise.search.slow_links import CODECS, WORTHWHILE, exposed_share, worthwhile


@dataclass(frozen=True)
class Searched:
    """A job whose compression is decided, and what a search found for it."""

    config: Config
    result: SearchResult
    why: str | None
    """Why it is compressed so, or not; None: the search had no say in it."""


def search_job(config: Config, cluster: Cluster, devices: int) -> Searched:
    """Search for the best layout, and where the job leaves it to the planner, for a codec."""
    if config.layout.compression != AUTO:
        return Searched(config, search(config, cluster, devices), None)
    plain = _without(config)
    without = search(plain, cluster, devices)
    if not len(without.order):
        return Searched(plain, without, None)
    jobs = {name: _with(config, name) for name in CODECS}
    found = {name: search(job, cluster, devices) for name, job in jobs.items()}
    seconds = {name: _seconds(result) for name, result in found.items() if len(result.order)}
    codec = worthwhile(seconds, _seconds(without))
    if codec is None:
        return Searched(plain, without, _why_not(without, seconds))
    why = f"{_seconds(without) / seconds[codec]:.3g} times quicker on this link; changes the numbers"
    return Searched(jobs[codec], found[codec], why)


def _with(config: Config, codec: str) -> Config:
    return config.model_copy(update={"layout": config.layout.model_copy(update={"compression": codec})})


def _without(config: Config) -> Config:
    """The job with no word of compression."""
    given = config.layout.model_dump(exclude_unset=True, exclude=set(SETTINGS))
    return config.model_copy(update={"layout": Layout(**given)})


def _seconds(result: SearchResult) -> float:
    return float(result.total[result.order[0]])


def _why_not(without: SearchResult, seconds: Mapping[str, float]) -> str:
    """In words, that no codec pays."""
    share = exposed_share(without)
    if share <= 1 - 1 / WORTHWHILE:  # to send nothing would not be enough
        return f"would not pay, the step waits only {share:.1%} for the data axis"
    if not seconds:
        return "no codec fits in memory under any layout"
    name = min(seconds, key=lambda name: seconds[name])
    return f"would not pay, a step with {name} would take {seconds[name] / _seconds(without):.0%} of the time"
