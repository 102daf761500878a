"""Find where a layout first differs from one device: run the first differing step again, module by module.

One device runs the whole global batch in one piece. It writes the weights that the step begins with, the
output of every module, and the gradient of that output, to a file. Each rank then compares its tensors with
the part of the reference that it should have computed. Which part of an output that is follows from the
shapes, by rules that hold for every layout:

- dim 0 holds sequences: those of the micro-batch, counted from the first row of the rank's share. Where
  tokens are flattened into one dim, as for a router, that dim is split into sequences and tokens first.
- dim 1 (dim 2 in the attention itself) holds the tokens of a sequence: the rank's positions under `context`.
  If the output is shorter still, by the size of `tensor`, it is the rank's part of these positions.
- Any other dim that is shorter was split over `tensor`. The ratio of the lengths is the number of parts. If
  there are fewer parts than devices, several devices hold the same part (shared key heads).

An output that does not fit these rules (rows sorted by expert, the loss, tables of positions) is not
compared. A gradient is compared only where `tensor` splits the output in some way: devices with the same
output correctly hold only a part of its gradient each.

Modules are compared in the order in which one device finishes them, so inner modules come before the modules
that contain them. The first module that differs is therefore the innermost and earliest one that shows the
fault.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch import inside_backward
from shardwise.config.axes import TOKEN_AXES
from shardwise.data.batches import split_evenly
from shardwise.mesh import Worker
from shardwise.models import matches
from shardwise.optim import local
from shardwise.optim.norm import sharded_axes
from shardwise.parallel.placement import local_slices
from shardwise.plans import COPIES
from shardwise.proof.compare_layout import build_proof, watch
from shardwise.proof.proof_job import ProofJob, Sabotage
from shardwise.proof.rank_reports import Key, ModuleDifference, RankTrace
from shardwise.proof.sabotage import apply_sabotage
from shardwise.proof.verdict import EXACT, LIMIT
from shardwise.train.build import Training

Outputs = dict[str, list[list[Tensor]]]
"""Tensors that each module returned, or their gradients, by call (one call per micro-batch). An empty tensor
means that no gradient arrived."""


class Recorder:
    """Records what every module returns in forward (not in recomputation), and the gradients of these
    outputs."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.outputs: Outputs = defaultdict(list)
        self.gradients: Outputs = defaultdict(list)
        self.weighted: set[str] = set()
        """Modules that hold weights directly. Each of them must be called."""
        for model in models:
            for path, module in model.named_modules():
                if path:
                    module.register_forward_hook(self._hook(path, any(True for _ in module.parameters())))
                    if any(True for _ in module.parameters(recurse=False)):
                        self.weighted.add(path)

    def _hook(self, path: str, has_weights: bool) -> Callable[[nn.Module, object, object], None]:
        def keep(module: nn.Module, inputs: object, output: object) -> None:
            if inside_backward():
                return
            tensors = list(_tensors(output, has_weights))
            gradients = [torch.empty(0) for _ in tensors]
            self.outputs[path].append([tensor.detach().clone() for tensor in tensors])
            self.gradients[path].append(gradients)
            for index, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    tensor.register_hook(_keep_first(gradients, index))

        return keep


def _keep_first(gradients: list[Tensor], index: int) -> Callable[[Tensor], None]:
    def keep(gradient: Tensor) -> None:
        if not gradients[index].numel():  # a backward in two halves calls this hook twice
            gradients[index] = gradient.detach().clone()

    return keep


def _tensors(output: object, has_weights: bool) -> Iterator[Tensor]:
    """Yield the tensors of an output that depend on weights, trained or frozen, and the integer choices made
    from them."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if has_weights or any(part.requires_grad for part in tensors):
        yield from (
            part for part in tensors if part.dtype == torch.int64 or _is_of_weights(part, has_weights)
        )


def _is_of_weights(part: Tensor, has_weights: bool) -> bool:
    """Return whether a part of the output of a module depends on weights."""
    return part.requires_grad or (has_weights and part.is_floating_point())


def write_reference_trace(worker: Worker, proof: ProofJob, path: Path, step: int) -> None:
    """Run one device to a step, and write the trace of that step to a file."""
    training = build_proof(worker, proof)
    traced = _trace(training, step)
    torch.save((dict(traced.modules.outputs), dict(traced.modules.gradients), traced.before), path)


def compare_traces(
    worker: Worker,
    proof: ProofJob,
    trace: Path,
    reference: Path,
    step: int,
    suspects: Sequence[str],
    sabotage: Sabotage | None = None,
) -> RankTrace:
    """Compare this rank's trace of a step with the trace of one device.

    The gradients of `suspects` are also summed over each axis, and compared with the gradients of the
    previous step.
    """
    training = build_proof(worker, proof)
    if sabotage:
        apply_sabotage(sabotage, training)
    traced = _trace(training, step)
    outputs, gradients, before = torch.load(trace, mmap=True)
    slicer = ReferenceSlicer.of(training)
    recorder, order = traced.modules, list(outputs)
    forward = _differences(order, recorder.outputs, outputs, slicer, recorder.weighted)
    backward = _differences(order, recorder.gradients, gradients, slicer)
    tensors = torch.load(reference, mmap=True)
    suspected = {name: pair for name, pair in traced.gradients.items() if name in suspects}
    return RankTrace(
        rank=worker.rank,
        forward=next(forward, None),
        backward=next(backward, None),
        summed=_sums(training, tensors, suspected, step),
        step=step,
        before=_changed(traced, before),
        left_over=[
            name for name, pair in suspected.items() if step > 1 and _is_left_over(name, *pair, tensors, step)
        ],
    )


@dataclass(frozen=True)
class _TracedStep:
    """What a rank recorded of one step: its modules, its part of the state before the step, and its gradients
    before the update."""

    modules: Recorder
    before: dict[str, Tensor]
    where: dict[str, tuple[slice, ...]]
    """The slice of each weight or buffer that this rank holds."""
    gradients: dict[str, tuple[nn.Parameter, Tensor]]


def _trace(training: Training, step: int) -> _TracedStep:
    """Train up to a step, and record that step."""
    parallel, traced = training.parallel, []

    def begin(number: int) -> None:
        if number == step:
            state = dict((*parallel.named_parameters(), *parallel.named_buffers()))
            before = {name: local(tensor.detach()).cpu().clone() for name, tensor in state.items()}
            where = {name: local_slices(tensor) for name, tensor in state.items()}
            traced.append(_TracedStep(Recorder(part.model for part in parallel.parts), before, where, {}))

    def keep(number: int) -> None:
        if number == step:
            for name, parameter in parallel.named_parameters():
                if parameter.grad is not None:
                    traced[0].gradients[name] = (parameter, local(parameter.grad).clone())

    watch(training, step, keep, begin)
    return traced[0]


def _changed(traced: _TracedStep, reference: dict[str, Tensor]) -> list[str]:
    """Return the weights and buffers that differ before the step begins.

    A weight near zero is measured against an average weight: where its gradient is rounding noise, so is its
    update by Adam.
    """
    elements = sum(whole.numel() for whole in reference.values())
    average = math.sqrt(
        sum(float(whole.double().square().sum()) for whole in reference.values()) / max(1, elements)
    )
    changed = []
    for name, actual in traced.before.items():
        part = reference[name][traced.where[name]].double()
        scale = max(float(part.norm()), average * math.sqrt(part.numel()))
        if not float((actual.double() - part).norm()) <= LIMIT * scale:
            changed.append(name)
    return changed


def _micro_batches(training: Training) -> tuple[range, ...]:
    rows = training.shares.of(training.mesh.data_index)
    return tuple(rows[part.start : part.stop] for part in split_evenly(len(rows), training.plan.accumulation))


@dataclass(frozen=True)
class ReferenceSlicer:
    """Cuts the part that this rank should have computed out of the reference, which holds the whole global
    batch."""

    micro_batches: tuple[range, ...]
    """This rank's rows of the global batch, for each forward."""
    positions: Tensor
    """Positions of this rank's tokens in a sequence."""
    length: int
    """Number of tokens in a whole sequence."""
    tensor: int
    coordinate: int
    """Coordinate of this rank on the tensor axis."""
    mixing: str | None
    skipped: frozenset[str]

    @classmethod
    def of(cls, training: Training) -> ReferenceSlicer:
        """Return the slicer for the part of the model and of the batches that this rank holds."""
        mesh, parallel, length = training.mesh, training.parallel, training.config.data.sequence_length
        table = parallel.table
        paths = [path for part in parallel.parts for path, _ in part.model.named_modules()]
        roles = {path: table.role(path) for path in paths}
        return cls(
            micro_batches=_micro_batches(training),
            positions=torch.arange(length)
            if parallel.positions is None
            else parallel.positions(length).cpu(),
            length=length,
            tensor=mesh.size("tensor"),
            coordinate=mesh.coordinate("tensor"),
            mixing=table.mixing,
            skipped=frozenset(
                path
                for path, role in roles.items()
                if role is not None and role.kind in ("experts", "positions")
            ),
        )

    def match(
        self, path: str, call: int, reference: Tensor, actual: Tensor
    ) -> tuple[Tensor, Tensor, bool] | None:
        """Return this rank's part of the reference, the rank's tensor in the same shape, and whether `tensor`
        splits it. Return None if the part is unclear."""
        if path in self.skipped or call >= len(self.micro_batches):
            return None
        rows = self.micro_batches[call]
        by_sequence = self._by_sequence(reference, actual, len(rows))
        if by_sequence is None:
            return None
        reference, actual = by_sequence
        part, sequence = reference[rows.start : rows.stop], 2 if matches(self.mixing, path) else 1
        part, split = self._of_sequence(part, sequence, actual.shape[sequence])
        part, in_full = self._of_other_dims(part, sequence, actual)
        return (part, actual, split or in_full or self.tensor == 1) if part.shape == actual.shape else None

    def _by_sequence(self, reference: Tensor, actual: Tensor, rows: int) -> tuple[Tensor, Tensor] | None:
        """Return both tensors with sequences as their first dim, or None if they have no such dim."""
        if actual.ndim < 2 or reference.ndim != actual.ndim:
            return None
        if actual.ndim > 2:
            return reference, actual
        if actual.shape[0] % rows or reference.shape[0] % self.length:  # (tokens, features)
            return None
        whole = reference.view(-1, self.length, reference.shape[1])
        return whole, actual.view(rows, -1, actual.shape[1])

    def _of_sequence(self, part: Tensor, dim: int, actual_size: int) -> tuple[Tensor, bool]:
        """Return this rank's part of the tokens of a sequence, and whether `tensor` splits them."""
        if part.shape[dim] != self.length:
            return part, False
        part = part.index_select(dim, self.positions)
        if actual_size == part.shape[dim] or self.tensor == 1:
            return part, False
        return part.chunk(self.tensor, dim)[self.coordinate], True

    def _of_other_dims(self, part: Tensor, sequence: int, actual: Tensor) -> tuple[Tensor, bool]:
        """Return this rank's part of the dims of features, and whether each device has a part of its own."""
        split = False
        for dim in range(1, actual.ndim):
            if dim != sequence and part.shape[dim] != actual.shape[dim]:
                part, in_full = self._of_features(part, dim, actual.shape[dim])
                split = split or in_full
        return part, split

    def _of_features(self, part: Tensor, dim: int, actual_size: int) -> tuple[Tensor, bool]:
        """Return this rank's part of a dim that `tensor` splits, and whether each device has a part of its
        own.

        There may be fewer parts than devices, so that several devices hold the same part. Otherwise parts are
        those of torch.chunk, where the last ones may be shorter.
        """
        size = part.shape[dim]
        parts = size // actual_size if actual_size and size % actual_size == 0 else self.tensor
        if parts < self.tensor and self.tensor % parts == 0:
            begin = self.coordinate * parts // self.tensor * actual_size
            return part.narrow(dim, begin, actual_size), False
        size_of_part = -(-size // self.tensor)
        begin = min(size, size_of_part * self.coordinate)
        return part.narrow(dim, begin, min(size_of_part, size - begin)), True


def _differences(
    order: Sequence[str],
    actual: Outputs,
    whole: Outputs,
    slicer: ReferenceSlicer,
    weighted: Collection[str] | None = None,
) -> Iterator[ModuleDifference]:
    """Yield the modules that differ, the earliest first.

    With `weighted`, outputs are compared, and a module of that set that was not called differs too. Without
    it, gradients are compared, from the last module to the first.
    """
    modules, backward = list(enumerate(order)), weighted is None
    for position, path in reversed(modules) if backward else modules:
        if len(whole[path]) != 1:
            continue  # the module is used several times: which call belongs to which micro-batch is unknown
        if path in (weighted or ()) and path not in actual:
            yield ModuleDifference(path, position, math.inf, 0, called=False)
        calls = [
            _compare_call(path, call, whole[path][0], outputs, slicer, backward)
            for call, outputs in enumerate(actual.get(path, []))
        ]
        if (difference := _difference(path, position, calls)) is not None:
            yield difference


def _difference(path: str, position: int, calls: Sequence[_CallComparison]) -> ModuleDifference | None:
    """Return how a module differs over all its calls, or None if every call is within the limit."""
    wrong = [call for call, compared in enumerate(calls) if not compared.error <= LIMIT]
    if not wrong:
        return None
    return ModuleDifference(
        path,
        position,
        error=max(compared.error for compared in calls),
        micro_batch=wrong[0],
        reference=sum(compared.reference for compared in calls),
        actual=sum(compared.actual for compared in calls),
        product=sum(compared.product for compared in calls),
    )


class _CallComparison(NamedTuple):
    """One call of a module compared with the reference; the sums are those of a SliceComparison."""

    error: float
    reference: float
    actual: float
    product: float


def _compare_call(
    path: str,
    call: int,
    whole: Sequence[Tensor],
    outputs: Sequence[Tensor],
    slicer: ReferenceSlicer,
    backward: bool,
) -> _CallComparison:
    errors, reference_squares, actual_squares, product = [0.0], 0.0, 0.0, 0.0
    for reference, output in zip(whole, outputs, strict=False):
        pair = slicer.match(path, call, reference, output) if reference.numel() and output.numel() else None
        if pair is None or (backward and not pair[2]):
            continue
        part, actual = pair[0].double(), pair[1].cpu().double()
        scale = float(reference.double().norm()) * math.sqrt(part.numel() / reference.numel())
        error = float((actual - part).norm()) / (scale or 1.0)
        errors.append(math.inf if math.isnan(error) else error)
        reference_squares += float(part.square().sum())
        actual_squares += float(actual.square().sum())
        product += float((actual * part).sum())
    return _CallComparison(max(errors), reference_squares, actual_squares, product)


def _is_left_over(
    name: str, parameter: nn.Parameter, gradient: Tensor, tensors: dict[Key, Tensor], step: int
) -> bool:
    """Return whether the excess of a gradient is a multiple of the previous step's gradient.

    The factor may be any, because an update may have divided that gradient.
    """
    reference, earlier = (
        tensors[name, "gradient", number][local_slices(parameter)].double() for number in (step, step - 1)
    )
    excess = gradient.cpu().double() - reference
    ratio = float((excess * earlier).sum()) / max(float(earlier.square().sum()), 1e-300)
    return float((excess - ratio * earlier).norm()) <= EXACT * float(excess.norm())


def _sums(
    training: Training,
    tensors: dict[Key, Tensor],
    suspects: dict[str, tuple[nn.Parameter, Tensor]],
    step: int,
) -> dict[str, list[str]]:
    """Return, for each suspect, the axes over which the copies of its gradient add up to the reference. A sum
    over such an axis was left out."""
    mesh, axes_of = training.mesh, defaultdict(list)
    for axis in (*reversed(TOKEN_AXES), COPIES):
        group = mesh.group(axis)
        for name, (parameter, gradient) in suspects.items():
            if group is None or _is_split(parameter, axis):
                continue
            added = gradient.clone()
            dist.all_reduce(added, group=group)
            reference = tensors[name, "gradient", step][local_slices(parameter)]
            if added.numel() and float((added.cpu() - reference).norm()) <= LIMIT * float(reference.norm()):
                axes_of[name].append(mesh.label(axis))
    return dict(axes_of)


def _is_split(parameter: Tensor, axis: str) -> bool:
    split = " x ".join(sharded_axes(parameter))
    return any(part in split for part in axis.split(" x "))
