"""What compression left out of gradients so far, as part of a run's state (checkpoint/residuals.py says how
it is named).

A device's residual of a parameter has the shape of what it encodes: the whole parameter where gradients are
summed whole or scattered, its own shard where shards are summed over replicas. PowerSGD's factors are the
same on all devices that sum the same.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from shardwise.checkpoint.residuals import ResidualName
from shardwise.comm import Compressor
from shardwise.comm.low_rank import LowRankSum
from shardwise.mesh import Mesh
from shardwise.parallel.data import DataParallel
from shardwise.parallel.placement import held
from shardwise.plan.grid import COPIES, EXPERT_SHARDS, SHARDS

EVERYONE = {SHARDS: COPIES, EXPERT_SHARDS: f"replica x {EXPERT_SHARDS}"}
"""Axes over which gradients are scattered, and all devices that hold the same parameter in pieces."""


def residual_state(part: DataParallel, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """By name; what is loaded into these tensors is what compression goes on with."""
    for compressor in part.compressors:
        residuals = compressor.residuals()
        for name, parameter in part.model.named_parameters():
            said = _name(compressor, name, parameter, mesh)
            if name in residuals:
                yield str(said), _own(residuals[name], said, compressor.axis in EVERYONE)
            if isinstance(compressor.sums, LowRankSum) and name in compressor.settings.names:
                factor = compressor.sums.factor(name, parameter.shape[-1], compressor.comm.device)
                yield said.of_factor(compressor.group.size()), factor


def _name(compressor: Compressor, name: str, parameter: nn.Parameter, mesh: Mesh) -> ResidualName:
    devices = EVERYONE.get(compressor.axis, compressor.axis)
    box = tuple((part.start, part.stop) for part in held(parameter, whole=compressor.axis in EVERYONE))
    return ResidualName(
        compressor.label.replace(" ", ""), name, box, mesh.coordinate(devices), mesh.size(devices)
    )


def _own(residual: Tensor, said: ResidualName, scattered: bool) -> Tensor:
    """Without the padding that follows."""
    begin, end = said.box[0]
    return residual.flatten(0, 1)[: end - begin] if scattered else residual[: end - begin]
