"""The exact global gradient norm, for any sharding.

A gradient that is sharded over some axes is held in disjoint pieces, so its squares are summed over these
axes and no others: a sum over replicas would count a gradient several times. Parameters are grouped by the
axes they are sharded over, and each group costs one all-reduce of a single number per axis. All ranks process
the groups in alphabetical order, so that collectives match.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shardwise.comm import Comm
from shardwise.models.torch_dtypes import wide


def global_norm(parameters: Iterable[nn.Parameter], comm: Comm) -> Tensor:
    """Return the 2-norm of all gradients together, the same on every rank, in float32 or float64."""
    pieces: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
    dtypes = set()  # dtypes of weights, because a pipeline stage of frozen weights has no gradients
    for parameter in parameters:
        dtypes.add(wide(parameter.dtype))
        if parameter.grad is not None:
            pieces[sharded_axes(parameter.grad)].append(local_values(parameter.grad))
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    total = torch.zeros((), device=comm.device, dtype=widest)
    for axes, gradients in sorted(pieces.items()):
        squares = _sum_of_squares(gradients).to(comm.device)  # offloaded gradients are in host memory
        for axis in axes:
            comm.all_reduce(squares, axis)
        total = total + squares
    return comm.all_reduce(total, "pipeline").sqrt()  # each stage has different parameters


def _sum_of_squares(gradients: Sequence[Tensor]) -> Tensor:
    norms = torch._foreach_norm(list(gradients), 2, dtype=wide(gradients[0].dtype))
    return torch.stack(norms).square().sum()


def sharded_axes(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the mesh axes that a tensor is split over; none for a plain tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names
    assert names is not None, "every mesh of ours has named axes"
    return tuple(
        name
        for name, placement in zip(names, tensor.placements, strict=True)
        if not isinstance(placement, Replicate)
    )


def local(tensor: Tensor) -> Tensor:
    """Return the piece of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_values(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient that this rank holds; for a sparse one, those of its rows."""
    return gradient.values() if gradient.is_sparse else local(gradient)


def first_non_finite(named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """Return the name of the first parameter whose gradient on this rank has a NaN or an infinity."""
    for name, parameter in named:
        if parameter.grad is not None and not torch.isfinite(local_values(parameter.grad)).all():
            return name
    return None
