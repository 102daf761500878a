"""Tensor and sequence parallelism: several devices share each matrix, and each layer's tokens.

The sharding table (plan/sharding.py) says what each module does; here that becomes weights that are DTensors on the `tensor`
axis, and collectives at the borders. A pair of matrices, the first split by outputs and the second by inputs, needs none
between them (Shoeybi et al. 2019): heads of attention, inner features of the feed-forward. Before the first the sequence is
gathered, after the second the partial results are summed and scattered along the sequence (Korthikanti et al. 2022), so what
lies outside the pair, norms and residuals, is held and computed once, in parts.

A layer, forward: all-gather of batch x sequence x hidden values before attention and before the feed-forward, and a
reduce-scatter of as many after each; the same again in backward, where each becomes the other. The gathered sequence is not
kept for backward: a device keeps its own part and gathers again when the weights' gradients ask for it, one more all-gather
before each of the two. (Recomputation, of all or of selected parts, does the same by itself; a compiled block keeps what its
compiler decides.)

DTensor holds the weights (who has which slice: sharded further by FSDP2, saved, loaded and compared by it), and no more than
that. A module computes on its local part, as if it were a smaller module: torch's kernels, the compiler and a user's own
modules see plain tensors, and every collective is one that we wrote down and count.

Weights that are whole on every device (norms, and key or value heads that several devices use) see different tokens or heads
on each, so their gradients are parts of a sum: `sum_whole` adds them up, once a step, in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import collect, eager, gather, scatter_sum
from shardwise.errors import UserError
from shardwise.models import Role, Sharding, VocabularyPart, linear_cross_entropy
from shardwise.optim import local
from shardwise.plan.sharding import copies_parts, split_dim

AXIS = "tensor"
SEQUENCE = 1
"""The dim of activations (batch, sequence, hidden) that is split between the pairs of matrices."""


def split_over_tensor(model: nn.Module, table: Sharding, comm: Comm, gather_again: bool = False) -> None:
    """Turn a plain model, on the meta device, into this rank's part of it. Experts are left to parallel/expert.py.

    With `gather_again`, gathered sequences are let go after forward and gathered again in backward.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        role = table.role(path)
        owned = [name for name, _ in module.named_parameters(recurse=False)]
        if role is None:
            if owned:
                raise UserError(missing_entry(path, owned))
        elif role.kind != "experts":
            _ROLES[role.kind](module, role, comm)
            if role.kind == "gathered" and gather_again:
                _keep_own_part(module, comm)
            for name in owned:
                _distribute(module, name, split_dim(role, name, comm.mesh.size(AXIS)), comm, made)


def missing_entry(path: str, owned: list[str]) -> str:
    """What to say of a module with weights that the table does not name."""
    return (
        f"the sharding table has no entry for {path or 'the model itself'}, which has the weights {', '.join(owned)}; "
        f'add one, for example "{path}": whole() (docs/sharding.md lists the roles)'
    )


def sum_whole(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Complete the gradients of weights that are whole on every device of the tensor axis."""
    if comm.mesh.size(AXIS) == 1:
        return
    parts = [local(p.grad) for p in parameters if p.grad is not None and _is_whole(p)]
    for dtype in {part.dtype for part in parts}:
        same = [part for part in parts if part.dtype == dtype]
        together = comm.all_reduce(torch.cat([part.flatten() for part in same]), AXIS)
        for part, summed in zip(same, torch.split(together, [part.numel() for part in same]), strict=True):
            part.copy_(summed.view_as(part))


def _is_whole(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    own = [placement for name, placement in zip(names, parameter.placements, strict=True) if _is_of_axis(name)]
    return bool(own) and all(isinstance(placement, Replicate) for placement in own)


def _is_of_axis(name: str) -> bool:
    """Whether a dim of the grid is the tensor axis, which has two parts where experts borrow one of them."""
    return all(part.partition(".")[0] == AXIS for part in name.split(" x "))


def _distribute(module: nn.Module, name: str, dim: int | None, comm: Comm, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Make one weight a DTensor; a weight that two modules share stays one."""
    old = module._parameters[name]
    assert old is not None
    if old not in made:
        placement = Replicate() if dim is None else Shard(dim)
        shared = distribute_tensor(old.detach(), comm.mesh.sub(AXIS), [placement], src_data_rank=None)
        made[old] = nn.Parameter(shared, requires_grad=old.requires_grad)
    module._parameters[name] = made[old]


def see_local(module: nn.Module, **views: Callable[[Tensor], Tensor | None]) -> None:
    """Let a module's own code read its part of each weight, through a view of it if one is given.

    The module gets a subclass of its class with a property for each weight; `named_parameters` and all that build on it still
    find the DTensors. So does FSDP2 while it holds the weight in shards, on a mesh of more axes.
    """

    def reader(name: str) -> property:
        view: Callable[[Tensor], Tensor | None] = views.get(name, _itself)

        def read(self: nn.Module) -> Any:
            value = self._parameters[name]
            sharded = isinstance(value, DTensor) and value.device_mesh.ndim > 1
            return value if value is None or sharded else view(local(value))

        return property(read)

    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {name: reader(name) for name in module._parameters})


def _itself(part: Tensor) -> Tensor:
    return part


def _whole(module: nn.Module, role: Role, comm: Comm) -> None:
    see_local(module)


def _gathered(module: nn.Module, role: Role, comm: Comm) -> None:
    see_local(module)
    module.register_forward_pre_hook(lambda _, inputs: (gather(inputs[0], comm, AXIS, SEQUENCE), *inputs[1:]))


def _keep_own_part(module: nn.Module, comm: Comm) -> None:
    """Wherever autograd would keep the gathered input of a module, or a view of it, keep this device's part of it instead."""
    inner = module.forward

    def forward(whole: Tensor, *rest: Any, **more: Any) -> Any:
        again = _Again(whole, comm)
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            return inner(whole, *rest, **more)

    module.forward = forward


class _Again:
    """A gathered tensor that is let go, and gathered again when the first of its users asks for it in backward."""

    def __init__(self, whole: Tensor, comm: Comm) -> None:
        index, size = comm.mesh.coordinate(AXIS), comm.mesh.size(AXIS)
        self.comm, self.storage = comm, whole.untyped_storage().data_ptr()
        self.own = whole.detach().chunk(size, SEQUENCE)[index].clone()
        self.whole: Tensor | None = None
        self.users = self.left = 0

    def pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != self.storage:
            return tensor
        self.users += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.whole is None:
            self.whole, self.left = gather(self.own, self.comm, AXIS, SEQUENCE), self.users
        view = self.whole.as_strided(*packed)
        self.left -= 1
        if not self.left:
            self.whole = None
        return view


def _columns(module: nn.Module, role: Role, comm: Comm) -> None:
    if copies_parts(role, comm.mesh.size(AXIS)):
        assert role.parts is not None
        parts, part = role.parts, comm.mesh.coordinate(AXIS) * role.parts // comm.mesh.size(AXIS)

        def own(weight: Tensor) -> Tensor:
            return weight.chunk(parts)[part]

        see_local(module, weight=own, bias=own)
    else:
        see_local(module)
    if role.gather:
        rows = _rows_of(module)
        module.register_forward_hook(lambda _, inputs, output: _put_together(output, rows, comm))


def _rows(module: nn.Module, role: Role, comm: Comm) -> None:
    see_local(module, bias=lambda bias: None)  # added once, after the sum

    def after(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        summed, bias = scatter_sum(output, comm, AXIS, SEQUENCE), module._parameters.get("bias")
        return summed if bias is None else summed + local(bias).to(summed.dtype)

    module.register_forward_hook(after)


def _vocabulary(module: nn.Module, role: Role, comm: Comm) -> None:
    assert isinstance(module, nn.Embedding), "the vocabulary role is for nn.Embedding"
    first = _first_row(module, comm)
    see_local(module)

    def lookup(ids: Tensor) -> Tensor:
        weight: Tensor = module.weight
        places = ids - first
        elsewhere = (places < 0) | (places >= weight.shape[0])
        weight = weight if weight.shape[0] else F.pad(weight, (0, 0, 0, 1))  # a device may have no rows
        found = F.embedding(places.masked_fill(elsewhere, 0), weight)
        return scatter_sum(found.masked_fill(elsewhere.unsqueeze(-1), 0), comm, AXIS, SEQUENCE)

    module.forward = lookup  # type: ignore[method-assign, assignment]


def _positions(module: nn.Module, role: Role, comm: Comm) -> None:
    see_local(module)
    index, size = comm.mesh.coordinate(AXIS), comm.mesh.size(AXIS)
    module.register_forward_pre_hook(lambda _, inputs: (inputs[0].chunk(size, -1)[index],))


def _loss(module: nn.Module, role: Role, comm: Comm) -> None:
    """`models.Head`, each device with its part of the vocabulary."""
    first, rows = _first_row(module, comm), _rows_of(module)
    see_local(module)

    def maximum(numbers: Tensor) -> Tensor:
        return comm.all_reduce(numbers, AXIS, op=torch.distributed.ReduceOp.MAX)

    part = VocabularyPart(first, -(-rows // comm.mesh.size(AXIS)), maximum, lambda numbers: comm.all_reduce(numbers, AXIS))

    @eager
    def forward(hidden: Tensor, targets: Tensor | None = None, at: int | None = None) -> Tensor:
        hidden, weight = gather(hidden, comm, AXIS, SEQUENCE), getattr(module, "weight")  # noqa: B009
        if targets is not None:
            flat, split = hidden.flatten(0, 1), bool(getattr(module, "split_backward", False))
            return linear_cross_entropy(flat, weight, targets.flatten(), part=part, split_backward=split)
        chosen = hidden if at is None else hidden[:, at]
        return _put_together(F.linear(chosen, weight.to(hidden.dtype)), rows, comm)

    module.forward = forward


def _put_together(features: Tensor, rows: int, comm: Comm) -> Tensor:
    """The features of all devices, of so many rows of a matrix; the last parts may be shorter, so they are padded on the way."""
    size = comm.mesh.size(AXIS)
    longest = -(-rows // size)
    padded = F.pad(features, (0, longest - features.shape[-1]))
    return collect(padded, comm, AXIS, padded.ndim - 1)[..., :rows]  # only behind the last row is there padding


def _first_row(module: nn.Module, comm: Comm) -> int:
    """Where this device's rows of a matrix begin: rows are dealt out as by torch.chunk."""
    rows = _rows_of(module)
    return min(rows, -(-rows // comm.mesh.size(AXIS)) * comm.mesh.coordinate(AXIS))


def _rows_of(module: nn.Module) -> int:
    """Rows of the whole matrix."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0]


_ROLES: dict[str, Callable[[nn.Module, Role, Comm], None]] = {
    "whole": _whole,
    "gathered": _gathered,
    "columns": _columns,
    "rows": _rows,
    "vocabulary": _vocabulary,
    "positions": _positions,
    "loss": _loss,
}
