"""Ring attention: one sequence over several devices, with keys and values passed from neighbour to
neighbour.

Each of the C ranks of the `context` axis holds S / C tokens of a sequence. Queries stay; keys and values go
around the ring, and each rank attends to whatever block is with it, merging the blocks' results by their
log-sum-exp (shardwise/parallel/blockwise.py). No rank ever holds the whole sequence (Liu et al., "Ring
Attention with Blockwise Transformers", 2023). While a block is computed, the next one is already on its way:
a transfer is posted before the kernel that hides it.

**Zig-zag.** Under a causal mask rank 0 of a plain split would have next to nothing to do and the last rank
almost all. So the sequence is cut into 2C chunks and rank r holds chunk r and chunk 2C-1-r (as in Llama 3;
Brandon et al., "Striped Attention", 2023, spread it token by token). Then each pair of ranks has one of three
kinds of work, all of one size and none with masked waste:

| keys come from | queries     | keys        | mask   |
| -------------- | ----------- | ----------- | ------ |
| itself         | all         | all         | causal |
| an earlier one | all         | first chunk | none   |
| a later one    | second half | all         | none   |

**Backward** goes around once more. The kernel's backward takes the merged result and log-sum-exp, so nothing
of the forward is kept but the local query, key, value, out and lse. The gradient of a block's keys and values
follows one step behind them, in float32 (float64 for float64): each rank adds its share while it has them,
and after the last step they go home.

What it costs a rank, where its keys and values have b bytes together, its queries n, and a gradient or sum in
float32 has twice the bytes of a 16-bit tensor:

| pass     | sends                                  | buffers beside its own tensors and results          |
| -------- | -------------------------------------- | --------------------------------------------------- |
| forward  | (C - 1) b                              | keys and values here and arriving: 2 b;             |
|          |                                        | the output in float32 and a block's output: 2 n + n |
| backward | (C - 1) b and (C - 1) gradients of 2 b | keys and values here and arriving: 2 b;             |
|          |                                        | their gradients leaving and arriving: 4 b;          |
|          |                                        | a block's gradients: b + n;                         |
|          |                                        | the queries' gradient in float32: 2 n               |

Buffers live only inside the call and do not grow with C. Document numbers, where given, travel with the keys;
pairs of blocks with no document in common are skipped, others use a mask.

**Recomputation.** The forward pass is one operator, `torch.ops.shardwise.ring_attention`, so that selective
recomputation can keep its result like that of any attention kernel, and then need not go around again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.comm import Comm, Exchange
from shardwise.comm.autograd import eager
from shardwise.errors import UserError
from shardwise.models.torch_dtypes import wide
from shardwise.parallel.blockwise import (
    KERNELS,
    Attended,
    Documents,
    Gradients,
    Kernel,
    attend,
    attend_backward,
    kernel_for,
    merge_,
    whole_attention,
)

AXIS = "context"
_GRADIENT_TAG = 3
"""Keys, values and documents have the tags 0 to 2; gradients are on their way at the same time."""


def zigzag_positions(length: int, size: int, rank: int) -> Tensor:
    """Where in the whole sequence the tokens of this rank are: chunk `rank`, then chunk `2 size - 1 -
    rank`."""
    if length % (2 * size):
        raise UserError(
            f"ring attention over context = {size} cuts a sequence into {2 * size} equal chunks, and "
            f"{length} tokens "
            f"cannot be cut so: make data.sequence_length a multiple of {2 * size}"
        )
    chunks = torch.arange(length).view(2 * size, -1)  # (chunks, tokens of a chunk)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


@dataclass(frozen=True)
class QueryKeySlices:
    """Which local queries attend to which keys of a peer's tokens."""

    queries: slice
    keys: slice
    causal: bool


def zigzag_block(rank: int, source: int, tokens: int) -> QueryKeySlices:
    """The work of `rank` on the keys of `source`, where each rank holds so many tokens."""
    everything, half = slice(0, tokens), tokens // 2
    if source == rank:
        return QueryKeySlices(everything, everything, causal=True)
    if source < rank:
        return QueryKeySlices(everything, slice(0, half), causal=False)
    return QueryKeySlices(slice(half, tokens), everything, causal=False)


@eager
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, comm: Comm, documents: Tensor | None = None
) -> Tensor:
    """Causal attention over a sequence that lies in zig-zag over the `context` axis.

    `query` is (batch, heads, tokens, head_dim), `key` and `value` likewise with as many or fewer heads;
    `documents` is (batch, tokens), and a token then sees only its own document. All ranks of the axis must
    call it, in the same order.
    """
    group = comm.mesh.group(AXIS)
    if group is None:
        return whole_attention(query, key, value, documents)
    if query.shape[2] % 2:
        raise UserError(f"ring attention needs an even number of tokens on each rank, not {query.shape[2]}")
    _COMMS[group.group_name] = comm
    kernel = kernel_for(query, key, value, documents is not None)
    result: Tensor = _RingAttention.apply(query, key, value, documents, kernel.name, group.group_name)  # type: ignore[no-untyped-call]
    return result


class Neighbours:
    """This rank and its neighbours on the `context` axis."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.mesh.coordinate(AXIS), comm.mesh.size(AXIS)

    def source(self, step: int) -> int:
        """Whose keys are here at this step."""
        return (self.rank - step) % self.size

    def pass_on(self, tensors: Sequence[Tensor], first_tag: int = 0) -> Exchange:
        """Start sending these to the next rank, and receiving the like from the one before."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self.comm.start_exchange(tensors, AXIS, after, before, first_tag)


def forward_pass(
    ring: Neighbours, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
) -> Attended:
    """Once around the ring: out in the query's dtype, and its lse."""
    merged: Attended | None = None
    here = _travelling(
        key, value, documents
    )  # keys and values (batch, tokens, kv_heads, head_dim), documents (batch, tokens)
    for step in range(ring.size):
        passing = ring.pass_on(here) if step < ring.size - 1 else None
        block = zigzag_block(ring.rank, ring.source(step), query.shape[2])
        merged = merge_block(kernel, merged, query, here, block, documents)
        if passing is not None:
            here = passing.arrived()
    assert (
        merged is not None
    )  # out (batch, heads, tokens, head_dim) in the wide dtype, lse (batch, heads, tokens)
    return merged[0].to(query.dtype), merged[1]


def merge_block(
    kernel: Kernel,
    merged: Attended | None,
    query: Tensor,
    here: Sequence[Tensor],
    block: QueryKeySlices,
    documents: Tensor | None,
) -> Attended:
    """Attend to the keys that are here, and add the result to what was found so far. The first block must be
    a rank's own."""
    # (batch, tokens, kv_heads, head_dim) as sent, to (batch, kv_heads, this block's keys, head_dim) as
    # attended to
    key, value = (tensor.transpose(1, 2)[:, :, block.keys] for tensor in here[:2])
    pair = _pair(block, documents, here)
    if merged is not None and _strangers(pair):
        return merged
    out, lse = attend(kernel, query[:, :, block.queries], key, value, block.causal, pair)
    if merged is None:
        return out.to(wide(out.dtype)), lse
    merge_(merged[0][:, :, block.queries], merged[1][:, :, block.queries], out, lse)
    return merged


def backward_pass(
    ring: Neighbours,
    kernel: Kernel,
    gradient: Tensor,
    saved: Gradients,
    merged: Attended,
    documents: Tensor | None,
) -> Gradients:
    """Once around the ring with keys and values, their gradients a step behind; `saved` is query, key and
    value."""
    query, key, value = saved  # (batch, heads or kv_heads, tokens, head_dim)
    here = _travelling(key, value, documents)  # (batch, tokens, kv_heads, head_dim)
    of_query, at_home, here = _own_gradients(ring, kernel, gradient, query, here, merged, documents)
    sums: list[
        Tensor
        # gradients of the keys and values that are here, as sent: (batch, tokens, kv_heads, head_dim), wide
    ] = []
    for step in range(1, ring.size):
        passing = ring.pass_on(here) if step < ring.size - 1 else None
        following = ring.pass_on(sums, _GRADIENT_TAG) if sums else None
        block = zigzag_block(ring.rank, ring.source(step), query.shape[2])
        added = block_gradients(kernel, gradient, query, here, block, merged, documents)
        sums = following.arrived() if following else [_zeros(tensor) for tensor in here[:2]]
        _add(block, added, of_query, sums)
        del added  # before the next block makes its own
        here = passing.arrived() if passing else []
    # Home again after the last step: (batch, tokens, kv_heads, head_dim) as sent to (batch, kv_heads, tokens,
    # head_dim).
    of_key, of_value = (
        total.transpose(1, 2).add_(own).to(key.dtype)
        for total, own in zip(ring.pass_on(sums, _GRADIENT_TAG).arrived(), at_home, strict=True)
    )
    return of_query.to(query.dtype), of_key, of_value


def _own_gradients(
    ring: Neighbours,
    kernel: Kernel,
    gradient: Tensor,
    query: Tensor,
    here: list[Tensor],
    merged: Attended,
    documents: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    """The first step: of the query in the wide dtype; of its own keys and values, which are at home; the keys
    that came."""
    passing = ring.pass_on(here)
    block = zigzag_block(ring.rank, ring.rank, query.shape[2])
    added = block_gradients(kernel, gradient, query, here, block, merged, documents)
    assert added is not None, "a token is of its own document"
    return added[0].to(wide(query.dtype)), added[1:], passing.arrived()


def block_gradients(
    kernel: Kernel,
    gradient: Tensor,
    query: Tensor,
    here: Sequence[Tensor],
    block: QueryKeySlices,
    merged: Attended,
    documents: Tensor | None,
) -> Gradients | None:
    """What this block adds to the gradients of its queries, keys and values; None where it has nothing to
    add."""
    pair = _pair(block, documents, here)
    if _strangers(pair):
        return None
    key, value = (
        tensor.transpose(1, 2)[:, :, block.keys] for tensor in here[:2]
    )  # (batch, kv_heads, block's keys, head_dim)
    rows, out, lse = (
        tensor[:, :, block.queries] for tensor in (query, *merged)
    )  # of the block's queries; lse without head_dim
    return attend_backward(
        kernel, gradient[:, :, block.queries], rows, key, value, (out, lse), block.causal, pair
    )


def _add(block: QueryKeySlices, added: Gradients | None, of_query: Tensor, sums: Sequence[Tensor]) -> None:
    """Put a block's gradients into those of the queries, and into the sums that travel with its keys and
    values."""
    if added is not None:
        of_query[:, :, block.queries] += added[0]
        for total, part in zip(sums, added[1:], strict=True):
            total.transpose(1, 2)[:, :, block.keys] += (
                part  # a view of what will be sent: (batch, kv_heads, tokens, head_dim)
            )


def _travelling(key: Tensor, value: Tensor, documents: Tensor | None) -> list[Tensor]:
    """As they are sent: (batch, tokens, heads, head_dim), which is how a projection leaves them, so this
    seldom copies."""
    tensors = [key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()]
    return tensors if documents is None else [*tensors, documents.contiguous()]


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=wide(like.dtype))


def _pair(block: QueryKeySlices, documents: Tensor | None, here: Sequence[Tensor]) -> Documents | None:
    """Document numbers of the block's queries and keys: (batch, queries) and (batch, keys)."""
    return None if documents is None else (documents[:, block.queries], here[2][:, block.keys])


def _strangers(documents: Documents | None) -> bool:
    """Whether no query can have a key of its own document, because their numbers do not overlap in any
    row."""
    if documents is None:
        return False
    queries, keys = documents
    # (batch): ranges of numbers that do not overlap have no document in common
    apart = (queries.amin(1) > keys.amax(1)) | (keys.amin(1) > queries.amax(1))
    return bool(
        apart.all()
    )  # on a GPU this waits for the device; a block of masked attention takes far longer


_COMMS: WeakValueDictionary[str, Comm] = WeakValueDictionary()
"""By the name of the `context` group: an operator takes tensors and strings, and no objects of ours."""


def around(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, kernel: str, group: str
) -> Attended:
    """`forward_pass` by names: what the operator runs."""
    return forward_pass(Neighbours(_COMMS[group]), KERNELS[kernel], query, key, value, documents)


torch.library.custom_op(
    "shardwise::ring_attention",
    around,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? documents, str kernel, str group) -> (Tensor, "
    "Tensor)",
)
RING = torch.ops.shardwise.ring_attention.default
"""The way around as one operator, which recomputation can be told to keep."""


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        kernel: str,
        group: str,
    ) -> Tensor:
        out, lse = torch.ops.shardwise.ring_attention(query, key, value, documents, kernel, group)
        context.save_for_backward(query, key, value, out, lse, documents)
        context.kernel, context.comm = KERNELS[kernel], _COMMS[group]
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, documents = context.saved_tensors
        if (
            gradient.stride() != out.stride()
        ):  # kernels want rows that lie together; a broadcast gradient has none
            gradient = torch.empty_like(out).copy_(gradient)
        gradients = backward_pass(
            Neighbours(context.comm), context.kernel, gradient, (query, key, value), (out, lse), documents
        )
        return *gradients, None, None, None
