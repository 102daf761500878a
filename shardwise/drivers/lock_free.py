"""Updates without a lock: each micro-batch of a worker is an update of the weights that all workers share
(Niu et al. 2011).

A step of the run is a global batch, and every worker has its rows of it. A worker does not add up the
gradients of its micro-batches: it makes an update with each, in memory that all workers share
(asynchronous/shared_memory.py). Within a step no worker waits for another. At its end all wait for each
other, to agree on the record of the step and on whether to stop, to save or to evaluate. So a larger global
batch means fewer waits, and a checkpoint never contains half an update.

A single worker makes the same updates as a synchronous run on one device whose global batch is one
micro-batch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardwise.asynchronous.shared_memory import SharedState
from shardwise.data.batches import Batch
from shardwise.optim import update
from shardwise.plans.learning_rate import learning_rate
from shardwise.train.build import Training
from shardwise.train.sources import RankRows, count_items, count_tokens, forward_backward
from shardwise.train.step_gradients import (
    StepGradients,
    Updates,
    at_least_some,
    divisor,
    gradient_norm,
)


class LockFree(RankRows):
    """Makes the updates of a step. Other sources only compute the gradient of one update."""

    def __init__(self, training: Training, shared: SharedState, takes_lock: bool) -> None:
        super().__init__(training)
        self.shared, self._takes_lock = shared, takes_lock

    def compute_gradients(self) -> StepGradients:
        """Make an update with each micro-batch of this rank's rows."""
        training, batch = self.training, self.next_batch()
        tokens = count_tokens(training, batch)
        items = count_items(training, batch, tokens)
        loss, sums = torch.zeros((), dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
        for micro_batch in batch:
            micro_batch_items = training.parallel.items(micro_batch)
            mean, norm, counts = self._update(micro_batch, at_least_some(micro_batch_items))
            loss += mean.double() * (micro_batch_items / items)
            sums += torch.tensor([float(norm), *counts], dtype=torch.float64)
            if not (mean + norm).isfinite():  # keep its gradient, so that the error can name the parameter
                break
        norms, *totals = training.comm.sum_over_data(sums)  # all workers wait for each other here
        return StepGradients(
            loss, tokens, self.checksum(batch), norm=norms / totals[0], updates=Updates(*map(int, totals))
        )

    def _update(self, batch: Batch, items: Tensor) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
        """Make the update of a micro-batch; return its mean loss over `items`, the norm of its gradient, and
        the numbers of an `Updates`."""
        training, clock, stamps = self.training, self.training.comm.clock, self.shared.stamps
        lr = learning_rate(training.config.train, training.step + 1)
        training.optimizer.zero_grad()
        with clock.span("forward_backward"):
            stamps.read()
            loss = forward_backward(training, [batch], items)
            norm = gradient_norm(training)
            rows = self.shared.touched()
        skip = (~(norm + loss).isfinite()).float()
        with clock.span("optimizer"), self._lock():
            conflicting = stamps.write(rows)
            update(
                training.optimizer,
                lr,
                divisor(training, norm, training.config.train.clip),
                skip,
                shared=training.mesh.worker.world > 1,
            )
            stamps.written()
        return loss, norm, (1, int(conflicting > 0), len(rows), conflicting)

    def _lock(self) -> AbstractContextManager[object]:
        return self.shared.memory.locked() if self._takes_lock else nullcontext()
