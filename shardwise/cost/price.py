"""Flows in seconds: what each collective takes on a cluster, by itself, before anything hides it.

A collective's seconds are linear in its bytes (`collectives.py`): count x alpha + bytes x beta. Alpha and
beta depend on the kind and on the group alone, so they are worked out once for each grid of devices and
looked up. What a codec does around the collectives of a compressed sum (`codec_work.py`) is part of their
seconds: one comes after the other.

Of these seconds some may pass beside computing: on a GPU all. A CPU's cores carry messages themselves where
both ends are on one host, and copy and encode them everywhere, and cannot compute meanwhile; but a network
they wait for, and where the program does not stand still meanwhile (comm/hooks.py) they compute.
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
from shardwise.plan.engine import engine_of
from shardwise.plan.grid import base

LINKS = ("inside", "between")
_BLOCKS: tuple[When, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Busy:
    """Seconds of a step in which rank 0's part of a link carries bytes: no step is shorter, whatever hides
    behind what."""

    blocks: Array
    """Seconds in the passes through blocks, which every pipeline rank has."""
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
    """Busy seconds by link: inside the node, and of the network card."""
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
    of_bytes, message, messages = dict.fromkeys(AXES, none), none, none
    of_links = {link: dict.fromkeys(("blocks", "stages", "rest"), none) for link in LINKS}
    of_seconds, of_beside = dict[tuple[str, When], Array](), dict[tuple[str, When], Array]()
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
            beside = np.where((take(group.nodes, index) > 1) & _goes_on(flow, work, space), wire, beside)
        if flow.when == "pipeline":
            message, messages = seconds / np.maximum(flow.count, 1.0), flow.count
        part = "blocks" if flow.when in _BLOCKS else "stages" if flow.when == "pipeline" else "rest"
        for link, each in busy_links(flow.kind, group, cluster, beta, flow.copies).items():
            if each.any():
                of_links[link][part] = of_links[link][part] + flow.bytes * take(each, index)
        axis = axis_of(flow)
        key = axis, flow.when
        of_bytes[axis] = of_bytes[axis] + flow.bytes
        of_seconds[key] = of_seconds.get(key, none) + seconds
        of_beside[key] = of_beside.get(key, none) + beside
    busy = {link: Busy(**parts) for link, parts in of_links.items()}
    return Priced(of_bytes, message, messages, busy, of_seconds, of_beside)


def _goes_on(flow: Flow, work: Workload, space: Space) -> Bools:
    """Whether a CPU worker computes while this flow of the data axis is under way: FSDP2 waits for gathers
    that are encoded or kept nearby, and where copies are summed after shards for both sums."""
    if flow.kind == "all_gather" and flow.codec_work is None:
        return np.full(len(space), work.gathers is None)
    engine = engine_of(space, work.model.experts)
    goes_on: Bools = (engine.replicated == 1) | ((engine.zero > 0) & (space.replica == 1))
    return goes_on
