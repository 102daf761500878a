"""The seconds of a collective on a cluster: a latency, and a time per byte (the alpha-beta model of Hockney,
1994).

A group of n devices has g members in each of q = n / g nodes. Its ring passes through all of them: inside a
node over the node's links, and between nodes over the network cards of all g members at once. The slower of
the two sets the pace. With S bytes of the full tensor (the ledger's convention) and B the bandwidth of one
device:

| kind                       | bandwidth term                | latency                             |
| -------------------------- | ----------------------------- | ----------------------------------- |
| all_reduce                 | 2 (n-1)/n S/B                 | 2 (g-1) hops inside a node,         |
|                            |                               | 2 min(q-1, log2 q) between nodes    |
| all_gather, reduce_scatter | (n-1)/n S/B                   | q (g-1) hops inside, q-1 between    |
| all_to_all                 | (g-1)/n S/B + (n-g)/n S/B_net | g-1 hops inside, q-1 between; only  |
|                            |                               | what leaves a node uses the network |
| broadcast                  | S/B                           | g-1 hops inside, q-1 between        |
| send                       | S/B                           | one hop                             |

The more nodes a ring passes through, the more of their traffic meets on the switches between them, so every
doubling beyond two nodes adds `CROWDING` of the time. In an all-to-all that sends `copies` of each row to
random members, a program may send one copy to each node and copy it there; then q (1 - (1 - 1/q)^copies)
nodes get a copy.

An all-reduce has the shorter of the latencies of a ring and of a (pipelined double) tree, as NCCL chooses
between them. If a link was measured, latency and bandwidth are interpolated over the logarithm of the number
of members. On a CPU the copies into and out of a message's buffer are counted separately (`copies`): they
keep a core from computing, while waiting for a link does not. Between nodes, a measurement on whole nodes
bounds every group with as many devices: a long ring is slow because it is long, and four short rings beside
each other share the network cards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.config.axes import RANK_AXES
from shardwise.config.layout_rules import borrowed_devices
from shardwise.cost.cluster import Cluster, Link
from shardwise.cost.space import Array, Ints, Space
from shardwise.plans.grid import EXPERT_SHARDS, base, devices

CROWDING = 0.01
"""Share by which a collective between nodes takes longer for every doubling of their number beyond two."""
COPIED = {"all_gather": 4.0, "reduce_scatter": 4.0, "all_to_all": 4.0}
"""Bytes read and written to copy each byte of the full tensor into a message and out of it, from profiles of
the collectives of FSDP2 and of the tensor axis on CPU workers. An all-reduce and a send need no copy."""


@dataclass(frozen=True)
class Group:
    """Devices that communicate with each other."""

    size: Array
    """Number of devices in the group of each candidate."""
    inside: Array
    """Number of them that share a node."""

    @property
    def nodes(self) -> Array:
        """Number of nodes with members of the group."""
        return self.size / self.inside


def group_of(axis: str, space: Space, cluster: Cluster) -> Group:
    """Return the group of an axis, which is named as in the ledger.

    If groups do not divide the nodes evenly, some of them lie across two nodes. The group that is returned is
    one of those.
    """
    size = devices(axis, space)
    places = np.maximum(cluster.devices_per_node // _distance(axis, space), 1)  # for members in one node
    inside = np.where((places >= size) & (places % size == 0), size, np.gcd(places, size))
    return Group(size.astype(float), inside.astype(float))


def _distance(axis: str, space: Space) -> Ints:
    """Return the number of ranks from one device of an axis to the next, for every candidate.

    Ranks are laid out with tensor innermost, then context, data, replica, pipeline. Experts borrow the
    innermost ranks, so devices with the same experts are as far apart as there are expert devices.
    """
    name, _, half = base(axis).split(" x ")[-1].partition(".")
    if name in ("expert", EXPERT_SHARDS):
        return space.expert if name == EXPERT_SHARDS else np.ones_like(space.expert)
    distance = np.ones(len(space), dtype=np.int64)
    for inner in RANK_AXES[RANK_AXES.index(name) + 1 :]:
        distance = distance * getattr(space, inner)
    return distance * borrowed_devices(space)[name] if half == "outer" else distance


def wire_factor(kind: str, members: Array) -> Array:
    """Return the bytes that a device sends in a ring, for each byte of the full tensor; 0 for one member."""
    if kind in ("broadcast", "send"):
        return np.minimum(members - 1, 1.0)
    return (2 if kind == "all_reduce" else 1) * (members - 1) / members


def on_links(kind: str, group: Group, copies: int = 1) -> dict[str, Array]:
    """Return the bytes that a device sends for each byte of the full tensor, by link.

    The links are those of its node ("inside") and its network card ("between"). A ring over several nodes
    leaves each node through the cards of all its members there. For a send, the result is that of the
    busiest device, whose neighbour is in another node. In an all-to-all, each node gets at most one of the
    `copies` of a row, and copies it for its other devices.
    """
    n, g, q = group.size, group.inside, group.nodes
    if kind == "all_to_all":
        visited = q * (1 - (1 - 1 / q) ** copies) / copies  # nodes per copy; 1 for a single copy
        return {"inside": (g - 1) / (g if copies > 1 else n), "between": (n - g) / n * visited}
    if kind == "send":
        return {"inside": np.where((n > 1) & (q == 1), 1.0, 0.0), "between": np.where(q > 1, 1.0, 0.0)}
    sent = wire_factor(kind, n)
    return {"inside": sent * (g - 1) / g, "between": np.where(q > 1, sent / g, 0.0)}


def busy_links(kind: str, group: Group, cluster: Cluster, beta: Array, copies: int = 1) -> dict[str, Array]:
    """Return the seconds that each byte of the full tensor keeps each link busy.

    That is at most `beta`, the seconds of the collective itself: a measured collective may be quicker than
    the link's own figure says.
    """
    sent = on_links(kind, group, copies)
    return {link: np.minimum(share / getattr(cluster, link).bandwidth, beta) for link, share in sent.items()}


def rates(kind: str, group: Group, cluster: Cluster, copies: int = 1) -> tuple[Array, Array]:
    """Return the seconds of a call (alpha) and of each byte of its full tensor (beta); 0 for one member."""
    n, g, q = group.size, group.inside, group.nodes
    inside = np.where(g > 1, _bandwidth(kind, g, cluster.inside), np.inf)
    between = cluster.between.bandwidth / (1 + CROWDING * np.log2(np.maximum(q / 2, 1)))
    if kind == "all_to_all":
        sent = on_links(kind, group, copies)
        per_byte = sent["inside"] / inside + sent["between"] / between
    elif kind == "send":
        per_byte = 1 / np.where(q > 1, between, _bandwidth(kind, g, cluster.inside))
    else:
        whole = cluster.devices_per_node * _bandwidth(kind, n / cluster.devices_per_node, cluster.between)
        ring = np.minimum(g * between, whole) if cluster.between.measured else g * between
        per_byte = wire_factor(kind, n) / np.where(q > 1, np.minimum(inside, ring), inside)
    return np.where(n > 1, _latency(kind, group, cluster), 0.0), np.where(n > 1, per_byte, 0.0)


def copies(kind: str, group: Group, cluster: Cluster) -> Array:
    """Return the seconds in which a CPU worker copies each byte of the full tensor; 0 on a GPU."""
    if cluster.device_type == "cuda":
        return np.zeros_like(group.size)
    per_worker = cluster.device.bandwidth * cluster.device.stream / cluster.devices_per_node
    per_byte = COPIED.get(kind, 0.0) / per_worker
    return np.where(group.size > 1, per_byte, 0.0)


def _bandwidth(kind: str, members: Array, link: Link) -> Array:
    return _measured(kind, "bandwidth", members, link, np.full_like(members, link.bandwidth))


def _latency(kind: str, group: Group, cluster: Cluster) -> Array:
    """Return the latency of one call: the sum of its hops inside a node and of those between nodes."""
    g, q = group.inside, group.nodes
    inside, between = cluster.inside.latency, cluster.between.latency
    ring_inside, ring_between = (g - 1) * inside, (q - 1) * between
    if kind == "send":
        near = _measured(kind, "latency", g, cluster.inside, np.full_like(g, inside))
        return np.where(q > 1, _measured(kind, "latency", q, cluster.between, np.full_like(q, between)), near)
    if kind == "all_reduce":
        near = 2 * ring_inside
        far = np.minimum(2 * ring_between + 2 * ring_inside * (q - 1), 2 * np.log2(q) * between)
    else:
        near, far = ring_inside, ring_between
        if kind in ("all_gather", "reduce_scatter"):
            far = far + ring_inside * (q - 1)
    near = np.where(g > 1, _measured(kind, "latency", g, cluster.inside, near), 0.0)
    return near + np.where(q > 1, _measured(kind, "latency", q, cluster.between, far), 0.0)


def _measured(kind: str, figure: str, members: Array, link: Link, default: Array) -> Array:
    """Return a measured figure of a link for these numbers of members; the default if none was measured."""
    rows = sorted((row.members, getattr(row, figure)) for row in link.measured if row.kind == kind)
    if not rows:
        return default
    known, values = zip(*rows, strict=True)
    return np.exp(np.interp(np.log(members), np.log(known), np.log(np.maximum(values, 1e-12))))
