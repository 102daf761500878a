"""What a program can take from its model: means over a dataset, tensors by name, and a file of weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwise.config.axes import LOSS_AXES, RANK_AXES
from shardwise.data.samples import Samples, to_device, with_positions
from shardwise.errors import UserError
from shardwise.models import LossCall, LossSums, attention_backends
from shardwise.models.program_module import LossFunction
from shardwise.models.torch_dtypes import DTYPES
from shardwise.train.build import Training


@torch.no_grad()
def means_over(
    training: Training, function: LossFunction, samples: Samples, agree: Callable[[str], None]
) -> dict[str, float]:
    """Return the means of a loss function over a whole dataset. `agree` raises if another rank does not make
    the call that it names."""
    sums = LossSums()
    with attention_backends(training.mesh.device.type), training.parallel.evaluating():
        for values, counts in _batches_of(training, samples):
            own = LossSums()
            training.parallel.loss(LossCall(function, values, 0, own))
            none = {name: torch.zeros_like(part) for name, part in own.parts.items()}
            sums.add(*((own.parts, own.items) if counts else (none, 0.0)))
    names = sums.names
    if training.plan.layout.pipeline > 1:
        # only the last stage has results
        names = max(map(tuple, training.peers.all_gather(names)), key=len)
    if not names:
        raise UserError("engine.evaluate: the dataset is empty")
    agree(f"engine.evaluate with results {', '.join(names)}")
    numbers = training.comm.sum_over_data(sums.vector(names, training.mesh.device))
    for axis in LOSS_AXES:
        training.comm.all_reduce(numbers, axis)
    total, *means = numbers.tolist()
    training.comm.ledger.take()  # the next step does not count this time
    training.comm.clock.restart()
    return {name: mean / (total or 1.0) for name, mean in zip(names, means, strict=True)}


def _batches_of(training: Training, samples: Samples) -> Iterator[tuple[Any, bool]]:
    """Yield this device's batches of a dataset, with True; and with False as many more as another device may
    have, because all devices make the same number of forwards."""
    parallel, size = training.parallel, training.plan.micro_batch
    dtype = DTYPES[training.plan.model.dtypes.compute]
    of_all, start = size * training.plan.layout.data_parallel, training.mesh.data_index * size
    for number, chunk in enumerate(samples.chunks(of_all)):
        values = samples.collated(chunk[start : start + size] or chunk[-1:], number * of_all + start)
        values = to_device(values, training.mesh.device, dtype)
        values = with_positions(values, samples.sequences, parallel.positions, parallel.multiple)
        yield values, start < len(chunk)


def state_dict(training: Training) -> dict[str, Any]:
    """Return the weights and buffers, and the optimizer's state, by name. The state of a tied weight is under
    one of its names."""
    trained, states = dict(training.parallel.named_parameters()), training.optimizer.state
    return {
        "model": dict(_model_tensors(training)),
        "optimizer": {name: dict(states[each]) for name, each in trained.items() if each in states},
    }


def _model_tensors(training: Training) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's weights and buffers by the names that the plain model's `state_dict` has: a tied
    weight comes under each of its names."""
    for part in training.parallel.parts:
        yield from part.model.named_parameters(remove_duplicate=False)
    yield from training.parallel.named_buffers()


@torch.no_grad()
def export(training: Training, path: str) -> None:
    """Write whole weights and buffers to a file, on the main rank. Every rank must call this."""
    tensors, mesh = dict[str, Tensor](), training.mesh
    leads_stage = not any(mesh.coordinate(axis) for axis in RANK_AXES if axis != "pipeline")
    for name, tensor in _model_tensors(training):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if leads_stage:
            tensors[name] = whole.detach().cpu().contiguous().clone()
    if mesh.size("pipeline") > 1:
        _send_to_main(training, tensors)
    if mesh.is_main:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path)


def _send_to_main(training: Training, tensors: dict[str, Tensor]) -> None:
    """Add the tensors of the other pipeline stages to those of the main rank. Only the rank of each stage
    that lies with it on the pipeline axis has tensors; every rank must call this."""
    mesh, comm = training.mesh, training.comm
    descriptions = [
        (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    ]
    everyone = training.peers.all_gather((mesh.coordinate("pipeline"), descriptions))
    for rank, (stage, described) in enumerate(everyone):
        for name, shape, dtype in described if rank else ():
            if mesh.worker.rank == rank:
                comm.send(tensors[name].to(comm.device), "pipeline", 0)
            elif mesh.is_main:
                received = torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
                tensors[name] = comm.receive(received, "pipeline", stage).cpu()
    comm.ledger.take()  # the next step does not count these
