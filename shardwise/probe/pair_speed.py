"""Measure the link of each pair of devices and of all devices together, and check the numbers that arrive.

Training uses all links at once, so `shardwise probe` measures neighbours together (link_speed.py). Here pairs
are measured one after the other, because the question is which link is wrong: a cable, a switch, or a GPU
that is connected in another way than the others. Both devices of a pair send at the same time.

This takes a few seconds for eight GPUs (28 pairs), and twice the bytes of a message on each device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.config import Device, Layout
from shardwise.mesh import Worker, gpus_are_shared, join, leave, nccl
from shardwise.probe.bench import Bench

MESSAGE_BYTES, SMALL_MESSAGE_BYTES = 64 << 20, 4 << 20
"""Bytes that a device sends at a time, and the same if messages go through the memory of the host."""
WINDOW_SECONDS, WINDOWS = 0.05, 3
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class PairSpeed:
    """How fast two ranks send to each other."""

    first: int
    second: int
    bytes_per_second: float
    """In each direction, while both send."""
    correct: bool
    """Whether both received what the other sent."""


@dataclass(frozen=True)
class LinkReport:
    """What was measured of the links between all ranks."""

    backend: str
    version: str
    """Version of NCCL; empty for gloo."""
    pairs: tuple[PairSpeed, ...]
    together: float
    """Bytes per second of an all-reduce over all ranks that each device sends (nccl-tests' bus bandwidth)."""
    sum_is_correct: bool


def measure_pairs(worker: Worker, device: Device, log_folder: Path | None) -> LinkReport:
    """Measure as one of the workers, and return the same report on each. NCCL's log goes to `log_folder`."""
    if log_folder is not None:
        nccl.write_log(log_folder)
    mesh = join(worker, Layout.model_validate({"data": worker.world}), device)
    try:
        bench = Bench(mesh.device, dist.group.WORLD, WINDOW_SECONDS, WINDOWS)
        own_gpu = mesh.device.type == "cuda" and not gpus_are_shared(worker.world)
        count = (MESSAGE_BYTES if own_gpu else SMALL_MESSAGE_BYTES) // FLOAT32_BYTES
        # All ranks must take part in the first collective of a communicator.
        together, sum_is_correct = _all_together(bench, worker, count)
        pairs = [_pair(bench, worker, pair, count) for pair in combinations(range(worker.world), 2)]
        on_gpu = mesh.device.type == "cuda"
        version = _nccl_version() if on_gpu else ""
        return LinkReport("NCCL" if on_gpu else "gloo", version, tuple(pairs), together, sum_is_correct)
    finally:
        leave()


def _nccl_version() -> str:
    numbers: tuple[int, ...] = torch.cuda.nccl.version()
    return ".".join(map(str, numbers))


def _message(rank: int, count: int, device: torch.device) -> Tensor:
    """Return numbers that differ from rank to rank, and whose sums over ranks are exact."""
    return (torch.arange(count, device=device) % 1021 + rank).float()


def _all_together(bench: Bench, worker: Worker, count: int) -> tuple[float, bool]:
    """Return the speed of an all-reduce over all ranks, and whether its sum is right on every rank."""
    total = _message(worker.rank, count, bench.device)
    dist.all_reduce(total)
    expected = _message(0, count, bench.device) * worker.world + sum(range(worker.world))
    correct = _on_all(bench, torch.equal(total, expected))
    zeros = torch.zeros(count, device=bench.device)
    seconds = bench.seconds(lambda: dist.all_reduce(zeros))
    sent = 2 * (worker.world - 1) / worker.world * count * FLOAT32_BYTES
    return sent / seconds, correct


def _pair(bench: Bench, worker: Worker, pair: tuple[int, int], count: int) -> PairSpeed:
    """Measure one pair, while the other ranks wait."""
    correct = True
    exchange: Callable[[], None] = _idle
    if worker.rank in pair:
        peer = pair[1] if worker.rank == pair[0] else pair[0]
        sent = _message(worker.rank, count, bench.device)
        received = torch.zeros_like(sent)

        def swap() -> None:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        exchange = swap
        exchange()
        correct = torch.equal(received, _message(peer, count, bench.device))
    seconds = bench.seconds(exchange)
    return PairSpeed(*pair, count * FLOAT32_BYTES / seconds, _on_all(bench, correct))


def _idle() -> None:
    pass


def _on_all(bench: Bench, correct: bool) -> bool:
    return bench.longest([0.0 if correct else 1.0]) == [0.0]
