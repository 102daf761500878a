"""The slice of a parameter that this rank holds.

A parameter may be split twice: by its role in a tensor-parallel or expert-parallel group, and then by FSDP2
over the devices that hold the same part. A DTensor records both, the second as the outer axis. Each split
cuts a dim into equal pieces, rounded up, so that the last ones may be smaller or empty (as torch.chunk does).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise.optim import local


def local_slices(parameter: Tensor, gathered: bool = False) -> tuple[slice, ...]:
    """Return the slice of the whole parameter that this rank holds, or, with `gathered`, that it computes
    with when FSDP2 has gathered it."""
    starts, lengths = [0] * parameter.ndim, list(parameter.shape)
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is on the mesh"
        # FSDP2 splits last, and its axis comes first.
        for axis in reversed(range(int(gathered), parameter.device_mesh.ndim)):
            placement = parameter.placements[axis]
            if isinstance(placement, Replicate):
                continue
            dim: int = placement.dim  # type: ignore[attr-defined]
            piece = -(-lengths[dim] // parameter.device_mesh.size(axis))
            begin = min(lengths[dim], piece * coordinate[axis])
            starts[dim] += begin
            lengths[dim] = min(piece, lengths[dim] - begin)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """Return this rank's part of a parameter and its slice of the whole."""
    return local(parameter), local_slices(parameter)


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy this rank's slice of a whole tensor, which every rank has, into a parameter."""
    part, slices = local_part(parameter)
    part.copy_(full[slices])
