"""PowerSGD: two thin factors of each matrix in place of the matrix (Vogels et al., 2019).

With M the sum over devices of a gradient (rows, columns) and Q (columns, rank) from the step before, one
power iteration is

    P = M Q, its columns made orthonormal;  Q = Mᵀ P;  M ≈ P Qᵀ

Both products are linear in M, so devices sum the factors of their own matrices, 4 rank (rows + columns)
bytes, and all arrive at the same approximation of the sum. What it leaves out of each device's own part stays
there as residual: the n residuals add up to what the approximation leaves out of the sum.

torch has PowerSGD as a hook of DistributedDataParallel. It sums inside callbacks of other sums, which never
finishes on gloo with more than one bucket, and does not know sharded gradients; here sums are made in order,
and a caller may keep some rows only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.comm import Comm
from shardwise.comm.compressed_sums import Rows


class LowRankSum:
    """Sums of matrices along one axis, as products of this rank."""

    def __init__(
        self, comm: Comm, axis: str, group: dist.ProcessGroup, rank: int, seed: int, dtype: torch.dtype
    ) -> None:
        self.comm, self.axis, self.group, self.rank, self.seed, self.dtype = (
            comm,
            axis,
            group,
            rank,
            seed,
            dtype,
        )
        self.factors: dict[str, Tensor] = {}
        """Of each matrix, Q: (columns, rank), the same on all devices, from step to step."""

    def rows(self, tensors: Sequence[Tensor], scattered: bool, dtype: torch.dtype) -> Rows:
        """Zeros for what is added up and for what is left out of it: each matrix by itself."""
        numbers = tensors[0].new_zeros(sum(tensor.numel() for tensor in tensors), dtype=dtype)
        return Rows(
            numbers,
            Rows.of(numbers.unsqueeze(0), [tensor.shape for tensor in tensors], scattered=False).parts,
        )

    def all_reduce(self, names: Sequence[str], rows: Rows, totals: Sequence[Tensor], take: bool) -> None:
        """Sum each over all devices into `totals`. To `take` leaves in the rows what was left out."""
        for total, (left, right) in zip(totals, self._factors(names, rows, take), strict=True):
            _multiply(left, right, total)

    def reduce_scatter(self, names: Sequence[str], rows: Rows, totals: Sequence[Tensor], take: bool) -> None:
        """Of each (devices, rows, ...), a piece for each device, sum this device's over all devices into
        `totals` (rows, ...)."""
        here = self.group.rank()
        for total, (left, right) in zip(totals, self._factors(names, rows, take), strict=True):
            _multiply(left.chunk(self.group.size())[here], right, total)

    def _factors(self, names: Sequence[str], rows: Rows, take: bool) -> list[tuple[Tensor, Tensor]]:
        """Of each sum over all devices, what it is approximately the product of: (rows, rank) and (columns,
        rank)."""
        matrices = [_matrix(tensor) for tensor in rows.parts]
        before = [
            self.factor(name, matrix.shape[1], matrix.device)
            for name, matrix in zip(names, matrices, strict=True)
        ]
        left = self._summed(
            [matrix @ factor for matrix, factor in zip(matrices, before, strict=True)], rows.numbers
        )
        left = [_orthonormal(factor) for factor in left]
        # (Pᵀ M)ᵀ is Mᵀ P in half the time on a CPU: rows of M lie one after the other.
        right = self._summed(
            [(factor.T @ matrix).T for matrix, factor in zip(matrices, left, strict=True)], rows.numbers[:0]
        )
        for matrix, factor, across, columns in zip(matrices, before, left, right, strict=True):
            finite = bool(columns.isfinite().all())  # else the step is skipped, on all devices
            if finite:
                factor.copy_(columns)
            if take and finite:
                matrix.addmm_(across, columns.T, alpha=-1 / self.group.size())
            elif take:
                matrix.nan_to_num_(0.0, 0.0, 0.0)
        return list(zip(left, right, strict=True))

    def _summed(self, factors: Sequence[Tensor], plain: Tensor) -> list[Tensor]:
        """Each summed over all devices. Both sums together stand for one of the matrices, which the first one
        answers for."""
        flat = torch.cat([factor.flatten() for factor in factors])
        with self.comm.collective("all_reduce", self.axis, flat, plain):
            dist.all_reduce(flat, group=self.group)
        parts = flat.split_with_sizes([factor.numel() for factor in factors])
        return [part.view_as(factor) for part, factor in zip(parts, factors, strict=True)]

    def factor(self, name: str, columns: int, device: torch.device) -> Tensor:
        """Of a matrix, Q of the step before; in the first step, what it begins with: the same on every device
        and layout."""
        if name not in self.factors:
            digest = hashlib.blake2b(f"{self.seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn = torch.randn(columns, self.rank, generator=generator, dtype=torch.float64)
            self.factors[name] = drawn.to(device, self.dtype)
        return self.factors[name]


def _orthonormal(factor: Tensor) -> Tensor:
    """Columns of length 1 at right angles; zeros, of a matrix of zeros, are as good as any. Of fewer rows
    than columns all directions are taken, and the columns left over are zeros."""
    if not factor.isfinite().all():
        return factor
    directions = torch.linalg.qr(factor).Q
    return nn.functional.pad(directions, (0, factor.shape[1] - directions.shape[1]))


def _multiply(left: Tensor, right: Tensor, into: Tensor) -> None:
    """(rows, rank) by (columns, rank), transposed."""
    if into.dtype == left.dtype:
        torch.mm(left, right.T, out=_matrix(into))
    else:
        _matrix(into).copy_(left @ right.T)


def _matrix(tensor: Tensor) -> Tensor:
    """As (rows, columns), a view: the last dim are the columns."""
    return tensor.view(-1, tensor.shape[-1])
