"""Layouts that are broken the way real ones have been: workers run these in place of the honest tasks.

`layout_faults:measured_FAULT` compares as proof/compare_layout.py does, `layout_faults:traced_FAULT` as
proof/trace_modules.py, each with the fault in place on every rank, and mended again after: the reference is
traced in the same process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace as with_fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm import GradientSum, autograd
from shardwise.models import loss as chunked_loss
from shardwise.models.torch_dtypes import wide
from shardwise.parallel import blockwise, parallel_model, ring
from shardwise.parallel import tensor as parallel_tensor
from shardwise.proof import compare_layout, sum_dtypes, trace_modules
from shardwise.train import evaluate
from shardwise.train.build import Training

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
        self._summed.update(bucket.parameters())  # as if they were
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
        return (
            super(parallel_tensor.Row, self)
            .forward(*inputs)
            .chunk(self.parallel_share.size, 1)[self.parallel_share.index]
        )

    replace(parallel_tensor.Row, "forward", forward)


def gathered_inputs_not_summed_back(replace: Replace) -> None:
    """Backward: what other devices did with a device's tokens is lost."""

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        mesh, axis = ctx.comm.mesh, ctx.axis
        return gradient.chunk(mesh.size(axis), ctx.dim)[mesh.coordinate(axis)], None, None, None

    replace(autograd._Gather, "backward", staticmethod(backward))


def gathered_inputs_summed_back_twice(replace: Replace) -> None:
    """Backward: as if every device had computed the same from what was gathered, and each added its copy."""
    honest = autograd._Gather.backward

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return honest(ctx, gradient * ctx.comm.mesh.size("tensor"))

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


def other_rows_from_step_2(replace: Replace) -> None:
    """From step 2 on the data set gives the rows of the step after."""

    def change(training: Training) -> None:
        honest, batch = training.text.sequences, training.config.train.global_batch
        later = lambda first, count: honest(first + batch * (first >= batch), count)  # noqa: E731
        object.__setattr__(training.text, "sequences", later)

    _change_training(replace, change)


def gradients_not_zeroed(replace: Replace) -> None:
    def change(training: Training) -> None:
        training.optimizer.zero_grad = lambda set_to_none: None

    _change_training(replace, change)


def block_skipped_from_step_2(replace: Replace) -> None:
    def change(training: Training) -> None:
        block = training.parallel.model.blocks[1]
        honest = block.forward
        block.forward = lambda x, angles, mask: (
            x + 0 * honest(x, angles, mask) if training.step else honest(x, angles, mask)
        )

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
    honest = compare_layout.build

    def build(*arguments: Any, **named: Any) -> Training:
        training = honest(*arguments, **named)
        change(training)
        return training

    replace(compare_layout, "build", build)


def _looked_up(first_is_lost: bool, off: int) -> Callable[..., Tensor]:
    """The embedding split by ids, with its upper parts wrong: rows so far off, or no vector for the first."""

    def forward(self: parallel_tensor.Vocabulary, ids: Tensor) -> Tensor:
        share = self.parallel_share
        own, upper = share.range_of(parallel_tensor._rows_of(self)), share.index > 0
        rows = ids - own.start
        elsewhere = (rows < (1 if upper and first_is_lost else 0)) | (rows >= len(own))
        rows = (rows + off) % len(own) if upper else rows
        vectors = F.embedding(rows.masked_fill(elsewhere, 0), self.weight)
        return autograd.scatter_sum(vectors.masked_fill(elsewhere.unsqueeze(-1), 0), share.comm, "tensor", 1)

    return forward


def upper_embeddings_one_row_off(replace: Replace) -> None:
    replace(parallel_tensor.Vocabulary, "forward", _looked_up(first_is_lost=False, off=1))


def first_row_of_upper_shards_lost(replace: Replace) -> None:
    replace(parallel_tensor.Vocabulary, "forward", _looked_up(first_is_lost=True, off=0))


def upper_one_hot_off_by_one(replace: Replace) -> None:
    honest = parallel_tensor.VocabularyLoss._part_of_vocabulary

    def part(self: parallel_tensor.VocabularyLoss) -> Any:
        right = honest(self)
        return with_fields(right, first=right.first + 1) if right.first else right

    replace(parallel_tensor.VocabularyLoss, "_part_of_vocabulary", part)


def later_chunks_replace_the_gradient(replace: Replace) -> None:
    """Of the loss's weight: right while there is one chunk."""

    def multiply(left: Tensor, right: Tensor, into: Tensor) -> None:
        into.copy_(left.to(into.dtype) @ right.to(into.dtype))

    replace(chunked_loss, "_multiply_add", multiply)


def held_out_loss_of_half_the_context(replace: Replace) -> None:
    def held_out_loss(training: Any) -> float | None:
        comm, honest = training.comm, type(training.comm).all_reduce
        comm.all_reduce = lambda tensor, axis, **more: (
            tensor if axis == "context" else honest(comm, tensor, axis, **more)
        )
        try:
            return evaluate.held_out_loss(training)
        finally:
            del comm.all_reduce

    replace(compare_layout, "held_out_loss", held_out_loss)


def loads_not_summed_over_data(replace: Replace) -> None:
    def take_loads(self: parallel_model.ParallelModel) -> Tensor:
        loads = torch.stack([mixture.take_load() for mixture in self.mixtures])
        return self.comm.all_reduce(loads, "tensor")

    replace(parallel_model.ParallelModel, "take_loads", take_loads)


def ring_sums_outputs_in_their_own_dtype(replace: Replace) -> None:
    """Those of queries, and their gradients."""
    replace(ring, "wide", lambda dtype: dtype)
    replace(ring, "_zeros", lambda like: torch.zeros_like(like, dtype=wide(like.dtype)))


def ring_sums_gradients_in_their_own_dtype(replace: Replace) -> None:
    replace(ring, "_zeros", torch.zeros_like)


def masked_blocks_sum_gradients_in_their_own_dtype(replace: Replace) -> None:
    replace(blockwise, "wide", lambda dtype: dtype)


def blocks_skipped_where_one_row_has_nothing_in_common(replace: Replace) -> None:
    """Documents: a block of the ring is left out for all rows of a micro-batch, where it may be for some."""

    def share_no_document(documents: Any) -> bool:
        if documents is None:
            return False
        queries, keys = documents
        return bool(((queries.amin(1) > keys.amax(1)) | (keys.amin(1) > queries.amax(1))).any())

    replace(ring, "_share_no_document", share_no_document)


def ignored_targets_count_in_a_part(replace: Replace) -> None:
    honest = chunked_loss._chunk_loss_and_gradient_of_part

    def chunk(logits: Tensor, targets: Tensor, *others: Any, **named: Any) -> Tensor:
        return honest(logits, targets.where(targets != chunked_loss.IGNORED, 0), *others, **named)

    replace(chunked_loss, "_chunk_loss_and_gradient_of_part", chunk)


def documents_shifted_by_one(replace: Replace) -> None:
    """A document's last token is taken for the first of the next."""
    honest = parallel_model.ParallelModel.local_batch

    def local_batch(self: parallel_model.ParallelModel, batch: Any) -> Any:
        shifted = with_fields(
            batch, documents=torch.cat((batch.documents[:, 1:], batch.documents[:, -1:]), 1)
        )
        return honest(self, shifted)

    replace(parallel_model.ParallelModel, "local_batch", local_batch)


def rank_dies(replace: Replace) -> None:
    os._exit(3)


def rank_raises(replace: Replace) -> None:
    raise ValueError("a fault of the test")


def __getattr__(name: str) -> Callable[..., Any]:
    side, _, fault = name.partition("_")
    honest = {
        "measured": compare_layout.compare_with_reference,
        "traced": trace_modules.compare_traces,
        "summed": sum_dtypes.short_sums,
    }[side]
    return partial(_broken, fault, honest)


def _broken(fault: str, honest: Callable[..., Any], worker: Any, *arguments: Any) -> Any:
    with ExitStack() as mended:
        if not (fault.startswith("rank_") and worker.rank == 0):
            globals()[fault](
                lambda owner, name, value: mended.enter_context(patch.object(owner, name, value))
            )
        return honest(worker, *arguments)
