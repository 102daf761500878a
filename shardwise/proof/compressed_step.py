"""Check the first step of a layout that compresses gradients or weights.

With compression a layout does not compute what one device computes. So the layout is proven without
compression first, and then one step is done with compression. Two things must hold for gradients. First, what
every device received and what all devices keep for later must add up to the gradient of one device, so that
nothing is lost. Second, devices that hold the same weights must receive the same bits. A codec without error
feedback keeps nothing, so only the second point is checked for it.

With compressed weights, all devices must compute with the same weights, in forward and in backward. A device
that used its own shard unrounded, while the others use it rounded, would compute with another model. The
gradient does not show this, because rounded weights change it anyway. So the gathered weights of every FSDP2
unit are read before its forward and before its backward.

In both cases the relative error of the step's gradient is reported.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch import UnitPiece, unit_pieces
from shardwise.checkpoint.state_key import StateKind
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.parallel.placement import local_slices
from shardwise.proof.compare_layout import build_proof, watch
from shardwise.proof.proof_job import ProofJob
from shardwise.proof.rank_reports import CompressedReport, Reference
from shardwise.train.build import Training


def measure_compressed(worker: Worker, proof: ProofJob, path: Path, reference: Reference) -> CompressedReport:
    """Do the first step of a layout with compression, and compare it with one device's gradients in a
    file."""
    training = build_proof(worker, proof)
    gradients: dict[str, tuple[tuple[slice, ...], Tensor]] = {}

    def keep(step: int) -> None:
        for name, parameter in training.parallel.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None, "the layout was proven without compression"
            gradients[name] = local_slices(parameter), local(parameter.grad).cpu().clone()

    weights = _WeightsInUse(training) if proof.plan.layout.weight_compression else None
    watch(training, 1, keep)
    truth = torch.load(path, mmap=True)
    lost = off = size = 0.0
    for name, shape in reference.shapes.items():  # in one order on all ranks
        residual = _residual_of_all(training, name, shape)
        if name not in gradients:
            continue
        where, received = gradients[name]
        expected = truth[name, "gradient", 1][where]
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        if received.numel() and largest:
            lost = max(lost, float((received + residual[where] - expected).abs().max()) / largest)
        off += float((received - expected).square().sum())
        size += float(expected.square().sum())
    sums = {f"{name}{_box(where)}": _checksum(gradient) for name, (where, gradient) in gradients.items()}
    in_use = {} if weights is None else weights.sorted_checksums()
    return CompressedReport(worker.rank, lost if _feeds_back(training) else None, off, size, sums, in_use)


def _feeds_back(training: Training) -> bool:
    """Return whether a codec of this device keeps what it leaves out for later steps."""
    compressors = (compressor for part in training.parallel.parts for compressor in part.compressors)
    return any(compressor.settings.how.feedback for compressor in compressors)


class _WeightsInUse:
    """Checksums of the gathered weights that this device computes with, in forward and in backward."""

    def __init__(self, training: Training) -> None:
        self.checksums: dict[str, set[int]] = defaultdict(set)
        names = {parameter: name for name, parameter in training.parallel.named_parameters()}
        for part in training.parallel.parts:
            for unit in part.model.modules():
                if isinstance(unit, FSDPModule):
                    self._follow(unit, names)

    def _follow(self, unit: FSDPModule, names: dict[nn.Parameter, str]) -> None:
        """Record the weights of a unit before its forward and before its backward.

        The hooks of FSDP2, which gather the weights, were registered earlier and so run first.
        """
        assert isinstance(unit, nn.Module)
        pieces = list(unit_pieces(unit))
        look = partial(self._look, pieces, [names[_weight(piece)] for piece in pieces])

        def before_backward(module: nn.Module, inputs: object, outputs: object) -> None:
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(look)

        unit.register_forward_pre_hook(look)
        unit.register_forward_hook(before_backward)

    def sorted_checksums(self) -> dict[str, list[int]]:
        """Return the checksums by parameter and slice, in ascending order."""
        return {name: sorted(checksums) for name, checksums in self.checksums.items()}

    def _look(self, pieces: Sequence[UnitPiece], names: Sequence[str], *_: object) -> None:
        for piece, name in zip(pieces, names, strict=True):
            weight = _weight(piece).detach()
            copied = local(weight).to("cpu", copy=True)  # FSDP2 frees its memory, which NumPy must not hold
            self.checksums[f"{name}{_box(local_slices(weight))}"].add(_checksum(copied))


def _weight(piece: UnitPiece) -> nn.Parameter:
    """Return what FSDP2 holds in place of a parameter: its shard, or the gathered weight.

    The attribute of a parallel module would be a plain tensor, which does not know which slice it is
    (parallel/modules.py).
    """
    return dict(piece.module.named_parameters(recurse=False))[piece.name]


def _residual_of_all(training: Training, parameter: str, shape: tuple[int, ...]) -> Tensor:
    """Return the sum over all devices of what they keep of a parameter's gradient for later steps."""
    total = torch.zeros(shape, dtype=torch.float64, device=training.mesh.device)
    for key, residual in training.parallel.residuals():
        if key.kind is StateKind.RESIDUAL and key.part is not None and key.name == parameter:
            total[tuple(slice(*edges) for edges in key.part.box)] += residual
    if training.mesh.worker.world > 1:
        dist.all_reduce(total)
    return total.cpu()


def _box(where: tuple[slice, ...]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in where]


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().numpy().tobytes())
