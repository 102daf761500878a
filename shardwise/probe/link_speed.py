"""Measure collectives: each kind over each size of group, inside a node and between nodes.

Groups consist of neighbours, as on the mesh, and all groups of a size communicate at the same moment, as in
training: two pairs on one machine share what one pair would have alone. Between nodes, a group has one device
of each node, and the other devices of the nodes form groups of their own. Each device therefore gets only its
share of the network.

Bytes are those of the full tensor (observe/ledger.py). The root of a broadcast changes with every call,
because a fixed root could run ahead of the others. A send goes to the next rank of the group while a receive
comes from the previous one, as in a pipeline or a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from shardwise.comm.gloo import all_gather, exchange, reduce_scatter
from shardwise.cost.cluster import KINDS, Link, Measured
from shardwise.mesh import Worker
from shardwise.probe.bench import TIMEOUT, Bench
from shardwise.probe.fit import fit_collective
from shardwise.probe.probe_budget import Budget
from shardwise.probe.probe_progress import ProbeProgress

UNUSED_LINK = Link(bandwidth=25e9, latency=10e-6)
"""Link of a single device, which is never used."""
LONG_CALL = 0.25
"""Seconds of a call after which no larger size is measured, once there are enough sizes for a fit."""
MIN_SIZES = 4
"""Number of sizes that are enough for a fit."""
FLOAT32_BYTES = 4
"""Number of bytes of a float32."""


@dataclass(frozen=True)
class Grouping:
    """All ranks, split into groups of one size that communicate at the same time."""

    members: int
    groups: tuple[tuple[int, ...], ...]


def groups_inside_nodes(world: int, per_node: int, every: bool = True) -> list[Grouping]:
    """Return groups of neighbours in a node, for every size that divides the node, or for the whole node
    only.
    """
    return [
        Grouping(members, tuple(tuple(range(first, first + members)) for first in range(0, world, members)))
        for members in _sizes(per_node, every)
    ]


def groups_between_nodes(world: int, per_node: int, every: bool = True) -> list[Grouping]:
    """Return groups with one device of each of several neighbouring nodes, for every number of nodes or for
    all.
    """
    return [
        Grouping(
            members,
            tuple(
                tuple(range(node * per_node + local_rank, (node + members) * per_node + local_rank, per_node))
                for node in range(0, world // per_node, members)
                for local_rank in range(per_node)
            ),
        )
        for members in _sizes(world // per_node, every)
    ]


def _sizes(most: int, every: bool) -> list[int]:
    return [size for size in range(2, most + 1) if most % size == 0 and (every or size == most)]


def measurement_count(budget: Budget, worker: Worker) -> int:
    """Return the maximum number of things that `measure_links` times."""
    groupings = groups_inside_nodes(worker.world, worker.local_world, budget.every_group)
    groupings += groups_between_nodes(worker.world, worker.local_world, budget.every_group)
    return len(groupings) * len(KINDS) * len(budget.sizes)


def measure_links(bench: Bench, worker: Worker, budget: Budget, progress: ProbeProgress) -> tuple[Link, Link]:
    """Measure the links inside a node and those between nodes."""
    inside = groups_inside_nodes(worker.world, worker.local_world, budget.every_group)
    near = _measure(bench, worker, inside, budget, progress)
    between = groups_between_nodes(worker.world, worker.local_world, budget.every_group)
    far = _measure(bench, worker, between, budget, progress)
    node = _link(near) or UNUSED_LINK
    return node, _link(far) or Link(node.bandwidth, node.latency)


def _link(rows: Sequence[Measured]) -> Link | None:
    """Return a link with the numbers of the largest all-reduce, which a ring runs in 2 (n - 1) hops."""
    sums = [row for row in rows if row.kind == "all_reduce"]
    if not sums:
        return None
    widest = max(sums, key=lambda row: row.members)
    return Link(widest.bandwidth, widest.latency / (2 * (widest.members - 1)), tuple(rows))


def _measure(
    bench: Bench, worker: Worker, groupings: list[Grouping], budget: Budget, progress: ProbeProgress
) -> list[Measured]:
    rows = []
    for grouping in groupings:
        # Every rank must take part in creating every group.
        process_groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in grouping.groups]
        index = next(index for index, ranks in enumerate(grouping.groups) if worker.rank in ranks)
        group = process_groups[index]
        for kind in KINDS:
            sizes, times = _times(bench, worker, kind, group, grouping.members, budget.sizes, progress)
            fitted = fit_collective(kind, grouping.members, sizes, times)
            rows.append(Measured(kind, grouping.members, fitted.latency, fitted.bandwidth))
        dist.destroy_process_group(group)
    return rows


def _times(
    bench: Bench,
    worker: Worker,
    kind: str,
    group: dist.ProcessGroup,
    members: int,
    full_sizes: Sequence[int],
    progress: ProbeProgress,
) -> tuple[list[int], list[float]]:
    sizes: list[int] = []
    times: list[float] = []
    for bytes in full_sizes:
        progress.next(f"{kind} over {members}")
        if times and times[-1] > LONG_CALL and len(times) >= MIN_SIZES:
            continue
        part = max(1, bytes // (FLOAT32_BYTES * members))  # number of elements of each member
        times.append(bench.seconds(_collective(kind, part, group, bench.device, worker)))
        sizes.append(part * members * FLOAT32_BYTES)
    return sizes, times


def _collective(
    kind: str, part: int, group: dist.ProcessGroup, device: torch.device, worker: Worker
) -> Callable[[], object]:
    """Return a function that runs one collective on a full tensor with `part` elements for each member."""
    members, rank = group.size(), group.rank()
    full, result = torch.zeros(members * part, device=device), torch.zeros(members * part, device=device)
    piece = torch.zeros(part, device=device)
    turns: Iterator[int] = count()

    def shift() -> None:
        sent = dist.P2POp(dist.isend, full, group=group, group_peer=(rank + 1) % members)
        received = dist.P2POp(dist.irecv, result, group=group, group_peer=(rank - 1) % members)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: all_gather(result, piece, group, worker),
        "reduce_scatter": lambda: reduce_scatter(piece, full, group, worker),
        "all_to_all": lambda: exchange(full.view(members, -1), group, worker),
        "broadcast": lambda: dist.broadcast(full, group=group, group_src=next(turns) % members),
        "send": shift,
    }
    return calls[kind]
