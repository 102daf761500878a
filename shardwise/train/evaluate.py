"""What the model has learnt: its loss on sequences it never saw, and a sample of its own."""

from __future__ import annotations

import torch

from shardwise.data.batches import to_batch
from shardwise.models import attention_backends, generate
from shardwise.train.build import Training


@torch.no_grad()
def held_out_loss(training: Training) -> float | None:
    """Mean loss in nats a token over the held-out split; None where nothing is held out. Same number on every rank."""
    dataset, device = training.dataset, training.mesh.device
    count = min(dataset.held_out_count, training.config.train.evaluate_sequences)
    if count == 0:
        return None
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    devices = training.plan.layout.data_parallel
    with attention_backends(device.type):
        # Every rank runs the same number of forwards, because sharded weights are gathered together; a rank that has no
        # rows left computes on one whose result is not counted.
        for first in range(0, count, devices * training.plan.micro_batch):
            start = first + training.mesh.data_index * training.plan.micro_batch
            rows = max(0, min(training.plan.micro_batch, count - start))
            batch = to_batch(dataset.held_out_rows(min(start, count - 1), max(1, rows)), device)
            loss = training.parallel.model(batch.inputs, batch.targets, batch.documents)
            if rows:
                sums += torch.stack([loss.double(), torch.tensor(float(batch.valid), device=device).double()])
    training.parallel.settle()
    total, tokens = training.traffic.sum_over_data(sums).tolist()
    return float(total / max(1.0, tokens))


@torch.no_grad()
def sample(training: Training, prompt: str) -> str:
    """The model's continuation of a text. Every rank takes part, because weights may be sharded."""
    tokenizer, device = training.dataset.tokenizer, training.mesh.device
    ids = [int(token) for token in tokenizer.encode_batch([prompt])[0]]

    def last_logits(tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = training.parallel.model(tokens.to(device), last_logits=True)
        return logits.reshape(-1)

    with attention_backends(device.type):
        continued = generate(
            last_logits,
            ids,
            training.config.observe.sample_tokens,
            seed=training.config.train.seed,
            max_positions=min(training.config.model.max_positions, training.config.data.sequence_length),
        )
    training.parallel.settle()
    return tokenizer.decode(continued)
