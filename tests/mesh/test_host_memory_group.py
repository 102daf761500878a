"""Workers that share a GPU: what every collective brings, that streams wait as they would for NCCL, and what
a lost peer does.

Each case runs twice: on tensors in host memory, where threads, order and failures are the same, and on a GPU,
where streams are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from shardwise._torch import all_gather_single, reduce_scatter_single
from shardwise.mesh import Worker, host_memory_group, leave, peer_is_gone
from shardwise.mesh.host_memory_group import HostMemoryGroup
from shardwise.mesh.mesh import _rendezvous
from shardwise.verify.sum_dtypes import SumRecorder

Ranks = Callable[[int], Pool]
HAS_GPU = torch.cuda.is_available()
NEEDS_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_GPU)]
ON_HOST = "through_host_on_cpu"
SECONDS = 40.0
"""For a case."""


def meet(worker: Worker, device: str, longest_delay: float = 0.0) -> None:
    """Make the group the default one of this process."""
    host_memory_group.longest_delay = longest_delay
    if device == "cuda":
        torch.cuda.set_device(0)
    host_memory_group.register()
    if ON_HOST not in dist.Backend.backend_list:
        dist.Backend.register_backend(ON_HOST, _on_host, devices=["cpu"])
    name = host_memory_group.NAME if device == "cuda" else ON_HOST
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        name, rank=worker.rank, world_size=worker.world, timeout=timeout, **_rendezvous(worker)
    )


def _on_host(store: Any, rank: int, size: int, timeout: timedelta) -> HostMemoryGroup:
    return HostMemoryGroup(store, rank, size, timeout)


def same(actual: Tensor, expected: Any) -> None:
    """To the bit."""
    wanted = torch.as_tensor(expected).to(actual.dtype)
    assert actual.cpu().tolist() == wanted.tolist(), f"{actual.tolist()} is not {wanted.tolist()}"


def every_collective(worker: Worker, device: str, longest_delay: float) -> None:
    """Each against what it must bring, which is written down here from its definition."""
    meet(worker, device, longest_delay)
    rank, world = worker.rank, worker.world
    everybody = range(world)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8):
        total = torch.tensor([[rank + 1, 2], [3, rank]], dtype=dtype, device=device)
        dist.all_reduce(total)
        same(total, [[sum(everybody) + world, 2 * world], [3 * world, sum(everybody)]])
    largest = torch.tensor(float(rank), device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    same(largest, float(world - 1))

    for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool):
        own = torch.tensor([rank % 2, 1, 0], device=device).to(dtype)
        gathered = torch.empty(3 * world, dtype=dtype, device=device)
        all_gather_single(gathered, own)
        same(gathered, [number for other in everybody for number in (other % 2, 1, 0)])
    parts = torch.empty(world, 2, device=device)
    dist.all_gather(list(parts), torch.tensor([rank, -rank], dtype=torch.float32, device=device))
    same(parts, [[other, -other] for other in everybody])

    rows = torch.tensor([[100.0 * rank + other, 1.0] for other in everybody], device=device)
    kept = torch.empty(2, device=device)
    reduce_scatter_single(kept, rows.flatten())
    same(kept, [sum(100.0 * other + rank for other in everybody), world])

    arrived = torch.empty(world, device=device)
    dist.all_to_all_single(arrived, torch.tensor([10.0 * rank + other for other in everybody], device=device))
    same(arrived, [10.0 * other + rank for other in everybody])
    sent = [(rank + other) % 3 for other in everybody]  # some get nothing
    uneven = torch.full((sum(sent), 2), float(rank), device=device)
    received = torch.empty(sum((rank + other) % 3 for other in everybody), 2, device=device)
    dist.all_to_all_single(received, uneven, sent, sent)
    same(
        received,
        [[float(other)] * 2 for other in everybody for _ in range((rank + other) % 3)] or torch.empty(0, 2),
    )

    told = torch.tensor([rank, 7.5], device=device)
    dist.broadcast(told, src=world - 1)
    same(told, [world - 1, 7.5])
    dist.barrier()
    with pytest.raises(NotImplementedError, match="scatter"):
        dist.scatter(told, None if rank else [told] * world)


def every_message(worker: Worker, device: str, longest_delay: float) -> None:
    """Around a ring, twice, with both halves asked for at once; then from the first rank to the last, one
    after the other."""
    meet(worker, device, longest_delay)
    rank, world = worker.rank, worker.world
    after, before = (rank + 1) % world, (rank - 1) % world
    for turn in range(2):
        leaving = [torch.full((5,), 10.0 * turn + rank + part, device=device) for part in (0.0, 0.5)]
        arriving = [torch.zeros(5, device=device) for _ in leaving]
        operations = []
        for tag, (out, into) in enumerate(zip(leaving, arriving, strict=True)):
            operations += [
                dist.P2POp(dist.irecv, into, before, tag=tag),
                dist.P2POp(dist.isend, out, after, tag=tag),
            ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        for part, into in zip((0.0, 0.5), arriving, strict=True):
            same(into, [10.0 * turn + before + part] * 5)
    numbers = torch.tensor([1, 2, 3], dtype=torch.int16, device=device) * (rank + 1)
    if rank == 0:
        dist.send(numbers, world - 1)
    elif rank == world - 1:
        dist.recv(numbers, 0)
        same(numbers, [1, 2, 3])


def collectives_follow_one_another(worker: Worker, device: str) -> None:
    """Many under way at once, each held back by another while on every rank."""
    meet(worker, device, longest_delay=0.01)
    tensors = [torch.full((3,), float(worker.rank + number), device=device) for number in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        same(tensor, [float(sum(range(worker.world)) + number * worker.world)] * 3)


def engines_train(worker: Worker, device: str, longest_delay: float) -> None:
    """What torch calls from C++: DTensor, DDP and FSDP2, against the same on one process."""
    meet(worker, device, longest_delay)
    rank, world = worker.rank, worker.world
    mesh = init_device_mesh(device, (world,))
    parts = DTensor.from_local(torch.tensor([1.0 * rank], device=device), mesh, [Shard(0)])
    same(parts.full_tensor(), [float(other) for other in range(world)])
    partial = DTensor.from_local(torch.ones(2 * world, device=device), mesh, [Partial()])
    same(partial.redistribute(mesh, [Replicate()]).to_local(), [float(world)] * 2 * world)
    same(partial.redistribute(mesh, [Shard(0)]).to_local(), [float(world)] * 2)

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    torch.manual_seed(1)
    rows = torch.randn(2 * world, 6, dtype=torch.float64)
    alone = model()
    alone(rows).square().mean().backward()
    own = rows[2 * rank : 2 * rank + 2].to(device)

    summed = DistributedDataParallel(model().to(device))
    summed.register_comm_hook(None, _averaged)
    summed(own).square().mean().backward()
    for expected, parameter in zip(alone.parameters(), summed.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), expected.grad, rtol=1e-12, atol=1e-14)

    sharded = model().to(device)
    for layer in (*sharded, sharded):
        fully_shard(layer, mesh=mesh)
        layer.set_gradient_divide_factor(1.0)
        layer.set_force_sum_reduction_for_comms(True)
    (sharded(own).square().mean() / world).backward()
    for expected, parameter in zip(alone.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor().cpu(), expected.grad, rtol=1e-12, atol=1e-14)


def _averaged(state, bucket):  # torch looks at annotations, which are texts here
    numbers = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(numbers, async_op=True).get_future().then(lambda future: future.value()[0])


def sums_that_are_seen(worker: Worker, device: str) -> list[tuple[str, str]]:
    """What a recorder of sums in 16 bits tells of two of them, and of none in 32."""
    meet(worker, device)
    with SumRecorder() as recorder:
        dist.all_reduce(torch.ones(4, device=device))
        dist.all_reduce(torch.ones(4, dtype=torch.bfloat16, device=device))
        both = torch.ones(2 * worker.world, dtype=torch.bfloat16, device=device)
        reduce_scatter_single(torch.empty(2, dtype=torch.bfloat16, device=device), both)
    return list(recorder.short)


def a_peer_that_left(worker: Worker, device: str) -> str:
    """The last rank goes; what the others hear."""
    meet(worker, device)
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    if worker.rank == worker.world - 1:
        leave()
        return "left"
    with pytest.raises(RuntimeError) as caught:
        _go_on(tensor)
    assert peer_is_gone(caught.value), f"{caught.value} does not tell that a peer is gone"
    leave()
    assert torch.ones(3, device=device).sum().item() == 3  # the device goes on
    return "heard"


def _go_on(tensor: Tensor, group: Any = None) -> None:
    for _ in range(1000):
        dist.all_reduce(tensor, group=group)
        time.sleep(0.01)


def a_failure_elsewhere(worker: Worker, device: str) -> str:
    """Of three ranks the last goes, and the others hear of it in a group without it."""
    meet(worker, device)
    pair = dist.new_group([0, 1])
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    if worker.rank == worker.world - 1:
        leave()
        return "left"
    dist.all_reduce(tensor, async_op=True)  # nobody waits for this one
    with pytest.raises(RuntimeError) as caught:
        _go_on(tensor, pair)
    assert peer_is_gone(caught.value), f"{caught.value} does not tell that a peer is gone"
    leave()
    return "heard"


def waits_order_streams(worker: Worker) -> tuple[int, int]:
    """Of ten sums without a wait, how many were not there yet; of ten messages that were overwritten without
    one, how many arrived so."""
    meet(worker, "cuda", longest_delay=0.1)
    rank, world = worker.rank, worker.world
    total, stale, spoilt = float(sum(range(world))), 0, 0
    for _ in range(10):
        numbers = torch.full((1024,), float(rank) - 1.0, device="cuda") + 1.0
        work = dist.all_reduce(numbers, async_op=True)
        seen = numbers.clone()
        work.wait()
        after = numbers.clone()
        stale += seen.tolist() != after.tolist()
        same(after, [total] * 1024)
    for _ in range(10):
        own, gathered = torch.full((16,), 1.0, device="cuda"), torch.empty(16 * world, device="cuda")
        work = all_gather_single(gathered, own, async_op=True)
        own.fill_(-1.0)
        work.wait()
        spoilt += bool((gathered != 1.0).any())
    return stale, spoilt


@pytest.mark.parametrize("longest_delay", [0.0, 0.01])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_every_collective_brings_what_it_must(
    ranks: Ranks, device: str, world: int, longest_delay: float
) -> None:
    ranks(world).run(every_collective, device, longest_delay, seconds=SECONDS)


@pytest.mark.parametrize("longest_delay", [0.0, 0.01])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_messages_meet_in_order_and_do_not_wait_for_each_other(
    ranks: Ranks, device: str, world: int, longest_delay: float
) -> None:
    ranks(world).run(every_message, device, longest_delay, seconds=SECONDS)


@pytest.mark.parametrize("device", DEVICES)
def test_collectives_keep_their_order_whatever_holds_them_up(ranks: Ranks, device: str) -> None:
    ranks(4).run(collectives_follow_one_another, device, seconds=SECONDS)


@pytest.mark.parametrize("longest_delay", [0.0, 0.01])
@pytest.mark.parametrize("device", DEVICES)
def test_torchs_own_engines_train_as_one_process_does(
    ranks: Ranks, device: str, longest_delay: float
) -> None:
    ranks(2).run(engines_train, device, longest_delay, seconds=SECONDS)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_seen_by_who_watches_operators(ranks: Ranks, device: str) -> None:
    where = "tests/mesh/test_host_memory_group.py sums_that_are_seen"
    for seen in ranks(2).run(sums_that_are_seen, device, seconds=SECONDS):
        assert seen == [("allreduce_", where), ("reduce_scatter_", where)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_peer_that_is_gone_is_heard_of_and_the_process_goes_on(ranks: Ranks, device: str) -> None:
    assert ranks(2).run(a_peer_that_left, device, seconds=SECONDS) == ["heard", "left"]


@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_is_heard_of_in_every_group(ranks: Ranks, device: str) -> None:
    assert ranks(3).run(a_failure_elsewhere, device, seconds=SECONDS) == ["heard", "heard", "left"]


@NEEDS_GPU
def test_without_a_wait_a_result_is_missed_and_a_message_spoilt(ranks: Ranks) -> None:
    for stale, spoilt in ranks(4).run(waits_order_streams, seconds=SECONDS):
        assert stale > 0, "a sum that nobody waited for was always there"
        assert spoilt > 0, "no message was overwritten by what came after it"
