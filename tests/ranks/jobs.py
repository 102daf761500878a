"""Small jobs, and what they come to: the cases that the pools run, and the same on one device as the truth.

Sizes are odd on purpose: 259 ids, 18 wide and 50 inside divide by neither 2 nor 4 alike, and the q/k norms, 6 long, leave the
last of four ranks with an empty shard.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.config import Config, from_tables
from shardwise.mesh import Worker
from shardwise.plan import choose
from shardwise.train.build import Training, build
from shardwise.train.steps import Step, steps

Tables = dict[str, dict[str, Any]]

LLAMA = {"layers": 2, "hidden": 18, "heads": 3, "kv_heads": 1, "head_dim": 6, "ffn": 50, "vocabulary": 259, "qk_norm": True}
GPT = {"layers": 2, "hidden": 18, "heads": 3, "kv_heads": 3, "head_dim": 6, "ffn": 50, "vocabulary": 259, "tied": True,
       "norm": "layer", "positions": "learned", "activation": "gelu", "bias": True, "max_positions": 37}  # fmt: skip
_LLAMA = {**LLAMA, "layers": 5, "hidden": 24, "heads": 4, "kv_heads": 2}
FAMILIES: Tables = {
    "llama": _LLAMA,
    "tied": {**_LLAMA, "layers": 4, "tied": True},
    "gpt": {**GPT, "layers": 3, "hidden": 24, "heads": 4, "kv_heads": 4, "max_positions": 48},
    "experts": {**_LLAMA, "layers": 4, "experts": 4, "experts_per_token": 2, "expert_ffn": 21, "shared_experts": 1,
                "balance_loss": 0.01, "router_z_loss": 0.001, "balance_bias": 0.001},
}  # fmt: skip
"""The same with heads and blocks that all axes can share."""
TRAIN = {"steps": 3, "global_batch": 8, "precision": "float64", "learning_rate": 0.01, "warmup": 1, "clip": 0.5, "seed": 3}
ALONE = Worker(rank=0, world=1, local_rank=0, local_world=64, address="", port=0, launcher="test")
"""One device, with one thread, as every rank of a pool has."""


def job(source: str, **sections: dict[str, Any]) -> Tables:
    """A job on that source: the small model above or the one given, other sections laid over the defaults above."""
    base: Tables = {
        "data": {"source": source, "sequence_length": 24, "held_out": 0.1},
        "train": TRAIN,
        "layout": {},
        "checkpoint": {},
        "run": {},
    }
    laid_over = {name: {**table, **sections.get(name, {})} for name, table in base.items()}
    return {**laid_over, "model": sections.get("model", LLAMA)}


def start(worker: Worker, tables: Tables) -> Training:
    """Build the job on this rank."""
    config: Config = from_tables(tables)
    return build(config, choose(config, worker.world), worker)


@dataclass(frozen=True)
class Trained:
    """What a run came to, on one rank."""

    steps: list[Step]
    weights: dict[str, Tensor]

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def norms(self) -> list[float]:
        return [step.gradient_norm for step in self.steps]


def train(worker: Worker, tables: Tables) -> Trained:
    """Train to the last step."""
    training = start(worker, tables)
    done = list(steps(training))
    return Trained(done, weights(training))


def weights(training: Training) -> dict[str, Tensor]:
    """Every parameter, whole, on every rank, with what the pipeline stages hold put together."""
    return across_stages(training, {name: whole(parameter) for name, parameter in training.parallel.named_parameters()})


def across_stages(training: Training, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """What this rank's stages hold, and those of the others."""
    group = training.mesh.group("pipeline")
    if group is None:
        return own
    stages: list[Any] = [None] * training.mesh.size("pipeline")
    dist.all_gather_object(stages, own, group=group)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def whole(tensor: Tensor) -> Tensor:
    """A copy of a tensor, put together from its shards if it has any."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@functools.cache
def _on_one_device(tables: str) -> Trained:
    return train(ALONE, json.loads(tables))


def on_one_device(tables: Tables) -> Trained:
    """The truth: the same job in this process alone, whatever its layout says."""
    return _on_one_device(json.dumps({**tables, "layout": {}, "train": {**tables["train"], "micro_batch": None}}))


def worst_difference(found: Trained, truth: Trained) -> float:
    """The largest relative difference in any step's loss or gradient norm, or in any final weight."""
    numbers = zip((*found.losses, *found.norms), (*truth.losses, *truth.norms), strict=True)
    assert found.weights.keys() == truth.weights.keys()
    tensors = ((found.weights[name], truth.weights[name]) for name in truth.weights)
    return max(*(abs(a - b) / abs(b) for a, b in numbers), *(difference(a, b) for a, b in tensors))


def difference(found: Tensor, truth: Tensor, moved: float = 0.01) -> float:
    """The largest difference, relative to the largest value, or to how far a step moves a weight.

    The bias of a key cannot change a softmax, so its gradient is zero but for rounding; such a bias stays near zero, and
    only the second yardstick means anything there.
    """
    return float((found - truth).abs().max()) / max(float(truth.abs().max()), moved)
