"""What compression left out of gradients, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.state_key import StateKind
from shardwise.train.build import Training


def left_out(training: Training, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum over devices of the residuals of each parameter, each counted once, where its key says it
    lies."""
    own, world = dict(training.parallel.residuals()), training.mesh.worker.world
    everyone: list[Any] = [own]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, own)
    total = {name: torch.zeros_like(value) for name, value in like.items()}
    counted = set()
    for residuals in everyone:
        for key, residual in residuals.items():
            if key.kind is StateKind.RESIDUAL and key not in counted:
                counted.add(key)
                total[key.name][tuple(slice(*edges) for edges in key.part.box)] += residual
    return total
