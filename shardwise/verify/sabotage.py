"""Breaking one thing on purpose, on one rank: a proof that cannot fail proves nothing.

| kind            | what happens on one rank                                               | what it needs   |
| --------------- | ---------------------------------------------------------------------- | --------------- |
| drop-all-reduce | one sum of gradients is left out: the rank keeps its own summand       | several devices |
| scale-gradient  | one parameter's gradient is multiplied by 1.01 before the norm is      |                 |
|                 | taken                                                                  |                 |
| swap-chunks     | the two halves of the rank's input sequence change places; its targets |                 |
|                 | stay where they are                                                    |                 |
| misroute-token  | in one layer, the first token of a micro-batch goes to an expert       | experts         |
|                 | that it did not choose                                                 |                 |

A rank that merely stayed away from a collective would leave its peers waiting. It takes part and then ignores
the result, which is what a collective on the wrong group or stream amounts to. Which sum is left out depends
on what the layout has: that over the data and context devices in FSDP2 or DDP, else that of the weights that
are whole on every tensor device, else the one over the pipeline's stages, which only the gradients' norm
passes.
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
from shardwise.models.experts import Routing
from shardwise.optim import local
from shardwise.parallel.data import Replicated, Sharded
from shardwise.plan import COPIES
from shardwise.train.build import Training
from shardwise.verify.job import SCALE, Sabotage

Description = dict[str, Any]
"""What was broken where, for people to hold against what the proof found."""


def apply_sabotage(kind: Sabotage, training: Training) -> Description | None:
    """Break one thing on one rank, before training; what and where, on that rank, else None."""
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
    part = training.parallel.parts[0]
    if training.mesh.size(COPIES) == 1:
        _drop_all_reduce(training, "tensor" if training.mesh.size("tensor") > 1 else "pipeline", description)
    elif isinstance(part, Replicated):
        _drop_bucket(part, description)
    else:
        assert isinstance(part, Sharded), "copies are summed by DDP or FSDP2"
        _drop_unit(part, training, description)


def _drop_bucket(part: Replicated, description: Description) -> None:
    """DDP's first bucket."""
    description["axis"] = part.hook.axis
    names = {parameter: name for name, parameter in part.model.named_parameters()}
    summed = part.hook.reduce

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        if bucket.index() > 0:
            return summed(bucket)
        buffer, own = bucket.buffer(), bucket.buffer().clone()
        description["parameters"] = [names[parameter] for parameter in bucket.parameters()]
        return summed(bucket).then(lambda done: (done.value(), buffer.copy_(own))[1])

    part.hook.reduce = reduce  # type: ignore[method-assign]


def _drop_unit(part: Sharded, training: Training, description: Description) -> None:
    """FSDP2's first block; of a module without blocks, the unit that holds the rest."""
    mesh = training.mesh
    units = [
        (path, unit)
        for path, unit in part.model.named_modules()
        if isinstance(unit, FSDPModule) and _own_names(unit)
    ]
    path, unit = next(((path, unit) for path, unit in units if "." in path), units[0])
    if mesh.layout.zero and mesh.size("data x context") > 1:
        axis = mesh.label("data x context")
        unit.set_custom_reduce_scatter(_OwnSummand(training.comm, axis))  # type: ignore[arg-type]
    else:
        axis = mesh.label(COPIES)
        undone = _UndoneAllReduce(training.comm, axis)
        unit.set_custom_reduce_scatter(undone)  # type: ignore[arg-type]
        unit.set_all_reduce_hook(undone.give_back)
    description.update(axis=axis, parameters=[f"{path}.{name}".lstrip(".") for name in _own_names(unit)])


def _own_names(unit: FSDPModule) -> list[str]:
    assert isinstance(unit, nn.Module)
    inner = [path for path, module in unit.named_modules() if path and isinstance(module, FSDPModule)]
    trained = [name for name, parameter in unit.named_parameters() if parameter.requires_grad]
    return [name for name in trained if not any(name.startswith(f"{path}.") for path in inner)]


class _OwnSummand(CountedReduceScatter):
    """FSDP2's sum over shards, of which only the own summand is kept."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        size, own = output_tensor.numel(), input_tensor.clone().flatten()
        work = super().__call__(output_tensor, input_tensor, group, op, async_op)
        if work is not None:
            work.wait()
        output_tensor.copy_(own.narrow(0, dist.get_rank(group) * size, size).view_as(output_tensor))
        return work


class _UndoneAllReduce(CountedReduceScatter):
    """FSDP2's sum over copies, taken back. There are no shards, so FSDP2 calls for no reduce-scatter, but it
    still asks for its buffers: first one for what goes in, then one for what comes out."""

    def __init__(self, comm: Comm, axis: str) -> None:
        super().__init__(comm, axis)
        self.buffers: list[Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.buffers.append(super().allocate(size, dtype=dtype, device=device))
        return self.buffers[-1]

    def give_back(self, summed: Tensor) -> None:
        """The hook that FSDP2 calls after its all-reduce: put back what this rank had before it."""
        summed.copy_(torch.stack(self.buffers[::2]).sum(0))
        self.buffers = []


def _drop_all_reduce(training: Training, axis: str, description: Description) -> None:
    """The sum of whole weights over `tensor`, or of the squares of the norm over `pipeline`."""
    comm, parallel = training.comm, training.parallel
    summed, complete = comm.all_reduce, parallel.complete_gradients
    completing = False

    def all_reduce(tensor: Tensor, over: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        dropped = over == axis and (completing if axis == "tensor" else tensor.ndim == 0)
        own = tensor.clone()
        summed(tensor, over, op)
        return tensor.copy_(own) if dropped else tensor

    def complete_gradients() -> None:
        nonlocal completing
        completing = True
        complete()
        completing = False

    comm.all_reduce = all_reduce  # type: ignore[method-assign, assignment]
    parallel.complete_gradients = complete_gradients  # type: ignore[method-assign]
    description["axis"] = axis


def _scale(training: Training, description: Description) -> None:
    parallel = training.parallel
    complete, blocks = (
        parallel.complete_gradients,
        f"{parallel.table.blocks or ''}",
    )  # a token's row may have no gradient
    matrices = [
        (name, p)
        for name, p in parallel.named_parameters()
        if p.ndim > 1 and p.requires_grad and local(p).numel()
    ]
    name, parameter = next(
        ((name, p) for name, p in matrices if name.startswith(blocks)), matrices[0]
    )  # all blocks may be frozen

    def complete_gradients() -> None:
        complete()
        assert parameter.grad is not None
        local(parameter.grad).mul_(SCALE)

    parallel.complete_gradients = complete_gradients  # type: ignore[method-assign]
    description.update(parameter=name, factor=SCALE)


def _swap(training: Training, description: Description) -> None:
    parallel = training.parallel
    own: Callable[[Batch], Batch] = parallel.own

    def swapped(batch: Batch) -> Batch:
        mine = own(batch)
        half = mine.inputs.shape[1] // 2
        return replace(mine, inputs=torch.cat((mine.inputs[:, half:], mine.inputs[:, :half]), 1))

    parallel.own = swapped  # type: ignore[method-assign]
    description["module"] = "embedding"


def _misroute(training: Training, description: Description) -> None:
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
