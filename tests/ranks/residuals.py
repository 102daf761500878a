"""What compression left out of gradients, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.residuals import ResidualName
from shardwise.train.build import Training


def left_out(training: Training, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sum over devices of the residuals of each parameter, each counted once, where its name says it
    lies."""
    own, world = dict(training.parallel.residuals()), training.mesh.worker.world
    everyone: list[Any] = [own]
    if world > 1:
        everyone = [None] * world
        dist.all_gather_object(everyone, own)
    total = {name: torch.zeros_like(value) for name, value in like.items()}
    counted = set()
    for residuals in everyone:
        for name, residual in residuals.items():
            said = ResidualName.parse(name)
            if said is not None and name not in counted:
                counted.add(name)
                total[said.parameter][tuple(slice(*part) for part in said.box)] += residual
    return total
