"""Everything shardwise takes from private parts of torch, in one place, each with its reason.

A new torch release is checked against this file first.
"""

from __future__ import annotations

import torch._functorch.config as _functorch
from torch.distributed.device_mesh import DeviceMesh


def set_activation_memory_budget(share: float) -> None:
    """The compiler's trade of memory against recomputation; it has no public setting."""
    _functorch.activation_memory_budget = share


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the axes of a mesh into one; still underscored in torch 2.11 to 2.13."""
    return mesh._flatten(name)
