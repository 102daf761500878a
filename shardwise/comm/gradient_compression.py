"""Compression of the gradients that are summed along one axis: which of them, from which step on, and their
residuals.

Matrices are compressed. Vectors and small matrices have few bytes and matter much, so they are summed
exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.codecs import MatrixCodec, RowCodec
from shardwise.comm.comm import Comm
from shardwise.comm.compressed_sums import DeviceRows, EncodedSum
from shardwise.comm.gloo import reduce_scatter
from shardwise.comm.low_rank import LowRankSum
from shardwise.config.compression import SumCompression


@dataclass(frozen=True)
class CompressionSettings:
    """Which gradients of a model are compressed, and how."""

    how: SumCompression
    seed: int
    dtype: torch.dtype
    """Dtype in which gradients are summed."""
    names: frozenset[str]
    """Names of the parameters whose gradients are compressed."""


@dataclass(frozen=True)
class Momentum:
    """Momentum that is summed in place of gradients (optimizers/onebit_adam.py)."""

    decay: float
    piece: Callable[[str], Tensor]
    """Returns this device's piece of a parameter's momentum, the same on all devices that sum it."""


class CompressedAxisSum:
    """Sums gradients along one axis, and holds their residuals: what compression has left out so far."""

    def __init__(self, comm: Comm, axis: str, settings: CompressionSettings, in_thread: bool = False) -> None:
        """`in_thread` says that a background thread makes the sums. Other threads may use the axis at the
        same time, so the sums get a process group of their own: in one group all devices must issue the
        collectives in the same order."""
        group = comm.mesh.second_group(axis) if in_thread else comm.mesh.group(axis)
        assert group is not None, "there are devices to exchange with"
        self.comm, self.axis, self.group, self.settings = comm, axis, group, settings
        self.label = comm.mesh.label(axis)
        self.momentum: Momentum | None = None
        """Momentum to sum in place of gradients, or None."""
        self.sums: EncodedSum | LowRankSum
        codec = settings.how.codec
        if isinstance(codec, MatrixCodec):
            self.sums = LowRankSum(comm, self.label, group, codec.rank, settings.seed, settings.dtype)
        else:
            assert isinstance(codec, RowCodec), "a codec is of rows or of matrices"
            self.sums = EncodedSum(comm, self.label, group, codec, settings.seed)
        self.names: set[str] = set()
        """Names of the parameters whose gradients this object compresses."""
        self._residuals: dict[str, Tensor] = {}
        self._rows: dict[tuple[str, ...], DeviceRows] = {}
        """Residuals by the names that are summed in one call; `residuals` moves them to `_residuals`."""

    @property
    def active(self) -> bool:
        """Whether this step compresses: the warm-up is over, and the gradients are used."""
        return self.comm.step > self.settings.how.warmup and not self.comm.discard_gradients

    def register(self, name: str, shape: Sequence[int]) -> None:
        """Add a parameter to those whose gradients are summed here. If they are compressed, error feedback
        gets a residual of zeros of this shape. Call this for every parameter before the first step."""
        if name not in self.settings.names:
            return
        self.names.add(name)
        if self.settings.how.feedback:
            self._residuals[name] = torch.zeros(*shape, dtype=self.settings.dtype, device=self.comm.device)

    def residuals(self) -> dict[str, Tensor]:
        """Return the residual of each parameter; what a caller writes into it is added to the next sum."""
        for names, rows in self._rows.items():
            self._residuals.update(zip(names, (part.clone() for part in rows.parts), strict=True))
        self._rows.clear()
        return self._residuals

    def all_reduce(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Sum each gradient over all devices, in place."""
        compressed, exact = self._split(names)
        if exact:
            flat = torch.cat([gradients[index].flatten() for index in exact]).to(self.settings.dtype)
            with self.comm.collective("all_reduce", self.label, flat):
                dist.all_reduce(flat, group=self.group)
            _copy_parts(flat, [gradients[index] for index in exact])
        if compressed:
            chosen, parts = [names[index] for index in compressed], [gradients[index] for index in compressed]
            with self._filled_rows(chosen, parts, scattered=False) as rows:
                self.sums.all_reduce(chosen, rows, parts, self.settings.how.feedback)

    def reduce_scatter(
        self, names: Sequence[str], pieces: Sequence[Tensor], totals: Sequence[Tensor]
    ) -> None:
        """Sum this device's piece of each (devices, *shape) over all devices into `totals` (*shape)."""
        compressed, exact = self._split(names)
        if exact:
            rows = torch.cat([pieces[index].flatten(1) for index in exact], dim=1)
            total = torch.empty_like(rows[0])
            with self.comm.collective("reduce_scatter", self.label, rows):
                reduce_scatter(total, rows.flatten(), self.group, self.comm.mesh.worker)
            _copy_parts(total, [totals[index] for index in exact])
        if compressed:
            chosen, parts = [names[index] for index in compressed], [pieces[index] for index in compressed]
            sums = [totals[index] for index in compressed]
            with self._filled_rows(chosen, parts, scattered=True) as filled:
                self.sums.reduce_scatter(chosen, filled, sums, self.settings.how.feedback)

    @contextmanager
    def _filled_rows(
        self, names: Sequence[str], gradients: Sequence[Tensor], scattered: bool
    ) -> Iterator[DeviceRows]:
        """Yield rows of gradients plus residuals; what the caller leaves in them is the new residual.
        Residuals are stored without the loss scale, which may change from step to step."""
        feedback = self.settings.how.feedback
        if feedback:
            rows = self._residual_rows(names, scattered)
        else:
            rows = self.sums.rows(gradients, scattered, self.settings.dtype)
        scale = self.comm.loss_scale if feedback else 1.0
        if scale != 1.0:
            rows.numbers.mul_(scale)
        for name, part, gradient in zip(names, rows.parts, gradients, strict=True):
            self._add(name, gradient, part)
        yield rows
        if scale != 1.0:
            rows.numbers.div_(scale)

    def _residual_rows(self, names: Sequence[str], scattered: bool) -> DeviceRows:
        """Return the rows that hold the residuals of these parameters, which are summed in one call."""
        key = tuple(names)
        if key not in self._rows:
            residuals = [self._residuals.pop(name) for name in names]
            rows = self._rows[key] = self.sums.rows(residuals, scattered, self.settings.dtype)
            for residual, part in zip(residuals, rows.parts, strict=True):
                part.copy_(residual)
                _used_on_this_stream(residual)
        return self._rows[key]

    def _add(self, name: str, gradient: Tensor, part: Tensor) -> None:
        """Add a gradient to its part of the rows, or the momentum that this gradient leads to."""
        if self.momentum is None:
            part.add_(gradient)
            return
        part.add_(gradient, alpha=1 - self.momentum.decay)
        before = self.momentum.piece(name).to(part.device)
        # Every device of the group adds the same momentum, so each adds 1 / devices of it. Gradients have the
        # loss scale, and the sum is divided by it later.
        factor = self.momentum.decay * self.comm.loss_scale / self.group.size()
        # FSDP2 pads shards to equal numbers of rows; the momentum has no padding.
        part[: len(before)].add_(before, alpha=factor)

    def _split(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Return the indices of compressed parameters, and of the others."""
        compressed = [index for index, name in enumerate(names) if name in self.names]
        return compressed, [index for index, name in enumerate(names) if name not in self.names]


def _used_on_this_stream(tensor: Tensor) -> None:
    """Keep the memory of a tensor from being used again until this stream has read it.

    Sums run on another stream than the one on which the first residuals are made. Without this, the memory
    of a freed residual may be overwritten before it is copied.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _copy_parts(flat: Tensor, into: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor into these tensors."""
    for part, tensor in zip(flat.split_with_sizes([each.numel() for each in into]), into, strict=True):
        tensor.copy_(part.view_as(tensor))
