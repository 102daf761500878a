"""Flows in seconds: what each collective takes on a cluster, by itself, before anything hides it.

A collective's seconds are linear in its bytes (`collectives.py`): count x alpha + bytes x beta. Alpha and beta depend on the kind
and on the group alone, so they are worked out once for each grid of devices and looked up. What a codec does around the
collectives of a compressed sum (`codec_work.py`) is part of their seconds: one comes after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost import codec_work
from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, group_of, rates
from shardwise.cost.flow import Flow, When
from shardwise.cost.space import Array, Space, take
from shardwise.plan.grid import base

AXES = ("tensor", "context", "expert", "data", "replica", "pipeline")
"""Whose time a prediction tells apart."""


@dataclass(frozen=True)
class Priced:
    """The seconds of a step's flows, and their bytes."""

    bytes: dict[str, Array]
    """By axis, as `axis_of` groups them: every flow is in one."""
    message: Array
    """Seconds of one message between pipeline stages."""
    _seconds: dict[tuple[str, When], Array]

    def seconds(self, axis: str, when: When) -> Array:
        """Of all flows of this axis and time, in a step."""
        return self._seconds.get((axis, when), np.zeros_like(self.message))

    def inside_blocks(self, axis: str) -> Array:
        """Of its flows in the forward and backward passes of blocks, in a step."""
        return self.seconds(axis, "forward") + self.seconds(axis, "backward")


def axis_of(flow: Flow) -> str:
    """The axis that a flow's time belongs to. Devices that hold the same weights are the data axis', whatever other axes they lie
    on; what only the replicas sum is their own."""
    first = base(flow.axis).partition(" x ")[0].partition(".")[0]
    return "data" if first == "expert_data" or (first == "replica" and flow.axis != "replica") else first


def price(sent: Sequence[Flow], space: Space, cluster: Cluster) -> Priced:
    """All flows of these candidates in seconds."""
    grids, index = space.grids
    groups: dict[str, Group] = {}
    none = np.zeros(len(space))
    of_bytes, of_seconds, message = dict.fromkeys(AXES, none), dict[tuple[str, When], Array](), none
    for flow in sent:
        if flow.axis not in groups:
            groups[flow.axis] = group_of(flow.axis, grids, cluster)
        alpha, beta = rates(flow.kind, groups[flow.axis], cluster)  # (grids,) each
        seconds = flow.count * take(alpha, index) + flow.bytes * take(beta, index)
        if flow.codec_work is not None:
            seconds = seconds + codec_work.seconds(flow.codec_work, space, cluster)
        if flow.when == "pipeline":
            message = seconds / np.maximum(flow.count, 1.0)
        axis = axis_of(flow)
        key = axis, flow.when
        of_bytes[axis] = of_bytes[axis] + flow.bytes
        of_seconds[key] = of_seconds[key] + seconds if key in of_seconds else seconds
    return Priced(of_bytes, message, of_seconds)
