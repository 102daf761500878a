"""Check, before the first step, that the loss of a user's own module is a sum.

A module that returns a mean would train without an error. But shardwise divides its loss by the tokens of the
global batch again, so loss and gradients are too small, and depend on the size of a micro-batch. Evaluation
fills its last batch with rows without targets, whose mean is 0 / 0, so the held-out loss would be nan.

So one sequence is evaluated alone, and twice in one batch. A sum doubles, a mean stays the same. This costs
forwards of three rows in eval mode, once in a run. All ranks evaluate the same sequence, so that all come to
the same conclusion on any layout. Weights, buffers, random state and the ledger of collectives are restored
afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shardwise.data import Rows
from shardwise.data.batches import Batch, to_batch
from shardwise.errors import UserError
from shardwise.models import IGNORED, attention_backends
from shardwise.models.user_module import WHAT_TO_RETURN
from shardwise.train.build import Training

CLOSE = 0.05
"""Relative difference below which two losses count as the same. A sum differs by 1, rounding in 16 bits by
less than 0.01."""


@torch.no_grad()
def check_summed_loss(training: Training) -> None:
    """Raise if the loss of a user's module is a mean, or is not finite for rows without targets. Every rank
    must call this."""
    if training.config.model.module is None:
        return
    row = _row_with_targets(training)
    untaught = replace(row, targets=torch.full_like(row.targets, IGNORED), valid=0)
    with _without_trace(training):
        (once, items), (twice, items_of_two) = (_measured(training, batch) for batch in (row, _twice(row)))
        empty = _measured(training, untaught)[0] if _evaluation_is_filled_up(training) else 0.0
    name = training.config.model.module.rpartition(":")[2]
    if once and items_of_two > items and abs(twice - once) <= CLOSE * abs(once):
        raise UserError(
            f"{name}.forward returns a mean: the loss of one sequence is {once:.4g}, and that of the same "
            f"sequence twice in a "
            f"batch is {twice:.4g}, where a sum is twice as large. {WHAT_TO_RETURN}"
        )
    if math.isfinite(once) and not math.isfinite(empty):
        raise UserError(
            f"{name}.forward returns {empty} for a sequence whose targets are all -100. Evaluation fills its "
            f"last batch with "
            f"such rows, so the held-out loss would be {empty} too; they must add 0. {WHAT_TO_RETURN}"
        )


def _row_with_targets(training: Training) -> Batch:
    """Return that of the run's first sequences which has the most targets: with conversations, some have
    none."""
    rows = training.dataset.sequences(0, training.plan.micro_batch)
    best = int(np.argmax((rows.targets != IGNORED).sum(1)))
    row = slice(best, best + 1)
    documents = None if rows.documents is None else rows.documents[row]
    return to_batch(Rows(rows.inputs[row], rows.targets[row], documents), training.mesh.device)


def _twice(batch: Batch) -> Batch:
    documents = None if batch.documents is None else batch.documents.repeat(2, 1)
    inputs, targets = batch.inputs.repeat(2, 1), batch.targets.repeat(2, 1)
    return replace(batch, inputs=inputs, targets=targets, documents=documents, valid=2 * batch.valid)


def _measured(training: Training, batch: Batch) -> tuple[float, float]:
    """Return the loss of whole sequences, and the number of items that it should be a sum over. Both are the
    same on every rank."""
    loss = training.parallel.loss(batch).double()
    for axis in ("context", "pipeline"):
        training.comm.all_reduce(loss, axis)
    return loss.item(), training.parallel.items(batch).item()


def _evaluation_is_filled_up(training: Training) -> bool:
    """Return whether the last batch of an evaluation has rows without targets (train/evaluate.py)."""
    plan = training.plan
    count = min(training.dataset.held_out_count, training.config.train.evaluate_sequences)
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
