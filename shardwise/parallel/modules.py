"""Modules that the devices of an axis compute together, as classes that can be read and printed.

Each way to share a module's work is a class with a `forward` of its own: `Column`, `Row` and `Gathered` in
tensor.py, `Exchanged` in expert.py, `Ring` in context.py. Whatever the model's module is, ours, torch's or a
user's, it becomes a subclass of both: a `Linear` split by outputs is a `ColumnLinear`, and `super().forward`
is what the module computes by itself, now on its part. Printed, it says which part that is:

    (query): ColumnLinear(in_features=64, out_features=64, bias=False, tensor 0 of 2: outputs 0:32 of 64)

Weights are DTensors (who has which slice: sharded further by FSDP2, saved, loaded and compared by it), and
the module's own code must see plain tensors. So a property of each weight's name reads this device's part,
while `named_parameters` and all that builds on it find the DTensor.

models/replace.py says how the new module takes the place of the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Comm
from shardwise.models.replace import Replacement, join_texts, replacement
from shardwise.optim import local
from shardwise.plan.chunks import largest_part
from shardwise.plan.sharding import Role


@dataclass(frozen=True)
class Share:
    """This device's place among those that share a module."""

    comm: Comm
    axis: str
    index: int
    size: int
    role: Role | None = None
    """What the sharding table says of the module, where it does."""

    @classmethod
    def of(cls, comm: Comm, axis: str, role: Role | None = None) -> Share:
        """The share of this rank on an axis of its mesh."""
        return cls(comm, axis, comm.mesh.coordinate(axis), comm.mesh.size(axis), role)

    def range_of(self, length: int) -> range:
        """This device's part of so many rows, dealt out as by torch.chunk: the last parts may be shorter, or
        empty."""
        longest = largest_part(length, self.size)
        return range(min(length, longest * self.index), min(length, longest * (self.index + 1)))


class ParallelModule(Replacement):
    """A module of which the devices of an axis have a share each. Subclasses say how, and come before the
    module's own class: so its names are such as a user's module does not have."""

    parallel_share: Share

    def parallel_part(self, name: str, part: Tensor) -> Tensor | None:
        """What the module's own code sees of a weight, of which this device holds `part`."""
        return part

    def describe_share(self) -> str:
        """This device's part, in words."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """What the module says of itself, and its share."""
        share = (
            f"{self.parallel_share.axis} {self.parallel_share.index} of {self.parallel_share.size}: "
            f"{self.describe_share()}"
        )
        return join_texts(super().extra_repr(), share)


def parallel_module(
    module: nn.Module, kind: type[ParallelModule], share: Share, **attributes: object
) -> nn.Module:
    """Return a module that takes the place of this one and computes this device's share of it, in the way of
    `kind`. Its weights read as this device's part of them."""
    parts = {name: _part(name) for name in module._parameters}
    return replacement(module, kind, parts, parallel_share=share, **attributes)


@cache
def _part(name: str) -> property:
    def read(self: ParallelModule) -> Tensor | None:
        weight = self._parameters[name]
        if weight is None or (isinstance(weight, DTensor) and weight.device_mesh.ndim > 1):
            return weight  # FSDP2 holds it in shards, on a mesh of more axes, and is the one who asks
        return self.parallel_part(name, local(weight))

    return property(read)
