"""Residuals of compressed gradients in a checkpoint: one tensor for each device that has one.

The key of a residual names the parameter, the slice and the device (state_key.py). Summed over all devices,
residuals are the part of the gradients that compression has not applied to the weights yet. A run that
continues with the same layout reads back the residual of each device, and is identical to the bit. On another
layout, every device gets an equal share of the sum.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.checkpoint.state_key import Box, StateKey, StateKind
from shardwise.checkpoint.tensor_files import Contents


def redistribute_residuals(state: dict[StateKey, Tensor], contents: Contents) -> None:
    """Fill this device's residuals with its share of the sum over all saved ones. If it has two of a
    parameter, for sums along two axes, the first gets all of it."""
    filled: set[str] = set()
    for key, tensor in state.items():
        tensor.zero_()
        if key.name not in filled:
            _add_saved(key, tensor, contents)
        filled.add(key.name)


def _add_saved(key: StateKey, tensor: Tensor, contents: Contents) -> None:
    part = key.part
    assert part is not None, "a residual's key names a slice"
    assert part.devices is not None, "and the number of its devices"
    for saved in contents.tensors:
        if saved.kind is not StateKind.RESIDUAL or saved.name != key.name or saved.part is None:
            continue
        if len(saved.part.box) == len(part.box):
            _add(tensor, part.box, contents.read(saved), saved.part.box, 1 / part.devices)


def _add(tensor: Tensor, tensor_box: Box, values: Tensor, values_box: Box, factor: float) -> None:
    """Add `factor` times the values to the tensor where their two boxes overlap."""
    for dim, ((begin, end), (first, last)) in enumerate(zip(tensor_box, values_box, strict=True)):
        low, length = max(begin, first), min(end, last) - max(begin, first)
        if length <= 0:
            return
        tensor, values = tensor.narrow(dim, low - begin, length), values.narrow(dim, low - first, length)
    tensor.add_(values.to(tensor), alpha=factor)
