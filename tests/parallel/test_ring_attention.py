"""Ring attention is attention: against softmax over the whole sequence on one device, in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks.pool import Pool
from sequences import Shape, local, make, together, truth, worst
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.comm import Comm
from shardwise.config import Layout
from shardwise.errors import UserError
from shardwise.mesh import Worker, join
from shardwise.parallel import blockwise
from shardwise.parallel.ring import (
    Neighbours,
    backward_pass,
    forward_pass,
    ring_attention,
    zigzag_block,
    zigzag_positions,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from memory import LiveBytes

Ranks = Callable[[int], Pool]


def split(worker: Worker, shape: Shape, **layout: int) -> tuple[Tensor, ...]:
    return local(worker, shape, ring_attention, zigzag_positions, {"context": worker.world, **layout})


SHAPES = [
    pytest.param(Shape(), id="plain"),
    pytest.param(Shape(batch=2, heads=6, kv_heads=2, length=72), id="grouped"),
    pytest.param(Shape(batch=2, heads=6, kv_heads=1, length=24, head_dim=5), id="one-kv-head"),
    pytest.param(Shape(heads=3, kv_heads=3, length=1200), id="long"),
]
WITH_DOCUMENTS = [
    # Chunks of 2C = 4, 6 and 8 ranks are 12, 8 and 6 tokens long: ends inside and at the edges of chunks,
    # documents of one token, and documents over several ranks.
    pytest.param(
        Shape(batch=2, heads=4, kv_heads=2, length=48, ends=((1, 2, 11, 29), (40,))), id="documents"
    ),
    pytest.param(Shape(length=48, kv_heads=1, ends=(tuple(range(9, 47)),)), id="lonely-tokens"),
    pytest.param(Shape(length=48, ends=((),)), id="one-document"),
]


@pytest.mark.parametrize("context", [2, 3, 4])
@pytest.mark.parametrize("shape", SHAPES + WITH_DOCUMENTS)
def test_result_and_gradients_are_those_of_one_device(ranks: Ranks, shape: Shape, context: int) -> None:
    found = together(ranks(context).run(split, shape))
    assert worst(found, truth(shape)) < 1e-12


@pytest.mark.parametrize("ends", [None, ((5, 17, 30),)], ids=["whole", "documents"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_lower_precisions_are_right_to_their_rounding(
    ranks: Ranks, dtype: torch.dtype, error: float, ends: Any
) -> None:
    shape = Shape(heads=4, kv_heads=2, length=48, ends=ends, dtype=dtype)
    found = together(ranks(4).run(split, shape))
    assert {tensor.dtype for tensor in found} == {dtype}
    assert worst(found, truth(shape)) < error


def test_each_data_parallel_group_has_its_own_ring(ranks: Ranks) -> None:
    shape = Shape(kv_heads=2)
    parts = ranks(4).run(split_in_two_rings, shape)
    for ring in (parts[:2], parts[2:]):
        assert worst(together(ring), truth(shape)) < 1e-12


def split_in_two_rings(worker: Worker, shape: Shape) -> tuple[Tensor, ...]:
    return split(worker, shape, data=2, context=2)


def test_one_device_needs_no_ring(ranks: Ranks) -> None:
    shape = Shape(heads=4, kv_heads=2, ends=((5,),))
    assert worst(together(ranks(1).run(split, shape)), truth(shape)) < 1e-12


def test_the_number_of_ranks_changes_only_the_rounding(ranks: Ranks) -> None:
    shape = Shape(heads=4, kv_heads=2, length=48)
    two, four = (tuple(together(ranks(context).run(split, shape))) for context in (2, 4))
    assert worst(list(two), four) < 1e-14


@pytest.mark.parametrize("context", [1, 2, 3, 4, 7])
def test_zig_zag_blocks_cover_the_causal_triangle_once_and_evenly(context: int) -> None:
    length = 4 * context
    seen = torch.zeros(length, length, dtype=torch.int64)
    work = []
    for rank in range(context):
        mine, before = zigzag_positions(length, context, rank), int(seen.sum())
        for source in range(context):
            block = zigzag_block(rank, source, len(mine))
            rows, columns = mine[block.queries], zigzag_positions(length, context, source)[block.keys]
            ones = torch.ones(len(rows), len(columns), dtype=torch.int64)
            seen[rows[:, None], columns] += ones.tril() if block.causal else ones
        work.append(int(seen.sum()) - before)
    assert torch.equal(seen, torch.ones(length, length, dtype=torch.int64).tril())
    assert len(set(work)) == 1


def test_a_length_that_cannot_be_cut_is_refused_with_one_that_can() -> None:
    with pytest.raises(UserError, match="multiple of 6"):
        zigzag_positions(20, 3, 0)


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_ledger_holds_what_the_module_says_is_sent(
    ranks: Ranks, context: int, dtype: torch.dtype
) -> None:
    shape = Shape(heads=4, kv_heads=2, length=48, dtype=dtype)
    tokens = shape.length // context
    keys = 2 * tokens * shape.kv_heads * shape.head_dim
    wide = 8 if dtype == torch.float64 else 4
    sent = {"count": 6 * (context - 1), "bytes": (context - 1) * keys * (2 * dtype.itemsize + wide)}
    assert ranks(context).run(ledger, shape) == [{"send/context": sent}] * context


def ledger(worker: Worker, shape: Shape) -> Any:
    kept: list[Comm] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, comm: Comm, documents: Tensor | None) -> Tensor:
        kept.append(comm)
        return ring_attention(query, key, value, comm, documents)

    local(worker, shape, attend, zigzag_positions, {"context": worker.world})
    return kept[0].ledger.take()


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_nothing(ranks: Ranks, mode: str) -> None:
    shape = Shape(heads=4, kv_heads=2, ends=((3, 9),))
    found = ranks(2).run(recomputed, shape, mode)
    assert worst(together([part for part, _ in found]), truth(shape)) < 1e-12
    rounds = 2 if mode == "full" else 1  # what is kept need not go around again
    assert [sends for _, sends in found] == [3 * rounds + 3 + 2] * 2


def recomputed(worker: Worker, shape: Shape, mode: str) -> tuple[tuple[Tensor, ...], int]:
    kept: list[Comm] = []

    def keep(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = operation is torch.ops.shardwise.ring_attention.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    def attend(query: Tensor, key: Tensor, value: Tensor, comm: Comm, documents: Tensor | None) -> Tensor:
        kept.append(comm)
        more: Any = (
            {"context_fn": lambda: create_selective_checkpoint_contexts(keep)} if mode == "selective" else {}
        )
        return checkpoint(
            lambda *tensors: ring_attention(*tensors, comm, documents) * 1.0,
            query,
            key,
            value,
            use_reentrant=False,
            **more,
        )

    part = local(worker, shape, attend, zigzag_positions, {"context": worker.world})
    return part, kept[0].ledger.take()["send/context"]["count"]


def test_a_block_around_it_may_be_compiled_and_gradients_may_be_broadcast(ranks: Ranks) -> None:
    for eager, compiled in ranks(2).run(summed, Shape(heads=4, kv_heads=2)):
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def summed(worker: Worker, shape: Shape) -> list[list[Tensor]]:
    comm = Comm(join(worker, Layout(data=1, context=worker.world)))
    mine = zigzag_positions(shape.length, worker.world, worker.rank)
    whole = make(shape)
    leaves = [t[:, mine].transpose(1, 2).requires_grad_() for t in (whole.query, whole.key, whole.value)]

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query.sin(), key, value, comm).sum(-1).mean()

    return [
        list(torch.autograd.grad(run(*leaves), leaves))
        for run in (block, torch.compile(block, backend="aot_eager"))
    ]


@pytest.mark.parametrize("ends", [None, ((3, 4, 13), (20,))], ids=["whole", "documents"])
@pytest.mark.parametrize("kernel", [blockwise.CPU, blockwise.PLAIN], ids=lambda kernel: kernel.name)
def test_each_kernel_is_attention_however_its_mask_is_sliced(
    monkeypatch: pytest.MonkeyPatch, kernel: blockwise.Kernel, ends: Any
) -> None:
    monkeypatch.setattr(blockwise, "MASK_ELEMENTS", 300)
    shape = Shape(batch=2, heads=6, kv_heads=2, length=24, ends=ends)
    whole = make(shape)
    query, key, value, weight = (
        t.transpose(1, 2) for t in (whole.query, whole.key, whole.value, whole.weight)
    )
    documents = None if whole.documents is None else (whole.documents, whole.documents)
    merged = blockwise.attend(kernel, query, key, value, True, documents)
    gradients = blockwise.attend_backward(kernel, weight, query, key, value, merged, True, documents)
    found = [tensor.transpose(1, 2) for tensor in (merged[0], *gradients)]
    assert worst(found, truth(shape)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernel", [blockwise.CPU, blockwise.PLAIN], ids=lambda kernel: kernel.name)
def test_a_query_that_sees_no_key_of_a_block_gets_exactly_nothing_from_it(
    kernel: blockwise.Kernel, dtype: torch.dtype
) -> None:
    whole = make(Shape(length=16, dtype=dtype))
    query, key, value, weight = (
        t.transpose(1, 2) for t in (whole.query, whole.key, whole.value, whole.weight)
    )
    out, lse = blockwise.attend(kernel, query, key, value, True)
    out = out.to(blockwise.wide(dtype))
    before = out.clone(), lse.clone()
    strangers = torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, 16, dtype=torch.int32)
    blockwise.merge_(out, lse, *blockwise.attend(kernel, query, key, value, False, strangers))
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    merged = out.to(dtype), lse
    for gradient in blockwise.attend_backward(kernel, weight, query, key, value, merged, False, strangers):
        assert not gradient.any()


@pytest.mark.parametrize("context", [2, 4])
def test_buffers_do_not_grow_with_the_ring(ranks: Ranks, context: int) -> None:
    shape = Shape(heads=4, kv_heads=2, length=1024 * context, head_dim=16, dtype=torch.float32)
    keys = 2 * 1024 * shape.kv_heads * shape.head_dim * 4
    queries = 1024 * shape.heads * shape.head_dim * 4
    small = queries // 4  # lse and the weights of a merge
    for forward, backward in ranks(context).run(live_bytes, shape):
        assert forward < 2 * keys + 2 * queries + small  # keys here and arriving; out and a block's out
        # Keys here and arriving; their gradients leaving and arriving, at home, and of the block; of the
        # query, and of the block.
        assert backward < 6 * keys + 2 * queries + small


def live_bytes(worker: Worker, shape: Shape) -> tuple[int, int]:
    """The most bytes alive at once beyond the tensors given, in each pass."""
    comm = Comm(join(worker, Layout(data=1, context=worker.world)))
    mine = zigzag_positions(shape.length, worker.world, worker.rank)
    whole = make(shape)
    query, key, value, weight = (
        t[:, mine].transpose(1, 2) for t in (whole.query, whole.key, whole.value, whole.weight)
    )
    del whole
    ring = Neighbours(comm)
    merged, forward = fullest(
        (query, key, value), lambda: forward_pass(ring, blockwise.CPU, query, key, value, None)
    )
    given = (query, key, value, weight, *merged)
    _, backward = fullest(
        given, lambda: backward_pass(ring, blockwise.CPU, weight, (query, key, value), merged, None)
    )
    return forward, backward


def fullest(given: tuple[Tensor, ...], work: Callable[[], Any]) -> tuple[Any, int]:
    with LiveBytes() as live:
        for tensor in given:
            live.note(tensor)
        before = live.total()
        live.watching = True
        result = work()
        return result, live.fullest - before
