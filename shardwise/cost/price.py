"""Flows in seconds: what each collective takes on a cluster, by itself, before anything hides it.

A collective's seconds are linear in its bytes (`collectives.py`): count x alpha + bytes x beta. Alpha and beta depend on the kind
and on the group alone, of which a million candidates have a few dozen, so they are worked out for each of those and looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, group_of, rates
from shardwise.cost.flow import EACH_MICRO_BATCH, Flow, When
from shardwise.cost.space import Array, Ints, Space

AXES = ("tensor", "context", "expert", "data", "replica", "pipeline")
"""Whose time a prediction tells apart."""
Key = tuple[str, When]
"""An axis, and what a flow runs beside."""


@dataclass(frozen=True)
class Priced:
    """The seconds of a step's flows, and their bytes, by axis (as `axis_of` groups them) and by what they run beside."""

    times: dict[Key, Array]
    volumes: dict[Key, Array]
    message: Array
    """Seconds of one message between pipeline stages."""

    def seconds(self, axis: str, when: When) -> Array:
        """Of all flows of this axis and time, in a step."""
        return self.times.get((axis, when), np.zeros_like(self.message))

    def inside_blocks(self, axis: str) -> Array:
        """Of its flows in the forward and backward passes of blocks, in a step."""
        return self.seconds(axis, "forward") + self.seconds(axis, "backward")

    @property
    def bytes(self) -> dict[str, Array]:
        """By axis: every flow is in one."""
        sums = dict.fromkeys(AXES, np.zeros_like(self.message))
        for (axis, _), volume in self.volumes.items():
            sums[axis] = sums[axis] + volume
        return sums

    def of_candidates(self, space: Space, index: Ints) -> Priced:
        """Prices of layouts as those of the candidates; index[i] is the layout of candidate i."""

        def whole_step(values: dict[Key, Array]) -> dict[Key, Array]:
            each = space.accumulation.astype(float)
            return {key: value[index] * each if key[1] in EACH_MICRO_BATCH else value[index] for key, value in values.items()}

        return Priced(whole_step(self.times), whole_step(self.volumes), self.message[index])

    def __add__(self, other: Priced) -> Priced:
        return Priced(_sum(self.times, other.times), _sum(self.volumes, other.volumes), self.message + other.message)


def _sum(some: dict[Key, Array], more: dict[Key, Array]) -> dict[Key, Array]:
    return {**some, **{key: some[key] + value if key in some else value for key, value in more.items()}}


def axis_of(flow: Flow) -> str:
    """The axis that a flow's time belongs to. Devices that hold the same weights are the data axis', whatever other axes they lie
    on; what only the replicas sum is their own."""
    first = flow.axis.partition(" x ")[0].partition(".")[0]
    return "data" if first == "expert_data" or (first == "replica" and flow.axis != "replica") else first


def price(sent: Sequence[Flow], space: Space, cluster: Cluster) -> Priced:
    """All flows of these candidates in seconds."""
    grids, index = space.grids
    groups: dict[str, Group] = {}
    times, volumes = dict[Key, Array](), dict[Key, Array]()
    message = np.zeros(len(space))
    for flow in sent:
        if flow.axis not in groups:
            groups[flow.axis] = group_of(flow.axis, grids, cluster)
        alpha, beta = rates(flow.kind, groups[flow.axis], cluster)  # (grids,) each
        seconds = flow.count * alpha[index] + flow.bytes * beta[index]
        if flow.when == "pipeline":
            message = seconds / np.maximum(flow.count, 1.0)
        key = axis_of(flow), flow.when
        times, volumes = _sum(times, {key: seconds}), _sum(volumes, {key: flow.bytes})
    return Priced(times, volumes, message)
