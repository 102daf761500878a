"""Whether a job fits at all on so many devices, asked of the model of memory alone: much quicker than a search."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.config import Config
from shardwise.cost.cluster import Cluster
from shardwise.cost.footprint import footprint, hold
from shardwise.cost.space import Array, Space, Work
from shardwise.cost.stack import SHARDWISE
from shardwise.search.candidates import candidates, fixed_fields
from shardwise.search.search import limit, work_of


def any_fits(config: Config, cluster: Cluster, devices: int) -> bool:
    """Whether any layout of the job fits on these devices."""
    return any(_some_fit(config, cluster, devices, space) for space in spaces(config, cluster, devices))


def any_fits_resident(config: Config, cluster: Cluster, devices: int) -> bool:
    """The same with all states in the devices' own memory."""
    space = next(spaces(config, cluster, devices))
    return not space.offload.any() and _some_fit(config, cluster, devices, space)


def _some_fit(config: Config, cluster: Cluster, devices: int, space: Space) -> bool:
    work, allowed = work_of(config), limit(cluster, config.cluster.margin, devices)
    return any(bool((peak_bytes(work, part, cluster) <= allowed).any()) for part in space.parts())


def peak_bytes(work: Work, space: Space, cluster: Cluster) -> Array:
    """Bytes of the fullest device; memory alone is much quicker than the whole prediction."""
    memory = footprint(work, space, cluster, SHARDWISE, hold(work, space, SHARDWISE))
    return sum(memory.values(), np.zeros(len(space)))


def spaces(config: Config, cluster: Cluster, devices: int) -> Iterator[Space]:
    """The candidates, and then, as a search would, those that offload."""
    fixed = fixed_fields(config)
    yield candidates(config, devices, fixed, bool(fixed.get("offload"))).space
    if "offload" not in fixed and cluster.device.overlap:
        yield candidates(config, devices, fixed, offload=True).space
