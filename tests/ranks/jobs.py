"""Small jobs, and what they come to: the cases that the pools run, and the same on one device as the truth.

Sizes are odd on purpose: 259 ids, 18 wide and 50 inside divide by neither 2 nor 4 alike, and the q/k norms, 6
long, leave the last of four ranks with an empty shard.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from ranks.pool import packed
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardwise.config import Config, from_tables
from shardwise.mesh import Worker
from shardwise.plans import choose
from shardwise.train.build import Training, build
from shardwise.train.steps import StepRecord, steps

Tables = dict[str, dict[str, Any]]

LLAMA = {
    "layers": 2,
    "hidden": 18,
    "heads": 3,
    "kv_heads": 1,
    "head_dim": 6,
    "ffn": 50,
    "vocabulary": 259,
    "qk_norm": True,
}
GPT = {"layers": 2, "hidden": 18, "heads": 3, "kv_heads": 3, "head_dim": 6, "ffn": 50, "vocabulary": 259,
"tied": True,
       "norm": "layer", "positions": "learned", "activation": "gelu", "bias": True,
       "max_positions": 37}  # fmt: skip
_LLAMA = {**LLAMA, "layers": 5, "hidden": 24, "heads": 4, "kv_heads": 2}
FAMILIES: Tables = {
    "llama": _LLAMA,
    "tied": {**_LLAMA, "layers": 4, "tied": True},
    "gpt": {**GPT, "layers": 3, "hidden": 24, "heads": 4, "kv_heads": 4, "max_positions": 48},
    "qwen2": {**_LLAMA, "layers": 4, "qk_norm": False, "bias": "qkv"},
    "mistral": {**_LLAMA, "layers": 4, "qk_norm": False, "window": 7},
    "gemma2": {**_LLAMA, "layers": 4, "qk_norm": False, "norm": "rms+1", "post_norms": True,
    "activation": "geglu", "tied": True,
               "scaled_embedding": True, "query_scalar": 5.0, "attention_softcap": 2.0, "logit_softcap": 3.0,
               "window": 7,
               "window_layers": "even"},
    "experts": {**_LLAMA, "layers": 4, "experts": 4, "experts_per_token": 2, "expert_ffn": 21,
    "shared_experts": 1,
                "balance_loss": 0.01, "router_z_loss": 0.001, "balance_bias": 0.001},
}  # fmt: skip
"""The same with heads and blocks that all axes can share."""
TRAIN = {
    "steps": 3,
    "global_batch": 8,
    "precision": "float64",
    "learning_rate": 0.01,
    "warmup": 1,
    "clip": 0.5,
    "seed": 3,
}
ALONE = Worker(rank=0, world=1, local_rank=0, local_world=64, address="", port=0, launcher="test")
"""One device, with one thread, as every rank of a pool has."""


def job(source: str, **sections: dict[str, Any]) -> Tables:
    """A job on that source: the small model above or the one given, other sections laid over the defaults
    above."""
    base: Tables = {
        "data": {"source": source, "sequence_length": 24, "held_out": 0.1},
        "train": TRAIN,
        "optimizer": {},
        "layout": {},
        "checkpoint": {},
        "run": {"device": "cpu"},  # the truth and the ranks must compute on the same kind of device
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

    steps: list[StepRecord]
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
    """Every parameter, whole, on every rank."""
    return put_together(dict(training.parallel.named_parameters()), training.mesh.worker.world)


def put_together(own: Mapping[str, Tensor], world: int) -> dict[str, Tensor]:
    """Tensors of which every rank has a piece, or none, whole on all of them. One message for all, because
    every message between processes takes milliseconds; and whoever holds the same numbers must hold the same
    bits.
    """
    pieces: list[Any] = [{name: _piece(tensor.detach()) for name, tensor in own.items()}]
    if world > 1:
        mine, pieces = packed(pieces[0]), [None] * world
        dist.all_gather_object(pieces, mine)
        pieces = [pickle.loads(piece) for piece in pieces]
    shapes = {name: shape for rank in pieces for name, (shape, _, _) in rank.items()}
    result = {}
    for name, shape in sorted(shapes.items()):
        held = [rank[name] for rank in pieces if name in rank]
        result[name] = torch.empty(shape, dtype=held[0][2].dtype)
        for _, where, piece in held:
            result[name][where] = piece
        for _, where, piece in held:
            assert torch.equal(result[name][where], piece), f"ranks hold different bits of {name}"
    return result


def _piece(tensor: Tensor) -> tuple[torch.Size, tuple[slice, ...], Tensor]:
    """The shape of the whole, where this rank's piece is in it, and the piece."""
    if not isinstance(tensor, DTensor):
        return tensor.shape, tuple(slice(0, size) for size in tensor.shape), tensor.clone()
    lengths, starts = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    where = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    return tensor.shape, where, tensor.to_local().clone()


@functools.cache
def _on_one_device(tables: str) -> Trained:
    return train(ALONE, json.loads(tables))


def on_one_device(tables: Tables) -> Trained:
    """The truth: the same job in this process alone, whatever its layout says."""
    return _on_one_device(
        json.dumps({**tables, "layout": {}, "train": {**tables["train"], "micro_batch": None}})
    )


def worst_difference(found: Trained, truth: Trained) -> float:
    """The largest relative difference in any step's loss or gradient norm, or in any final weight."""
    numbers = zip((*found.losses, *found.norms), (*truth.losses, *truth.norms), strict=True)
    assert found.weights.keys() == truth.weights.keys()
    tensors = ((found.weights[name], truth.weights[name]) for name in truth.weights)
    return max(*(abs(a - b) / abs(b) for a, b in numbers), *(difference(a, b) for a, b in tensors))


def difference(found: Tensor, truth: Tensor, moved: float = 0.01) -> float:
    """The largest difference, relative to the largest value, or to how far a step moves a weight.

    The bias of a key cannot change a softmax, so its gradient is zero but for rounding; such a bias stays
    near zero, and only the second yardstick means anything there.
    """
    return float((found - truth).abs().max()) / max(float(truth.abs().max()), moved)
