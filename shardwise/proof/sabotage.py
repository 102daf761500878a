"""Inject one fault on one rank on purpose, to show that the proof can fail.

| kind            | what happens on one rank                                               | what it needs   |
| --------------- | ---------------------------------------------------------------------- | --------------- |
| drop-all-reduce | one sum of gradients is left out: the rank keeps its own summand       | several devices |
| scale-gradient  | one parameter's gradient is multiplied by 1.01 before the norm is      |                 |
|                 | taken                                                                  |                 |
| swap-chunks     | the two halves of the rank's input sequence change places; its targets |                 |
|                 | stay where they are                                                    |                 |
| misroute-token  | in one layer, the first token of a micro-batch goes to an expert       | experts         |
|                 | that it did not choose                                                 |                 |

A rank that skipped a collective would leave its peers waiting. So the rank takes part and ignores the result,
which has the same effect as a collective on a wrong group or stream. Which sum is left out depends on the
layout: the sum over data and context devices in FSDP2 or DDP; else the sum of the gradients of weights that
are whole on every tensor device; else the sum over the pipeline's stages, which only the gradient norm uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shardwise.comm import Comm, CountedReduceScatter
from shardwise.data.batches import Batch
from shardwise.files import Json
from shardwise.models.experts import Routing
from shardwise.optim import local
from shardwise.parallel.data import Replicated, Sharded
from shardwise.plans import COPIES
from shardwise.proof.proof_job import SCALE, Sabotage
from shardwise.train.build import Training

Description = Json
"""What was broken and where, so that people can compare it with what the proof found."""


def apply_sabotage(kind: Sabotage, training: Training) -> Description | None:
    """Break one thing on one rank, before training. Return what and where on that rank, and None on all
    others."""
    mesh, world = training.mesh, training.mesh.worker.world
    # Only the first stage reads tokens, and the first tensor device looks up the ids that occur most.
    reader = world // mesh.size("pipeline") - mesh.size("tensor")
    chosen = reader if kind == "swap-chunks" else world - 1
    if mesh.worker.rank != chosen:
        return None
    description: Description = {"kind": kind, "rank": chosen}
    _KINDS[kind](training, description)
    return description


def _drop(training: Training, description: Description) -> None:
    """Drop one sum of gradients: the one that DDP or FSDP2 takes, or else one of our own."""
    part = training.parallel.parts[0]
    if training.mesh.size(COPIES) == 1:
        _drop_all_reduce(training, "tensor" if training.mesh.size("tensor") > 1 else "pipeline", description)
    elif isinstance(part, Replicated):
        _drop_bucket(part, description)
    else:
        assert isinstance(part, Sharded), "copies are summed by DDP or FSDP2"
        _drop_unit(part, training, description)


def _drop_bucket(part: Replicated, description: Description) -> None:
    """Drop the sum of DDP's first bucket of gradients."""
    description["axis"] = part.hook.axis
    names = {parameter: name for name, parameter in part.model.named_parameters()}
    summed = part.hook.reduce

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        if bucket.index() > 0:
            return summed(bucket)
        buffer, summand = bucket.buffer(), bucket.buffer().clone()
        description["parameters"] = [names[parameter] for parameter in bucket.parameters()]
        return summed(bucket).then(lambda done: (done.value(), buffer.copy_(summand))[1])

    part.hook.reduce = reduce  # type: ignore[method-assign]


def _drop_unit(part: Sharded, training: Training, description: Description) -> None:
    """Drop the sum of FSDP2's first block, or of the outer unit in a module without blocks."""
    mesh = training.mesh
    units = [
        (path, unit)
        for path, unit in part.model.named_modules()
        if isinstance(unit, FSDPModule) and _trained_names(unit)
    ]
    path, unit = next(((path, unit) for path, unit in units if "." in path), units[0])
    if mesh.layout.zero and mesh.size("data x context") > 1:
        axis = mesh.label("data x context")
        unit.set_custom_reduce_scatter(_LocalSummand(training.comm, axis))  # type: ignore[arg-type]
    else:
        axis = mesh.label(COPIES)
        undone = _UndoneAllReduce(training.comm, axis)
        unit.set_custom_reduce_scatter(undone)  # type: ignore[arg-type]
        unit.set_all_reduce_hook(undone.give_back)
    description.update(axis=axis, parameters=[f"{path}.{name}".lstrip(".") for name in _trained_names(unit)])


def _trained_names(unit: FSDPModule) -> list[str]:
    """Return the trained parameters that belong to this unit and to no unit inside it."""
    assert isinstance(unit, nn.Module)
    inner = [path for path, module in unit.named_modules() if path and isinstance(module, FSDPModule)]
    trained = [name for name, parameter in unit.named_parameters() if parameter.requires_grad]
    return [name for name in trained if not any(name.startswith(f"{path}.") for path in inner)]


class _LocalSummand(CountedReduceScatter):
    """A reduce-scatter for FSDP2 that keeps only this rank's summand."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        *more: Any,
        **named: Any,
    ) -> dist.Work | None:
        size, summand = output_tensor.numel(), input_tensor.clone().flatten()
        work = super().__call__(output_tensor, input_tensor, group, *more, **named)
        if work is not None:
            work.wait()
        output_tensor.copy_(summand.narrow(0, dist.get_rank(group) * size, size).view_as(output_tensor))
        return work


class _UndoneAllReduce(CountedReduceScatter):
    """Undoes FSDP2's all-reduce over copies.

    There are no shards, so FSDP2 calls no reduce-scatter. It still allocates the buffers of one: first for
    the input, then for the output.
    """

    def __init__(self, comm: Comm, axis: str) -> None:
        super().__init__(comm, axis)
        self.buffers: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.buffers.append(super().allocate(size, dtype=dtype, device=device))
        return self.buffers[-1]

    def give_back(self, summed: Tensor) -> None:
        """Restore what this rank had before the all-reduce. FSDP2 calls this hook after it."""
        summed.copy_(torch.stack(self.buffers[::2]).sum(0))
        self.buffers = []


def _drop_all_reduce(training: Training, axis: str, description: Description) -> None:
    """Drop the sum over `tensor` of the gradients of whole weights, or the sum over `pipeline` of the squares
    of the norm."""
    comm, parallel = training.comm, training.parallel
    summed, complete = comm.all_reduce, parallel.complete_gradients
    completing = False

    def all_reduce(tensor: Tensor, over: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        dropped = over == axis and (completing if axis == "tensor" else tensor.ndim == 0)
        summand = tensor.clone()
        summed(tensor, over, op)
        return tensor.copy_(summand) if dropped else tensor

    def complete_gradients() -> None:
        nonlocal completing
        completing = True
        complete()
        completing = False

    comm.all_reduce = all_reduce  # type: ignore[method-assign, assignment]
    parallel.complete_gradients = complete_gradients  # type: ignore[method-assign]
    description["axis"] = axis


def _scale(training: Training, description: Description) -> None:
    """Multiply the gradient of one parameter by SCALE."""
    parallel = training.parallel
    complete, named = parallel.complete_gradients, parallel.named_parameters()
    matrices = [(name, p) for name, p in named if p.ndim > 1 and p.requires_grad and local(p).numel()]
    # A block is preferred, because a row of the embedding may have no gradient. But all blocks may be frozen.
    blocks = f"{parallel.table.blocks or ''}"
    name, parameter = next(((name, p) for name, p in matrices if name.startswith(blocks)), matrices[0])

    def complete_gradients() -> None:
        complete()
        assert parameter.grad is not None
        local(parameter.grad).mul_(SCALE)

    parallel.complete_gradients = complete_gradients  # type: ignore[method-assign]
    description.update(parameter=name, factor=SCALE)


def _swap(training: Training, description: Description) -> None:
    """Swap the two halves of this rank's input sequences."""
    parallel = training.parallel
    local_part: Callable[[Batch], Batch] = parallel.local_batch

    def swapped(batch: Batch) -> Batch:
        part = local_part(batch)
        half = part.inputs.shape[1] // 2
        return replace(part, inputs=torch.cat((part.inputs[:, half:], part.inputs[:, :half]), 1))

    parallel.local_batch = swapped  # type: ignore[method-assign]
    description["module"] = "embedding"


def _misroute(training: Training, description: Description) -> None:
    """Send the first token of each micro-batch to an expert that it did not choose."""
    mixture = training.parallel.mixtures[0]
    paths = {module: path for part in training.parallel.parts for path, module in part.model.named_modules()}
    router = mixture.router

    def misroute(router: nn.Module, inputs: object, routing: Routing) -> Routing:
        experts = routing.experts.clone()
        experts[0, 0] = min(set(range(mixture.config.experts)) - set(experts[0].tolist()))
        return routing._replace(experts=experts)

    router.register_forward_hook(misroute, prepend=True)
    description["module"] = paths[router]


_KINDS: dict[Sabotage, Callable[[Training, Description], None]] = {
    "drop-all-reduce": _drop,
    "scale-gradient": _scale,
    "swap-chunks": _swap,
    "misroute-token": _misroute,
}
