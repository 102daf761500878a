"""Exchanges between hosts, in pieces, bring what torch's own bring in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks.pool import Pool

from shardwise.comm import gloo
from shardwise.config import Layout
from shardwise.mesh import Worker, join

Ranks = Callable[[int], Pool]
SIZES = (1, 15, 16, 17, 100)
"""Numbers in a row: less than a piece, a piece, several and a bit."""


def exchanged(worker: Worker, local_world: int) -> int:
    """Compare them; how many messages one of them took at most."""
    group = join(worker, Layout(data=worker.world)).group("data")
    assert group is not None
    whole, gloo.PIECE = gloo.PIECE, 64
    try:
        return max(compare(replace(worker, local_world=local_world), group, size) for size in SIZES)
    finally:
        gloo.PIECE = whole  # a rank lives on


def compare(here: Worker, group: dist.ProcessGroup, size: int) -> int:
    rows = torch.randn(here.world, size, generator=torch.Generator().manual_seed(here.rank))
    before, arrived, gathered, total = (
        rows.clone(),
        torch.empty_like(rows),
        torch.empty_like(rows),
        torch.empty(size),
    )
    dist.all_to_all_single(arrived, rows, group=group)
    assert torch.equal(gloo.exchange(rows, group, here), arrived)
    gloo.reduce_scatter(total, rows.flatten(), group, here)
    summed = arrived[0].clone()
    for row in arrived[1:]:
        summed += row
    assert torch.equal(total, summed)
    everyone = [torch.empty(size) for _ in range(here.world)]
    dist.all_gather(everyone, rows[0].clone(), group=group)
    gloo.all_gather(gathered.flatten(), rows[0], group, here)
    assert torch.equal(gathered, torch.stack(everyone))
    assert torch.equal(rows, before)
    under_way = gloo.RowExchange(rows, group, here)
    assert torch.equal(under_way.arrived(), arrived)
    return len(under_way.works)


@pytest.mark.parametrize("world", [2, 4])
def test_pieces_bring_what_whole_messages_do(ranks: Ranks, world: int) -> None:
    assert ranks(world).run(exchanged, 1) == [7] * world
    assert ranks(world).run(exchanged, world) == [1] * world, "inside a host nothing is cut"
