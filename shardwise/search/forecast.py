"""Predict the costs of a run before it begins, with the cost model. The prediction is stored in plan.json
and later compared with the run.

`plan_job` decides what the user left open; `forecast` predicts the result. If a prediction cannot be made,
the run starts without it.
"""

from __future__ import annotations

from typing import Any

from shardwise.config import Config, Layout
from shardwise.config.compression import AUTO
from shardwise.cost.cluster import Cluster
from shardwise.cost.space import space_of_layout
from shardwise.errors import ConfigError
from shardwise.plans.choose import OriginalJob
from shardwise.search.answer import chosen, device_peak, traffic, with_total
from shardwise.search.lossy import search_job
from shardwise.search.reasons import nothing_fits, reason
from shardwise.search.search import simulate_pipelines, workload_of
from shardwise.units import GIB


def plan_job(config: Config, cluster: Cluster, devices: int) -> tuple[Config, OriginalJob]:
    """Return the job with the best layout, and the job as it was asked for, with the reason in one line."""
    searched = search_job(config, cluster, devices)
    result = searched.result
    if not len(result.order):
        raise ConfigError(f"the job on {devices} devices", nothing_fits(config, result))
    whys = {"compression": searched.why} if searched.why else {}
    why = f"planned: {reason(result, int(result.order[0]))}"
    return chosen(searched.config, result), OriginalJob(config, why, whys)


def is_open(layout: Layout) -> bool:
    """Return whether the user left the whole layout, or the choice of compression, to the planner."""
    return not layout.model_fields_set or layout.compression == AUTO


def forecast(
    config: Config,
    layout: Layout,
    micro_batch: int,
    accumulation: int,
    cluster: Cluster,
    bucket_bytes: int | None = None,
) -> dict[str, Any]:
    """Return the seconds by term, the memory by kind, and the bytes of every collective, of one step under
    this layout."""
    space = space_of_layout(config.model, config.train.recompute, layout, micro_batch, accumulation)
    work = workload_of(config, bucket_bytes)
    prediction = simulate_pipelines(work, space, cluster)
    return {
        "cluster": cluster.name,
        "device": cluster.device.name,
        "peak_flops": device_peak(cluster, config.train.precision),
        "step_seconds": with_total(prediction.seconds),
        "memory_gib": with_total(prediction.memory, GIB),
        "tokens_per_second": work.tokens / float(prediction.total[0]),
        "bytes": traffic(work, cluster, space),
    }
