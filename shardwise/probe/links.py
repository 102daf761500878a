"""Measuring collectives: each kind over each size of group, inside a node and between nodes.

Groups are made of neighbours, as the mesh makes them, and all groups of a size talk at the same moment, as
they do in training: two pairs on one machine share what one pair would have alone. Between nodes a group has
one device of each node, and the others of the nodes have groups of their own, so each device is left with its
share of the network.

Bytes are those of the full tensor (observe/ledger.py). A broadcast takes turns in who sends it, since
otherwise the sender could run ahead; a send goes to the next in the group while one comes from the one
before, as in a pipeline or a ring.
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
from shardwise.probe.budget import Budget
from shardwise.probe.fit import fit_collective
from shardwise.probe.progress import ProbeProgress

UNKNOWN = Link(bandwidth=25e9, latency=10e-6)
"""Stands for the links of a single device, over which nothing goes."""
LONG_CALL = 0.25
"""Seconds: after a call this long no larger one is tried, once there are enough to draw a line through."""
ENOUGH = 4
ITEM = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Grouping:
    """All ranks in groups of one size, which talk at the same time."""

    members: int
    groups: tuple[tuple[int, ...], ...]


def inside(world: int, per_node: int, every: bool = True) -> list[Grouping]:
    """Groups of neighbours in a node, for every size that divides it, or for the whole node only."""
    return [
        Grouping(members, tuple(tuple(range(first, first + members)) for first in range(0, world, members)))
        for members in _sizes(per_node, every)
    ]


def between(world: int, per_node: int, every: bool = True) -> list[Grouping]:
    """Groups with one device of each of so many neighbouring nodes."""
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


def cells(budget: Budget, worker: Worker) -> int:
    """How many things are timed, at most."""
    groupings = inside(worker.world, worker.local_world, budget.every_group)
    groupings += between(worker.world, worker.local_world, budget.every_group)
    return len(groupings) * len(KINDS) * len(budget.sizes)


def measure_links(bench: Bench, worker: Worker, budget: Budget, progress: ProbeProgress) -> tuple[Link, Link]:
    """The links inside a node, and those between nodes."""
    near = _measure(
        bench, worker, inside(worker.world, worker.local_world, budget.every_group), budget, progress
    )
    far = _measure(
        bench, worker, between(worker.world, worker.local_world, budget.every_group), budget, progress
    )
    node = _link(near) or UNKNOWN
    return node, _link(far) or Link(node.bandwidth, node.latency)


def _link(rows: Sequence[Measured]) -> Link | None:
    """A link's own figures are those of the widest all-reduce, which a ring runs in 2 (n - 1) hops."""
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
        # Every rank takes part in making every group.
        process_groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in grouping.groups]
        own = process_groups[
            next(index for index, ranks in enumerate(grouping.groups) if worker.rank in ranks)
        ]
        for kind in KINDS:
            sizes, times = _times(bench, worker, kind, own, grouping.members, budget.sizes, progress)
            fitted = fit_collective(kind, grouping.members, sizes, times)
            rows.append(Measured(kind, grouping.members, fitted.latency, fitted.bandwidth))
        dist.destroy_process_group(own)
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
        if times and times[-1] > LONG_CALL and len(times) >= ENOUGH:
            continue
        part = max(1, bytes // (ITEM * members))  # elements of each member
        times.append(bench.seconds(_collective(kind, part, group, bench.device, worker)))
        sizes.append(part * members * ITEM)
    return sizes, times


def _collective(
    kind: str, part: int, group: dist.ProcessGroup, device: torch.device, worker: Worker
) -> Callable[[], object]:
    """One call of this kind on a full tensor of `part` elements for each member."""
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
