"""Tensor and sequence parallelism: several devices share each matrix, and each layer's tokens.

The sharding table (plan/sharding.py) says what each module does; here that becomes weights that are DTensors
on the `tensor` axis, and collectives at the borders. A pair of matrices, the first split by outputs and the
second by inputs, needs none between them (Shoeybi et al. 2019): heads of attention, inner features of the
feed-forward. Before the first the sequence is gathered, after the second the partial results are summed and
scattered along the sequence (Korthikanti et al. 2022), so what lies outside the pair, norms and residuals, is
held and computed once, in parts.

A layer, forward: all-gather of batch x sequence x hidden values before attention and before the feed-forward,
and a reduce-scatter of as many after each; the same again in backward, where each becomes the other. The
gathered sequence is not kept for backward: a device keeps its own part and gathers again when the weights'
gradients ask for it, one more all-gather before each of the two. (Recomputation, of all or of selected parts,
does the same by itself; a compiled block keeps what its compiler decides.)

DTensor holds the weights, and no more than that. A module computes on its local part, as if it were a smaller
module (parallel/modules.py): torch's kernels, the compiler and a user's own modules see plain tensors, and
every collective is one that we wrote down and count.

Matrices are those of `nn.Linear` and `nn.Conv1d`, which is one for each place of its kernel: (outputs,
inputs, kernel), between activations (batch, channels, sequence). `unfit` says what else a role can be given
to.

Weights that are whole on every device (norms, and key or value heads that several devices use) see different
tokens or heads on each, so their gradients are parts of a sum: `sum_whole` adds them up, once a step, in one
message.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import collect, eager, gather, scatter_sum
from shardwise.errors import UserError
from shardwise.models import Head, Role, Sharding, VocabularyPart, linear_cross_entropy
from shardwise.models.float8_products import Float8
from shardwise.models.layers import lookup
from shardwise.models.loss import cap_logits
from shardwise.models.products import linear
from shardwise.models.replace import put_in_place
from shardwise.optim import local
from shardwise.parallel.modules import ParallelModule, Share, parallel_module
from shardwise.plan.chunks import largest_part
from shardwise.plan.sharding import copies_parts, split_dim

AXIS = "tensor"
SEQUENCE = 1
"""The dim of activations (batch, sequence, hidden) that is split between the pairs of matrices."""

SPLITTABLE = (
    "columns() and rows() split nn.Linear, nn.Conv1d with groups=1, and modules of your own with a weight "
    "(outputs, inputs); "
    "vocabulary() splits nn.Embedding; loss() splits shardwise.models.Head; whole() and positions() keep "
    "weights whole"
)
"""What a table can split, for whoever asked for something else."""


def unfit(role: Role, module: nn.Module) -> str | None:
    """Why a module cannot have this role; None: it can, as far as its kind tells."""
    reason = _reason(role, module)
    return (
        None
        if reason is None
        else f"the role {role.kind}() does not fit {type(module).__name__}: {reason}. {SPLITTABLE}"
    )


def _reason(role: Role, module: nn.Module) -> str | None:
    weight = getattr(module, "weight", None)
    if role.kind in ("vocabulary", "positions"):
        if not isinstance(module, nn.Embedding):
            return "it is for nn.Embedding"
        if role.kind == "vocabulary" and (module.max_norm is not None or module.scale_grad_by_freq):
            return "a device that has some of the rows knows neither max_norm nor scale_grad_by_freq"
    elif role.kind == "loss" and not isinstance(module, Head):
        return "it is for shardwise.models.Head; elsewhere use columns(gather=True)"
    elif role.kind == "whole" and isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        return (
            "it looks at all of a sequence, of which a device has a part here; write it with nn.Linear, as "
            "examples/own_model.py"
        )
    elif role.kind in ("columns", "rows"):
        if isinstance(module, nn.Conv1d):
            return None if module.groups == 1 else f"it has groups={module.groups}"
        others = type(module).__module__.partition(".")[0] in ("torch", "transformers") and not isinstance(
            module, nn.Linear
        )
        if others or isinstance(module, nn.Embedding):
            return "that has no matrix (outputs, inputs) which a part of it could stand for"
        if getattr(weight, "ndim", 0) != 2:
            return "it has no weight (outputs, inputs)"
    return None


def split_over_tensor(model: nn.Module, table: Sharding, comm: Comm, gather_again: bool = False) -> nn.Module:
    """Return this rank's part of a plain model on the meta device, which it is made from. Experts are left to
    parallel/expert.py.

    With `gather_again`, gathered sequences are let go after forward and gathered again in backward.
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
            split[module] = _split(module, Share.of(comm, AXIS, role), gather_again)
            for name in names:
                _distribute(module, name, split_dim(role, name, comm.mesh.size(AXIS)), comm, distributed)
    return put_in_place(model, split)


def _split(module: nn.Module, share: Share, gather_again: bool) -> nn.Module:
    """Return the module that takes the place of this one, in the way that its role asks for."""
    assert share.role is not None
    kind = _KINDS[share.role.kind]
    if kind is not Gathered:
        return parallel_module(module, kind, share)
    first = next(iter(signature(module.forward).parameters), "")
    kind = Regathered if gather_again else Gathered
    gathered = parallel_module(module, kind, share, parallel_input=first)
    gathered.register_forward_pre_hook(_gather_input, with_kwargs=True)
    return gathered


def missing_entry(path: str, names: list[str]) -> str:
    """What to say of a module with weights that the table does not name."""
    return (
        f"the sharding table has no entry for {path or 'the model itself'}, which has the weights "
        f"{', '.join(names)}; "
        f'add one, for example "{path}": whole() (docs/sharding.md lists the roles). {SPLITTABLE}'
    )


def sum_whole(parameters: Iterable[nn.Parameter], comm: Comm) -> None:
    """Complete the gradients of weights that are whole on every device of the tensor axis."""
    if comm.mesh.size(AXIS) == 1:
        return
    parts = [local(p.grad) for p in parameters if p.grad is not None and is_whole(p)]
    for dtype in {part.dtype for part in parts}:
        same = [part for part in parts if part.dtype == dtype]
        together = comm.all_reduce(torch.cat([part.flatten() for part in same]), AXIS)
        for part, summed in zip(same, torch.split(together, [part.numel() for part in same]), strict=True):
            part.copy_(summed.view_as(part))


def is_whole(parameter: Tensor) -> bool:
    """Whether every device of the tensor axis has all of a weight, and a part of its gradient's sum."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    own = [
        placement for name, placement in zip(names, parameter.placements, strict=True) if _is_of_axis(name)
    ]
    return bool(own) and all(isinstance(placement, Replicate) for placement in own)


def _is_of_axis(name: str) -> bool:
    """Whether a dim of the grid is the tensor axis, which has two parts where experts borrow one of them."""
    return all(part.partition(".")[0] == AXIS for part in name.split(" x "))


def _distribute(
    module: nn.Module, name: str, dim: int | None, comm: Comm, distributed: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Make one weight a DTensor; a weight that two modules share stays one."""
    plain = module._parameters[name]
    assert plain is not None
    if plain not in distributed:
        placement = Replicate() if dim is None else Shard(dim)
        part = distribute_tensor(plain.detach(), comm.mesh.sub(AXIS), [placement], src_data_rank=None)
        distributed[plain] = nn.Parameter(part, requires_grad=plain.requires_grad)
    module._parameters[name] = distributed[plain]


class Whole(ParallelModule):
    """Weights on every device, used on the device's own tokens or heads."""

    def describe_share(self) -> str:
        """All of it."""
        return "whole, gradients summed"


class Gathered(ParallelModule):
    """Needs the whole sequence: (batch, part of the sequence, hidden) is gathered to (batch, sequence,
    hidden) before forward.

    By a hook, which stays outside of what recomputation makes of forward: beside experts, attention is
    recomputed selectively by itself and keeps its gathered input.
    """

    parallel_input: str
    """The name of the first argument, which is what is gathered, for callers who give it by name."""

    def describe_share(self) -> str:
        """What happens to its input."""
        return "sequence gathered before"


def _gather_input(
    module: Gathered, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not inputs:
        if module.parallel_input not in named:
            raise UserError(
                f"a module that the sharding table calls gathered() was called without its first argument, "
                f"{module.parallel_input or 'of which it has none'}: that is the sequence to put together "
                f"before the call"
            )
        inputs, named = (
            (named[module.parallel_input],),
            {k: v for k, v in named.items() if k != module.parallel_input},
        )
    return (gather(inputs[0], module.parallel_share.comm, AXIS, SEQUENCE), *inputs[1:]), named


class Regathered(Gathered):
    """Wherever autograd would keep the gathered input, or a view of it, it keeps this device's part of it
    instead."""

    def forward(self, whole: Tensor, *rest: Any, **named: Any) -> Any:
        """The module's own."""
        again = _Again(whole, self.parallel_share)
        with torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack):
            return super().forward(whole, *rest, **named)

    def describe_share(self) -> str:
        """What happens to its input."""
        return "sequence gathered before, and again in backward"


class _Again:
    """A gathered tensor that is let go, and gathered again when the first of its users asks for it in
    backward."""

    def __init__(self, whole: Tensor, share: Share) -> None:
        self.comm, self.storage = share.comm, whole.untyped_storage().data_ptr()
        self.own = whole.detach().chunk(share.size, SEQUENCE)[share.index].clone()
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


class Column(ParallelModule):
    """A matrix split by outputs: (batch, sequence, inputs) to (batch, sequence, device's outputs); of a
    convolution, (batch, inputs, sequence) to (batch, device's outputs, sequence)."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own, on this device's rows of the weight."""
        output = super().forward(*inputs, **named)
        assert self.parallel_share.role is not None
        if not self.parallel_share.role.gather:
            return output
        return _put_together(output, _rows_of(self), self.parallel_share, _dim_of_features(self, output))

    def parallel_part(self, name: str, part: Tensor) -> Tensor:
        """Where there are fewer parts (key heads) than devices, each device holds all of them and uses
        one."""
        copied = self._copied_part()
        return part if copied is None else part.chunk(copied[1])[copied[0]]

    def _copied_part(self) -> tuple[int, int] | None:
        """Which of how many parts, where every device holds all of them."""
        role, share = self.parallel_share.role, self.parallel_share
        assert role is not None
        if role.parts is None or not copies_parts(role, share.size):
            return None
        return share.index * role.parts // share.size, role.parts

    def describe_share(self) -> str:
        """This device's outputs."""
        rows, copied = _rows_of(self), self._copied_part()
        if copied is not None:
            part, parts = copied
            return (
                f"outputs {part * rows // parts}:{(part + 1) * rows // parts} of {rows}, all of which "
                f"it holds"
            )
        assert self.parallel_share.role is not None
        return f"outputs {_in_words(self.parallel_share, rows)}" + (
            ", gathered after" if self.parallel_share.role.gather else ""
        )


class Row(ParallelModule):
    """A matrix split by inputs: (batch, sequence, device's inputs) to (batch, device's part of the sequence,
    outputs); of a convolution, (batch, device's inputs, sequence) to (batch, outputs, device's part of the
    sequence)."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The module's own, without its bias, which is added once, after the sum over the devices."""
        partial: Tensor = super().forward(*inputs, **named)
        sequence = partial.ndim - 1 if isinstance(self, nn.Conv1d) else SEQUENCE
        summed, bias = (
            scatter_sum(partial, self.parallel_share.comm, AXIS, sequence),
            self._parameters.get("bias"),
        )
        if bias is None:
            return summed
        own = local(bias).to(summed.dtype)
        return summed + (own.unsqueeze(-1) if isinstance(self, nn.Conv1d) else own)

    def parallel_part(self, name: str, part: Tensor) -> Tensor | None:
        """No bias for the module's own code."""
        return None if name == "bias" else part

    def describe_share(self) -> str:
        """This device's inputs."""
        weight = self._parameters["weight"]
        assert weight is not None
        return (
            f"inputs {_in_words(self.parallel_share, weight.shape[1])}, outputs summed and scattered along "
            f"the sequence"
        )


class Vocabulary(ParallelModule):
    """An embedding split by ids: all ids (batch, sequence) to (batch, this device's part of the sequence,
    hidden)."""

    weight: Tensor
    padding_idx: int | None

    def forward(self, ids: Tensor) -> Tensor:
        """Rows of ids that other devices have are zeros here, and the sum over the devices fills them in."""
        weight, first = self.weight, self.parallel_share.range_of(_rows_of(self)).start
        rows = ids - first
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        weight = weight if weight.shape[0] else F.pad(weight, (0, 0, 0, 1))  # a device may have no rows
        dtype = getattr(self, "compute_dtype", None)  # which a user's own kind of embedding does not have
        padding = (
            None
            if self.padding_idx is None or not 0 <= self.padding_idx - first < weight.shape[0]
            else self.padding_idx - first
        )
        vectors = lookup(rows.masked_fill(elsewhere, 0), weight, dtype, padding)  # (batch, sequence, hidden)
        return scatter_sum(
            vectors.masked_fill(elsewhere.unsqueeze(-1), 0), self.parallel_share.comm, AXIS, SEQUENCE
        )

    def describe_share(self) -> str:
        """This device's ids."""
        return (
            f"ids {_in_words(self.parallel_share, _rows_of(self))}, summed and scattered along the sequence"
        )


class Position(ParallelModule):
    """An embedding of positions, whole on every device: all positions to the vectors of this device's part of
    the sequence."""

    def forward(self, positions: Tensor) -> Any:
        """The module's own, of fewer positions."""
        return super().forward(positions.chunk(self.parallel_share.size, -1)[self.parallel_share.index])

    def describe_share(self) -> str:
        """All of it."""
        return "whole, asked for this device's part of the sequence, gradients summed"


class VocabularyLoss(ParallelModule):
    """`models.Head`, each device with its part of the vocabulary: the logits exist in parts only."""

    weight: Tensor
    split_backward: bool
    softcap: float | None
    chunk: int | None
    float8: Float8 | None

    @eager
    def forward(self, hidden: Tensor, targets: Tensor | None = None, at: int | None = None) -> Tensor:
        """Of (batch, part of the sequence, hidden): the loss, or whole logits at one position, or at all."""
        hidden, weight = (
            gather(hidden, self.parallel_share.comm, AXIS, SEQUENCE),
            self.weight,
        )  # (batch, sequence, hidden)
        if targets is not None:
            flat, goals, part = hidden.flatten(0, 1), targets.flatten(), self._part_of_vocabulary()
            split, softcap, float8 = self.split_backward, self.softcap, self.float8
            return linear_cross_entropy(
                flat,
                weight,
                goals,
                self.chunk,
                part=part,
                split_backward=split,
                softcap=softcap,
                float8=float8,
            )
        chosen = hidden if at is None else hidden[:, at]
        logits = cap_logits(linear(chosen, weight.to(hidden.dtype)), self.softcap)
        return _put_together(logits, _rows_of(self), self.parallel_share, logits.ndim - 1)

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
        """This device's ids."""
        return (
            f"ids {_in_words(self.parallel_share, _rows_of(self))}, sequence gathered before, sums of the "
            f"loss over all devices"
        )


def _dim_of_features(module: nn.Module, output: Tensor) -> int:
    """Of what a split module returns: the last, but for convolutions."""
    return output.ndim - (2 if isinstance(module, nn.Conv1d) else 1)


def _put_together(features: Tensor, rows: int, share: Share, dim: int) -> Tensor:
    """The features of all devices, of so many rows of a matrix; the last parts may be shorter, so they are
    padded on the way."""
    behind = (0, 0) * (features.ndim - 1 - dim)  # F.pad wants the last dim first
    padded = F.pad(features, (*behind, 0, largest_part(rows, share.size) - features.shape[dim]))
    return collect(padded, share.comm, AXIS, dim).narrow(
        dim, 0, rows
    )  # only behind the last row is there padding


def _rows_of(module: nn.Module) -> int:
    """Rows of the whole matrix."""
    weight = module._parameters["weight"]
    assert weight is not None
    return weight.shape[0]


def _in_words(share: Share, length: int) -> str:
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
"""By the role in the sharding table."""
