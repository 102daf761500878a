"""`layout = "auto+lossy"`: a search that may also choose a codec for gradients, where that makes a step
quicker.

Compression changes the numbers, so no search chooses it unless the job says so. Then one search over all
layouts is made for each proposed codec (search/slow_links.py). On a slow link the best layout without
compression may be one that hardly uses the data axis, and the best with it one that does. The quickest codec
is taken if it makes the step at least a tenth quicker than the best layout without one.
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
    """A job whose compression is decided, and the result of its search."""

    config: Config
    result: SearchResult
    why: str | None
    """Why the codec was chosen, or none was; None if the search did not decide it."""


def search_job(config: Config, cluster: Cluster, devices: int) -> Searched:
    """Search for the best layout, and if the job leaves that to the planner, for the best codec."""
    if config.layout.compression != AUTO:
        return Searched(config, search(config, cluster, devices), None)
    plain = _without(config)
    without = search(plain, cluster, devices)
    if not len(without.order):
        return Searched(plain, without, None)
    jobs = {name: _with(config, name) for name in CODECS}
    results = {name: search(job, cluster, devices) for name, job in jobs.items()}
    seconds = {name: _seconds(result) for name, result in results.items() if len(result.order)}
    codec = worthwhile(seconds, _seconds(without))
    if codec is None:
        return Searched(plain, without, _why_not(without, seconds))
    why = f"{_seconds(without) / seconds[codec]:.3g} times quicker on this link; changes the numbers"
    return Searched(jobs[codec], results[codec], why)


def _with(config: Config, codec: str) -> Config:
    return config.model_copy(update={"layout": config.layout.model_copy(update={"compression": codec})})


def _without(config: Config) -> Config:
    """Return the job without its settings of compression."""
    given = config.layout.model_dump(exclude_unset=True, exclude=set(SETTINGS))
    return config.model_copy(update={"layout": Layout(**given)})


def _seconds(result: SearchResult) -> float:
    return float(result.total[result.order[0]])


def _why_not(without: SearchResult, seconds: Mapping[str, float]) -> str:
    """Return in words why no codec is worth its cost."""
    share = exposed_share(without)
    if share <= 1 - 1 / WORTHWHILE:  # even sending nothing would not be enough
        return f"would not pay, the step waits only {share:.1%} for the data axis"
    if not seconds:
        return "no codec fits in memory under any layout"
    name = min(seconds, key=lambda name: seconds[name])
    return f"would not pay, a step with {name} would take {seconds[name] / _seconds(without):.0%} of the time"
