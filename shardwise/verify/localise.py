"""Where a layout first departs from one device: the first step that differs once more, watched module by
module.

One device runs the whole global batch in one piece and writes the weights that the step begins with, every
module's output, and the gradient of that output, to a file. Each rank then compares its own with the part of
the reference that it should have computed. Which part of an output that is follows from the shapes, given
what every layout has in common:

- dim 0 are sequences: those of the micro-batch, counted from the first row of the rank's share (where tokens
  are flattened into one dim, as for a router, it is opened up first);
- dim 1 (dim 2 in the attention itself) is the sequence: the rank's positions under `context`, and, if what is
  left is shorter still by the size of `tensor`, the rank's part of that;
- any other dim that is shorter was split over `tensor`: in as many parts as it is shorter by. Fewer parts
  than devices means that several devices have the same part (shared key heads).

What does not fit (rows sorted by expert, the loss, tables of positions) is not compared. A gradient is
compared only where `tensor` splits the output, in whatever way: devices with the same output each have but a
part of its gradient, rightly.

Modules are looked at in the order in which one device finishes them: inner modules before what contains them.
The first that differs is as far in and as early as the fault can be seen.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise._torch import inside_backward
from shardwise.data.batches import split_evenly
from shardwise.mesh import Worker
from shardwise.models import matches
from shardwise.optim import local
from shardwise.optim.norm import sharded_axes
from shardwise.parallel.placement import held
from shardwise.plan import COPIES
from shardwise.train.build import Training
from shardwise.verify.job import ProofJob, Sabotage
from shardwise.verify.measure import build_proof, watch
from shardwise.verify.reports import Key, ModuleDifference, RankTrace
from shardwise.verify.sabotage import apply_sabotage
from shardwise.verify.verdict import EXACT, LIMIT

Outputs = dict[str, list[list[Tensor]]]
"""By module, by call (a micro-batch each), what it returned or the gradients of that; an empty tensor: none
came."""


class Recorder:
    """Keeps what every module returns in forwards (not in recomputations), and the gradients that come back
    to it."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.outputs: Outputs = defaultdict(list)
        self.gradients: Outputs = defaultdict(list)
        self.weighted: set[str] = set()
        """Modules with weights of their own: none of them may go uncalled."""
        for model in models:
            for path, module in model.named_modules():
                if path:
                    module.register_forward_hook(self._hook(path, any(True for _ in module.parameters())))
                    if any(True for _ in module.parameters(recurse=False)):
                        self.weighted.add(path)

    def _hook(self, path: str, has_weights: bool) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if inside_backward():
                return
            tensors = list(_tensors(output, has_weights))
            gradients = [torch.empty(0) for _ in tensors]
            self.outputs[path].append([tensor.detach().clone() for tensor in tensors])
            self.gradients[path].append(gradients)
            for index, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    tensor.register_hook(_keep_first(gradients, index))  # type: ignore[no-untyped-call]

        return keep


def _keep_first(gradients: list[Tensor], index: int) -> Any:
    def keep(gradient: Tensor) -> None:
        if not gradients[index].numel():  # a backward in two halves comes by twice
            gradients[index] = gradient.detach().clone()

    return keep


def _tensors(output: Any, has_weights: bool) -> Iterator[Tensor]:
    """What depends on weights, be they trained or frozen, and choices made from it."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if has_weights or any(part.requires_grad for part in tensors):
        of_weights = (part.requires_grad or (has_weights and part.is_floating_point()) for part in tensors)
        yield from (
            part for part, kept in zip(tensors, of_weights, strict=True) if kept or part.dtype == torch.int64
        )


def write_reference_trace(worker: Worker, proof: ProofJob, path: Path, step: int) -> None:
    """One device: write the trace of a step."""
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
    """The layout: compare this rank's trace of a step with that of one device, and the suspects' gradients,
    summed over each axis and held against those of the step before, too."""
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
    """What a rank kept of one step: its modules, its part of the state before, and its gradients before the
    update."""

    modules: Recorder
    before: dict[str, Tensor]
    where: dict[str, tuple[slice, ...]]
    """Which part of a weight or buffer it is."""
    gradients: dict[str, tuple[nn.Parameter, Tensor]]


def _trace(training: Training, step: int) -> _TracedStep:
    """Train to a step, and watch that one."""
    parallel, traced = training.parallel, []

    def begin(number: int) -> None:
        if number == step:
            state = dict((*parallel.named_parameters(), *parallel.named_buffers()))
            before = {name: local(tensor.detach()).cpu().clone() for name, tensor in state.items()}
            where = {name: held(tensor) for name, tensor in state.items()}
            traced.append(_TracedStep(Recorder(part.model for part in parallel.parts), before, where, {}))

    def keep(number: int) -> None:
        if number == step:
            for name, parameter in parallel.named_parameters():
                if parameter.grad is not None:
                    traced[0].gradients[name] = (parameter, local(parameter.grad).clone())

    watch(training, step, keep, begin)
    return traced[0]


def _changed(traced: _TracedStep, reference: dict[str, Tensor]) -> list[str]:
    """What differs before the step begins. A weight near zero is measured against an average one: where its
    gradient is rounding noise, so is what Adam makes of it."""
    elements = sum(whole.numel() for whole in reference.values())
    average = math.sqrt(
        sum(float(whole.double().square().sum()) for whole in reference.values()) / max(1, elements)
    )
    changed = []
    for name, own in traced.before.items():
        part = reference[name][traced.where[name]].double()
        scale = max(float(part.norm()), average * math.sqrt(part.numel()))
        if not float((own.double() - part).norm()) <= LIMIT * scale:
            changed.append(name)
    return changed


def _micro_batches(training: Training) -> tuple[range, ...]:
    rows = training.shares.of(training.mesh.data_index)
    return tuple(rows[part.start : part.stop] for part in split_evenly(len(rows), training.plan.accumulation))


@dataclass(frozen=True)
class ReferenceSlicer:
    """Cuts out of the reference, which has the whole global batch, what this rank should have computed."""

    micro_batches: tuple[range, ...]
    """This rank's rows of the global batch, forward by forward."""
    positions: Tensor
    """Of this rank's tokens in a sequence."""
    length: int
    """Of a whole sequence."""
    tensor: int
    coordinate: int
    """On the tensor axis."""
    mixing: str | None
    skipped: frozenset[str]

    @classmethod
    def of(cls, training: Training) -> ReferenceSlicer:
        """The slicer for the part of a model and of its batches that this rank holds."""
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
        """The part of the reference that is this rank's, what this rank has, and whether `tensor` splits it;
        None: unclear."""
        if (
            path in self.skipped
            or actual.ndim < 2
            or reference.ndim != actual.ndim
            or call >= len(self.micro_batches)
        ):
            return None
        rows = self.micro_batches[call]
        if actual.ndim == 2:  # (tokens, features)
            if actual.shape[0] % len(rows) or reference.shape[0] % self.length:
                return None
            actual = actual.view(len(rows), -1, actual.shape[1])
            reference = reference.view(-1, self.length, reference.shape[1])
        part, sequence = reference[rows.start : rows.stop], 2 if matches(self.mixing, path) else 1
        part, split = self._of_sequence(part, sequence, actual.shape[sequence])
        for dim in range(1, actual.ndim):
            if dim != sequence and part.shape[dim] != actual.shape[dim]:
                part, in_full = self._of_features(part, dim, actual.shape[dim])
                split = split or in_full
        return (part, actual, split or self.tensor == 1) if part.shape == actual.shape else None

    def _of_sequence(self, part: Tensor, dim: int, own: int) -> tuple[Tensor, bool]:
        if part.shape[dim] != self.length:
            return part, False
        part = part.index_select(dim, self.positions)
        if own == part.shape[dim] or self.tensor == 1:
            return part, False
        return part.chunk(self.tensor, dim)[self.coordinate], True

    def _of_features(self, part: Tensor, dim: int, own: int) -> tuple[Tensor, bool]:
        """Fewer parts than devices, each on several; or as torch.chunk deals them out, the last ones
        shorter."""
        size = part.shape[dim]
        parts = size // own if own and size % own == 0 else self.tensor
        if parts < self.tensor and self.tensor % parts == 0:
            return part.narrow(dim, self.coordinate * parts // self.tensor * own, own), False
        size_of_part = -(-size // self.tensor)
        begin = min(size, size_of_part * self.coordinate)
        return part.narrow(dim, begin, min(size_of_part, size - begin)), True


def _differences(
    order: Sequence[str],
    own: Outputs,
    whole: Outputs,
    slicer: ReferenceSlicer,
    weighted: Collection[str] | None = None,
) -> Iterator[ModuleDifference]:
    """Modules that differ, the earliest first, of which those with weights (`weighted`) must be called;
    without that: gradients, from the last module on."""
    modules, backward = list(enumerate(order)), weighted is None
    for position, path in reversed(modules) if backward else modules:
        if len(whole[path]) != 1:
            continue  # used several times: which call is which micro-batch's is not known
        if path in (weighted or ()) and path not in own:
            yield ModuleDifference(path, position, math.inf, 0, called=False)
        calls = [
            _compare_call(path, call, whole[path][0], mine, slicer, backward)
            for call, mine in enumerate(own.get(path, []))
        ]
        if calls and not (error := max(compared.error for compared in calls)) <= LIMIT:
            first = next(call for call, compared in enumerate(calls) if not compared.error <= LIMIT)
            reference, mine, product = (sum(compared[index] for compared in calls) for index in range(1, 4))
            yield ModuleDifference(path, position, error, first, reference, mine, product)


class _CallComparison(NamedTuple):
    """One call of a module compared with the reference: sums as in a SliceComparison."""

    error: float
    reference: float
    own: float
    product: float


def _compare_call(
    path: str,
    call: int,
    whole: Sequence[Tensor],
    own: Sequence[Tensor],
    slicer: ReferenceSlicer,
    backward: bool,
) -> _CallComparison:
    errors, reference_squares, own_squares, product = [0.0], 0.0, 0.0, 0.0
    for reference, output in zip(whole, own, strict=False):
        pair = slicer.match(path, call, reference, output) if reference.numel() and output.numel() else None
        if pair is None or (backward and not pair[2]):
            continue
        part, mine = pair[0].double(), pair[1].cpu().double()
        scale = float(reference.double().norm()) * math.sqrt(part.numel() / reference.numel())
        error = float((mine - part).norm()) / (scale or 1.0)
        errors.append(math.inf if math.isnan(error) else error)
        reference_squares += float(part.square().sum())
        own_squares += float(mine.square().sum())
        product += float((mine * part).sum())
    return _CallComparison(max(errors), reference_squares, own_squares, product)


def _is_left_over(
    name: str, parameter: nn.Parameter, own: Tensor, tensors: dict[Key, Tensor], step: int
) -> bool:
    """Whether what a gradient has too much is a multiple of the gradient of the step before, which an update
    may have divided."""
    reference, earlier = (
        tensors[name, "gradient", number][held(parameter)].double() for number in (step, step - 1)
    )
    excess = own.cpu().double() - reference
    ratio = float((excess * earlier).sum()) / max(float(earlier.square().sum()), 1e-300)
    return float((excess - ratio * earlier).norm()) <= EXACT * float(excess.norm())


def _sums(
    training: Training,
    tensors: dict[Key, Tensor],
    suspects: dict[str, tuple[nn.Parameter, Tensor]],
    step: int,
) -> dict[str, list[str]]:
    """Over which axes the copies of a suspect's gradient, added up, give the reference: there a sum was left
    out."""
    mesh, axes_of = training.mesh, defaultdict(list)
    for axis in dict.fromkeys(("tensor", "data", "context", "replica", COPIES)):
        group = mesh.group(axis)
        for name, (parameter, gradient) in suspects.items():
            if group is None or _is_split(parameter, axis):
                continue
            added = gradient.clone()
            dist.all_reduce(added, group=group)
            reference = tensors[name, "gradient", step][held(parameter)]
            if added.numel() and float((added.cpu() - reference).norm()) <= LIMIT * float(reference.norm()):
                axes_of[name].append(mesh.label(axis))
    return dict(axes_of)


def _is_split(parameter: Tensor, axis: str) -> bool:
    split = " x ".join(sharded_axes(parameter))
    return any(part in split for part in axis.split(" x "))
