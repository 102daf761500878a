"""Ulysses attention is attention: against softmax over the whole sequence on one device, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks.pool import Pool
from sequences import Shape, local, together, truth, worst
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.comm import Comm
from shardwise.errors import UserError
from shardwise.mesh import Worker
from shardwise.parallel.ulysses import contiguous_positions, ulysses_attention

Ranks = Callable[[int], Pool]


def split(worker: Worker, shape: Shape, **layout: int) -> tuple[Tensor, ...]:
    return local(worker, shape, ulysses_attention, contiguous_positions, {"context": worker.world, **layout})


# 12 query heads over 2, 3 and 4 ranks; of the kv heads, 12 and 6 divide by some, 4 are as many or fewer, 1 is
# everybody's.
HEADS = [
    pytest.param(Shape(batch=2, heads=12, kv_heads=heads, length=24), id=f"{heads}-kv-heads")
    for heads in (12, 6, 4, 2, 1)
]
DOCUMENTS = [
    pytest.param(Shape(batch=2, heads=12, kv_heads=3, length=24, ends=((1, 5, 7, 14), ())), id="documents")
]


@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize("shape", HEADS + DOCUMENTS)
def test_result_and_gradients_are_those_of_one_device(ranks: Ranks, shape: Shape, context: int) -> None:
    found = together(ranks(context).run(split, shape))
    assert worst(found, truth(shape)) < 1e-12


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_lower_precisions_are_right_to_their_rounding(ranks: Ranks, dtype: torch.dtype, error: float) -> None:
    shape = Shape(heads=4, kv_heads=2, length=48, dtype=dtype)
    found = together(ranks(4).run(split, shape))
    assert {tensor.dtype for tensor in found} == {dtype}
    assert worst(found, truth(shape)) < error


def test_each_data_parallel_group_exchanges_by_itself(ranks: Ranks) -> None:
    shape = Shape(kv_heads=2, ends=((9,),))
    parts = ranks(4).run(split_in_two_groups, shape)
    for group in (parts[:2], parts[2:]):
        assert worst(together(group), truth(shape)) < 1e-12


def split_in_two_groups(worker: Worker, shape: Shape) -> tuple[Tensor, ...]:
    return split(worker, shape, data=2, context=2)


def test_heads_that_cannot_be_dealt_out_are_refused(ranks: Ranks) -> None:
    assert all("3 heads" in message for message in ranks(2).run(refusal, Shape(heads=3, kv_heads=1)))


def refusal(worker: Worker, shape: Shape) -> str:
    with pytest.raises(UserError) as refused:
        split(worker, shape)
    return str(refused.value)


def test_a_length_that_cannot_be_cut_is_refused_with_one_that_can() -> None:
    with pytest.raises(UserError, match="multiple of 3"):
        contiguous_positions(20, 3, 0)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_ledger_holds_one_exchange_each_way_a_pass(ranks: Ranks, recompute: bool) -> None:
    shape = Shape(heads=4, kv_heads=1, length=48)
    tokens = shape.length // 2
    there = (
        tokens * shape.head_dim * (shape.heads + 2 * 2) * 8
    )  # the one kv head is repeated for each of two ranks
    back = tokens * shape.head_dim * shape.heads * 8
    again = (
        there if recompute else 0
    )  # the way back is not repeated: backward needs nothing that comes after it
    found = ranks(2).run(recorded, shape, recompute)
    for _, ledger in found:
        assert ledger == {
            "all_to_all/context": {"count": 4 + bool(again), "bytes": 2 * (there + back) + again}
        }
    assert worst(together([part for part, _ in found]), truth(shape)) < 1e-12


def recorded(worker: Worker, shape: Shape, recompute: bool) -> tuple[tuple[Tensor, ...], Any]:
    kept: list[Comm] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, comm: Comm, documents: Tensor | None) -> Tensor:
        kept.append(comm)
        if not recompute:
            return ulysses_attention(query, key, value, comm, documents)
        return checkpoint(
            lambda *tensors: ulysses_attention(*tensors, comm, documents),
            query,
            key,
            value,
            use_reentrant=False,
        )

    part = local(worker, shape, attend, contiguous_positions, {"context": worker.world})
    return part, kept[0].ledger.take()
