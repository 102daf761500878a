"""The grid of devices: which axes it has, and which of its dimensions an axis is made of.

Ranks are laid out with `pipeline` outermost and `tensor` innermost, so that the axes which talk most sit on
neighbouring devices. Experts borrow ranks: the `expert` axis is made of the innermost devices of data x
context x tensor, and `expert_data` of the others, which hold the same experts. Where that cuts an axis in
two, the grid has `data.outer` and `data.inner` in its place. `solo` is an axis of one device.

Axes are written as one with an "x" between: "data x context". What takes `degrees` takes a Layout, whose
numbers are ints, and the cost model's Space, whose numbers are arrays with one entry a candidate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import Any, Protocol

from shardwise.config import RANK_AXES, Layout, borrowed

SHARDS = "data x context"
"""Devices of one replica that hold the same weights and read different tokens: sharded states are shared
among them."""
COPIES = "replica x data x context"
"""Devices that hold the same weights when nothing is sharded."""
EXPERT_SHARDS = "expert_data"
"""Devices of one replica that hold the same experts."""
JOINED_AXES = (SHARDS, COPIES, "expert", EXPERT_SHARDS, f"replica x {EXPERT_SHARDS}")
"""Axes that are several of the grid's as one."""

_WITHIN = " within "
"""Neighbours along an axis are written "data within 8"."""
Dims = dict[str, int]
"""Dimensions of the grid and their sizes, outermost first."""


class Degrees(Protocol):
    """Devices along each axis: an int each (Layout), or an array each (Space)."""

    @property
    def pipeline(self) -> Any: ...
    @property
    def replica(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def context(self) -> Any: ...
    @property
    def tensor(self) -> Any: ...
    @property
    def expert(self) -> Any: ...


def expert_shards(degrees: Degrees) -> Any:
    """Devices of one replica that hold the same experts; 1 where there are more expert devices than devices
    to borrow."""
    shared = degrees.data * degrees.context * degrees.tensor // degrees.expert
    return shared + (shared == 0)


def devices(axis: str, degrees: Degrees) -> Any:
    """Devices along an axis, along several as one, or along a part of one that experts cut in two."""
    axis, _, count = axis.partition(_WITHIN)
    return (
        int(count) + 0 * degrees.data
        if count
        else prod(_devices(part, degrees) for part in axis.split(" x "))
    )


def _devices(part: str, degrees: Degrees) -> Any:
    axis, _, half = part.partition(".")
    if half:
        inner = borrowed(degrees)[axis]
        return inner if half == "inner" else getattr(degrees, axis) // inner
    if axis == "solo":
        return 1
    return expert_shards(degrees) if axis == EXPERT_SHARDS else getattr(degrees, axis)


def within(axis: str, count: int) -> str:
    """So many neighbours along an axis, as an axis."""
    return f"{axis}{_WITHIN}{count}"


def base(axis: str) -> str:
    """The axis whose neighbours an axis consists of; others are their own."""
    return axis.partition(_WITHIN)[0]


def label(axis: str, degrees: Degrees) -> str:
    """An axis for people to read: its parts with several devices. Those of experts keep their name. Of a
    Layout."""
    if "expert" in axis:
        return axis
    axis, near, count = axis.partition(_WITHIN)
    return (
        (" x ".join(part for part in axis.split(" x ") if devices(part, degrees) > 1) or axis.split(" x ")[0])
        + near
        + count
    )


def describe_degrees(layout: Mapping[str, Any]) -> str:
    """The degrees above one, in words: `data 4 x tensor 2, experts over 4 of them`."""
    degrees = [f"{axis} {layout[axis]}" for axis in RANK_AXES if layout.get(axis, 1) > 1]
    experts = f", experts over {layout['expert']} of them" if layout.get("expert", 1) > 1 else ""
    return f"{' x '.join(degrees) or 'one device'}{experts}"


def grid_dims(layout: Layout) -> Dims:
    """The grid of a layout."""
    dims: Dims = {}
    for axis in RANK_AXES:
        size, inner = getattr(layout, axis), borrowed(layout).get(axis, 1)
        dims.update(
            {axis: size} if inner in (1, size) else {f"{axis}.outer": size // inner, f"{axis}.inner": inner}
        )
    return {**dims, "solo": 1}


@lru_cache(maxsize=1024)
def members(layout: Layout, axis: str) -> Dims:
    """The dimensions of the grid that an axis, or several as one, is made of."""
    dims = grid_dims(layout)
    wanted = {dim for part in axis.split(" x ") for dim in _members(layout, dims, part)}
    return {dim: size for dim, size in dims.items() if dim in wanted}


def _members(layout: Layout, dims: Dims, axis: str) -> list[str]:
    if axis not in ("expert", EXPERT_SHARDS):
        return [dim for dim in dims if dim == axis or dim.rpartition(".")[0] == axis]
    taken = borrowed(layout)
    inner = [dim for dim in dims if dim.endswith(".inner") or (taken.get(dim, 1) == dims[dim] > 1)]
    outer = [dim for dim in dims if dim.partition(".")[0] in taken and dim not in inner]
    return inner if axis == "expert" else outer


def joined_name(layout: Layout, axis: str) -> str:
    """The name of the grid's dimension that is this axis once its members are joined; `solo` where it has one
    device."""
    return " x ".join(dim for dim, size in members(layout, axis).items() if size > 1) or "solo"
