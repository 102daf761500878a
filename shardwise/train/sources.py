"""Where the gradients of a step come from.

In a synchronous run every rank computes the gradients of its own rows of the global batch (`OwnRows`). Other
drivers have other sources (drivers/). The step around it, from the norm of the gradient to the record of what
happened, is the same wherever gradients come from (train/steps.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shardwise.data.batches import Batch, Batches
from shardwise.models import attention_backends
from shardwise.models.torch_dtypes import DTYPES
from shardwise.train.build import Training
from shardwise.train.shares import Dealer


@dataclass(frozen=True)
class Updates:
    """Updates that workers made already in a step, each with its own gradient (drivers/lock_free.py)."""

    made: int
    conflicting: int
    """Updates that wrote rows which others had written since they were read."""
    rows: int
    """Rows that all updates wrote together; a dense gradient counts as one."""
    conflicting_rows: int


@dataclass(frozen=True)
class Drawn:
    """The gradients of a global batch are in place, complete, on this rank's parameters; this is what is
    known of the batch."""

    loss: Tensor
    """This rank's part of the batch's mean loss."""
    tokens: Tensor
    """Tokens of the whole batch."""
    checksum: int
    """Checksum of the sequences that this rank reports."""
    rows: tuple[int, ...] = ()
    """Rows of the batch by data-parallel device; where their numbers differ from step to step."""
    staleness: tuple[int, ...] = ()
    """Staleness of the gradients in the sum; where workers brought them."""
    dropped: int = 0
    """Gradients since the step before that came after another of the same portion."""
    rate: float = 1.0
    """Factor of the learning rate in this step: less than 1 where old gradients are damped."""
    updates: Updates | None = None
    """Updates that were made already, each with a gradient of its own; None: the update of the step is still
    to be made."""
    norm: Tensor | None = None
    """Mean norm of the gradients of these updates."""


class Source(Protocol):
    """Puts the gradients of one step after the other in place."""

    def draw(self) -> Drawn | None:
        """Put the gradients of the next step in place; None: the run is to stop before there are any."""

    def ahead(self) -> None:
        """Prepare the next step, while the device works on this one."""

    def again(self) -> None:
        """The step just drawn has to be drawn once more."""

    def hear(self, step: int, seconds: tuple[tuple[float, float], ...]) -> None:
        """A step is done. `seconds` is what each rank took for its own work (compute, data) in the step
        before, where that is known."""

    def close(self) -> None:
        """There are no more steps."""


class OwnRows:
    """Every rank computes its rows of the global batch; a thread reads them ahead."""

    def __init__(self, training: Training, by_speed: bool = False) -> None:
        """With `by_speed`, a faster device gets more rows of later batches."""
        self.training = training
        train, plan = training.config.train, training.plan
        self._by_speed = by_speed
        self._dealer = Dealer(training.shares, plan.layout, plan.accumulation, training.step, self._by_speed)
        self._batches = Batches(
            training.dataset,
            global_batch=train.global_batch,
            rows=self._next_rows(),
            micro_batches=plan.accumulation,
            device=training.mesh.device,
            seen=training.sequences,
        )
        self._batch: list[Batch] | None = None
        self._drawn: list[Batch] | None = None
        self._after: list[Batch] | None = None
        """The batch that was read ahead, while a step is made again."""

    def draw(self) -> Drawn:
        training = self.training
        batch = self._drawn = self.next_batch()
        tokens = count_tokens(training, batch)
        items = count_items(training, batch, tokens)
        with training.comm.clock.span("forward_backward"):
            loss = forward_backward(training, batch, items)
        rows = self._dealer.dealt(training.step + 1).rows if self._by_speed else ()
        return Drawn(loss, tokens, self.checksum(batch), rows)

    def next_batch(self) -> list[Batch]:
        """Return the micro-batches of this rank's rows."""
        return self._batch or self._fetch()

    def ahead(self) -> None:
        more = self.training.step + 1 < self.training.config.train.steps
        self._batch, self._after = self._after or (self._fetch() if more else None), None

    def again(self) -> None:
        self._batch, self._after = self._drawn, self._batch

    def hear(self, step: int, seconds: tuple[tuple[float, float], ...]) -> None:
        self._dealer.hear(step - 1, seconds)

    def close(self) -> None:
        self._batches.close()

    def _fetch(self) -> list[Batch]:
        with self.training.comm.clock.span("data"):
            return self._batches.take(then=self._next_rows())

    def _next_rows(self) -> range:
        return self._dealer.deal().of(self.training.mesh.data_index)

    def checksum(self, batch: list[Batch]) -> int:
        """Devices along pipeline and context read the same sequences, so the first of them speaks for all."""
        mesh = self.training.mesh
        speaks = mesh.coordinate("pipeline") == mesh.coordinate("context") == 0
        return sum(micro_batch.checksum for micro_batch in batch) if speaks else 0


def count_tokens(training: Training, batch: list[Batch]) -> Tensor:
    """Tokens that carry a loss in the whole global batch (a group's part of it)."""
    config = training.config
    if not config.data.reset_attention:  # then every token carries one, and no rank need ask the others
        rows = config.train.global_batch // training.plan.groups
        return torch.tensor(float(rows * config.data.sequence_length), device=training.mesh.device)
    local = float(sum(micro_batch.valid for micro_batch in batch))
    return training.comm.sum_over_data(torch.tensor(local, device=training.mesh.device))


def count_items(training: Training, batch: list[Batch], tokens: Tensor) -> Tensor:
    """What the loss is divided by, on every layout alike: these tokens, or what a user's module counts in the
    whole global batch. Where it counts nothing there is no loss to divide."""
    if not training.parallel.counts_items:
        return at_least_some(tokens)
    local = torch.stack([training.parallel.items(micro_batch) for micro_batch in batch]).sum()
    return at_least_some(training.comm.sum_over_data(local))


def at_least_some(items: Tensor) -> Tensor:
    """A number to divide by: one, where there are none."""
    return torch.where(items > 0, items, torch.ones_like(items))


def forward_backward(training: Training, batch: list[Batch], items: Tensor) -> Tensor:
    """Gradients of the global mean loss over so many items, complete on this rank; returns this rank's part
    of that loss."""
    items = items.to(DTYPES[training.plan.model.dtypes.sums])
    with attention_backends(training.mesh.device.type):
        return training.parallel.forward_backward(batch, training.scale.value / items) / items
