"""PowerSGD: two thin factors of each matrix in place of the matrix (Vogels et al., 2019).

With M the sum over devices of a gradient (rows, columns) and Q (columns, rank) from the step before, one
power iteration is

    P = M Q, its columns made orthonormal;  Q = Mᵀ P;  M ≈ P Qᵀ

Both products are linear in M, so devices sum the factors of their local matrices, 4 rank (rows + columns)
bytes, and all get the same approximation of the sum. What it leaves out of each device's matrix is that
device's residual: the n residuals add up to what the approximation leaves out of the sum.

torch has PowerSGD as a hook of DistributedDataParallel. It sums inside callbacks of other sums, which never
finishes on gloo with more than one bucket, and it does not support sharded gradients. Here sums are made in
order, and a caller may ask for some rows only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.comm import Comm
from shardwise.comm.compressed_sums import DeviceRows
from shardwise.models.draw import hashed


class LowRankSum:
    """Sums matrices along one axis, approximated by matrices of a low rank."""

    def __init__(
        self, comm: Comm, axis: str, group: dist.ProcessGroup, rank: int, seed: int, dtype: torch.dtype
    ) -> None:
        self.comm, self.axis, self.group = comm, axis, group
        self.rank, self.seed, self.dtype = rank, seed, dtype
        self.factors: dict[str, Tensor] = {}
        """Q of each matrix, (columns, rank): the same on all devices, updated in every step."""

    def rows(self, tensors: Sequence[Tensor], scattered: bool, dtype: torch.dtype) -> DeviceRows:
        """Return zeros for the numbers to be summed and their residuals, each matrix by itself."""
        numbers = tensors[0].new_zeros(sum(tensor.numel() for tensor in tensors), dtype=dtype)
        shapes = [tensor.shape for tensor in tensors]
        return DeviceRows(numbers, DeviceRows.of(numbers.unsqueeze(0), shapes, scattered=False).parts)

    def all_reduce(
        self, names: Sequence[str], rows: DeviceRows, totals: Sequence[Tensor], feedback: bool
    ) -> None:
        """Sum each matrix over all devices into `totals`; `feedback` leaves the residuals in the rows."""
        for total, (left, right) in zip(totals, self._factors(names, rows, feedback), strict=True):
            _multiply(left, right, total)

    def reduce_scatter(
        self, names: Sequence[str], rows: DeviceRows, totals: Sequence[Tensor], feedback: bool
    ) -> None:
        """Sum this device's piece of each (devices, rows, ...) over all devices into `totals` (rows, ...)."""
        here = self.group.rank()
        for total, (left, right) in zip(totals, self._factors(names, rows, feedback), strict=True):
            _multiply(left.chunk(self.group.size())[here], right, total)

    def _factors(self, names: Sequence[str], rows: DeviceRows, feedback: bool) -> list[tuple[Tensor, Tensor]]:
        """Return P (rows, rank) and Q (columns, rank) of each sum over all devices."""
        matrices = [_matrix(tensor) for tensor in rows.parts]
        named = list(zip(names, matrices, strict=True))
        before = [self.factor(name, matrix.shape[1], matrix.device) for name, matrix in named]
        products = [matrix @ factor for matrix, factor in zip(matrices, before, strict=True)]
        left = [_orthonormal(factor) for factor in self._sum(products, rows.numbers)]
        # (Pᵀ M)ᵀ is Mᵀ P in half the time on a CPU, because rows of M are contiguous.
        products = [(factor.T @ matrix).T for matrix, factor in zip(matrices, left, strict=True)]
        right = self._sum(products, rows.numbers[:0])
        for matrix, factor, p, q in zip(matrices, before, left, right, strict=True):
            self._update(matrix, factor, p, q, feedback)
        return list(zip(left, right, strict=True))

    def _update(self, matrix: Tensor, factor: Tensor, p: Tensor, q: Tensor, feedback: bool) -> None:
        """Store Q for the next step, and leave this device's residual in the matrix."""
        finite = bool(q.isfinite().all())  # otherwise the step is skipped, on all devices
        if finite:
            factor.copy_(q)
        if feedback and finite:
            matrix.addmm_(p, q.T, alpha=-1 / self.group.size())
        elif feedback:
            matrix.nan_to_num_(0.0, 0.0, 0.0)

    def _sum(self, factors: Sequence[Tensor], plain: Tensor) -> list[Tensor]:
        """Return the sum of each factor over all devices. The ledger counts the plain bytes of the matrices
        once, with the sum of P."""
        flat = torch.cat([factor.flatten() for factor in factors])
        with self.comm.collective("all_reduce", self.axis, flat, plain):
            dist.all_reduce(flat, group=self.group)
        parts = flat.split_with_sizes([factor.numel() for factor in factors])
        return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]

    def factor(self, name: str, columns: int, device: torch.device) -> Tensor:
        """Return Q of a matrix from the step before, or its random start, which is the same on every device
        and layout."""
        if name not in self.factors:
            generator = torch.Generator().manual_seed(hashed(f"{self.seed}:{name}") >> 1)
            drawn = torch.randn(columns, self.rank, generator=generator, dtype=torch.float64)
            self.factors[name] = drawn.to(device, self.dtype)
        return self.factors[name]


def _orthonormal(factor: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns. With fewer rows than columns, the remaining columns are
    zeros."""
    if not factor.isfinite().all():
        return factor
    directions = torch.linalg.qr(factor).Q
    return nn.functional.pad(directions, (0, factor.shape[1] - directions.shape[1]))


def _multiply(left: Tensor, right: Tensor, into: Tensor) -> None:
    """Write P Qᵀ, from (rows, rank) and (columns, rank), into a tensor."""
    if into.dtype == left.dtype:
        torch.mm(left, right.T, out=_matrix(into))
    else:
        _matrix(into).copy_(left @ right.T)


def _matrix(tensor: Tensor) -> Tensor:
    """Return a view as (rows, columns): the last dim becomes the columns."""
    return tensor.view(-1, tensor.shape[-1])
