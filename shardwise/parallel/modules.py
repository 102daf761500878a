"""Modules that the devices of an axis compute together, as classes that can be read and printed.

Each way to share a module's work is a class with its own `forward`: `Column`, `Row` and `Gathered` in
tensor.py, `Exchanged` in expert.py, `Ring` in context.py. A module of the model, whether shardwise's, torch's
or a user's, is replaced by an instance of a subclass of both: a `Linear` split by outputs is a
`ColumnLinear`, whose `super().forward` is that of `Linear`, on this device's part. Its text names the part:

    (query): ColumnLinear(in_features=64, out_features=64, bias=False, tensor 0 of 2: outputs 0:32 of 64)

Weights are DTensors, which record the slices of each device: FSDP2 shards them further, and checkpoints save
and load them. The module's code must see plain tensors. So a property with each weight's name reads this
device's part, while `named_parameters` and all that builds on it return the DTensor.

models/replace.py puts the new module in the place of the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Comm
from shardwise.models.replace import Replacement, join_texts, replacement
from shardwise.optim import local
from shardwise.plans.chunks import largest_part
from shardwise.plans.sharding import Role


@dataclass(frozen=True)
class Share:
    """This device's place among those that share a module."""

    comm: Comm
    axis: str
    index: int
    size: int
    role: Role | None = None
    """The module's role in the sharding table, if it has one."""
    splits_sequence: bool = True
    """Whether each device has its own part of the sequence between the modules that share a matrix. Otherwise
    all devices have the same activations there."""

    @classmethod
    def of(cls, comm: Comm, axis: str, role: Role | None = None) -> Share:
        """Return the share of this rank on an axis of its mesh."""
        return cls(comm, axis, comm.mesh.coordinate(axis), comm.mesh.size(axis), role)

    def range_of(self, length: int) -> range:
        """Return this device's part of `length` rows, split as by torch.chunk: the last parts may be shorter,
        or empty."""
        longest = largest_part(length, self.size)
        return range(min(length, longest * self.index), min(length, longest * (self.index + 1)))


class ParallelModule(Replacement):
    """Base of modules of which each device of an axis has a share. It precedes the module's own class, so its
    attributes have names that a user's module does not have."""

    parallel_share: Share

    def parallel_part(self, name: str, part: Tensor) -> Tensor | None:
        """Return what the module's code reads for a weight of which this device holds `part`."""
        return part

    def describe_share(self) -> str:
        """Return a text that names this device's part."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the module's description and its share."""
        share = self.parallel_share
        part = f"{share.axis} {share.index} of {share.size}: {self.describe_share()}"
        return join_texts(super().extra_repr(), part)


def parallel_module(
    module: nn.Module, kind: type[ParallelModule], share: Share, **attributes: Any
) -> nn.Module:
    """Return a module that computes this device's share of this one, in the way of `kind`; reading a weight
    gives this device's part."""
    parts = {name: _part(name) for name in module._parameters}
    return replacement(module, kind, parts, parallel_share=share, **attributes)


@cache
def _part(name: str) -> property:
    def read(self: ParallelModule) -> Tensor | None:
        weight = self._parameters[name]
        if weight is None or (isinstance(weight, DTensor) and weight.device_mesh.ndim > 1):
            return weight  # FSDP2 holds it in shards, on a mesh of more axes, and reads it itself
        return self.parallel_part(name, local(weight))

    return property(read)
