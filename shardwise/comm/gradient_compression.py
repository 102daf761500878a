"""Compression of the gradients that are summed along one axis: which of them, from which step on, and their
residuals.

Matrices are compressed; vectors and small matrices, which weigh little and matter much, are summed as they
are.
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
from shardwise.comm.compressed_sums import EncodedSum, Rows
from shardwise.comm.gloo import reduce_scatter
from shardwise.comm.low_rank import LowRankSum
from shardwise.config.compression import SumCompression


@dataclass(frozen=True)
class CompressionSettings:
    """What of a model's gradients is compressed, and how."""

    how: SumCompression
    seed: int
    dtype: torch.dtype
    """Of gradients when they are summed."""
    names: frozenset[str]
    """Of the parameters that are compressed."""


@dataclass(frozen=True)
class Momentum:
    """What is summed in place of gradients (optim/onebit.py)."""

    decay: float
    of: Callable[[str], Tensor]
    """This device's piece of a parameter's momentum, the same on all devices that sum it."""


class Compressor:
    """Sums gradients along one axis, and keeps what compression leaves out of them."""

    def __init__(self, comm: Comm, axis: str, settings: CompressionSettings, apart: bool = False) -> None:
        """`apart`: sums are made in a thread of their own, while others use the axis."""
        group = comm.mesh.second_group(axis) if apart else comm.mesh.group(axis)
        assert group is not None, "there are devices to exchange with"
        self.comm, self.axis, self.group, self.settings = comm, axis, group, settings
        self.label = comm.mesh.label(axis)
        self.momentum: Momentum | None = None
        """None: gradients are summed."""
        self.sums: EncodedSum | LowRankSum
        codec = settings.how.codec
        if isinstance(codec, MatrixCodec):
            self.sums = LowRankSum(comm, self.label, group, codec.rank, settings.seed, settings.dtype)
        else:
            assert isinstance(codec, RowCodec), "a codec is of rows or of matrices"
            self.sums = EncodedSum(comm, self.label, group, codec, settings.seed)
        self.names: set[str] = set()
        """Of the parameters whose gradients it compresses."""
        self._residuals: dict[str, Tensor] = {}
        self._rows: dict[tuple[str, ...], Rows] = {}
        """Residuals of what is summed at once, where they were used since they were last asked for."""

    @property
    def begun(self) -> bool:
        """Whether the warm-up, in which everything is sent as it is, is over; and the step counts."""
        return self.comm.step > self.settings.how.warmup and not self.comm.only_to_look

    def follow(self, name: str, shape: Sequence[int]) -> None:
        """Before the first step, of each parameter: keep what is left out of its gradients, if they are
        compressed."""
        if name not in self.settings.names:
            return
        self.names.add(name)
        if self.settings.how.feedback:
            self._residuals[name] = torch.zeros(*shape, dtype=self.settings.dtype, device=self.comm.device)

    def residuals(self) -> dict[str, Tensor]:
        """By parameter, each a tensor of its own: what is written into it is what the next sum adds."""
        for names, rows in self._rows.items():
            self._residuals.update(zip(names, (part.clone() for part in rows.parts), strict=True))
        self._rows.clear()
        return self._residuals

    def all_reduce(self, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Sum each over all devices, in place."""
        large, small = self._sorted(names)
        if small:
            flat = torch.cat([gradients[index].flatten() for index in small]).to(self.settings.dtype)
            with self.comm.collective("all_reduce", self.label, flat):
                dist.all_reduce(flat, group=self.group)
            for index, total in zip(
                small, flat.split_with_sizes([gradients[index].numel() for index in small]), strict=True
            ):
                gradients[index].copy_(total.view_as(gradients[index]))
        if large:
            chosen, parts = [names[index] for index in large], [gradients[index] for index in large]
            with self._filled(chosen, parts, scattered=False) as rows:
                self.sums.all_reduce(chosen, rows, parts, self.settings.how.feedback)

    def reduce_scatter(self, names: Sequence[str], pieces: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """Of each (devices, *shape), one piece for each device, sum this device's over all devices into `own`
        (*shape)."""
        large, small = self._sorted(names)
        if small:
            rows = torch.cat([pieces[index].flatten(1) for index in small], dim=1)
            total = torch.empty_like(rows[0])
            with self.comm.collective("reduce_scatter", self.label, rows):
                reduce_scatter(total, rows.flatten(), self.group, self.comm.mesh.worker)
            for index, part in zip(
                small, total.split_with_sizes([own[index].numel() for index in small]), strict=True
            ):
                own[index].copy_(part.view_as(own[index]))
        if large:
            chosen, parts = [names[index] for index in large], [pieces[index] for index in large]
            with self._filled(chosen, parts, scattered=True) as filled:
                self.sums.reduce_scatter(
                    chosen, filled, [own[index] for index in large], self.settings.how.feedback
                )

    @contextmanager
    def _filled(self, names: Sequence[str], gradients: Sequence[Tensor], scattered: bool) -> Iterator[Rows]:
        """What is to be sent, gradients and residuals; what is left there is kept. Residuals are kept without
        the loss scale, which may change from step to step."""
        if not self.settings.how.feedback:
            rows = self.sums.rows(gradients, scattered, self.settings.dtype)
        elif (key := tuple(names)) in self._rows:
            rows = self._rows[key]
        else:
            rows = self._rows[key] = self.sums.rows(
                [self._residuals[name] for name in names], scattered, self.settings.dtype
            )
            for name, part in zip(names, rows.parts, strict=True):
                part.copy_(self._residuals.pop(name))
        scale = self.comm.loss_scale if self.settings.how.feedback else 1.0
        if scale != 1.0:
            rows.numbers.mul_(scale)
        for name, part, gradient in zip(names, rows.parts, gradients, strict=True):
            part.add_(gradient, alpha=1.0 if self.momentum is None else 1 - self.momentum.decay)
            if self.momentum is not None:
                own = self.momentum.of(name).to(part.device)
                part[: len(own)].add_(
                    own, alpha=self.momentum.decay * self.comm.loss_scale / self.group.size()
                )
        yield rows
        if scale != 1.0:
            rows.numbers.div_(scale)

    def _sorted(self, names: Sequence[str]) -> tuple[list[int], list[int]]:
        """Indices of those that are compressed, and of the others."""
        large = [index for index, name in enumerate(names) if name in self.names]
        return large, [index for index, name in enumerate(names) if name not in self.names]
