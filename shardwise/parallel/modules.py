"""Modules that the devices of an axis compute together, as classes that can be read and printed.

Each way to share a module's work is a class with a `forward` of its own: `Column`, `Row` and `Gathered` in
tensor.py, `Exchanged` in expert.py, `Ring` in context.py. Whatever the model's module is, ours, torch's or a
user's, it becomes a subclass of both: a `Linear` split by outputs is a `ColumnLinear`, and `super().forward`
is what the module computes by itself, now on its part. Printed, it says which part that is:

    (query): ColumnLinear(in_features=64, out_features=64, bias=False, tensor 0 of 2: outputs 0:32 of 64)

Weights are DTensors (who has which slice: sharded further by FSDP2, saved, loaded and compared by it), and
the module's own code must see plain tensors. So a property of each weight's name reads this device's part,
while `named_parameters` and all that builds on it find the DTensor.

It stays the same object, with the same parameters' names, hooks and parent, and gets another class, as FSDP2
does it too. A new object in its place would miss whoever else holds the old one: a user's module may keep its
layers in a list, or use one twice. One class serves all modules of a kind, because the compiler compiles
blocks anew whose parts differ in class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.comm import Comm
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


class ParallelModule(nn.Module):
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
        return ", ".join(text for text in (super().extra_repr(), share) if text)


class _ForwardOfInstance(nn.Module):
    """Comes before the class of a module that had a `forward` set on the instance, where it would hide those
    of all classes."""

    parallel_forward_of_instance: Callable[..., Any]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.parallel_forward_of_instance(*inputs, **named)


def make_parallel(module: nn.Module, kind: type[ParallelModule], share: Share) -> None:
    """Let this device compute its share of a module, in the way of `kind`."""
    bases: tuple[type[nn.Module], ...] = (kind, type(module))
    if "forward" in vars(module):
        vars(module)["parallel_forward_of_instance"] = vars(module).pop("forward")
        bases = (kind, _ForwardOfInstance, type(module))
    vars(module)["parallel_share"] = share
    module.__class__ = _joined(bases, tuple(module._parameters))


@cache
def _joined(bases: tuple[type[nn.Module], ...], weights: tuple[str, ...]) -> type[nn.Module]:
    """The class that is all of these, and whose weights read as this device's part of them."""
    kind, *_, own = bases
    return type(
        f"{kind.__name__}{own.__name__}",
        bases,
        {"__module__": own.__module__, **{name: _part(name) for name in weights}},
    )


def _part(name: str) -> property:
    def read(self: ParallelModule) -> Tensor | None:
        weight = self._parameters[name]
        if weight is None or (isinstance(weight, DTensor) and weight.device_mesh.ndim > 1):
            return weight  # FSDP2 holds it in shards, on a mesh of more axes, and is the one who asks
        return self.parallel_part(name, local(weight))

    return property(read)
