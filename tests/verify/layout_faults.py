"""Layouts that are broken the way real ones have been: workers run these in place of the honest tasks.

`layout_faults:measured_FAULT` compares as verify/measure.py does, `layout_faults:traced_FAULT` as verify/localise.py, each with
the fault in place on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.comm import GradientSum, autograd
from shardwise.parallel import model as parallel_model
from shardwise.parallel import tensor as parallel_tensor
from shardwise.verify import localise, measure

SUMMED_BACK = autograd._Gather.backward  # a worker measures and then traces: what is broken anew must not break twice


def whole_weights_not_summed() -> None:
    parallel_model.sum_whole = lambda parameters, comm: None


def whole_weights_summed_twice() -> None:
    honest = parallel_tensor.sum_whole

    def twice(parameters: Any, comm: Any) -> None:
        parameters = list(parameters)
        honest(parameters, comm)
        honest(parameters, comm)

    parallel_model.sum_whole = twice


def copies_not_summed() -> None:
    def reduce(self: GradientSum, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    GradientSum.reduce = reduce


def copies_averaged() -> None:
    honest = GradientSum.reduce

    def reduce(self: GradientSum, bucket: Any) -> torch.futures.Future[Tensor]:
        return honest(self, bucket).then(lambda done: done.value().div_(self.group.size()))

    GradientSum.reduce = reduce


def row_outputs_not_summed() -> None:
    """Forward: after a matrix that is split by inputs, a device goes on with its own partial result."""

    def forward(self: parallel_tensor.Row, *inputs: Any) -> Any:
        return super(parallel_tensor.Row, self).forward(*inputs).chunk(self.parallel_share.size, 1)[self.parallel_share.index]

    parallel_tensor.Row.forward = forward


def gathered_inputs_not_summed_back() -> None:
    """Backward: what other devices did with a device's tokens is lost."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        comm, axis, dim = ctx.where
        return gradient.chunk(comm.mesh.size(axis), dim)[comm.mesh.coordinate(axis)], None, None, None

    autograd._Gather.backward = staticmethod(backward)


def gathered_inputs_summed_back_twice() -> None:
    """Backward: as if every device had computed the same from what was gathered, and each added its copy."""

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return SUMMED_BACK(ctx, gradient * ctx.where[0].mesh.size("tensor"))

    autograd._Gather.backward = staticmethod(backward)


def optimizer_skips_decay() -> None:
    honest = measure.build

    def build(*arguments: Any) -> Any:
        training = honest(*arguments)
        for group in training.optimizer.param_groups:
            group["weight_decay"] = 0.0
        return training

    measure.build = build


def rank_dies() -> None:
    os._exit(3)


def rank_raises() -> None:
    raise ValueError("a fault of the test")


def __getattr__(name: str) -> Callable[..., Any]:
    side, _, fault = name.partition("_")
    honest = {"measured": measure.compare_with_reference, "traced": localise.compare_traces}[side]
    return partial(_broken, fault, honest)


def _broken(fault: str, honest: Callable[..., Any], worker: Any, *arguments: Any) -> Any:
    if not (fault.startswith("rank_") and worker.rank == 0):
        globals()[fault]()
    return honest(worker, *arguments)
