"""torch's dtypes for the names that jobs and plans use (plans/dtypes.py says which number has which)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.config.dtype_names import BYTES
from shardwise.plans import dtypes

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in BYTES}
_WIDE = {dtype: DTYPES[dtypes.wide(name)] for name, dtype in DTYPES.items()}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of this dtype are summed: float64 for float64, else float32."""
    return _WIDE[dtype]


def rounded_to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return the tensor in this dtype, for the output of an `autograd.Function`.

    `Tensor.to` would return the same tensor if it has the dtype already. Compiled by torch 2.11, such a
    function would have two equal outputs and its gradient would be lost.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
