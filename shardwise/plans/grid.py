"""The grid of devices: its dimensions, and the dimensions of which each axis consists.

Ranks are laid out with `pipeline` outermost and `tensor` innermost, so that the axes that communicate most
are on neighbouring devices. Experts borrow ranks: the `expert` axis consists of the innermost devices of data
x context x tensor, and `expert_data` of the others, which hold the same experts. If that splits an axis in
two, the grid has two dimensions for it, such as `data.outer` and `data.inner`. `solo` is an axis of one
device.

The names of joined axes have an "x" between them: "data x context". Functions with an argument `degrees` take
a Layout, whose numbers are ints, or the cost model's Space, whose numbers are arrays with one entry per
candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Protocol

from shardwise.config import RANK_AXES, Layout, borrowed_devices
from shardwise.config.schedules import Numbers

SHARDS = "data x context"
"""Devices of one replica that hold the same weights and read different tokens; they shard states."""
COPIES = "replica x data x context"
"""Devices that hold the same weights when nothing is sharded."""
EXPERT_SHARDS = "expert_data"
"""Devices of one replica that hold the same experts."""
JOINED_AXES = (SHARDS, COPIES, "expert", EXPERT_SHARDS, f"replica x {EXPERT_SHARDS}")
"""Axes that join several dimensions of the grid."""

_WITHIN = " within "
"""Separator in the name of neighbours along an axis: "data within 8"."""
Dims = dict[str, int]
"""Dimensions of the grid and their sizes, outermost first."""


class Degrees(Protocol):
    """Number of devices along each axis: ints (Layout) or arrays (Space)."""

    @property
    def pipeline(self) -> Numbers:
        """Number of ranks in the pipeline."""

    @property
    def replica(self) -> Numbers:
        """Number of copies of the sharded model."""

    @property
    def data(self) -> Numbers:
        """Number of data-parallel devices in a replica."""

    @property
    def context(self) -> Numbers:
        """Number of devices that share a sequence."""

    @property
    def tensor(self) -> Numbers:
        """Number of devices that share each matrix."""

    @property
    def expert(self) -> Numbers:
        """Number of devices that share the experts."""


def expert_shards(degrees: Degrees) -> Numbers:
    """Return the number of devices of one replica that hold the same experts, at least 1."""
    shared = degrees.data * degrees.context * degrees.tensor // degrees.expert
    return shared + (shared == 0)


def devices(axis: str, degrees: Degrees) -> Numbers:
    """Return the number of devices along an axis, along joined axes, or along a part of a cut axis."""
    axis, _, count = axis.partition(_WITHIN)
    if count:
        return int(count) + 0 * degrees.data
    return prod(_devices(part, degrees) for part in axis.split(" x "))


def _devices(part: str, degrees: Degrees) -> Numbers:
    axis, _, half = part.partition(".")
    if half:
        inner = borrowed_devices(degrees)[axis]
        return inner if half == "inner" else getattr(degrees, axis) // inner
    if axis == "solo":
        return 1
    return expert_shards(degrees) if axis == EXPERT_SHARDS else getattr(degrees, axis)


def within(axis: str, count: int) -> str:
    """Return the name of the axis of `count` neighbours along an axis."""
    return f"{axis}{_WITHIN}{count}"


def base(axis: str) -> str:
    """Return the axis of such a name of neighbours; another name is returned unchanged."""
    return axis.partition(_WITHIN)[0]


def label(axis: str, degrees: Degrees) -> str:
    """Return the name of a Layout's axis as people read it: without the parts that have one device."""
    if "expert" in axis:
        return axis
    axis, near, count = axis.partition(_WITHIN)
    parts = axis.split(" x ")
    used = [part for part in parts if devices(part, degrees) > 1]
    return " x ".join(used or parts[:1]) + near + count


def describe_degrees(layout: Mapping[str, Numbers]) -> str:
    """Return the degrees above one in words: `data 4 x tensor 2, experts over 4 of them`."""
    degrees = [f"{axis} {layout[axis]}" for axis in RANK_AXES if layout.get(axis, 1) > 1]
    experts = f", experts over {layout['expert']} of them" if layout.get("expert", 1) > 1 else ""
    return f"{' x '.join(degrees) or 'one device'}{experts}"


def grid_dims(layout: Layout) -> Dims:
    """Return the dimensions of a layout's grid."""
    dims: Dims = {}
    for axis in RANK_AXES:
        size, inner = getattr(layout, axis), borrowed_devices(layout).get(axis, 1)
        dims.update(
            {axis: size} if inner in (1, size) else {f"{axis}.outer": size // inner, f"{axis}.inner": inner}
        )
    return {**dims, "solo": 1}


@lru_cache(maxsize=1024)
def members(layout: Layout, axis: str) -> Dims:
    """Return the dimensions of the grid that an axis, or several joined axes, consist of."""
    dims = grid_dims(layout)
    wanted = {dim for part in axis.split(" x ") for dim in _members(layout, dims, part)}
    return {dim: size for dim, size in dims.items() if dim in wanted}


def _members(layout: Layout, dims: Dims, axis: str) -> list[str]:
    if axis not in ("expert", EXPERT_SHARDS):
        return [dim for dim in dims if dim == axis or dim.rpartition(".")[0] == axis]
    borrowed = borrowed_devices(layout)
    inner = [dim for dim in dims if dim.endswith(".inner") or (borrowed.get(dim, 1) == dims[dim] > 1)]
    if axis == "expert":
        return inner
    return [dim for dim in dims if dim.partition(".")[0] in borrowed and dim not in inner]


def joined_name(layout: Layout, axis: str) -> str:
    """Return the name of an axis, composed of the dimensions of the grid that it joins; `solo` for one
    device."""
    return " x ".join(dim for dim, size in members(layout, axis).items() if size > 1) or "solo"
