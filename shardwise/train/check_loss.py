"""Check, before the first step, that the loss of a user's own module is a sum.

A module that returns a mean would train without an error. But shardwise divides its loss by the tokens of the
global batch again, so loss and gradients are too small, and depend on the size of a micro-batch. Evaluation
fills its last batch with rows without targets, whose mean is 0 / 0, so the held-out loss would be nan.

So one sequence is evaluated alone, and twice in one batch. A sum doubles, a mean over the batch stays the
same.

A module may also return a sum over rows of means within each row. Such a loss doubles too. So a sequence of
random tokens is evaluated whole and up to its middle. A sum over tokens halves, a mean stays. The tokens are
random because a text may repeat itself, and then almost all of its loss may lie in the first half. The rest
is cut off, not masked with targets of -100: masked tokens add 0 to a mean that divides by the length, so it
would halve too. Nothing is concluded about a module that cannot take a shorter sequence, or whose
`count_items` counts as many items in the half.

That costs forwards of less than five rows in eval mode, once in a run. All ranks evaluate the same sequences,
so that all come to the same conclusion on any layout. Weights, buffers, random state and the ledger of
collectives are restored afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwise.config.axes import LOSS_AXES
from shardwise.data import Rows
from shardwise.data.batches import Batch, to_batch
from shardwise.data.samples import Samples, to_device, with_positions
from shardwise.errors import UserError
from shardwise.models import IGNORED, LossCall, LossSums, attention_backends
from shardwise.models.program_module import WHAT_TO_RETURN as WHAT_A_PROGRAM_RETURNS
from shardwise.models.program_module import LossFunction
from shardwise.models.torch_dtypes import DTYPES
from shardwise.models.user_module import WHAT_TO_RETURN
from shardwise.parallel import build_plain
from shardwise.plans import ModelSpec
from shardwise.train.build import Training

CLOSE = 0.05
"""Relative difference below which two losses count as the same. A sum differs by 1, rounding in 16 bits by
less than 0.01."""
SHORTER = 0.75
"""Largest share of the items of a sequence that may be in its half. With more, a sum and a mean are too
close."""
SEED = 1
"""Seed of the random tokens."""


@torch.no_grad()
def check_summed_loss(training: Training) -> None:
    """Raise if the loss of a user's module is a mean, or is not finite for rows without targets. Every rank
    must call this."""
    if training.config.model.module is None or training.program is not None:
        return
    rows = training.text.sequences(0, training.plan.micro_batch)
    row, random = _row_with_targets(training, rows), _random_row(training, rows)
    untaught = replace(row, targets=torch.full_like(row.targets, IGNORED), valid=0)
    with _without_trace(training):
        (once, items), (twice, items_of_two) = (_measured(training, batch) for batch in (row, _twice(row)))
        half = _beginning(random, _half_length(training))
        (part, items_of_part), (whole, items_of_whole) = (
            _measured(training, each) for each in (half, random)
        )
        empty = _measured(training, untaught)[0] if _evaluation_is_filled_up(training) else 0.0
    name = training.config.model.module.rpartition(":")[2]
    if once and items_of_two > items and abs(twice - once) <= CLOSE * abs(once):
        raise UserError(
            f"{name}.forward returns a mean: the loss of one sequence is {once:.4g}, and that of the same "
            f"sequence twice in a "
            f"batch is {twice:.4g}, where a sum is twice as large. {WHAT_TO_RETURN}"
        )
    sum_of_part = whole * items_of_part / (items_of_whole or 1.0)
    if items_of_part <= SHORTER * items_of_whole and part > (sum_of_part + whole) / 2 > 0:
        raise UserError(
            f"{name}.forward returns a mean over each sequence: the loss of {random.valid} random tokens is "
            f"{whole:.4g}, and that of the first {half.valid} of them is {part:.4g}, where a sum is "
            f"about {sum_of_part:.4g}. {WHAT_TO_RETURN}"
        )
    if math.isfinite(once) and not math.isfinite(empty):
        raise UserError(
            f"{name}.forward returns {empty} for a sequence whose targets are all -100. Evaluation fills its "
            f"last batch with "
            f"such rows, so the held-out loss would be {empty} too; they must add 0. {WHAT_TO_RETURN}"
        )


@torch.no_grad()
def check_program_loss(training: Training, loss: LossFunction, samples: Samples, sample: Any) -> None:
    """Raise if a loss of a program is a mean and not a sum: of one sample, and of the same sample twice in a
    batch, it is the same. Every rank must call this."""
    device = training.mesh.device
    dtype = DTYPES[training.plan.model.dtypes.compute]
    try:
        batches = [
            to_device(samples.collated(batch, 0), device, dtype) for batch in ([sample], [sample, sample])
        ]
    except Exception:  # the same on all devices: the function wants larger batches
        return
    try:
        with _without_trace(training):
            (once, items), (twice, items_of_two) = (
                _measured_sums(training, loss, batch, samples) for batch in batches
            )
    except UserError:
        raise
    except Exception:  # it may need gradients, or larger batches; the step itself shows what is wrong
        if training.plan.layout.pipeline * training.plan.layout.context > 1:  # others wait for this one
            raise
        return
    for name in once.keys() & twice.keys():
        if once[name] and items_of_two > items and abs(twice[name] - once[name]) <= CLOSE * abs(once[name]):
            which = f" ({name})" if len(once) > 1 else ""
            raise UserError(
                f"the loss{which} looks like a mean: that of one sample is {once[name]:.4g}, and that of the "
                f"same sample twice in a batch is {twice[name]:.4g}, where a sum is twice as large. "
                f"{WHAT_A_PROGRAM_RETURNS}"
            )


def _measured_sums(
    training: Training, loss: LossFunction, values: Any, samples: Samples
) -> tuple[dict[str, float], float]:
    """Return the losses of a batch and its number of items."""
    sums, parallel = LossSums(), training.parallel
    values = with_positions(values, samples.sequences, parallel.positions, parallel.multiple)
    training.parallel.loss(LossCall(loss, values, 0, sums))
    return {name: float(value) for name, value in sums.parts.items()}, float(sums.items)


def _row_with_targets(training: Training, rows: Rows) -> Batch:
    """Return the one of the run's first sequences that has most targets. A sequence of a conversation may
    have none."""
    best = int(np.argmax((rows.targets != IGNORED).sum(1)))
    row = slice(best, best + 1)
    documents = None if rows.documents is None else rows.documents[row]
    return to_batch(Rows(rows.inputs[row], rows.targets[row], documents), training.mesh.device)


def _random_row(training: Training, rows: Rows) -> Batch:
    """Return one document of random tokens, drawn from those that occur in the run's first sequences."""
    drawn = np.random.default_rng(SEED).choice(np.unique(rows.inputs), rows.inputs.shape[1] + 1)
    documents = None if rows.documents is None else np.zeros_like(rows.documents[:1])
    return to_batch(Rows(drawn[None, :-1], drawn[None, 1:], documents), training.mesh.device)


def _half_length(training: Training) -> int:
    """Return about half of the length of a sequence, which the devices can share. If the module cannot take
    that length, return the whole length.

    The module is called without values for this. On the devices, an error of one pipeline stage would let the
    others wait.
    """
    config, multiple = training.config, training.parallel.multiple
    length = config.data.sequence_length
    half = length // 2 // multiple * multiple
    ids = torch.zeros(1, half, dtype=torch.int64, device="meta")
    try:
        build_plain(ModelSpec.of(config)).to("meta").eval()(ids, ids, documents=ids)
    except Exception:
        return length
    return half or length


def _beginning(batch: Batch, length: int) -> Batch:
    documents = None if batch.documents is None else batch.documents[:, :length]
    inputs, targets = batch.inputs[:, :length], batch.targets[:, :length]
    return replace(batch, inputs=inputs, targets=targets, documents=documents, valid=length)


def _twice(batch: Batch) -> Batch:
    documents = None if batch.documents is None else batch.documents.repeat(2, 1)
    inputs, targets = batch.inputs.repeat(2, 1), batch.targets.repeat(2, 1)
    return replace(batch, inputs=inputs, targets=targets, documents=documents, valid=2 * batch.valid)


def _measured(training: Training, batch: Batch) -> tuple[float, float]:
    """Return the loss of whole sequences, and the number of items that it should be a sum over. Both are the
    same on every rank."""
    loss = training.parallel.loss(batch).double()
    for axis in LOSS_AXES:
        training.comm.all_reduce(loss, axis)
    return loss.item(), training.parallel.items(batch).item()


def _evaluation_is_filled_up(training: Training) -> bool:
    """Return whether the last batch of an evaluation has rows without targets (train/evaluate.py)."""
    plan = training.plan
    count = min(training.text.held_out_count, training.config.train.evaluate_sequences)
    return count % (plan.groups * plan.layout.data_parallel * plan.micro_batch) != 0


@contextmanager
def _without_trace(training: Training) -> Iterator[None]:
    """Return a context for evaluation, which restores buffers, random state and ledger."""
    device, parallel = training.mesh.device, training.parallel
    buffers = [buffer for part in parallel.parts for buffer in part.model.buffers()]
    before: list[Tensor] = [buffer.clone() for buffer in buffers]
    eager = torch.compiler.set_stance("force_eager")  # other shapes than those of training would be compiled
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(gpus), attention_backends(device.type), parallel.evaluating(), eager:
        yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)
    training.comm.ledger.take()
