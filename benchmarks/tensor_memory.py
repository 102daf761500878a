"""Tensors on each device of a tensor-parallel group during a step, with the module that created each.

    python benchmarks/tensor_memory.py [--quick] [--tensor 4]

prints one JSON object. Workers train a small transformer, split over `tensor`, and one worker trains it
unsplit. For every tensor that torch creates in forward and backward, the size and the module that runs are
recorded. There are two kinds of modules. Attention, feed-forward, embedding and head process the whole
sequence, and are split over heads, features or vocabulary. In the others, norms and residuals (the sequence
region), the sequence is split (Korthikanti et al. 2022).

- `made_in_sequence_region`: the largest tensor that was created there. It must not have more than batch x
  sequence / tensor x hidden values;
- `alive_in_sequence_region`: tensors of at least batch x sequence x hidden values that other modules created
  in this step, and that are alive while a module of the sequence region runs: what attention and feed-forward
  keep for backward;
- `logits`: the largest tensor with a vocabulary, or a device's part of one, in its last dim. Whole logits
  have batch x sequence rows and all of the vocabulary. The budget of a chunk (plans/chunks.py) is scaled down
  with the model;
- `fullest`: bytes that are alive at the worst moment, without those from before the step (weights and
  gradients): the activations.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import random_tokens
import torch
from memory import LiveBytes, _free_ports
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from shardwise._torch import inside_backward
from shardwise.config import Config, from_tables
from shardwise.data.batches import Batch, Batches
from shardwise.mesh import Worker, leave
from shardwise.optim import local
from shardwise.plans import choose, chunks
from shardwise.train.build import Training, build
from shardwise.train.sources import count_tokens, forward_backward

VOCABULARY, HIDDEN, LENGTH, BATCH = 4096, 128, 256, 8
MODEL = {"hidden": HIDDEN, "heads": 8, "kv_heads": 4, "head_dim": 16, "ffn": 352, "vocabulary": VOCABULARY}
"""`ffn` is such that no device's share of it is as wide as `hidden`: a size then tells what a tensor is."""
CHUNK_BYTES = 2**20
WHOLE_SEQUENCE = {"attention", "feed_forward", "embedding", "head"}
"""Modules that see the whole sequence."""
OUTSIDE, WHOLE, SPLIT = "outside", "whole", "split"
"""Regions: no module at work; one that sees the whole sequence; one that sees this device's part of it."""


def job(folder: Path, tensor: int, layers: int) -> Config:
    return from_tables(
        {
            "model": {**MODEL, "layers": layers},
            "data": {"source": str(folder), "sequence_length": LENGTH, "held_out": 0.0},
            "train": {
                "steps": 1,
                "global_batch": BATCH,
                "micro_batch": BATCH,
                "precision": "float32",
                "recompute": "none",
            },
            "layout": {"tensor": tensor, "data": 1},
        }
    )


@dataclass(frozen=True, order=True)
class Made:
    """A tensor and where it was made."""

    values: int
    shape: tuple[int, ...]
    maker: str

    def shown(self) -> dict[str, Any]:
        return {"values": self.values, "shape": list(self.shape), "made_by": self.maker}


NOTHING = Made(0, (), "")


class AtWork:
    """The paths of the modules whose forward or backward is running.

    A module's backward begins with the gradient of its output and ends with that of its input. (torch's
    ModuleTracker does the same, and keeps graphs alive that would be gone without it.)
    """

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: f"model.{path}".rstrip(".") for path, module in model.named_modules()}
        self.paths: set[str] = set()
        self.handles = (
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end),
        )

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        name = self.names[module]
        self.paths.add(name)
        self._on_gradient(inputs, partial(self.paths.discard, name))

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        name = self.names[module]
        self.paths.discard(name)
        self._on_gradient((output,), partial(self.paths.add, name))

    def _on_gradient(self, tensors: Any, act: Callable[[], None]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: act())
                return

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Record(LiveBytes):
    """Bytes alive, the largest tensor made in each region, and the large ones alive while the sequence region
    works."""

    def __init__(self, tensor: int) -> None:
        super().__init__()
        self.tensor = tensor
        self.paths: set[str] = set()
        self.maker, self.region = "", OUTSIDE
        self.made = dict.fromkeys((OUTSIDE, WHOLE, SPLIT), NOTHING)
        self.logits = NOTHING
        self.alive: list[Made] = []
        """Tensors that are alive at the moment when most bytes are held."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.watching:
            place, self.region = self.place()
            self.maker = f"{place} ({function})"
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if self.watching:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.see(local(leaf))
            if self.region == SPLIT:
                self.alive = max(self.alive, self.large(), key=lambda all_: sum(made.values for made in all_))
        return result

    def place(self) -> tuple[str, str]:
        """The innermost module at work, and its region."""
        path = max(self.paths, key=lambda name: name.count("."), default="")
        _, *parts = path.split(".")
        region = OUTSIDE if not path else WHOLE if set(parts) & WHOLE_SEQUENCE else SPLIT
        name = ".".join("*" if part.isdigit() else part for part in parts) or "the model"
        return f"{name}, {'backward' if inside_backward() else 'forward'}", region

    def note(self, tensor: Tensor) -> bool:
        first = super().note(tensor)
        if first and self.watching:
            self.storages[local(tensor).untyped_storage()] = self.described(local(tensor))
        return first

    def described(self, tensor: Tensor) -> Made:
        values = min(
            tensor.numel(), tensor.untyped_storage().nbytes() // tensor.itemsize
        )  # broadcast views show more
        return Made(values, tuple(tensor.shape), self.maker)

    def see(self, tensor: Tensor) -> None:
        made = self.described(tensor)
        self.made[self.region] = max(self.made[self.region], made)
        rows = prod(tensor.shape[:-1])
        if tensor.ndim > 1 and tensor.shape[-1] in (VOCABULARY, VOCABULARY // self.tensor) and rows != HIDDEN:
            self.logits = max(self.logits, made)

    def large(self) -> list[Made]:
        """Tensors of this step, as large as the activations of the whole sequence, that are alive."""
        of_this_step = [made for made in map(self.storages.get, self.storages) if isinstance(made, Made)]
        return [made for made in of_this_step if made.values >= BATCH * LENGTH * HIDDEN]


def measure(worker: Worker, folder: Path, layers: int) -> dict[str, Any]:
    """The record of this worker's second step; the first made the gradients."""
    chunks.CHUNK_BYTES["cpu"] = CHUNK_BYTES
    config = job(folder, worker.world, layers)
    with Record(worker.world) as record:
        training = build(config, choose(config, worker.world), worker)
        batch = _batch(training)
        forward_backward(training, batch, count_tokens(training, batch))
        gc.collect()
        before = record.total()
        at_work = AtWork(training.parallel.model)
        record.paths, record.watching = at_work.paths, True
        forward_backward(training, batch, count_tokens(training, batch))
        record.watching = False
        at_work.remove()
    return {
        "before": before,
        "fullest": record.fullest - before,
        "made_in_sequence_region": record.made[SPLIT].shown(),
        "made_in_other_modules": record.made[WHOLE].shown(),
        "alive_in_sequence_region": dict(
            Counter(f"{made.maker} {list(made.shape)}" for made in record.alive)
        ),
        "logits": record.logits.shown(),
    }


def _batch(training: Training) -> list[Batch]:
    batches = Batches(training.text, BATCH, rows=range(BATCH), micro_batches=1, device=training.mesh.device)
    batch = next(batches)
    batches.close()
    return batch


def _work(rank: int, workers: int, port: int, folder: Path, layers: int) -> None:
    torch.set_num_threads(1)
    found = measure(Worker(rank, workers, rank, workers, "127.0.0.1", port, "benchmark"), folder, layers)
    (folder / f"{workers}-{rank}.json").write_text(json.dumps(found))
    leave()


def table(ranks: list[dict[str, Any]], one: dict[str, Any]) -> dict[str, Any]:
    """The fullest and the largest of all ranks, beside one device."""
    tensor = len(ranks)
    part, whole, all_logits = (
        BATCH * LENGTH // tensor * HIDDEN,
        BATCH * LENGTH * HIDDEN,
        BATCH * LENGTH * VOCABULARY,
    )
    made = max((rank["made_in_sequence_region"] for rank in ranks), key=lambda found: found["values"])
    logits = max((rank["logits"] for rank in ranks), key=lambda found: found["values"])
    alive = max((rank["alive_in_sequence_region"] for rank in ranks), key=lambda found: sum(found.values()))
    sums = {name: (max(rank[name] for rank in ranks), one[name]) for name in ("before", "fullest")}
    return {
        "values": {"part_of_the_sequence": part, "whole_sequence": whole, "whole_logits": all_logits},
        "made_in_sequence_region": {**made, "at_most_a_part": made["values"] <= part},
        "made_in_other_modules": max(
            (rank["made_in_other_modules"] for rank in ranks), key=lambda found: found["values"]
        ),
        "alive_in_sequence_region": {"none_of_the_whole_sequence": not alive, "tensors": alive},
        "logits": {**logits, "share_of_whole_logits": logits["values"] / all_logits},
        "bytes": {
            n: {"fullest_rank": most, "one_device": alone, "ratio": most / alone}
            for n, (most, alone) in sums.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one block instead of four")
    parser.add_argument("--tensor", type=int, default=4)
    given = parser.parse_args()
    layers, tensor = 1 if given.quick else 4, given.tensor
    with tempfile.TemporaryDirectory() as name:
        folder = random_tokens.write(Path(name), 50_000, VOCABULARY)
        for workers in (tensor, 1):
            spawn(_work, (workers, _free_ports(1)[0], folder, layers), workers)
        ranks = [json.loads((folder / f"{tensor}-{rank}.json").read_text()) for rank in range(tensor)]
        one = json.loads((folder / "1-0.json").read_text())
    facts = {"tensor": tensor, "batch": BATCH, "sequence": LENGTH, "layers": layers, **MODEL}
    print(json.dumps({**facts, **table(ranks, one)}, indent=1))


if __name__ == "__main__":
    main()
