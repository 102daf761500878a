"""Flows in seconds: what each collective takes on a cluster, by itself, before anything hides it.

A collective's seconds are linear in its bytes (`collectives.py`): count x alpha + bytes x beta. Alpha and beta depend on the kind
and on the group alone, of which a million candidates have a few dozen, so they are worked out for each of those and looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost.axes import devices, distance
from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, placed, rates
from shardwise.cost.flow import Flow, When
from shardwise.cost.space import Array, Ints, Space, distinct

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
    _none: Array

    def seconds(self, axis: str, when: When) -> Array:
        """Of all flows of this axis and time, in a step."""
        return self._seconds.get((axis, when), self._none)

    def inside_blocks(self, axis: str) -> Array:
        """Of its flows in the forward and backward passes of blocks, in a step."""
        return self.seconds(axis, "forward") + self.seconds(axis, "backward")


def axis_of(flow: Flow) -> str:
    """The axis that a flow's time belongs to. Devices that hold the same weights are the data axis', whatever other axes they lie
    on; what only the replicas sum is their own."""
    first = flow.axis.partition(" x ")[0].partition(".")[0]
    return "data" if first == "expert_data" or (first == "replica" and flow.axis != "replica") else first


def price(sent: Sequence[Flow], space: Space, cluster: Cluster) -> Priced:
    """All flows of these candidates in seconds."""
    groups: dict[str, tuple[Group, Ints]] = {}
    none = np.zeros(len(space))
    of_bytes, of_seconds, message = dict.fromkeys(AXES, none), dict[tuple[str, When], Array](), none
    for flow in sent:
        if flow.axis not in groups:
            groups[flow.axis] = _groups(flow.axis, space, cluster)
        group, index = groups[flow.axis]
        alpha, beta = rates(flow.kind, group, cluster)
        seconds = flow.count * alpha[index] + flow.bytes * beta[index]
        if flow.when == "pipeline":
            message = seconds / np.maximum(flow.count, 1.0)
        axis = axis_of(flow)
        key = axis, flow.when
        of_bytes[axis] = of_bytes[axis] + flow.bytes
        of_seconds[key] = of_seconds[key] + seconds if key in of_seconds else seconds
    return Priced(of_bytes, message, of_seconds, none)


def _groups(axis: str, space: Space, cluster: Cluster) -> tuple[Group, Ints]:
    """The distinct groups of an axis, and for each candidate the index of its own."""
    kinds, index = distinct([devices(axis, space), distance(axis, space)])
    sizes, steps = np.asarray(kinds, dtype=np.int64).reshape(-1, 2).T
    return placed(sizes, steps, cluster), index
