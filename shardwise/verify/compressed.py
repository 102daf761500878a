"""What a proof checks of compressed gradients and weights, with which a layout does not compute what one
device computes.

The layout is proven without compression first. Then its first step is done with it. For gradients two things
must hold: what every device was given and what all devices keep for later add up to the gradient of one
device, so nothing is lost; and devices that hold the same weights got the same bits. A codec without error
feedback keeps nothing, and only the latter is checked.

For weights, all devices must compute with the same ones, in forward and in backward. A device that used its
own shard as it is, while others have it rounded, would compute with another model. The gradient does not show
that: rounded weights change it anyway. So every unit of FSDP2 is looked at after it was gathered, before its
forward and before its backward.

How far the gradient of the step is off is reported for both.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise._torch import UnitPiece, unit_pieces
from shardwise.checkpoint.state_key import StateKind
from shardwise.mesh import Worker
from shardwise.optim import local
from shardwise.parallel.placement import held
from shardwise.train.build import Training
from shardwise.verify.job import ProofJob
from shardwise.verify.measure import build_proof, watch
from shardwise.verify.reports import CompressedReport, Reference


def measure_compressed(worker: Worker, proof: ProofJob, path: Path, reference: Reference) -> CompressedReport:
    """The first step of a layout with compression, against the gradients of one device in a file."""
    training = build_proof(worker, proof)
    gradients: dict[str, tuple[tuple[slice, ...], Tensor]] = {}

    def keep(step: int) -> None:
        for name, parameter in training.parallel.named_parameters():
            if not parameter.requires_grad:
                continue
            assert parameter.grad is not None, "the layout was proven without compression"
            gradients[name] = held(parameter), local(parameter.grad).cpu().clone()

    weights = _WeightsInUse(training) if proof.plan.layout.weight_compression else None
    watch(training, 1, keep)
    truth = torch.load(path, mmap=True)
    lost = off = size = 0.0
    for name, shape in reference.shapes.items():  # in one order on all ranks
        kept = _kept_by_all(training, name, shape)
        if name not in gradients:
            continue
        where, own = gradients[name]
        expected = truth[name, "gradient", 1][where]
        largest = float(expected.abs().max()) if expected.numel() else 0.0
        if own.numel() and largest:
            lost = max(lost, float((own + kept[where] - expected).abs().max()) / largest)
        off, size = off + float((own - expected).square().sum()), size + float(expected.square().sum())
    sums = {f"{name}{_box(where)}": _checksum(own) for name, (where, own) in gradients.items()}
    fed_back = any(
        compressor.settings.how.feedback
        for part in training.parallel.parts
        for compressor in part.compressors
    )
    in_use = (
        {} if weights is None else {name: sorted(checksums) for name, checksums in weights.checksums.items()}
    )
    return CompressedReport(worker.rank, lost if fed_back else None, off, size, sums, in_use)


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
        """Look at the weights of a unit before its forward and before its backward. FSDP2's own hooks, which
        gather them, were registered earlier and so run first."""
        assert isinstance(unit, nn.Module)
        pieces = list(unit_pieces(unit))
        look = partial(self._look, pieces, [names[_weight(piece)] for piece in pieces])

        def before_backward(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(look)  # type: ignore[no-untyped-call]

        unit.register_forward_pre_hook(look)
        unit.register_forward_hook(before_backward)

    def _look(self, pieces: Sequence[UnitPiece], names: Sequence[str], *_: Any) -> None:
        for piece, name in zip(pieces, names, strict=True):
            weight = _weight(piece).detach()
            copied = local(weight).to("cpu", copy=True)  # FSDP2 frees its memory, which NumPy must not hold
            self.checksums[f"{name}{_box(held(weight))}"].add(_checksum(copied))


def _weight(piece: UnitPiece) -> nn.Parameter:
    """What FSDP2 has in place of a parameter: its shard, or the gathered weight. The attribute of a parallel
    module would be a plain tensor, which does not say which slice it is (parallel/modules.py)."""
    return dict(piece.module.named_parameters(recurse=False))[piece.name]


def _kept_by_all(training: Training, parameter: str, shape: tuple[int, ...]) -> Tensor:
    """The sum over all devices of what they keep of a parameter's gradient."""
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
