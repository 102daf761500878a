"""The seconds of flows on a cluster, before anything hides them.

The seconds of a collective are linear in its bytes (`collectives.py`): count x alpha + bytes x beta. Alpha
and beta depend only on the kind and on the group, so they are computed once for each grid of devices and
looked up. The work of the codec of a compressed sum (`codec_work.py`) is added: it cannot overlap with its
own collective.

Part of these seconds may pass beside computing. On a GPU this is all of them. On a CPU the cores themselves
encode and copy messages, and carry those inside a host, and cannot compute meanwhile. While they wait for a
network between hosts they can compute, unless the program waits too (comm/hooks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.config.axes import AXES
from shardwise.cost import codec_work
from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, busy_links, copies, group_of, rates
from shardwise.cost.flow import Flow, When
from shardwise.cost.space import Array, Bools, Space, Workload, take
from shardwise.plans.engine import engine_of
from shardwise.plans.grid import base

LINKS = ("inside", "between")
_BLOCKS: tuple[When, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Busy:
    """Seconds of a step in which rank 0's part of a link carries bytes. No step is shorter than that."""

    blocks: Array
    """Seconds in passes through blocks, which every pipeline rank has."""
    stages: Array
    """Seconds of messages between stages."""
    rest: Array

    @property
    def total(self) -> Array:
        """Seconds of all bytes on the link."""
        return self.blocks + self.stages + self.rest


@dataclass(frozen=True)
class Priced:
    """The seconds of a step's flows, and their bytes."""

    bytes: dict[str, Array]
    """Bytes by axis, as `axis_of` groups the flows."""
    message: Array
    """Seconds of one message between pipeline stages."""
    messages: Array
    """Number of messages between stages that rank 0 sends in a step."""
    busy: dict[str, Busy]
    """Busy seconds by link, "inside" the node and "between" nodes."""
    _seconds: dict[tuple[str, When], Array]
    _beside: dict[tuple[str, When], Array]

    def seconds(self, axis: str, when: When) -> Array:
        """Return the seconds of all flows of this axis and time in a step."""
        return self._seconds.get((axis, when), np.zeros_like(self.message))

    def beside(self, axis: str, when: When) -> Array:
        """Return the part of these seconds in which the device can compute."""
        return self._beside.get((axis, when), np.zeros_like(self.message))

    def inside_blocks(self, axis: str) -> Array:
        """Return the seconds of an axis in the forward and backward passes of blocks, in a step."""
        return self.seconds(axis, "forward") + self.seconds(axis, "backward")


def axis_of(flow: Flow) -> str:
    """Return the axis whose term a flow is part of.

    Flows between devices with the same weights belong to the data axis, except sums over replicas alone.
    """
    first = base(flow.axis).partition(" x ")[0].partition(".")[0]
    return "data" if first == "expert_data" or (first == "replica" and flow.axis != "replica") else first


def is_of_weights(flow: Flow) -> bool:
    """Return whether a flow gathers weights or sums gradients over devices with the same weights."""
    return axis_of(flow) in ("data", "replica") and flow.when != "step"


def price(sent: Sequence[Flow], work: Workload, space: Space, cluster: Cluster) -> Priced:
    """Return the seconds of all flows of these candidates."""
    grids, index = space.grids
    groups: dict[str, Group] = {}
    none = np.zeros(len(space))
    bytes_by_axis, message, messages = dict.fromkeys(AXES, none), none, none
    busy_by_link = {link: dict.fromkeys(("blocks", "stages", "rest"), none) for link in LINKS}
    all_seconds, all_beside = dict[tuple[str, When], Array](), dict[tuple[str, When], Array]()
    for flow in sent:
        if flow.axis not in groups:
            groups[flow.axis] = group_of(flow.axis, grids, cluster)
        group = groups[flow.axis]
        alpha, beta = rates(flow.kind, group, cluster, flow.copies)  # (grids,) each
        wire = flow.count * take(alpha, index) + flow.bytes * take(beta, index)
        seconds = wire + flow.bytes * take(copies(flow.kind, group, cluster), index)
        if flow.codec_work is not None:
            seconds = seconds + codec_work.seconds(flow.codec_work, space, cluster)
        beside = cluster.device.overlap * seconds
        if cluster.device_type == "cpu":
            computes = (take(group.nodes, index) > 1) & _computes_beside(flow, work, space)
            beside = np.where(computes, wire, beside)
        if flow.when == "pipeline":
            message, messages = seconds / np.maximum(flow.count, 1.0), flow.count
        part = "blocks" if flow.when in _BLOCKS else "stages" if flow.when == "pipeline" else "rest"
        for link, per_byte in busy_links(flow.kind, group, cluster, beta, flow.copies).items():
            if per_byte.any():
                busy_by_link[link][part] = busy_by_link[link][part] + flow.bytes * take(per_byte, index)
        axis = axis_of(flow)
        key = axis, flow.when
        bytes_by_axis[axis] = bytes_by_axis[axis] + flow.bytes
        all_seconds[key] = all_seconds.get(key, none) + seconds
        all_beside[key] = all_beside.get(key, none) + beside
    busy = {link: Busy(**parts) for link, parts in busy_by_link.items()}
    return Priced(bytes_by_axis, message, messages, busy, all_seconds, all_beside)


def _computes_beside(flow: Flow, work: Workload, space: Space) -> Bools:
    """Return whether a CPU worker computes while this flow of the data axis runs.

    FSDP2 waits for gathers that are encoded or kept nearby. With replicas it waits for both sums.
    """
    if flow.kind == "all_gather" and flow.codec_work is None:
        return np.full(len(space), work.gathers is None)
    engine = engine_of(space, work.model.experts)
    computes: Bools = (engine.replicated == 1) | ((engine.zero > 0) & (space.replica == 1))
    return computes
