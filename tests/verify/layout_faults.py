"""Layouts that are broken the way real ones have been: workers run these in place of the honest tasks.

`layout_faults:measured_FAULT` compares as verify/measure.py does, `layout_faults:traced_FAULT` as verify/localise.py, each with
the fault in place on every rank, and mended again after: the reference is traced in the same process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.comm import GradientSum, autograd
from shardwise.parallel import model as parallel_model
from shardwise.parallel import tensor as parallel_tensor
from shardwise.train.build import Training
from shardwise.verify import localise, measure

Replace = Callable[[Any, str, Any], None]


def whole_weights_not_summed(replace: Replace) -> None:
    replace(parallel_model, "sum_whole", lambda parameters, comm: None)


def whole_weights_summed_twice(replace: Replace) -> None:
    honest = parallel_tensor.sum_whole

    def twice(parameters: Any, comm: Any) -> None:
        parameters = list(parameters)
        honest(parameters, comm)
        honest(parameters, comm)

    replace(parallel_model, "sum_whole", twice)


def copies_not_summed(replace: Replace) -> None:
    def reduce(self: GradientSum, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    replace(GradientSum, "reduce", reduce)


def copies_averaged(replace: Replace) -> None:
    honest = GradientSum.reduce

    def reduce(self: GradientSum, bucket: Any) -> torch.futures.Future[Tensor]:
        return honest(self, bucket).then(lambda done: done.value().div_(self.group.size()))

    replace(GradientSum, "reduce", reduce)


def row_outputs_not_summed(replace: Replace) -> None:
    """Forward: after a matrix that is split by inputs, a device goes on with its own partial result."""

    def forward(self: parallel_tensor.Row, *inputs: Any) -> Any:
        return super(parallel_tensor.Row, self).forward(*inputs).chunk(self.parallel_share.size, 1)[self.parallel_share.index]

    replace(parallel_tensor.Row, "forward", forward)


def gathered_inputs_not_summed_back(replace: Replace) -> None:
    """Backward: what other devices did with a device's tokens is lost."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        comm, axis, dim = ctx.where
        return gradient.chunk(comm.mesh.size(axis), dim)[comm.mesh.coordinate(axis)], None, None, None

    replace(autograd._Gather, "backward", staticmethod(backward))


def gathered_inputs_summed_back_twice(replace: Replace) -> None:
    """Backward: as if every device had computed the same from what was gathered, and each added its copy."""
    honest = autograd._Gather.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return honest(ctx, gradient * ctx.where[0].mesh.size("tensor"))

    replace(autograd._Gather, "backward", staticmethod(backward))


def loss_divided_by_micro_batches(replace: Replace) -> None:
    """As loops do that take the mean loss of each micro-batch: here the loss is a sum."""
    honest = parallel_model.ParallelModel.forward_backward
    divided = lambda self, batch, factor: honest(self, batch, factor / len(batch))  # noqa: E731
    replace(parallel_model.ParallelModel, "forward_backward", divided)


def gradients_divided_by_micro_batches(replace: Replace) -> None:
    honest = parallel_model.ParallelModel.forward_backward

    def divided(self: parallel_model.ParallelModel, batch: Any, factor: Tensor) -> Tensor:
        loss = honest(self, batch, factor)
        for _, parameter in self.named_parameters():
            parameter.grad /= len(batch)
        return loss

    replace(parallel_model.ParallelModel, "forward_backward", divided)


def optimizer_skips_decay(replace: Replace) -> None:
    def change(training: Training) -> None:
        for group in training.optimizer.param_groups:
            group["weight_decay"] = 0.0

    _change_training(replace, change)


class LaterRows:
    """A data set that from step 2 on gives the rows of the step after."""

    def __init__(self, dataset: Any, batch: int) -> None:
        self.honest, self.batch = dataset, batch

    def sequences(self, first: int, count: int) -> Any:
        return self.honest.sequences(first + self.batch * (first >= self.batch), count)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.honest, name)


def other_rows_from_step_2(replace: Replace) -> None:
    def change(training: Training) -> None:
        training.dataset = LaterRows(training.dataset, training.config.train.global_batch)

    _change_training(replace, change)


def gradients_not_zeroed(replace: Replace) -> None:
    def change(training: Training) -> None:
        training.optimizer.zero_grad = lambda set_to_none: None

    _change_training(replace, change)


def block_skipped_from_step_2(replace: Replace) -> None:
    def change(training: Training) -> None:
        block = training.parallel.model.blocks[1]
        honest = block.forward
        block.forward = lambda x, angles, mask: x + 0 * honest(x, angles, mask) if training.step else honest(x, angles, mask)

    _change_training(replace, change)


def block_left_out_from_step_2(replace: Replace) -> None:
    """Its modules are not even called."""

    def change(training: Training) -> None:
        block = training.parallel.model.blocks[1]
        honest = block.forward
        spent = lambda: sum(0 * parameter.sum() for parameter in block.parameters())  # noqa: E731  (each must have a gradient)
        block.forward = lambda x, angles, mask: x + spent() if training.step else honest(x, angles, mask)

    _change_training(replace, change)


def _change_training(replace: Replace, change: Callable[[Training], None]) -> None:
    honest = measure.build

    def build(*arguments: Any) -> Training:
        training = honest(*arguments)
        change(training)
        return training

    for module in (measure, localise):
        replace(module, "build", build)


def rank_dies(replace: Replace) -> None:
    os._exit(3)


def rank_raises(replace: Replace) -> None:
    raise ValueError("a fault of the test")


def __getattr__(name: str) -> Callable[..., Any]:
    side, _, fault = name.partition("_")
    honest = {"measured": measure.compare_with_reference, "traced": localise.compare_traces}[side]
    return partial(_broken, fault, honest)


def _broken(fault: str, honest: Callable[..., Any], worker: Any, *arguments: Any) -> Any:
    with ExitStack() as mended:
        if not (fault.startswith("rank_") and worker.rank == 0):
            globals()[fault](lambda owner, name, value: mended.enter_context(patch.object(owner, name, value)))
        return honest(worker, *arguments)
