"""Evaluation: the loss on sequences that the model is never trained on, and a generated sample."""

from __future__ import annotations

import numpy as np
import torch

from shardwise.config.axes import LOSS_AXES
from shardwise.data import Dataset, Rows
from shardwise.data.batches import to_batch
from shardwise.mesh import nccl
from shardwise.models import IGNORED, attention_backends, generate
from shardwise.train.build import Training


@torch.no_grad()
def held_out_loss(training: Training) -> float | None:
    """Return the mean loss over the held-out data, the same on every rank: in nats per token, or per item
    that a user's module counts. None: nothing is held out, or the model is that of a
    program, which evaluates it itself (`engine.evaluate`)."""
    if not isinstance(training.dataset, Dataset) or training.config.model.is_of_program:
        return None
    dataset, device = training.dataset, training.mesh.device
    count = min(dataset.held_out_count, training.config.train.evaluate_sequences)
    if count == 0:
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    devices, size = training.plan.groups * training.plan.layout.data_parallel, training.plan.micro_batch
    weights = training.rank_driver.evaluated_weights(training)
    with attention_backends(device.type), weights, training.parallel.evaluating():
        for first in range(0, count, devices * size):
            start = first + training.mesh.data_index * size
            batch = to_batch(_rows(dataset, start, size, count), device)
            sums[0] += training.parallel.loss(batch).double()
            sums[1] += training.parallel.items(batch)
    for axis in LOSS_AXES:  # all ranks along these have counted the same items
        training.comm.all_reduce(sums[:1], axis)
    total, items = training.comm.all_reduce(training.comm.sum_over_data(sums), "group").tolist()
    nccl.check_not_interrupted()
    return float(total / (items or 1.0))


def _rows(dataset: Dataset, start: int, size: int, count: int) -> Rows:
    """Return `size` held-out rows from `start`. Rows past `count` repeat the last one, without targets.

    Every rank must run the same number of forwards, because sharded weights are gathered by all ranks
    together, and a compiled model needs one shape.
    """
    first = min(start, count - 1)
    rows = dataset.held_out_rows(first, min(size, count - first))
    indices = np.minimum(np.arange(size), len(rows.inputs) - 1)
    targets = rows.targets[indices]
    targets[max(0, count - start) :] = IGNORED
    return Rows(rows.inputs[indices], targets, None if rows.documents is None else rows.documents[indices])


@torch.no_grad()
def sample(training: Training, prompt: str) -> str:
    """Return the model's continuation of a text. Every rank must call this, because weights may be
    sharded."""
    tokenizer, device = training.text.tokenizer, training.mesh.device
    ids = [int(token) for token in tokenizer.encode_batch([prompt])[0]]

    def last_logits(tokens: torch.Tensor) -> torch.Tensor:
        return training.parallel.logits(tokens.to(device))

    eager = torch.compiler.set_stance("force_eager")  # otherwise every length would be compiled
    weights = training.rank_driver.evaluated_weights(training)
    with attention_backends(device.type), weights, training.parallel.evaluating(), eager:
        continued = generate(
            last_logits,
            ids,
            training.config.observe.sample_tokens,
            temperature=0.8,
            seed=training.config.train.seed,
            max_positions=min(training.config.model.max_positions, training.config.data.sequence_length),
        )
    return tokenizer.decode(continued)
