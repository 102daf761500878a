"""Tensor and sequence parallelism: several devices share each matrix, and each layer's tokens.

The sharding table (plans/sharding.py) gives each module a role. Here roles become weights that are DTensors
on the `tensor` axis, and collectives around modules. A pair of matrices, the first split by outputs and the
second by inputs, needs no collective between them (Shoeybi et al. 2019): heads of attention, inner features
of the feed-forward. Before the first the sequence is gathered, after the second the partial results are
summed and scattered along the sequence (Korthikanti et al. 2022), so norms and residuals outside the pair are
stored and computed once, in parts.

Forward of a layer: all-gather of batch x sequence x hidden values before attention and before the
feed-forward, and a reduce-scatter of as many after each; backward has the same, with the two exchanged. The
gathered sequence is not saved for backward: a device saves its part and gathers again for the gradients of
the weights, one more all-gather before each of the two. (Recomputation does the same by itself, and the
compiler of a compiled block decides what to save.)

DTensor only holds the weights. A module computes on its local part, as if it were a smaller module
(parallel/modules.py): torch's kernels, the compiler and a user's modules see plain tensors, and every
collective is written down here and counted.

Matrices are those of `nn.Linear` and `nn.Conv1d`, which has one for each element of its kernel: (outputs,
inputs, kernel), between activations (batch, channels, sequence). `role_problem` says which other modules can
have a role.

Weights that are whole on every device (norms, and key or value heads that several devices use) see different
tokens or heads on each, so their gradients are parts of a sum: `sum_whole` adds them up, once per step, in
one message.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import collect, eager, gather, replicate, scatter_sum, total
from shardwise.errors import UserError
from shardwise.models import Head, Role, Sharding, VocabularyPart, linear_cross_entropy
from shardwise.models.float8_products import Float8Product
from shardwise.models.layers import lookup
from shardwise.models.loss import cap_logits
from shardwise.models.products import linear
from shardwise.models.replace import put_in_place
from shardwise.optim import local
from shardwise.parallel.modules import ParallelModule, Share, parallel_module
from shardwise.plans.chunks import largest_part
from shardwise.plans.sharding import copies_parts, split_dim

AXIS = "tensor"
SEQUENCE = 1
"""Dim of activations (batch, sequence, hidden) that is split between the pairs of matrices."""

SPLITTABLE = (
    "columns() and rows() split nn.Linear, nn.Conv1d with groups=1, and modules of your own with a weight "
    "(outputs, inputs); vocabulary() splits nn.Embedding; loss() splits shardwise.models.Head; whole() and "
    "positions() keep weights whole"
)
"""Part of error messages that names what a table can split."""


def role_problem(role: Role, module: nn.Module) -> str | None:
    """Return why a module cannot have this role; None: it can, as far as its class tells."""
    if role.kind in ("columns", "rows"):
        reason = _matrix_problem(module)
    elif role.kind in ("vocabulary", "positions"):
        reason = _embedding_problem(role, module)
    else:
        reason = _whole_module_problem(role, module)
    if reason is None:
        return None
    return f"the role {role.kind}() does not fit {type(module).__name__}: {reason}. {SPLITTABLE}"


def _matrix_problem(module: nn.Module) -> str | None:
    if isinstance(module, nn.Conv1d):
        return None if module.groups == 1 else f"it has groups={module.groups}"
    from_library = type(module).__module__.partition(".")[0] in ("torch", "transformers")
    if (from_library and not isinstance(module, nn.Linear)) or isinstance(module, nn.Embedding):
        return "it has no matrix (outputs, inputs) that could be split"
    if getattr(getattr(module, "weight", None), "ndim", 0) != 2:
        return "it has no weight (outputs, inputs)"
    return None


def _embedding_problem(role: Role, module: nn.Module) -> str | None:
    if not isinstance(module, nn.Embedding):
        return "it is for nn.Embedding"
    if role.kind == "vocabulary" and (module.max_norm is not None or module.scale_grad_by_freq):
        return "max_norm and scale_grad_by_freq need all rows, and a device has some of them"
    return None


def _whole_module_problem(role: Role, module: nn.Module) -> str | None:
    if role.kind == "loss" and not isinstance(module, Head):
        return "it is for shardwise.models.Head; elsewhere use columns(gather=True)"
    if role.kind == "whole" and isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return (
            "it needs the whole sequence, and a device has a part of it; write it with nn.Linear, as in "
            "examples/own_model.py"
        )
    return None


def split_over_tensor(model: nn.Module, table: Sharding, comm: Comm, gather_again: bool = False) -> nn.Module:
    """Return this rank's part of a plain model on the meta device, which is changed. parallel/expert.py
    splits experts. With `gather_again`, gathered sequences are freed after forward and gathered again in
    backward.
    """
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    split: dict[nn.Module, nn.Module] = {}
    for path, module in model.named_modules():
        role = table.role(path)
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if role is None:
            if names:
                raise UserError(missing_entry(path, names))
        elif role.kind != "experts":
            share = replace(Share.of(comm, AXIS, role), splits_sequence=table.sequence_parallel)
            split[module] = _split(module, share, gather_again)
            for name in names:
                _distribute(module, name, split_dim(role, name, comm.mesh.size(AXIS)), comm, distributed)
    return put_in_place(model, split)


def _split(module: nn.Module, share: Share, gather_again: bool) -> nn.Module:
    """Return the module that takes the place of this one, of the class for its role."""
    assert share.role is not None
    kind = _KINDS[share.role.kind]
    if kind is Gathered and not share.splits_sequence:
        return module  # it has the whole sequence already
    if kind is not Gathered:
        return parallel_module(module, kind, share)
    first = next(iter(signature(module.forward).parameters), "")
    kind = Regathered if gather_again else Gathered
    gathered = parallel_module(module, kind, share, parallel_input=first)
    gathered.register_forward_pre_hook(_gather_input, with_kwargs=True)
    return gathered


def missing_entry(path: str, names: list[str]) -> str:
    """Return the error message for a module with weights that the table does not name."""
    return (
        f"the sharding table has no entry for {path or 'the model itself'}, which has the weights "
        f'{", ".join(names)}; add one, for example "{path}": whole() (docs/sharding.md lists the roles). '
        f"{SPLITTABLE}"
    )


def split_like(parameter: nn.Parameter) -> None:
    """Split a gradient as its weight is split. torch 2.11 gathers the gradient of an unevenly split weight
    when it adds the next micro-batch's."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def sum_whole(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Sum the gradients of weights that are whole on every device of the tensor axis."""
    if comm.mesh.size(AXIS) == 1:
        return
    parts = [local(p.grad) for p in parameters if p.grad is not None and is_whole(p)]
    for dtype in {part.dtype for part in parts}:
        _sum_in_place([part for part in parts if part.dtype == dtype], comm)


def _sum_in_place(parts: list[Tensor], comm: Comm) -> None:
    total = comm.all_reduce(torch.cat([part.flatten() for part in parts]), AXIS)
    for part, summed in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))


def is_whole(parameter: Tensor) -> bool:
    """Return whether every device of the tensor axis has all of a weight, and a part of its gradient's
    sum."""
    if not isinstance(parameter, DTensor):
        return False
    named = zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True)
    placements = [placement for name, placement in named if _is_tensor_axis(name)]
    return bool(placements) and all(isinstance(placement, Replicate) for placement in placements)


def _is_tensor_axis(name: str) -> bool:
    """Return whether a dim of the mesh is the tensor axis, which has two parts where experts use one of
    them."""
    return all(part.partition(".")[0] == AXIS for part in name.split(" x "))


def _distribute(
    module: nn.Module, name: str, dim: int | None, comm: Comm, distributed: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Make a weight a DTensor; a weight that two modules share stays shared."""
    plain = module._parameters[name]
    assert plain is not None
    if plain not in distributed:
        placement = Replicate() if dim is None else Shard(dim)
        part = distribute_tensor(plain.detach(), comm.mesh.sub(AXIS), [placement], src_data_rank=None)
        distributed[plain] = nn.Parameter(part, requires_grad=plain.requires_grad)
    module._parameters[name] = distributed[plain]


class Whole(ParallelModule):
    """A module whose weights are whole on every device, and used on the device's tokens or heads."""

    def describe_share(self) -> str:
        """Return that this device has all of it."""
        return "whole, gradients summed"


class Gathered(ParallelModule):
    """A module that needs the whole sequence: (batch, part of the sequence, hidden) is gathered to (batch,
    sequence, hidden) before forward, by a hook. A hook stays outside of recomputation, which wraps forward:
    beside experts, attention is recomputed selectively by itself and saves its gathered input.
    """

    parallel_input: str
    """Name of the first argument, which is gathered, for callers who pass it by name."""

    def describe_share(self) -> str:
        """Return what happens to its input."""
        return "sequence gathered before"


def _gather_input(
    module: Gathered, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    if not inputs:
        if module.parallel_input not in named:
            raise UserError(
                f"a module with the role gathered() was called without its first argument "
                f"({module.parallel_input or 'it has none'}), which is the sequence to gather"
            )
        inputs = (named[module.parallel_input],)
        named = {name: value for name, value in named.items() if name != module.parallel_input}
    return (gather(inputs[0], module.parallel_share.comm, AXIS, SEQUENCE), *inputs[1:]), named


class Regathered(Gathered):
    """A module for which autograd saves this device's part of the gathered input, instead of all of it or a
    view of it."""

    def forward(self, whole: Tensor, *rest: object, **named: object) -> Tensor:
        """Run the module's forward with hooks for saved tensors."""
        saved = _SavedPart(whole, self.parallel_share)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            output: Tensor = super().forward(whole, *rest, **named)
            return output

    def describe_share(self) -> str:
        """Return what happens to its input."""
        return "sequence gathered before, and again in backward"


View = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]
"""Size, stride and storage offset of a view of the gathered tensor."""


class _SavedPart:
    """This device's part of a gathered tensor, which is gathered again when backward first needs it."""

    def __init__(self, whole: Tensor, share: Share) -> None:
        self.comm, self.storage = share.comm, whole.untyped_storage().data_ptr()
        self.part = whole.detach().chunk(share.size, SEQUENCE)[share.index].clone()
        self.whole: Tensor | None = None
        self.views = self.views_left = 0

    def pack(self, tensor: Tensor) -> Tensor | View:
        if tensor.untyped_storage().data_ptr() != self.storage:
            return tensor
        self.views += 1
        return tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def unpack(self, packed: Tensor | View) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self.whole is None:
            self.whole, self.views_left = gather(self.part, self.comm, AXIS, SEQUENCE), self.views
        view = self.whole.as_strided(*packed)
        self.views_left -= 1
        if not self.views_left:
            self.whole = None
        return view


class Column(ParallelModule):
    """A matrix split by outputs: (batch, sequence, inputs) to (batch, sequence, device's outputs); for a
    convolution, (batch, inputs, sequence) to (batch, device's outputs, sequence)."""

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Run the module's forward on this device's rows of the weight."""
        if not self.parallel_share.splits_sequence:
            first, *rest = inputs
            assert isinstance(first, Tensor), "a matrix is called with its input"
            inputs = (replicate(first, self.parallel_share.comm, AXIS), *rest)
        output: Tensor = super().forward(*inputs, **named)
        assert self.parallel_share.role is not None
        if not self.parallel_share.role.gather:
            return output
        return _gather_features(output, _rows_of(self), self.parallel_share, _feature_dim(self, output))

    def parallel_part(self, name: str, part: Tensor) -> Tensor:
        """Return this device's rows. Where there are fewer parts (key heads) than devices, each device holds
        all parts and uses one."""
        copied = self._copied_part()
        return part if copied is None else part.chunk(copied[1])[copied[0]]

    def _copied_part(self) -> tuple[int, int] | None:
        """Return the index of this device's part and the number of parts, where every device holds all parts;
        None elsewhere."""
        role, share = self.parallel_share.role, self.parallel_share
        assert role is not None
        if role.parts is None or not copies_parts(role, share.size):
            return None
        return share.index * role.parts // share.size, role.parts

    def describe_share(self) -> str:
        """Return the range of this device's outputs."""
        rows, copied = _rows_of(self), self._copied_part()
        if copied is not None:
            part, parts = copied
            start, stop = part * rows // parts, (part + 1) * rows // parts
            return f"outputs {start}:{stop} of {rows}, all of which it holds"
        assert self.parallel_share.role is not None
        gathered = ", gathered after" if self.parallel_share.role.gather else ""
        return f"outputs {_describe_range(self.parallel_share, rows)}{gathered}"


class Row(ParallelModule):
    """A matrix split by inputs: (batch, sequence, device's inputs) to (batch, device's part of the sequence,
    outputs); for a convolution, (batch, device's inputs, sequence) to (batch, outputs, device's part of the
    sequence)."""

    def forward(self, *inputs: object, **named: object) -> Tensor:
        """Run the module's forward without its bias, which is added once, after the sum over the devices."""
        partial: Tensor = super().forward(*inputs, **named)
        sequence = partial.ndim - 1 if isinstance(self, nn.Conv1d) else SEQUENCE
        summed = _summed(partial, self.parallel_share, sequence)
        parameter = self._parameters.get("bias")
        if parameter is None:
            return summed
        bias = local(parameter).to(summed.dtype)
        return summed + (bias.unsqueeze(-1) if isinstance(self, nn.Conv1d) else bias)

    def parallel_part(self, name: str, part: Tensor) -> Tensor | None:
        """Return this device's part of the weight, and None for the bias."""
        return None if name == "bias" else part

    def describe_share(self) -> str:
        """Return the range of this device's inputs."""
        weight = self._parameters["weight"]
        assert weight is not None
        inputs = _describe_range(self.parallel_share, weight.shape[1])
        return f"inputs {inputs}, outputs summed and scattered along the sequence"


class Vocabulary(ParallelModule):
    """An embedding split by ids: all ids (batch, sequence) to (batch, this device's part of the sequence,
    hidden)."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        """Look up this device's ids, with zeros for the others, and sum over the devices."""
        weight, first = self.weight, self.parallel_share.range_of(_rows_of(self)).start
        rows = ids - first
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        weight = weight if weight.shape[0] else F.pad(weight, (0, 0, 0, 1))  # a device may have no rows
        dtype = getattr(self, "compute_dtype", None)  # a user's class of embedding does not have it
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        vectors = lookup(rows.masked_fill(elsewhere, 0), weight, dtype, padding)  # (batch, sequence, hidden)
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        return _summed(vectors, self.parallel_share, SEQUENCE)

    def describe_share(self) -> str:
        """Return the range of this device's ids."""
        ids = _describe_range(self.parallel_share, _rows_of(self))
        return f"ids {ids}, summed and scattered along the sequence"


class Position(ParallelModule):
    """An embedding of positions, whole on every device: all positions to the vectors of this device's part of
    the sequence."""

    def forward(self, positions: Tensor) -> Tensor:
        """Run the module's forward for this device's positions."""
        share = self.parallel_share
        part = positions.chunk(share.size, -1)[share.index] if share.splits_sequence else positions
        output: Tensor = super().forward(part)
        return output

    def describe_share(self) -> str:
        """Return that this device has all of it."""
        return "whole, asked for this device's part of the sequence, gradients summed"


class VocabularyLoss(ParallelModule):
    """`models.Head` split by ids: each device computes the logits of its part of the vocabulary."""

    weight: Tensor
    split_backward: bool
    softcap: float | None
    chunk: int | None
    float8: Float8Product | None

    @eager
    def forward(self, hidden: Tensor, targets: Tensor | None = None, at: int | None = None) -> Tensor:
        """Return the loss of (batch, part of the sequence, hidden), or, without targets, the whole logits at
        one position or at all."""
        comm, weight = self.parallel_share.comm, self.weight
        if self.parallel_share.splits_sequence:
            hidden = gather(hidden, comm, AXIS, SEQUENCE)
        else:
            hidden = replicate(hidden, comm, AXIS)
        if targets is not None:
            return linear_cross_entropy(
                hidden.flatten(0, 1),
                weight,
                targets.flatten(),
                self.chunk,
                part=self._part_of_vocabulary(),
                split_backward=self.split_backward,
                softcap=self.softcap,
                float8=self.float8,
            )
        chosen = hidden if at is None else hidden[:, at]
        logits = cap_logits(linear(chosen, weight.to(hidden.dtype)), self.softcap)
        return _gather_features(logits, _rows_of(self), self.parallel_share, logits.ndim - 1)

    def _part_of_vocabulary(self) -> VocabularyPart:
        comm, rows = self.parallel_share.comm, _rows_of(self)

        def maximum(numbers: Tensor) -> Tensor:
            return comm.all_reduce(numbers, AXIS, op=torch.distributed.ReduceOp.MAX)

        first, max_rows = (
            self.parallel_share.range_of(rows).start,
            largest_part(rows, self.parallel_share.size),
        )
        return VocabularyPart(first, max_rows, maximum, lambda numbers: comm.all_reduce(numbers, AXIS))

    def describe_share(self) -> str:
        """Return the range of this device's ids."""
        ids = _describe_range(self.parallel_share, _rows_of(self))
        return f"ids {ids}, sequence gathered before, sums of the loss over all devices"


def _summed(partial: Tensor, share: Share, sequence: int) -> Tensor:
    """Return the sum of the devices' results: this device's part along the dim `sequence`, or all of it."""
    if share.splits_sequence:
        return scatter_sum(partial, share.comm, AXIS, sequence)
    return total(partial, share.comm, AXIS)


def _feature_dim(module: nn.Module, output: Tensor) -> int:
    """Return the dim of a split module's output that has the features: the last, except for convolutions."""
    return output.ndim - (2 if isinstance(module, nn.Conv1d) else 1)


def _gather_features(features: Tensor, rows: int, share: Share, dim: int) -> Tensor:
    """Gather the features of all devices, `rows` in all; the last parts may be shorter, so they are padded on
    the way."""
    other_dims = (0, 0) * (features.ndim - 1 - dim)  # F.pad takes the last dim first
    padded = F.pad(features, (*other_dims, 0, largest_part(rows, share.size) - features.shape[dim]))
    return collect(padded, share.comm, AXIS, dim).narrow(dim, 0, rows)  # all padding is after the last row


def _rows_of(module: nn.Module) -> int:
    """Return the number of rows of the whole matrix."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0]


def _describe_range(share: Share, length: int) -> str:
    part = share.range_of(length)
    return f"{part.start}:{part.stop} of {length}"


_KINDS: dict[str, type[ParallelModule]] = {
    "whole": Whole,
    "gathered": Gathered,
    "columns": Column,
    "rows": Row,
    "vocabulary": Vocabulary,
    "positions": Position,
    "loss": VocabularyLoss,
}
"""Class of a module by its role in the sharding table."""
