"""Plan a job: the cluster that it is for, and the answer of the planner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.config import Config, Sections
    from shardwise.cost.cluster import Cluster
    from shardwise.files import Json


def problems_of_cluster(sections: Sections) -> Iterator[str]:
    """Raise an error if the job names a cluster that is not known."""
    from shardwise.config import complete_config
    from shardwise.cost.clusters import requested_cluster

    if config := complete_config(sections):
        requested_cluster(config.cluster)
    yield from ()


def cluster_of(config: Config) -> Cluster:
    """Return the cluster that the job names, or this machine, which is measured once."""
    from shardwise.cost.clusters import requested_cluster

    named = requested_cluster(config.cluster)
    if named is not None:
        return named
    from shardwise.library.machine import this_machine

    layout = config.layout
    workers = config.cluster.devices or (layout.world if layout.data > 0 else None)
    return this_machine(workers, config.run.device)[0]


def plan_answer(
    config: Config,
    cluster: Cluster,
    job: str,
    everything: bool,
    storage_speed: float,
    device_mtbf: float | None,
) -> Json:
    """Search for the best layout of a job on a cluster, and return the answer that `--json` prints."""
    from shardwise.library.plan_drawings import drawings
    from shardwise.library.plan_show import advice_of
    from shardwise.search.answer import answer
    from shardwise.search.interval import DEVICE_HOURS
    from shardwise.search.lossy import search_job
    from shardwise.search.whole_run import beyond
    from shardwise.version import __version__

    searched = search_job(config, cluster, cluster.devices)
    config, result = searched.config, searched.result
    content = answer(config, result, everything)
    content["best"] |= drawings(result)
    more = beyond(config, result, 1e9 * storage_speed, device_mtbf or DEVICE_HOURS)
    chosen = [f"compression {config.layout.compression or 'none'}: {searched.why}"] if searched.why else []
    return {
        "version": __version__,
        **content,
        "job": job,
        "beyond": more,
        "advice": [*chosen, *advice_of(more)],
    }
