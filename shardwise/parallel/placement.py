"""Who holds what: the slice of a parameter that this rank keeps.

A parameter may be split twice: by its role in a tensor-parallel or expert-parallel group, and then, whatever
that left, by FSDP2 over the devices that hold the same weights. A DTensor carries both, the second as the
outer axis. Each split deals out a dim in equal pieces, rounded up, so that the last ones may be smaller or
empty (as torch.chunk does).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shardwise.optim import local


def held(parameter: Tensor, whole: bool = False) -> tuple[slice, ...]:
    """The slice of the whole parameter that this rank holds; or, `whole`, that it computes with: before FSDP2
    splits it."""
    starts, lengths = [0] * parameter.ndim, list(parameter.shape)
    if isinstance(parameter, DTensor):
        coordinate = parameter.device_mesh.get_coordinate()
        assert coordinate is not None, "this rank is on the mesh"
        for axis in reversed(
            range(int(whole), parameter.device_mesh.ndim)
        ):  # FSDP2 splits last, and its axis comes first
            placement = parameter.placements[axis]
            if isinstance(placement, Replicate):
                continue
            dim: int = placement.dim  # type: ignore[attr-defined]
            piece = -(-lengths[dim] // parameter.device_mesh.size(axis))
            begin = min(lengths[dim], piece * coordinate[axis])
            starts[dim] += begin
            lengths[dim] = min(piece, lengths[dim] - begin)
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))


def own_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """What this rank holds of a parameter, and which slice of it that is."""
    return local(parameter), held(parameter)


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's slice into its shard. No communication: every rank
    has the whole."""
    own, where = own_part(parameter)
    own.copy_(full[where])
