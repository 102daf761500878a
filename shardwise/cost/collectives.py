"""What a collective costs on a cluster: latency and bandwidth of its group's place (the alpha-beta model of
Hockney, 1994).

A group of n devices has g members in each node it touches, on q = n / g nodes. Its ring passes through all of
them; inside a node it runs at the node's links, and between nodes over the network cards of all its g members
at once, so the slower of the two sets the pace. With S bytes of the full tensor (the ledger's convention) and
B the bandwidth of one device:

| kind                       | bandwidth term                | latency                             |
| -------------------------- | ----------------------------- | ----------------------------------- |
| all_reduce                 | 2 (n-1)/n S/B                 | 2 (g-1) hops inside a node,         |
|                            |                               | 2 min(q-1, log2 q) between nodes    |
| all_gather, reduce_scatter | (n-1)/n S/B                   | q (g-1) hops inside, q-1 between    |
| all_to_all                 | (g-1)/n S/B + (n-g)/n S/B_net | g-1 hops inside, q-1 between; only  |
|                            |                               | what leaves a node uses the network |
| broadcast                  | S/B                           | g-1 hops inside, q-1 between        |
| send                       | S/B                           | one hop                             |

A ring is as quick as its slowest link, and the more nodes it passes through, the more of their traffic meets
on the switches between them: for every doubling beyond two nodes, `CROWDING` of the time is added. Where rows
are copied (`copies` of each, to random members), one may go to a node and be copied there: then q (1 - (1 -
1/q)^copies) nodes get one.

An all-reduce has the shorter latency of ring and (pipelined double) tree, as NCCL chooses between them. Where
a link was measured, latency and bandwidth come from the nearest measured numbers of members, interpolated
over the logarithm of that number. On a CPU the copies into and out of a message's buffer go through the same
memory as everything else, and are counted beside (`copies`): they take a core from computing, which waiting
for a link does not. Between nodes, what was measured on whole nodes bounds every group with as many devices:
a long ring is slow because it is long, and four short rings beside each other share the network cards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.config.axes import RANK_AXES
from shardwise.config.layout_rules import borrowed_devices
from shardwise.cost.cluster import Cluster, Link
from shardwise.cost.space import Array, Ints, Space
from shardwise.plan.grid import EXPERT_SHARDS, base, devices

CROWDING = 0.01
"""Share by which a collective between nodes takes longer for every doubling of their number beyond two."""
COPIED = {"all_gather": 4.0, "reduce_scatter": 4.0, "all_to_all": 4.0}
"""Bytes read and written for each byte of the full tensor to bring it into a message's order and out of it
again (profiles of FSDP2's and the tensor axis' collectives on CPU workers); an all-reduce and a send are done
where the tensor lies."""


@dataclass(frozen=True)
class Group:
    """Devices that talk to each other: how many, and how many of them share a node."""

    size: Array
    inside: Array

    @property
    def nodes(self) -> Array:
        """Nodes that a group touches."""
        return self.size / self.inside


def group_of(axis: str, space: Space, cluster: Cluster) -> Group:
    """The group of an axis, named as in the ledger. Where groups do not divide the nodes evenly some lie
    across two, and the cost is theirs.
    """
    size = devices(axis, space)
    room = np.maximum(
        cluster.devices_per_node // _distance(axis, space), 1
    )  # members that one node has a place for
    inside = np.where((room >= size) & (room % size == 0), size, np.gcd(room, size))
    return Group(size.astype(float), inside.astype(float))


def _distance(axis: str, space: Space) -> Ints:
    """Ranks from one device of an axis to the next, for every candidate. Ranks are laid out with tensor
    innermost, then context, data, replica, pipeline. Experts borrow the innermost ranks, and those who hold
    the same experts are as far apart as there are expert devices.
    """
    name, _, half = base(axis).split(" x ")[-1].partition(".")
    if name in ("expert", EXPERT_SHARDS):
        return space.expert if name == EXPERT_SHARDS else np.ones_like(space.expert)
    apart = np.ones(len(space), dtype=np.int64)
    for inner in RANK_AXES[RANK_AXES.index(name) + 1 :]:
        apart = apart * getattr(space, inner)
    return apart * borrowed_devices(space)[name] if half == "outer" else apart


def wire_factor(kind: str, members: Array) -> Array:
    """How often a ring puts the full tensor on each device's wire; a send and a broadcast once, nothing goes
    to nobody."""
    if kind in ("broadcast", "send"):
        return np.minimum(members - 1, 1.0)
    return (2 if kind == "all_reduce" else 1) * (members - 1) / members


def on_links(kind: str, group: Group, copies: int = 1) -> dict[str, Array]:
    """Bytes that a device puts on its node's links ("inside") and on its network card ("between"), for each
    byte of the full tensor. A ring over several nodes leaves each through the cards of all its members there;
    of neighbours that only send, the busiest has the other in another node. Of `copies` of a row that go to
    as many devices of an all-to-all, one goes to each node that they are in, and is dealt out there.
    """
    n, g, q = group.size, group.inside, group.nodes
    if kind == "all_to_all":
        visited = q * (1 - (1 - 1 / q) ** copies) / copies  # nodes for each copy; 1 where none is made there
        return {"inside": (g - 1) / (g if copies > 1 else n), "between": (n - g) / n * visited}
    if kind == "send":
        return {"inside": np.where((n > 1) & (q == 1), 1.0, 0.0), "between": np.where(q > 1, 1.0, 0.0)}
    sent = wire_factor(kind, n)
    return {"inside": sent * (g - 1) / g, "between": np.where(q > 1, sent / g, 0.0)}


def busy_links(kind: str, group: Group, cluster: Cluster, beta: Array, copies: int = 1) -> dict[str, Array]:
    """Seconds that each byte of the full tensor keeps these links busy: never more than the collective takes
    for it (beta), where one was measured to be quicker than its link's own figure."""
    sent = on_links(kind, group, copies)
    return {link: np.minimum(each / getattr(cluster, link).bandwidth, beta) for link, each in sent.items()}


def rates(kind: str, group: Group, cluster: Cluster, copies: int = 1) -> tuple[Array, Array]:
    """Seconds of a call (alpha) and of each byte of its full tensor (beta); none where the group has one
    member."""
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
    several = n > 1
    return np.where(several, _latency(kind, group, cluster), 0.0), np.where(several, per_byte, 0.0)


def copies(kind: str, group: Group, cluster: Cluster) -> Array:
    """Seconds of each byte of the full tensor that the device itself is busy with."""
    if cluster.device.overlap:
        return np.zeros_like(group.size)
    sharing = cluster.devices_per_node if cluster.shared else 1
    per_byte = COPIED.get(kind, 0.0) * sharing / (cluster.device.bandwidth * cluster.device.stream)
    return np.where(group.size > 1, per_byte, 0.0)


def _bandwidth(kind: str, members: Array, link: Link) -> Array:
    return _measured(kind, "bandwidth", members, link, np.full_like(members, link.bandwidth))


def _latency(kind: str, group: Group, cluster: Cluster) -> Array:
    """Return the latency of one call: of the hops inside a node, and of those between nodes."""
    g, q = group.inside, group.nodes
    inside, between = cluster.inside.latency, cluster.between.latency
    ring_inside, ring_between = (g - 1) * inside, (q - 1) * between
    if kind == "send":
        near = _measured(kind, "latency", g, cluster.inside, np.full_like(g, inside))
        return np.where(q > 1, _measured(kind, "latency", q, cluster.between, np.full_like(q, between)), near)
    if kind == "all_reduce":
        tree = 2 * ring_inside + 2 * np.log2(q) * between
        own, far = (
            2 * ring_inside,
            np.minimum(2 * ring_between + 2 * ring_inside * (q - 1), tree - 2 * ring_inside),
        )
    else:
        own, far = (
            ring_inside,
            ring_between + (ring_inside * (q - 1) if kind in ("all_gather", "reduce_scatter") else 0.0),
        )
    own = np.where(g > 1, _measured(kind, "latency", g, cluster.inside, own), 0.0)
    return own + np.where(q > 1, _measured(kind, "latency", q, cluster.between, far), 0.0)


def _measured(kind: str, figure: str, members: Array, link: Link, otherwise: Array) -> Array:
    rows = sorted((row.members, getattr(row, figure)) for row in link.measured if row.kind == kind)
    if not rows:
        return otherwise
    known, values = zip(*rows, strict=True)
    return np.exp(np.interp(np.log(members), np.log(known), np.log(np.maximum(values, 1e-12))))
