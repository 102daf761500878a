"""Sources of the gradients of a step.

In a synchronous run every rank computes the gradients of its rows of the global batch (`RankRows`). Other
drivers have other sources (drivers/). The rest of a step, from the norm of the gradient to the record of the
step, is the same for all sources (train/steps.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from shardwise.data.batches import Batch, Batches
from shardwise.models import attention_backends
from shardwise.models.torch_dtypes import DTYPES
from shardwise.train.build import Training
from shardwise.train.record import StepRecord
from shardwise.train.shares import Dealer
from shardwise.train.step_gradients import StepGradients, at_least_some


class Source(Protocol):
    """Computes or receives the gradients of one step after the other."""

    def compute_gradients(self) -> StepGradients | None:
        """Put the gradients of the next step on the parameters. Return None if the run stops before."""

    def prepare_next(self) -> None:
        """Prepare the next step while the device works on this one."""

    def repeat_last(self) -> None:
        """Let the next `compute_gradients` repeat the last one."""

    def step_done(self, done: StepRecord) -> Mapping[str, float]:
        """Note that a step is done. Return more numbers to record with it."""

    def finish(self) -> None:
        """Do what follows the last step. Called when it is saved; not in a run that stops before."""

    def close(self) -> None:
        """End all threads: there are no more steps."""


class RankRows:
    """The source of a synchronous run: each rank computes its rows of the global batch. A thread reads them
    in advance."""

    def __init__(self, training: Training, by_speed: bool = False) -> None:
        """With `by_speed`, a faster device gets more rows of later batches."""
        self.training = training
        train, plan = training.config.train, training.plan
        self._by_speed = by_speed
        self._dealer = Dealer(training.shares, plan.layout, plan.accumulation, training.step, self._by_speed)
        self._batches = Batches(
            training.text,
            global_batch=train.global_batch,
            rows=self._next_rows(),
            micro_batches=plan.accumulation,
            device=training.mesh.device,
            seen=training.sequences,
        )
        self._batch: list[Batch] | None = None
        """The batch of the next step, if it was already read."""
        self._drawn: list[Batch] | None = None
        self._after: list[Batch] | None = None
        """While a step is repeated, the batch that was read for the step after it."""

    def compute_gradients(self) -> StepGradients:
        """Compute the gradients of this rank's rows."""
        self._drawn = self.next_batch()
        return self.gradients(self._drawn)

    def gradients(self, batch: list[Batch]) -> StepGradients:
        """Compute the gradients of these rows."""
        training = self.training
        tokens = count_tokens(training, batch)
        items = count_items(training, batch, tokens)
        with training.comm.clock.span("forward_backward"):
            loss = forward_backward(training, batch, items)
        rows = self._dealer.dealt(training.step + 1).rows if self._by_speed else ()
        return StepGradients(loss, tokens, self.checksum(batch), training.config.train.clip, rows)

    def next_batch(self) -> list[Batch]:
        """Return the micro-batches of this rank's rows."""
        return self._batch or self._fetch()

    def prepare_next(self) -> None:
        """Read the rows of the next step."""
        more = self.training.step + 1 < self.training.config.train.steps
        self._batch, self._after = self._after or (self._fetch() if more else None), None

    def repeat_last(self) -> None:
        """Use the rows of the last step once more."""
        self._batch, self._after = self._drawn, self._batch

    def step_done(self, done: StepRecord) -> Mapping[str, float]:
        """Use the times of the ranks for the shares of later batches."""
        self._dealer.note_seconds(done.step - 1, done.rank_seconds)
        return {}

    def finish(self) -> None:
        """Do nothing, because nothing follows the last step."""

    def close(self) -> None:
        """End the thread that reads batches."""
        self._batches.close()

    def _fetch(self) -> list[Batch]:
        with self.training.comm.clock.span("data"):
            return self._batches.take(then=self._next_rows())

    def _next_rows(self) -> range:
        return self._dealer.deal().of(self.training.mesh.data_index)

    def checksum(self, batch: list[Batch]) -> int:
        """Return the checksum of this rank's rows, or 0: ranks along pipeline and context read the same rows,
        so only the first of them reports a checksum."""
        mesh = self.training.mesh
        reports = mesh.coordinate("pipeline") == mesh.coordinate("context") == 0
        return sum(micro_batch.checksum for micro_batch in batch) if reports else 0


def count_tokens(training: Training, batch: list[Batch]) -> Tensor:
    """Return the number of tokens with a loss in the global batch, or in the part of this rank's group."""
    config = training.config
    if not config.data.reset_attention:  # every token has a loss, so the number is known without a sum
        rows = config.train.global_batch // training.plan.groups
        return torch.tensor(float(rows * config.data.sequence_length), device=training.mesh.device)
    local = float(sum(micro_batch.valid for micro_batch in batch))
    return training.comm.sum_over_data(torch.tensor(local, device=training.mesh.device))


def count_items(training: Training, batch: list[Batch], tokens: Tensor) -> Tensor:
    """Return the divisor of the loss, which is the same on every layout: the tokens, or the items that a
    user's module counts in the global batch."""
    if not training.parallel.counts_items:
        return at_least_some(tokens)
    local = torch.stack([training.parallel.items(micro_batch) for micro_batch in batch]).sum()
    return at_least_some(training.comm.sum_over_data(local))


def forward_backward(training: Training, batch: list[Batch], items: Tensor) -> Tensor:
    """Compute this rank's complete gradients of the mean loss over `items`, and return its part of that
    loss."""
    items = items.to(DTYPES[training.plan.model.dtypes.sums])
    with attention_backends(training.mesh.device.type):
        return training.parallel.forward_backward(batch, training.scale.value / items) / items
