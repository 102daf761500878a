"""Both sides of the comparison, inside the workers: one device writes the reference, every rank compares its
part with it.

The loop is the one that trains (train/steps.py), merely watched: after each backward, when gradients are
complete and not yet divided for the update; when the loads of experts are taken; and after the last step,
which is followed by an evaluation. A rank compares what it holds itself, slice by slice, so every copy on
every rank is checked, and a whole parameter is put together nowhere but in the reference. The file is mapped,
not read: ranks of one machine share its pages.

What a rank reports of a slice are three sums, from which errors and ratios follow for any union of slices:
the squares of the difference, of the reference and of its own values, and the product of the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

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
from shardwise.parallel.placement import held
from shardwise.plan import COPIES
from shardwise.train.build import Training, build
from shardwise.train.evaluate import held_out_loss
from shardwise.train.own_loss import check_summed_loss
from shardwise.train.shares import Shares
from shardwise.train.steps import Step, steps
from shardwise.verify.proof_job import ProofJob, Sabotage
from shardwise.verify.plain_torch import PlainStep, Reader, Text, checksum, train_plainly
from shardwise.verify.plain_torch import Rows as PlainRows
from shardwise.verify.plain_torch import held_out_loss as plain_held_out_loss
from shardwise.verify.rank_reports import HELD_OUT, LOAD, Key, RankReport, Reference, SliceComparison
from shardwise.verify.proof_rows import ProofDataset
from shardwise.verify.sabotage import apply_sabotage


def build_proof(worker: Worker, proof: ProofJob) -> Training:
    """The job of a proof on this rank: its rows, and its chunks of the loss."""
    training = build(proof.config, proof.plan, worker, ProofDataset.of(proof))
    if proof.uneven:
        training.shares = _uneven(training.shares, training.plan.accumulation)
    for part in training.parallel.parts:
        for module in part.model.modules():
            if isinstance(module, Head):
                module.chunk = proof.chunk
    return training


def _uneven(shares: Shares, least: int) -> Shares:
    """Each second device has given a row to the one before it, where it has one to give: what is proven is
    not the even split."""
    rows = list(shares.rows)
    for giver in range(1, len(rows), 2):
        if rows[giver] > least:
            rows[giver - 1], rows[giver] = rows[giver - 1] + 1, rows[giver] - 1
    return Shares(tuple(rows))


def write_reference(worker: Worker, proof: ProofJob, path: Path) -> Reference:
    """Train on one device, and write gradients and weights to a file."""
    training = build_proof(worker, proof)
    check_summed_loss(training)
    tensors: dict[Key, Tensor] = {}
    frozen = {name: parameter.detach().clone() for name, parameter in _frozen(training)}

    def keep(step: int) -> None:
        for name, parameter in _trained(training):
            if parameter.grad is None:
                raise UserError(
                    f"{name} has no gradient on one device: is it used in forward? Use it, remove it, or "
                    f"give it "
                    "requires_grad=False, and it is not trained"
                )
            tensors[name, "gradient", step] = parameter.grad.detach().clone()

    loads = watch_loads(training)
    done = watch(training, proof.steps, keep)
    for name, parameter in _frozen(training):
        if not torch.equal(parameter, frozen[name]):
            raise UserError(
                f"{name} has requires_grad=False, and forward changes it; what forward changes must be a "
                f"buffer, which devices "
                "do not share"
            )
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


def write_plain_reference(worker: Worker, proof: ProofJob, path: Path) -> Reference:
    """Train in plain torch (verify/plain_torch.py), from the first weights and the prepared folders that one device
    has."""
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
    numbers = {("", "loss", step.step): step.loss for step in done}
    numbers |= {("", "gradient norm", step.step): step.norm for step in done}
    if proof.config.model.experts:
        numbers |= {("", "expert imbalance", step.step): step.imbalance for step in done}
    if (held_out := rows.held_out()) is not None:
        numbers["", HELD_OUT, proof.steps] = plain_held_out_loss(proof.config, weights, buffers, held_out)
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
    """The rows of a proof as verify/plain_torch.py reads them, but for those that the proof makes, which are given
    to it."""

    reader: Reader
    dataset: ProofDataset

    @classmethod
    def of(cls, training: Training) -> _PlainRows:
        """For the job of a proof."""
        dataset = training.dataset
        assert isinstance(dataset, ProofDataset), "a proof trains on rows of its own"
        texts = [Text(stream.tokens.folder) for stream in dataset.streams]
        return cls(Reader(training.config, texts, [stream.weight for stream in dataset.streams]), dataset)

    def batch(self, step: int) -> PlainRows:
        """The global batch of a step, counted from 1."""
        size = self.reader.config.train.global_batch
        places = range((step - 1) * size, step * size)
        made = [self.dataset.is_made(place) for place in places]
        return _with_made(self.reader.batch(step), self.dataset.sequences(places.start, size), made)

    def held_out(self) -> PlainRows | None:
        """What is evaluated on."""
        count = min(self.dataset.held_out_count, self.reader.config.train.evaluate_sequences)
        if not count:
            return None
        made = [self.dataset.held_out_is_made(row) for row in range(count)]
        return _with_made(self.reader.held_out(count), self.dataset.held_out_rows(0, count), made)


def _with_made(own: PlainRows, given: Rows, made: Sequence[bool]) -> PlainRows:
    documents = np.zeros_like(given.inputs) if given.documents is None else given.documents
    inputs, targets, documents_of = (
        torch.where(torch.tensor(made)[:, None], torch.from_numpy(theirs), mine)
        for mine, theirs in zip(own, (given.inputs, given.targets, documents), strict=True)
    )
    return inputs, targets, documents_of


def compare_with_reference(
    worker: Worker, proof: ProofJob, path: Path, reference: Reference, sabotage: Sabotage | None = None
) -> RankReport:
    """Train on the layout, and compare everything that this rank has with the file."""
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
                slices.append(
                    _compare_slice((name, "gradient", step), parameter, local(parameter.grad), tensors)
                )

    loads = watch_loads(training)
    done = watch(training, proof.steps, check)
    for name, quantity, tensor in _state(training):
        slices.append(_compare_slice((name, quantity, proof.steps), tensor, local(tensor), tensors))
    slices += [_compare_slice(key, load, load, tensors) for key, load in loads.items()]
    slices += [
        _compare_number(key, own, reference.numbers[key])
        for key, own in _numbers(done, held_out_loss(training))
    ]
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
) -> list[Step]:
    """Train so many steps as always, looking at the gradients of each once they are complete; `begin` is
    called before each. In eval mode: dropout draws for a whole micro-batch, and those of the layout are
    others than those of one device."""
    parallel, original = training.parallel, training.parallel.forward_backward

    def watched(batch: Sequence[Any], factor: Tensor) -> Tensor:
        begin(training.step + 1)
        loss = original(batch, factor)
        if parallel.scales is None or not bool(parallel.scales.see().outgrown):  # else the step is made again
            look(training.step + 1)
        return loss

    parallel.forward_backward = watched  # type: ignore[method-assign]
    with parallel.evaluating():
        return list(islice(steps(training), count))


def watch_loads(training: Training) -> dict[Key, Tensor]:
    """What each step takes for the loads of this rank's mixtures of experts, as it trains."""
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
    """By the path of a mixture, the experts that no token chose in any step; a mixture without such is left
    out."""
    total: dict[str, Tensor] = {}
    for (path, _, _), load in loads.items():
        total[path] = total.get(path, torch.zeros_like(load)) + load
    idle = {path: (load == 0).nonzero().flatten().tolist() for path, load in total.items()}
    return {path: experts for path, experts in idle.items() if experts}


def reductions(training: Training, name: str, parameter: nn.Parameter) -> dict[str, int]:
    """The axes that the gradient of a parameter is summed over; several that are summed at once count as
    one."""
    mesh, parallel = training.mesh, training.parallel
    role = parallel.table.role(name.rpartition(".")[0])
    expert = role is not None and role.kind == "experts"
    together = "expert_data" if expert else "data x context"
    zero = mesh.layout.zero
    copies = (COPIES if not expert else f"replica x {together}",) if not zero else (together, "replica")
    sums = [(mesh.label(axis), mesh.size(axis)) for axis in copies]
    if not expert and "tensor" not in sharded_axes(parameter):
        sums.append(("tensor", mesh.size("tensor")))
    if name in parallel.table.tied.values():
        sums.append(("pipeline", mesh.size("pipeline")))
    return {axis: size for axis, size in sums if size > 1}


def _trained(training: Training) -> Iterator[tuple[str, nn.Parameter]]:
    return (
        (name, parameter)
        for name, parameter in training.parallel.named_parameters()
        if parameter.requires_grad
    )


def _frozen(training: Training) -> Iterator[tuple[str, nn.Parameter]]:
    return (
        (name, parameter)
        for name, parameter in training.parallel.named_parameters()
        if not parameter.requires_grad
    )


def _is_reference(key: Key, holder: Tensor, tensors: dict[Key, Tensor]) -> bool:
    """Whether this rank's slice is the reference's to the bit."""
    return torch.equal(local(holder.detach()).cpu(), tensors[key][held(holder)].to(holder.dtype))


def _state(training: Training) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in training.parallel.named_parameters():
        yield name, "weight", parameter
    for name, buffer in training.parallel.named_buffers():
        yield name, "buffer", buffer


def _numbers(done: Sequence[Step], held_out: float | None) -> Iterator[tuple[Key, float]]:
    """What each step said of itself, and the evaluation after the last."""
    for step in done:
        yield ("", "loss", step.step), step.loss
        yield ("", "gradient norm", step.step), step.gradient_norm
        if step.expert_imbalance is not None:
            yield ("", "expert imbalance", step.step), step.expert_imbalance
    if held_out is not None:
        yield ("", HELD_OUT, len(done)), held_out


def _compare_number(key: Key, own: float, reference: float) -> SliceComparison:
    return SliceComparison(key, (), (own - reference) ** 2, reference**2, own**2, own * reference)


def _compare_slice(key: Key, holder: Tensor, own: Tensor, tensors: dict[Key, Tensor]) -> SliceComparison:
    where = held(holder)
    reference, own = tensors[key][where].double(), own.detach().cpu().double()
    assert own.shape == reference.shape, (
        f"{key[0]}: this rank holds {tuple(own.shape)}, not {tuple(reference.shape)}"
    )
    box = tuple((part.start, part.stop) for part in where)
    return SliceComparison(
        key,
        box,
        _squares(own - reference),
        _squares(reference),
        _squares(own),
        float((own * reference).sum()),
    )


def _all_squares(tensors: dict[Key, Tensor], numbers: dict[Key, float]) -> dict[Key, float]:
    return {
        **{key: _squares(tensor) for key, tensor in tensors.items()},
        **{key: own**2 for key, own in numbers.items()},
    }


def _squares(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())
