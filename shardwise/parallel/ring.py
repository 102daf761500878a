"""Ring attention: one sequence over several devices, with keys and values passed from neighbour to
neighbour.

Each of the C ranks of the `context` axis holds S / C tokens of a sequence. Queries stay; keys and values go
around the ring. Each rank attends to the block that it has at a step, and merges the results by their
log-sum-exp (shardwise/parallel/blockwise.py). No rank ever holds the whole sequence (Liu et al., "Ring
Attention with Blockwise Transformers", 2023). The transfer of the next block starts before the kernel of the
current one, and overlaps with it.

**Zig-zag.** Under a causal mask, rank 0 of a plain split would have little work and the last rank most of it.
So the sequence is cut into 2C chunks and rank r holds chunk r and chunk 2C-1-r (as in Llama 3; Brandon et
al., "Striped Attention", 2023, distribute it token by token). Then each pair of ranks has one of three kinds
of work, all of one size and without masked waste:

| keys come from | queries     | keys        | mask   |
| -------------- | ----------- | ----------- | ------ |
| the same rank  | all         | all         | causal |
| an earlier one | all         | first chunk | none   |
| a later one    | second half | all         | none   |

**Backward** goes around once more. The kernel's backward takes the merged result and log-sum-exp, so forward
saves only the local query, key, value, out and lse. The gradient of a block's keys and values follows one
step behind them, in float32 (float64 for float64): each rank adds its share while it has them, and after the
last step they return to their rank.

Cost per rank, where its keys and values have b bytes together, its queries n, and a gradient or sum in
float32 has twice the bytes of a 16-bit tensor:

| pass     | sends                                  | buffers beside its own tensors and results          |
| -------- | -------------------------------------- | --------------------------------------------------- |
| forward  | (C - 1) b                              | keys and values here and arriving: 2 b;             |
|          |                                        | the output in float32 and a block's output: 2 n + n |
| backward | (C - 1) b and (C - 1) gradients of 2 b | keys and values here and arriving: 2 b;             |
|          |                                        | their gradients leaving and arriving: 4 b;          |
|          |                                        | a block's gradients: b + n;                         |
|          |                                        | the queries' gradient in float32: 2 n               |

Buffers exist only during the call and do not grow with C. Document numbers, where given, are sent with the
keys; pairs of blocks with no document in common are skipped, others use a mask.

**Recomputation.** The forward pass is one operator, `torch.ops.shardwise.ring_attention`, so that selective
recomputation can save its result like that of any attention kernel, and need not go around again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise._torch import AutogradContext
from shardwise.comm import Comm, PeerExchange
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
"""First tag of gradients; keys, values and documents, which are sent at the same time, have the tags 0 to
2."""


def zigzag_positions(length: int, size: int, rank: int) -> Tensor:
    """Return the positions of this rank's tokens in the whole sequence: chunk `rank`, then chunk
    `2 size - 1 - rank`."""
    if length % (2 * size):
        raise UserError(
            f"ring attention over context = {size} cuts a sequence into {2 * size} equal chunks, and "
            f"{length} tokens cannot be divided by that: make data.sequence_length a multiple of {2 * size}"
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
    """Return the work of `rank` on the keys of `source`, where each rank holds `tokens` tokens."""
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
    """Return causal attention over a sequence that is split in zig-zag over the `context` axis.

    `query` is (batch, heads, tokens, head_dim), `key` and `value` likewise with as many or fewer heads. With
    `documents` (batch, tokens), a token sees only its own document. All ranks of the axis must call it, in
    the same order.
    """
    group = comm.mesh.group(AXIS)
    if group is None:
        return whole_attention(query, key, value, documents)
    if query.shape[2] % 2:
        raise UserError(f"ring attention needs an even number of tokens on each rank, not {query.shape[2]}")
    _COMMS[group.group_name] = comm
    kernel = kernel_for(query, key, value, documents is not None)
    result: Tensor = _RingAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, documents, kernel.name, group.group_name
    )
    return result


class Neighbours:
    """This rank and its neighbours on the `context` axis."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.rank, self.size = comm, comm.mesh.coordinate(AXIS), comm.mesh.size(AXIS)

    def source(self, step: int) -> int:
        """Return the rank whose keys are here at this step."""
        return (self.rank - step) % self.size

    def pass_on(self, tensors: Sequence[Tensor], first_tag: int = 0) -> PeerExchange:
        """Start sending tensors to the next rank, and receiving those of the rank before."""
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return self.comm.start_exchange(tensors, AXIS, after, before, first_tag)


def forward_pass(
    ring: Neighbours, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
) -> Attended:
    """Go around the ring once, and return out in the query's dtype, and its lse."""
    merged: Attended | None = None
    # Keys and values (batch, tokens, kv_heads, head_dim), documents (batch, tokens).
    here = _to_send(key, value, documents)
    for step in range(ring.size):
        passing = ring.pass_on(here) if step < ring.size - 1 else None
        block = zigzag_block(ring.rank, ring.source(step), query.shape[2])
        merged = merge_block(kernel, merged, query, here, block, documents)
        if passing is not None:
            here = passing.arrived()
    assert merged is not None, "a ring has at least one rank"
    out, lse = merged  # (batch, heads, tokens, head_dim) in the wide dtype, (batch, heads, tokens)
    return out.to(query.dtype), lse


def merge_block(
    kernel: Kernel,
    merged: Attended | None,
    query: Tensor,
    here: Sequence[Tensor],
    block: QueryKeySlices,
    documents: Tensor | None,
) -> Attended:
    """Attend to the keys that are here, and merge the result with those of earlier blocks. The first block
    must be that of the rank itself."""
    # From (batch, tokens, kv_heads, head_dim), as sent, to (batch, kv_heads, this block's keys, head_dim).
    key, value = (tensor.transpose(1, 2)[:, :, block.keys] for tensor in here[:2])
    pair = _document_pair(block, documents, here)
    if merged is not None and _share_no_document(pair):
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
    """Go around the ring once with keys and values, whose gradients follow a step behind, and return the
    gradients; `saved` is query, key and value."""
    query, key, value = saved  # (batch, heads or kv_heads, tokens, head_dim)
    here = _to_send(key, value, documents)  # (batch, tokens, kv_heads, head_dim)
    of_query, local_gradients, here = _first_step(ring, kernel, gradient, query, here, merged, documents)
    # Gradients of the keys and values that are here, as sent: (batch, tokens, kv_heads, head_dim), wide.
    sums: list[Tensor] = []
    for step in range(1, ring.size):
        passing = ring.pass_on(here) if step < ring.size - 1 else None
        following = ring.pass_on(sums, _GRADIENT_TAG) if sums else None
        block = zigzag_block(ring.rank, ring.source(step), query.shape[2])
        added = block_gradients(kernel, gradient, query, here, block, merged, documents)
        sums = following.arrived() if following else [_zeros(tensor) for tensor in here[:2]]
        _add(block, added, of_query, sums)
        del added  # frees the memory before the next block needs it
        here = passing.arrived() if passing else []
    # After the last step the gradients return to the rank of their keys, as (batch, tokens, kv_heads,
    # head_dim).
    returned = ring.pass_on(sums, _GRADIENT_TAG).arrived()
    of_key, of_value = (
        total.transpose(1, 2).add_(local).to(key.dtype)
        for total, local in zip(returned, local_gradients, strict=True)
    )
    return of_query.to(query.dtype), of_key, of_value


def _first_step(
    ring: Neighbours,
    kernel: Kernel,
    gradient: Tensor,
    query: Tensor,
    here: list[Tensor],
    merged: Attended,
    documents: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    """Do the first step of backward, with this rank's keys. Return the gradient of the query in the wide
    dtype, those of the local keys and values, and the tensors that arrived."""
    passing = ring.pass_on(here)
    block = zigzag_block(ring.rank, ring.rank, query.shape[2])
    added = block_gradients(kernel, gradient, query, here, block, merged, documents)
    assert added is not None, "a token sees its own document"
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
    """Return what this block adds to the gradients of its queries, keys and values; None: nothing."""
    pair = _document_pair(block, documents, here)
    if _share_no_document(pair):
        return None
    # (batch, kv_heads, block's keys, head_dim)
    key, value = (tensor.transpose(1, 2)[:, :, block.keys] for tensor in here[:2])
    # The rows of the block's queries; lse is without head_dim.
    of_out, rows, out, lse = (tensor[:, :, block.queries] for tensor in (gradient, query, *merged))
    return attend_backward(kernel, of_out, rows, key, value, (out, lse), block.causal, pair)


def _add(block: QueryKeySlices, added: Gradients | None, of_query: Tensor, sums: Sequence[Tensor]) -> None:
    """Add a block's gradients to those of the queries, and to the sums that are sent with its keys and
    values."""
    if added is not None:
        of_query[:, :, block.queries] += added[0]
        for total, part in zip(sums, added[1:], strict=True):
            # A view of what will be sent, as (batch, kv_heads, tokens, head_dim).
            total.transpose(1, 2)[:, :, block.keys] += part


def _to_send(key: Tensor, value: Tensor, documents: Tensor | None) -> list[Tensor]:
    """Return keys and values as they are sent: (batch, tokens, heads, head_dim). A projection returns this
    order, so there is seldom a copy."""
    tensors = [key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()]
    return tensors if documents is None else [*tensors, documents.contiguous()]


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=wide(like.dtype))


def _document_pair(
    block: QueryKeySlices, documents: Tensor | None, here: Sequence[Tensor]
) -> Documents | None:
    """Return the document numbers of the block's queries and keys: (batch, queries) and (batch, keys)."""
    return None if documents is None else (documents[:, block.queries], here[2][:, block.keys])


def _share_no_document(documents: Documents | None) -> bool:
    """Return whether no query has a key of its document, because their numbers do not overlap in any row."""
    if documents is None:
        return False
    queries, keys = documents
    # (batch): ranges of numbers that do not overlap have no document in common.
    apart = (queries.amin(1) > keys.amax(1)) | (keys.amin(1) > queries.amax(1))
    return bool(apart.all())  # on a GPU the host waits here; a block of masked attention takes far longer


_COMMS: WeakValueDictionary[str, Comm] = WeakValueDictionary()
"""`Comm` by the name of its `context` group, because an operator takes no objects but tensors and strings."""


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None, kernel: str, group: str
) -> Attended:
    """Run `forward_pass` with a kernel and a group that are given by name, as an operator needs it."""
    return forward_pass(Neighbours(_COMMS[group]), KERNELS[kernel], query, key, value, documents)


torch.library.custom_op(
    "shardwise::ring_attention",
    ring_forward,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? documents, str kernel, str group) -> (Tensor, "
    "Tensor)",
)
RING = torch.ops.shardwise.ring_attention.default
"""The forward pass as one operator, whose result recomputation can save."""


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        kernel: str,
        group: str,
    ) -> Tensor:
        out, lse = torch.ops.shardwise.ring_attention(query, key, value, documents, kernel, group)
        ctx.save_for_backward(query, key, value, out, lse, documents)
        ctx.kernel, ctx.comm = KERNELS[kernel], _COMMS[group]
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, documents = ctx.saved_tensors
        if gradient.stride() != out.stride():  # kernels need contiguous rows, unlike a broadcast gradient's
            gradient = torch.empty_like(out).copy_(gradient)
        ring, saved = Neighbours(ctx.comm), (query, key, value)
        gradients = backward_pass(ring, ctx.kernel, gradient, saved, (out, lse), documents)
        return *gradients, None, None, None
