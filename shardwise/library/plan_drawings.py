"""The data for pictures of the best layout: its timeline, the places of its ranks on the cluster, and the
traffic on each kind of link."""

from __future__ import annotations

from shardwise.config import AXES, RANK_AXES
from shardwise.config.schedules import SCHEDULES
from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import group_of
from shardwise.cost.space import Space
from shardwise.cost.traffic import flows
from shardwise.files import Json
from shardwise.plans.grid import COPIES, SHARDS, devices
from shardwise.plans.schedule import make_schedule
from shardwise.plans.timeline import Span, simulate
from shardwise.search.search import SearchResult

MAPPED = 4096
"""Largest number of ranks whose node is given; on a larger cluster the pattern repeats."""
DRAWN = 24
"""Number of micro-batches in a drawn timeline, or three per pipeline rank if that is more. Further
micro-batches in the middle would look the same."""


def drawings(result: SearchResult) -> Json:
    """Return all drawings as plain data, for a search that found a layout."""
    best = int(result.order[0])
    winner = result.space.take([best])
    return {
        "links": _links(result, winner),
        "timeline": _timeline(result, best),
        "map": _map(winner, result.cluster),
    }


def _links(result: SearchResult, winner: Space) -> list[Json]:
    """Return the bytes of one step by axis, and whether they stay inside a node."""
    sums: dict[tuple[str, str], int] = {}
    for flow in flows(result.work, winner, device=result.cluster.device_type):
        if flow.axis not in (SHARDS, COPIES, *AXES) or devices(flow.axis, winner)[0] <= 1:
            continue
        where = "between" if group_of(flow.axis, winner, result.cluster).nodes[0] > 1 else "inside"
        sums[where, flow.axis] = sums.get((where, flow.axis), 0) + int(flow.bytes[0])
    return [{"from": where, "axis": axis, "bytes": size} for (where, axis), size in sums.items() if size]


def _timeline(result: SearchResult, best: int) -> Json | None:
    """Return when each action of the pipeline runs, for the first micro-batches; None without a pipeline."""
    row = result.space.row(best)
    if row["pipeline"] == 1:
        return None
    micro_batches = min(row["accumulation"], max(DRAWN, 3 * row["pipeline"]))
    schedule = make_schedule(
        SCHEDULES[row["schedule"]], row["pipeline"], micro_batches, row["stages_per_rank"]
    )
    third = float(result.prediction(best).block_seconds[0]) * result.work.model.layers / schedule.stages / 3
    played = simulate(schedule, third, third, third)
    return {
        "rank_rows": [[_span(span) for span in spans] for spans in played.spans],
        "makespan": played.makespan,
        "micro_batches": micro_batches,
        "of": row["accumulation"],
    }


def _span(span: Span) -> Json:
    action = span.action
    return {
        "stage": action.stage,
        "kind": action.kind,
        "micro_batch": action.micro_batch,
        "start": span.start,
        "end": span.end,
    }


def _map(winner: Space, cluster: Cluster) -> list[dict[str, int]]:
    """Return the node of each rank, and its coordinate on every axis: tensor is innermost, pipeline
    outermost."""
    world = int(winner.world[0])
    sizes = {axis: int(getattr(winner, axis)[0]) for axis in reversed(RANK_AXES)}
    ranks = []
    for rank in range(min(world, MAPPED)):
        remainder, coordinates = rank, {}
        for axis, size in sizes.items():
            coordinates[axis], remainder = remainder % size, remainder // size
        ranks.append({"rank": rank, "node": rank // cluster.devices_per_node, **coordinates})
    return ranks
