"""The comparison inside the workers: one device writes the reference, and every rank compares its part with
it.

Training runs in the ordinary loop (train/steps.py), which is only observed: after each backward, when
gradients are complete and not yet divided for the update; when the loads of experts are computed; and after
the last step, which is followed by an evaluation. A rank compares what it holds, slice by slice, so every
copy on every rank is checked, and no whole parameter is assembled except in the reference. The file of the
reference is memory-mapped, so that the ranks of one machine share its pages.

For each slice a rank reports four sums: the squares of the difference, of the reference and of the rank's
values, and the products of the last two. Errors and ratios of any union of slices follow from these sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from shardwise.config import AXES
from shardwise.data import Rows
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.models import Head
from shardwise.optim import local
from shardwise.optim.norm import sharded_axes
from shardwise.parallel.parallel_model import MicroBatches
from shardwise.parallel.placement import local_slices
from shardwise.plans import COPIES
from shardwise.proof.plain_torch import PlainStep, Reader, Text, checksum, train_plainly
from shardwise.proof.plain_torch import Rows as PlainRows
from shardwise.proof.plain_torch import held_out_loss as plain_held_out_loss
from shardwise.proof.proof_job import ProofJob, Sabotage
from shardwise.proof.proof_rows import ProofDataset
from shardwise.proof.rank_reports import HELD_OUT, LOAD, Key, RankReport, Reference, SliceComparison
from shardwise.proof.sabotage import apply_sabotage
from shardwise.train.build import Training, build
from shardwise.train.check_loss import check_summed_loss
from shardwise.train.evaluate import held_out_loss
from shardwise.train.program_source import make_program
from shardwise.train.shares import RowShares
from shardwise.train.steps import StepRecord, steps


def build_proof(worker: Worker, proof: ProofJob) -> Training:
    """Build the training of a proof on this rank, with the rows and the loss chunks of the proof."""
    program = None if proof.config.run.program is None else make_program(proof.config)
    own_data = None if program is None else program.begin().samples
    dataset = own_data or ProofDataset.of(proof)
    training = build(proof.config, proof.plan, worker, dataset, program=program)
    if proof.uneven:
        training.shares = _uneven(training.shares, training.plan.accumulation)
    for part in training.parallel.parts:
        for module in part.model.modules():
            if isinstance(module, Head):
                module.chunk = proof.chunk
    return training


def _uneven(shares: RowShares, least: int) -> RowShares:
    """Return shares in which every second device gives one row to the device before it, if it has more than
    `least` rows, so that the proof covers an uneven split too."""
    rows = list(shares.rows)
    for giver in range(1, len(rows), 2):
        if rows[giver] > least:
            rows[giver - 1], rows[giver] = rows[giver - 1] + 1, rows[giver] - 1
    return RowShares(tuple(rows))


def write_reference(worker: Worker, proof: ProofJob, path: Path) -> Reference:
    """Train on one device, write gradients and weights to a file, and return the numbers of the reference."""
    training = build_proof(worker, proof)
    check_summed_loss(training)
    tensors: dict[Key, Tensor] = {}
    frozen = {name: parameter.detach().clone() for name, parameter in _frozen(training)}

    def keep(step: int) -> None:
        for name, parameter in _trained(training):
            if parameter.grad is None:
                raise UserError(
                    f"{name} has no gradient on one device. Use it in forward, remove it, or give it "
                    f"requires_grad=False"
                )
            tensors[name, "gradient", step] = parameter.grad.detach().clone()

    loads = watch_loads(training)
    done = watch(training, proof.steps, keep)
    _check_unchanged(training, frozen)
    for name, quantity, tensor in _state(training):
        tensors[name, quantity, proof.steps] = tensor.detach().clone()
    tensors.update(loads)
    torch.save(tensors, path)
    numbers = dict(_numbers(done, held_out_loss(training)))
    return Reference(
        losses=[step.loss for step in done],
        norms=[step.gradient_norm for step in done],
        shapes={name: tuple(parameter.shape) for name, parameter in training.parallel.named_parameters()},
        buffers={name: tuple(buffer.shape) for name, buffer in training.parallel.named_buffers()},
        squares=_all_squares(tensors, numbers),
        learning_rate=max(step.learning_rate for step in done),
        data=[step.data for step in done],
        numbers=numbers,
        idle_experts=_idle_experts(loads),
    )


def _check_unchanged(training: Training, frozen: Mapping[str, Tensor]) -> None:
    """Refuse a model whose forward changed a parameter that is not trained."""
    for name, parameter in _frozen(training):
        if not torch.equal(parameter, frozen[name]):
            raise UserError(
                f"{name} has requires_grad=False, and forward changes it; what forward changes must be a "
                f"buffer, which devices do not share"
            )


def write_plain_reference(worker: Worker, proof: ProofJob, path: Path) -> Reference:
    """Train in plain torch (proof/plain_torch.py), from the initial weights and the prepared data of one
    device, and write the reference like `write_reference`."""
    training = build_proof(worker, proof)
    rows, tensors, done = _PlainRows.of(training), dict[Key, Tensor](), list[PlainStep]()
    weights = {name: parameter.detach().clone() for name, parameter in training.parallel.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in training.parallel.named_buffers()}
    for step in train_plainly(proof.config, weights, buffers, rows.batch, proof.steps):
        tensors |= {(name, "gradient", step.step): gradient for name, gradient in step.gradients.items()}
        tensors |= {(name, LOAD, step.step): load for name, load in step.loads.items()}
        done.append(step)
    tensors |= {(name, "weight", proof.steps): weight for name, weight in weights.items()}
    tensors |= {(name, "buffer", proof.steps): buffer for name, buffer in buffers.items()}
    torch.save(tensors, path)
    numbers = _plain_numbers(done, bool(proof.config.model.experts))
    if (held_out := rows.held_out()) is not None:
        numbers["", HELD_OUT, proof.steps] = plain_held_out_loss(proof.config, weights, buffers, held_out)
    return _plain_reference(done, tensors, numbers, weights, buffers, rows)


def _plain_numbers(done: Sequence[PlainStep], has_experts: bool) -> dict[Key, float]:
    """Return the numbers of plain torch's steps that belong to no parameter."""
    numbers = {("", "loss", step.step): step.loss for step in done}
    numbers |= {("", "gradient norm", step.step): step.norm for step in done}
    if has_experts:
        numbers |= {("", "expert imbalance", step.step): step.imbalance for step in done}
    return numbers


def _plain_reference(
    done: Sequence[PlainStep],
    tensors: dict[Key, Tensor],
    numbers: dict[Key, float],
    weights: dict[str, Tensor],
    buffers: dict[str, Tensor],
    rows: _PlainRows,
) -> Reference:
    return Reference(
        losses=[step.loss for step in done],
        norms=[step.norm for step in done],
        shapes={name: tuple(weight.shape) for name, weight in weights.items()},
        buffers={name: tuple(buffer.shape) for name, buffer in buffers.items()},
        squares=_all_squares(tensors, numbers),
        learning_rate=max(step.learning_rate for step in done),
        data=[checksum(rows.batch(step.step)[0]) for step in done],
        numbers=numbers,
        idle_experts=_idle_experts({key: tensor for key, tensor in tensors.items() if key[1] == LOAD}),
    )


@dataclass(frozen=True)
class _PlainRows:
    """The rows of a proof: the job's own rows as proof/plain_torch.py reads them, and the generated rows as
    ProofDataset makes them."""

    reader: Reader
    dataset: ProofDataset

    @classmethod
    def of(cls, training: Training) -> _PlainRows:
        """Return the rows for the training of a proof."""
        dataset = training.dataset
        assert isinstance(dataset, ProofDataset), "build_proof gives the training a ProofDataset"
        texts = [Text(stream.tokens.folder) for stream in dataset.streams]
        return cls(Reader(training.config, texts, [stream.weight for stream in dataset.streams]), dataset)

    def batch(self, step: int) -> PlainRows:
        """Return the global batch of a step, counted from 1."""
        size = self.reader.config.train.global_batch
        places = range((step - 1) * size, step * size)
        made = [self.dataset.is_made(place) for place in places]
        return _with_made(self.reader.batch(step), self.dataset.sequences(places.start, size), made)

    def held_out(self) -> PlainRows | None:
        """Return the held-out rows of the evaluation, or None if there are none."""
        count = min(self.dataset.held_out_count, self.reader.config.train.evaluate_sequences)
        if not count:
            return None
        made = [self.dataset.held_out_is_made(row) for row in range(count)]
        return _with_made(self.reader.held_out(count), self.dataset.held_out_rows(0, count), made)


def _with_made(read: PlainRows, given: Rows, made: Sequence[bool]) -> PlainRows:
    """Return the rows that plain torch read, with the generated ones taken from the given rows."""
    documents = np.zeros_like(given.inputs) if given.documents is None else given.documents
    inputs, targets, document_numbers = (
        torch.where(torch.tensor(made)[:, None], torch.from_numpy(generated), from_job)
        for from_job, generated in zip(read, (given.inputs, given.targets, documents), strict=True)
    )
    return inputs, targets, document_numbers


def compare_with_reference(
    worker: Worker, proof: ProofJob, path: Path, reference: Reference, sabotage: Sabotage | None = None
) -> RankReport:
    """Train on the layout, and compare everything that this rank holds with the reference file."""
    training = build_proof(worker, proof)
    sabotaged = apply_sabotage(sabotage, training) if sabotage else None
    tensors = torch.load(path, mmap=True)
    slices: list[SliceComparison] = []
    missing: dict[str, None] = {}

    def check(step: int) -> None:
        for name, parameter in _trained(training):
            if parameter.grad is None:
                missing[name] = None
            else:
                gradient = local(parameter.grad)
                slices.append(_compare_slice((name, "gradient", step), parameter, gradient, tensors))

    loads = watch_loads(training)
    done = watch(training, proof.steps, check)
    for name, quantity, tensor in _state(training):
        slices.append(_compare_slice((name, quantity, proof.steps), tensor, local(tensor), tensors))
    slices += [_compare_slice(key, load, load, tensors) for key, load in loads.items()]
    numbers = _numbers(done, held_out_loss(training))
    slices += [_compare_number(key, number, reference.numbers[key]) for key, number in numbers]
    return RankReport(
        rank=worker.rank,
        coordinates={axis: training.mesh.coordinate(axis) for axis in AXES},
        slices=slices,
        losses=[step.loss for step in done],
        missing=list(missing),
        frozen={
            name: _is_reference((name, "weight", proof.steps), parameter, tensors)
            for name, parameter in _frozen(training)
        },
        reductions={
            name: reductions(training, name, parameter)
            for name, parameter in training.parallel.named_parameters()
        },
        sabotaged=sabotaged,
        data=[step.data for step in done],
    )


def watch(
    training: Training,
    count: int,
    look: Callable[[int], None],
    begin: Callable[[int], None] = lambda step: None,
) -> list[StepRecord]:
    """Train `count` steps in the ordinary loop; call `begin` before each step, and `look` when its gradients
    are complete.

    The model is in eval mode: dropout draws one mask for a whole micro-batch, and the micro-batches of a
    layout are not those of one device.
    """
    parallel, original = training.parallel, training.parallel.forward_backward

    def watched(batch: MicroBatches, factor: Tensor) -> Tensor:
        begin(training.step + 1)
        loss = original(batch, factor)
        # A step in which a tensor outgrew its float8 scale is repeated, so only its last attempt counts.
        if parallel.scales is None or not bool(parallel.scales.observe().outgrown):
            look(training.step + 1)
        return loss

    parallel.forward_backward = watched  # type: ignore[method-assign]
    with parallel.evaluating(), closing(steps(training)) as done_steps:
        return list(islice(done_steps, count))


def watch_loads(training: Training) -> dict[Key, Tensor]:
    """Return a dictionary that fills, during training, with the loads of this rank's experts in each step."""
    parallel, original = training.parallel, training.parallel.take_loads
    paths = {module: path for part in parallel.parts for path, module in part.model.named_modules()}
    loads: dict[Key, Tensor] = {}

    def watched() -> Tensor:
        taken = original()
        for mixture, load in zip(parallel.mixtures, taken, strict=True):
            loads[paths[mixture], LOAD, training.step + 1] = load
        return taken

    parallel.take_loads = watched  # type: ignore[method-assign]
    return loads


def _idle_experts(loads: dict[Key, Tensor]) -> dict[str, list[int]]:
    """Return the experts that no token chose in any step, by the path of their mixture. A mixture without
    such experts is left out."""
    total: dict[str, Tensor] = {}
    for (path, _, _), load in loads.items():
        total[path] = total.get(path, torch.zeros_like(load)) + load
    idle = {path: (load == 0).nonzero().flatten().tolist() for path, load in total.items()}
    return {path: experts for path, experts in idle.items() if experts}


def reductions(training: Training, name: str, parameter: nn.Parameter) -> dict[str, int]:
    """Return the axes over which the gradient of a parameter is summed, with their sizes. Axes that are
    summed at once count as one."""
    mesh, parallel = training.mesh, training.parallel
    role = parallel.table.role(name.rpartition(".")[0])
    expert = role is not None and role.kind == "experts"
    sums = [(mesh.label(axis), mesh.size(axis)) for axis in _copy_axes(expert, bool(mesh.layout.zero))]
    if not expert and "tensor" not in sharded_axes(parameter):
        sums.append(("tensor", mesh.size("tensor")))
    if name in parallel.table.tied.values() and parallel.pipeline is not None:
        ranks = parallel.pipeline.schedule.rank_of_stage
        sums.append(("pipeline", len({ranks[0], ranks[-1]})))  # copies are on the first and last stage
    return {axis: size for axis, size in sums if size > 1}


def _copy_axes(expert: bool, sharded: bool) -> list[str]:
    """Return the axes over which the copies of a weight are summed, one name for axes that are summed at
    once."""
    shards = "expert_data" if expert else "data x context"
    if sharded:
        return [shards, "replica"]
    return [f"replica x {shards}" if expert else COPIES]


def _trained(training: Training) -> Iterator[tuple[str, nn.Parameter]]:
    named = training.parallel.named_parameters()
    return ((name, parameter) for name, parameter in named if parameter.requires_grad)


def _frozen(training: Training) -> Iterator[tuple[str, nn.Parameter]]:
    named = training.parallel.named_parameters()
    return ((name, parameter) for name, parameter in named if not parameter.requires_grad)


def _is_reference(key: Key, holder: Tensor, tensors: dict[Key, Tensor]) -> bool:
    """Return whether this rank's slice equals the reference to the bit."""
    return torch.equal(local(holder.detach()).cpu(), tensors[key][local_slices(holder)].to(holder.dtype))


def _state(training: Training) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in training.parallel.named_parameters():
        yield name, "weight", parameter
    for name, buffer in training.parallel.named_buffers():
        yield name, "buffer", buffer


def _numbers(done: Sequence[StepRecord], held_out: float | None) -> Iterator[tuple[Key, float]]:
    """Yield the numbers that each step reports, and the held-out loss after the last step."""
    for step in done:
        yield ("", "loss", step.step), step.loss
        yield ("", "gradient norm", step.step), step.gradient_norm
        if step.expert_imbalance is not None:
            yield ("", "expert imbalance", step.step), step.expert_imbalance
    if held_out is not None:
        yield ("", HELD_OUT, len(done)), held_out


def _compare_number(key: Key, actual: float, reference: float) -> SliceComparison:
    difference = (actual - reference) ** 2
    return SliceComparison(key, (), difference, reference**2, actual**2, actual * reference)


def _compare_slice(key: Key, holder: Tensor, values: Tensor, tensors: dict[Key, Tensor]) -> SliceComparison:
    """Compare this rank's values with the slice of the reference that `holder` holds."""
    where = local_slices(holder)
    reference, actual = tensors[key][where].double(), values.detach().cpu().double()
    shapes = tuple(actual.shape), tuple(reference.shape)
    assert actual.shape == reference.shape, f"{key[0]}: this rank holds {shapes[0]}, not {shapes[1]}"
    return SliceComparison(
        key,
        box=tuple((part.start, part.stop) for part in where),
        difference=_squares(actual - reference),
        reference=_squares(reference),
        actual=_squares(actual),
        product=float((actual * reference).sum()),
    )


def _all_squares(tensors: dict[Key, Tensor], numbers: dict[Key, float]) -> dict[Key, float]:
    return {
        **{key: _squares(tensor) for key, tensor in tensors.items()},
        **{key: number**2 for key, number in numbers.items()},
    }


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
