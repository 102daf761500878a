"""Residuals of gradient compression as part of a run's state (checkpoint/state_key.py has the keys).

A device's residual of a parameter has the shape of what it encodes: the whole parameter where gradients are
all-reduced or reduce-scattered, its shard where shards are summed over replicas. PowerSGD's factors are equal
on all devices of a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from shardwise.checkpoint.state_key import GradientSlice, StateKey, StateKind
from shardwise.comm import CompressedAxisSum
from shardwise.comm.low_rank import LowRankSum
from shardwise.mesh import Mesh
from shardwise.parallel.data import DataParallel
from shardwise.parallel.placement import local_slices
from shardwise.plans.grid import COPIES, EXPERT_SHARDS, SHARDS

ALL_DEVICES = {SHARDS: COPIES, EXPERT_SHARDS: f"replica x {EXPERT_SHARDS}"}
"""For each axis over which gradients are scattered, the axis of all devices that hold pieces of a
parameter."""


def residual_state(part: DataParallel, mesh: Mesh) -> Iterator[tuple[StateKey, Tensor]]:
    """Yield residuals and factors with their keys; compression continues with what is loaded into them."""
    for compressor in part.compressors:
        residuals = compressor.residuals()
        for name, parameter in part.model.named_parameters():
            where = _slice(compressor, parameter, mesh)
            if name in residuals:
                key = StateKey(StateKind.RESIDUAL, name, part=where)
                yield key, _unpadded(residuals[name], where, compressor.axis in ALL_DEVICES)
            if isinstance(compressor.sums, LowRankSum) and name in compressor.settings.names:
                factor = compressor.sums.factor(name, parameter.shape[-1], compressor.comm.device)
                shared = replace(where, device=where.device // compressor.group.size(), devices=None)
                yield StateKey(StateKind.FACTOR, name, part=shared), factor


def _slice(compressor: CompressedAxisSum, parameter: nn.Parameter, mesh: Mesh) -> GradientSlice:
    """Return the slice of a parameter whose gradients this device compresses."""
    devices = ALL_DEVICES.get(compressor.axis, compressor.axis)
    slices = local_slices(parameter, gathered=compressor.axis in ALL_DEVICES)
    box = tuple((part.start, part.stop) for part in slices)
    axis = compressor.label.replace(" ", "")
    return GradientSlice(axis, box, mesh.coordinate(devices), mesh.size(devices))


def _unpadded(residual: Tensor, where: GradientSlice, scattered: bool) -> Tensor:
    """Return a residual without the padding that follows it."""
    begin, end = where.box[0]
    return residual.flatten(0, 1)[: end - begin] if scattered else residual[: end - begin]
