"""NCCL between workers that share a GPU: what every collective brings, that a missing wait shows, and that a
worker leaves a collective whose peer is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.pool import Pool
from torch import Tensor

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.mesh import Worker, abandon, leave, nccl, peer_is_gone
from shardwise.mesh.mesh import _prepare_nccl, _rendezvous
from shardwise.proof.delays import DelayedCollectives

Ranks = Callable[[int], Pool]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SECONDS = 60.0
"""For a case."""


@pytest.fixture(autouse=True)
def nothing_interrupted() -> Any:
    yield
    nccl.forget_interruption()


def meet(worker: Worker) -> None:
    """Make NCCL's the default group of this process, on a GPU that all ranks share."""
    torch.cuda.set_device(0)
    _prepare_nccl(worker)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "nccl", rank=worker.rank, world_size=worker.world, timeout=timeout, **_rendezvous(worker)
    )


def same(actual: Tensor, expected: Any) -> None:
    """To the bit."""
    wanted = torch.as_tensor(expected).to(actual.dtype)
    assert actual.cpu().tolist() == wanted.tolist(), f"{actual.tolist()} is not {wanted.tolist()}"


def every_collective(worker: Worker) -> None:
    """Each against what it must bring, which is written down here from its definition."""
    meet(worker)
    rank, world = worker.rank, worker.world
    everybody = range(world)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        total = torch.tensor([[rank + 1, 2], [3, rank]], dtype=dtype, device="cuda")
        dist.all_reduce(total)
        same(total, [[sum(everybody) + world, 2 * world], [3 * world, sum(everybody)]])
    gathered = torch.empty(3 * world, device="cuda")
    all_gather_single(gathered, torch.tensor([rank % 2, 1.0, 0.0], device="cuda"))
    same(gathered, [number for other in everybody for number in (other % 2, 1, 0)])
    rows = torch.tensor([[100.0 * rank + other, 1.0] for other in everybody], device="cuda")
    part = torch.empty(2, device="cuda")
    reduce_scatter_single(part, rows.flatten())
    same(part, [sum(100.0 * other + rank for other in everybody), world])
    sent = [(rank + other) % 3 for other in everybody]  # some get nothing
    uneven = torch.full((sum(sent), 2), float(rank), device="cuda")
    received = torch.empty(sum(sent), 2, device="cuda")
    dist.all_to_all_single(received, uneven, sent, sent)
    same(received, [[float(other)] * 2 for other in everybody for _ in range((rank + other) % 3)])
    after, before = (rank + 1) % world, (rank - 1) % world
    for turn in range(2):
        leaving = [torch.full((5,), 10.0 * turn + rank + part, device="cuda") for part in (0.0, 0.5)]
        arriving = [torch.zeros(5, device="cuda") for _ in leaving]
        operations = []
        for out, into in zip(leaving, arriving, strict=True):
            operations += [dist.P2POp(dist.irecv, into, before), dist.P2POp(dist.isend, out, after)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for part, into in zip((0.0, 0.5), arriving, strict=True):
            same(into, [10.0 * turn + before + part] * 5)
    leave()


def missing_waits(worker: Worker) -> int:
    """How many of ten sums were not there yet when nobody had waited for them."""
    meet(worker)
    total, stale = float(sum(range(1, worker.world + 1))), 0
    with DelayedCollectives(0.1):
        for _ in range(10):
            numbers = torch.full((1024,), float(worker.rank), device="cuda") + 1.0
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                work = dist.all_reduce(numbers, async_op=True)
            seen = numbers.clone()
            work.wait()
            same(numbers, [total] * 1024)
            stale += seen.tolist() != numbers.tolist()
    leave()
    return stale


def a_peer_that_never_comes(worker: Worker) -> str:
    """The last rank leaves out a sum. The others are freed, and compute on."""
    meet(worker)
    pair = dist.new_group(list(range(worker.world)))
    numbers = torch.ones(4, device="cuda")
    dist.all_reduce(numbers)
    dist.all_reduce(numbers, group=pair)
    torch.cuda.synchronize()
    if worker.rank == worker.world - 1:
        time.sleep(4.0)
        abandon()
        return "absent"
    threading.Timer(1.0, nccl.interrupt).start()
    dist.all_reduce(numbers, group=pair)
    numbers.tolist()  # would block for good
    with pytest.raises(nccl.Interrupted) as caught:
        nccl.check_not_interrupted()
    assert peer_is_gone(caught.value)
    abandon()
    nccl.forget_interruption()
    assert torch.ones(3, device="cuda").sum().item() == 3
    return "freed"


@NEEDS_GPU
@pytest.mark.parametrize("world", [2, 4])
def test_every_collective_brings_what_it_must(ranks: Ranks, world: int) -> None:
    ranks(world).run(every_collective, seconds=SECONDS)


@NEEDS_GPU
def test_a_missing_wait_shows_if_collectives_are_delayed(ranks: Ranks) -> None:
    assert all(stale > 0 for stale in ranks(2).run(missing_waits, seconds=SECONDS))


@NEEDS_GPU
def test_a_worker_leaves_a_collective_whose_peer_is_gone(ranks: Ranks) -> None:
    assert ranks(2).run(a_peer_that_never_comes, seconds=SECONDS) == ["freed", "absent"]
    ranks(2).run(every_collective, seconds=SECONDS)  # the same processes meet again


def test_numbers_that_were_read_after_an_interruption_are_not_used() -> None:
    nccl.check_not_interrupted()
    nccl.interrupt()
    with pytest.raises(nccl.Interrupted, match="a peer is gone"):
        nccl.check_not_interrupted()
    nccl.forget_interruption()
    nccl.check_not_interrupted()
