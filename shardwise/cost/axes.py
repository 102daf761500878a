"""How far apart the devices of an axis are; plan/grid.py says which they are, and how many.

Ranks are laid out with tensor innermost, then context, data, replica, pipeline. Experts borrow the innermost ranks, and those who
hold the same experts are as far apart as there are expert devices.
"""

from __future__ import annotations

import numpy as np

from shardwise.config import borrowed
from shardwise.cost.space import Ints, Space
from shardwise.plan import grid
from shardwise.plan.grid import EXPERT_SHARDS, RANK_AXES


def devices(axis: str, space: Space) -> Ints:
    """Devices along an axis of a flow, for every candidate."""
    size: Ints = grid.devices(axis, space)
    return size


def distance(axis: str, space: Space) -> Ints:
    """Ranks from one device of an axis of a flow to the next, for every candidate."""
    name, _, half = axis.split(" x ")[-1].partition(".")
    if name in ("expert", EXPERT_SHARDS):
        return space.expert if name == EXPERT_SHARDS else np.ones_like(space.expert)
    apart = np.ones(len(space), dtype=np.int64)
    for inner in RANK_AXES[RANK_AXES.index(name) + 1 :]:
        apart = apart * getattr(space, inner)
    return apart * borrowed(space)[name] if half == "outer" else apart
