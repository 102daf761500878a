"""What a run that is about to begin will take, by the model that plans: kept in plan.json, and held against
what then happened.

`plan_job` decides what the user left open; `forecast` predicts what was decided. A run goes on if its
prediction cannot be made: the plan is advice, the training is the purpose.
"""

from __future__ import annotations

from typing import Any

from shardwise.config import Config, Layout
from shardwise.config.compression import AUTO
from shardwise.cost.cluster import Cluster
from shardwise.cost.space import space_of_layout
from shardwise.errors import ConfigError
from shardwise.plan.choose import Asked
from shardwise.search.answer import chosen, device_peak, traffic
from shardwise.search.lossy import search_job
from shardwise.search.reasons import nothing_fits, reason
from shardwise.search.search import play, work_of
from shardwise.units import GIB


def plan_job(config: Config, cluster: Cluster, devices: int) -> tuple[Config, Asked]:
    """The job with the best layout put in; and the job as it was asked for, with why in one line."""
    searched = search_job(config, cluster, devices)
    result = searched.result
    if not len(result.order):
        raise ConfigError(f"the job on {devices} devices", nothing_fits(config, result))
    whys = {"compression": searched.why} if searched.why else {}
    return chosen(searched.config, result), Asked(
        config, f"planned: {reason(result, int(result.order[0]))}", whys
    )


def is_open(layout: Layout) -> bool:
    """Whether the user left all of the layout to the planner, or whether to compress."""
    return not layout.model_fields_set or layout.compression == AUTO


def forecast(
    config: Config,
    layout: Layout,
    micro_batch: int,
    accumulation: int,
    cluster: Cluster,
    bucket_bytes: int | None = None,
) -> dict[str, Any]:
    """Seconds by term, bytes of memory by kind, and of every collective, of one step under this layout."""
    space = space_of_layout(config.model, config.train.recompute, layout, micro_batch, accumulation)
    work = work_of(config, bucket_bytes)
    prediction = play(work, space, cluster)
    total = float(prediction.total[0])
    return {
        "cluster": cluster.name,
        "device": cluster.device.name,
        "peak_flops": device_peak(cluster, config.train.precision),
        "step_seconds": {name: float(value[0]) for name, value in prediction.seconds.items()}
        | {"total": total},
        "memory_gib": {name: float(value[0]) / GIB for name, value in prediction.memory.items()}
        | {"total": float(prediction.peak[0]) / GIB},
        "tokens_per_second": work.tokens / total,
        "bytes": traffic(work, cluster, space),
    }
