"""Bytes of model state on each of four workers, measured, against the closed form of
shardwise/plans/memory.py.

    python benchmarks/memory.py [--workers 4]

prints one JSON object. The measurement uses neither the formula nor the modules that shard. From before the
model is built, it records the storage of every tensor that torch creates, and adds up the bytes of those that
are alive

- `held`: at the beginning of the last micro-batch of a step, when there are weights, gradients and optimizer
  state, but no activations. This is what the formula predicts;
- `fullest`: at the worst moment inside that micro-batch. This adds gathered units, buffers of communication,
  gradients that are being reduced, copies of weights in the compute dtype for backward, and the few
  activations of one sequence of 16 tokens.

The formula of the ZeRO paper, with gradients in 16 bits, is printed for comparison; shardwise sums gradients
in float32.
"""

from __future__ import annotations

import argparse
import gc
import json
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import random_tokens
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.config import Config, from_tables
from shardwise.mesh import Worker, leave
from shardwise.plans import choose
from shardwise.train.build import Training, build
from shardwise.train.steps import steps

STAGES = (0, 1, 2, 3)
VOCABULARY = 257
MODEL = {
    "layers": 12,
    "hidden": 192,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 48,
    "ffn": 512,
    "vocabulary": VOCABULARY,
}
"""Five million parameters in many small units: FSDP2 keeps the buffer of the last unit it reduced, which is
no model state."""


class LiveBytes(TorchDispatchMode):
    """Knows every storage made while it is active, for as long as that storage lives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages = WeakIdKeyDictionary()
        self.watching = False
        self.fullest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [self.note(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if self.watching and any(made):
            self.fullest = max(self.fullest, self.total())
        return result

    def note(self, tensor: Tensor) -> bool:
        """Whether this is the first sight of a storage large enough to matter."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        if local.device.type == "meta" or storage in self.storages:
            return False
        self.storages[storage] = True
        return storage.nbytes() > 1 << 14

    def total(self) -> int:
        """Bytes alive now. A storage that was freed by resizing it to nothing counts as nothing."""
        return sum(storage.nbytes() for storage in self.storages)


def job(folder: Path, workers: int, zero: int) -> Config:
    return from_tables(
        {
            "model": MODEL,
            "data": {"source": str(folder), "sequence_length": 16, "held_out": 0.0},
            "train": {"steps": 2, "global_batch": 2 * workers, "micro_batch": 1, "precision": "bfloat16"},
            "layout": {"data": workers, "zero": zero},
        }
    )


def measure(worker: Worker, folder: Path, zero: int) -> dict[str, float]:
    """Live bytes on this worker, in the last micro-batch of the second step: the first made the optimizer's
    state."""
    config = job(folder, worker.world, zero)
    plan = choose(config, worker.world)
    with LiveBytes() as live:
        training = build(config, plan, worker)
        buffers = sum(buffer.nbytes for buffer in training.parallel.model.buffers())
        held: list[int] = []
        with _watched(training, live, held):
            for _ in steps(training):
                pass
    return {
        "held": held[-1] - buffers,
        "fullest": live.fullest - buffers,
        "formula": plan.state_bytes.total,
        "parameters": plan.parameters,
    }


def _settled(live: LiveBytes) -> int:
    """Return the bytes alive once the threads of finished collectives have freed their buffers."""
    totals = []
    for _ in range(10):
        time.sleep(0.05)
        totals.append(live.total())
    return min(totals)


@contextmanager
def _watched(training: Training, live: LiveBytes, held: list[int]) -> Iterator[None]:
    """Take stock as each step's last micro-batch begins, and watch until it ends."""
    (part,) = training.parallel.parts
    original = part.micro_batch

    @contextmanager
    def micro_batch(last: bool) -> Iterator[None]:
        if last:
            gc.collect()  # what only waits for the collector is not state
            held.append(_settled(live))
            live.watching = True
        with original(last):
            yield
        live.watching = False

    part.micro_batch = micro_batch  # type: ignore[method-assign]
    yield


def paper(parameters: int, zero: int, devices: int) -> float:
    """Rajbhandari et al. (2020), figure 1, with K = 12 for Adam."""
    whole, sharded = ((16, 0), (4, 12), (2, 14), (0, 16))[zero]
    return whole * parameters + sharded * parameters / devices


def table(measured: list[list[dict[str, float]]], workers: int) -> dict[str, Any]:
    """For each stage the worker that holds most, since some hold a few padded rows less."""
    config = job(Path("."), workers, 0)
    parameters = choose(config, workers).parameters
    rows = []
    for zero, of_workers in zip(STAGES, measured, strict=True):
        most = max(of_workers, key=lambda row: row["held"])
        rows.append(
            {
                "zero": zero,
                **most,
                "ratio": most["held"] / most["formula"],
                "paper": paper(parameters, zero, workers),
            }
        )
    facts = {"parameters": parameters, "workers": workers, "precision": "bfloat16", "micro_batches": 2}
    return {**facts, "bytes_per_worker": rows}


def _work(rank: int, workers: int, ports: list[int], folder: Path) -> None:
    for zero, port in zip(STAGES, ports, strict=True):
        row = measure(Worker(rank, workers, rank, workers, "127.0.0.1", port, "benchmark"), folder, zero)
        (folder / f"{zero}-{rank}.json").write_text(json.dumps(row))
        leave()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    workers = parser.parse_args().workers
    with tempfile.TemporaryDirectory() as name:
        folder = random_tokens.write(Path(name), 100_000, VOCABULARY)
        spawn(_work, (workers, _free_ports(len(STAGES)), folder), workers)
        measured = [
            [json.loads((folder / f"{zero}-{rank}.json").read_text()) for rank in range(workers)]
            for zero in STAGES
        ]
    print(json.dumps(table(measured, workers), indent=1))


if __name__ == "__main__":
    main()
