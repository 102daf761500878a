"""What a proof checks of compressed gradients, which are not those of one device, and are not meant to be.

The layout is proven without compression first. Then its first step is done with it, and three things must hold: what every device
was given and what all devices keep for later add up to the gradient of one device, so nothing is lost; devices that hold the same
weights got the same bits; and how far the gradient of that step is off is said. A codec that is not fed back keeps nothing, and
only the last two are looked at.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.checkpoint.residuals import ResidualName
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
    sums = {f"{name}{_box(where)}": zlib.crc32(own.contiguous().numpy().tobytes()) for name, (where, own) in gradients.items()}
    fed_back = any(compressor.settings.how.feedback for part in training.parallel.parts for compressor in part.compressors)
    return CompressedReport(worker.rank, lost if fed_back else None, off, size, sums)


def _kept_by_all(training: Training, parameter: str, shape: tuple[int, ...]) -> Tensor:
    """The sum over all devices of what they keep of a parameter's gradient."""
    total = torch.zeros(shape, dtype=torch.float64, device=training.mesh.device)
    for name, residual in training.parallel.residuals():
        said = ResidualName.parse(name)
        if said is not None and said.parameter == parameter:
            total[tuple(slice(*part) for part in said.box)] += residual
    if training.mesh.worker.world > 1:
        dist.all_reduce(total)
    return total.cpu()


def _box(where: tuple[slice, ...]) -> list[tuple[int, int]]:
    return [(part.start, part.stop) for part in where]
