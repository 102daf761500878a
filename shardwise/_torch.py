"""Everything shardwise takes from private parts of torch, in one place, each with its reason.

A new torch release is checked against this file first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch._functorch.config as _functorch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renames `all_gather_into_tensor`, which 2.11 has, and warns at each use of the old name."""

reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Likewise for `reduce_scatter_tensor`."""


def set_activation_memory_budget(share: float) -> None:
    """The compiler's trade of memory against recomputation; it has no public setting."""
    _functorch.activation_memory_budget = share


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Join the axes of a mesh into one; still underscored in torch 2.11 to 2.13."""
    return mesh._flatten(name)
