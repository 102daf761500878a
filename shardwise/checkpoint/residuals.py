"""What compression left out of gradients, in a checkpoint: one tensor for each device that has some.

Its name says which slice of which parameter it is of, and which device of how many has it:

    residual.data.blocks.0.attention.query.weight@0:64,0:64/1of4

Over all devices they add up to what the weights have not been told yet. A run that goes on with the same
layout reads back each device's own, and goes on to the bit. On another layout their sum counts: every device
gets an equal share of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from shardwise.checkpoint.contents import Contents

RESIDUAL, FACTOR = "residual.", "factor."
Box = tuple[tuple[int, int], ...]
"""Where a slice begins and ends in each dim."""
_NAME = re.compile(r"residual\.([^.]+)\.(.+)@([\d:,]*)/(\d+)of(\d+)")


@dataclass(frozen=True)
class ResidualName:
    """Whose residual a tensor is."""

    axis: str
    """Along which gradients are summed."""
    parameter: str
    box: Box
    device: int
    devices: int

    def __str__(self) -> str:
        return f"{RESIDUAL}{self.axis}.{self.parameter}@{_box(self.box)}/{self.device}of{self.devices}"

    def of_factor(self, together: int) -> str:
        """The name of PowerSGD's factor of the same slice, which is one for so many devices that sum
        together."""
        return f"{FACTOR}{self.axis}.{self.parameter}@{_box(self.box)}/{self.device // together}"

    @classmethod
    def parse(cls, name: str) -> ResidualName | None:
        """From a name in a checkpoint; None: it is of something else."""
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        box = [tuple(map(int, part.split(":"))) for part in found[3].split(",") if part.count(":") == 1]
        return cls(
            found[1], found[2], tuple((begin, end) for begin, end in box), int(found[4]), int(found[5])
        )


def _box(box: Box) -> str:
    return ",".join(f"{begin}:{end}" for begin, end in box)


def deal_out(state: dict[str, Tensor], contents: Contents) -> None:
    """Give this device, in the residuals it has now, its share of what all devices had. Where it has two of a
    parameter, of sums along two axes, the first gets all of it."""
    stored = [found for name in contents.tensors if (found := ResidualName.parse(name)) is not None]
    dealt: set[str] = set()
    for name, tensor in state.items():
        own = ResidualName.parse(name)
        assert own is not None, "a residual's name says whose it is"
        tensor.zero_()
        for other in stored if own.parameter not in dealt else []:
            if other.parameter == own.parameter and len(other.box) == len(own.box):
                _add(tensor, own, contents.read(str(other)), other)
        dealt.add(own.parameter)


def _add(tensor: Tensor, own: ResidualName, values: Tensor, other: ResidualName) -> None:
    for dim, ((begin, end), (first, last)) in enumerate(zip(own.box, other.box, strict=True)):
        low, high = max(begin, first), min(end, last)
        if low >= high:
            return
        tensor, values = (
            tensor.narrow(dim, low - begin, high - low),
            values.narrow(dim, low - first, high - low),
        )
    tensor.add_(values.to(tensor), alpha=1 / own.devices)
