"""Tell whether a job fits on this many devices. Only memory is predicted, which is much quicker than a
search."""

from __future__ import annotations

import numpy as np

from shardwise.config import Config
from shardwise.cost.cluster import Cluster
from shardwise.cost.footprint import footprint, hold, host_bytes
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Bools, Space, Workload
from shardwise.search.candidates import candidates, fixed_fields
from shardwise.search.search import offloads, within_limits, workload_of


def any_fits(config: Config, cluster: Cluster, devices: int) -> bool:
    """Return whether any layout of the job fits on these devices."""
    space = candidates(config, devices, fixed_fields(config), offloads(cluster)).space
    return _some_fit(config, cluster, devices, space)


def any_fits_resident(config: Config, cluster: Cluster, devices: int) -> bool:
    """Return whether any layout fits with all states in the devices' own memory."""
    space = candidates(config, devices, fixed_fields(config)).space
    return not space.offload.any() and _some_fit(config, cluster, devices, space)


def _some_fit(config: Config, cluster: Cluster, devices: int, space: Space) -> bool:
    work, margin = workload_of(config), config.cluster.margin
    return any(bool(fitting(work, part, cluster, margin, devices).any()) for part in space.parts())


def fitting(work: Workload, space: Space, cluster: Cluster, margin: float, devices: int) -> Bools:
    """Return, for each candidate, whether its peak fits in the memory of the devices and of their hosts."""
    held = hold(work, space, SHARDWISE)
    memory = footprint(work, space, cluster, SHARDWISE, held)
    peak = sum(memory.values(), np.zeros(len(space)))
    return within_limits(peak, host_bytes(work, space, cluster, held), cluster, margin, devices)
