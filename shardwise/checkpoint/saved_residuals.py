"""What compression left out of gradients, in a checkpoint: one tensor for each device that has some.

Its key says which slice of which parameter it is of, and which device of how many has it (state_key.py). Over
all devices they add up to what the weights have not been told yet. A run that goes on with the same layout
reads back each device's own, and goes on to the bit. On another layout their sum counts: every device gets an
equal share of it.
"""

from __future__ import annotations

from torch import Tensor

from shardwise.checkpoint.state_key import Box, StateKey, StateKind
from shardwise.checkpoint.tensor_files import Contents


def deal_out(state: dict[StateKey, Tensor], contents: Contents) -> None:
    """Give this device, in the residuals it has now, its share of what all devices had. Where it has two of a
    parameter, of sums along two axes, the first gets all of it."""
    stored = [key for key in contents.tensors if key.kind is StateKind.RESIDUAL]
    dealt: set[str] = set()
    for own, tensor in state.items():
        assert own.part is not None, "a residual's key says which slice it is of"
        assert own.part.devices is not None, "and how many devices have one"
        tensor.zero_()
        for other in stored if own.name not in dealt else []:
            if other.part is not None and other.name == own.name and len(other.part.box) == len(own.part.box):
                _add(tensor, own.part.box, contents.read(other), other.part.box, 1 / own.part.devices)
        dealt.add(own.name)


def _add(tensor: Tensor, own: Box, values: Tensor, other: Box, factor: float) -> None:
    """Add `factor` times the values, which lie in the box `other`, to the tensor in the box `own`,
    where the two boxes overlap."""
    for dim, ((begin, end), (first, last)) in enumerate(zip(own, other, strict=True)):
        low, high = max(begin, first), min(end, last)
        if low >= high:
            return
        tensor, values = (
            tensor.narrow(dim, low - begin, high - low),
            values.narrow(dim, low - first, high - low),
        )
    tensor.add_(values.to(tensor), alpha=factor)
