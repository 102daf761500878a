"""Ulysses: a sequence that is split over devices is exchanged for some heads of all tokens on each device.

Attention mixes tokens but never heads. So where C ranks hold S / C tokens of all heads, one all-to-all gives
each rank all S tokens of 1 / C of the heads; the ordinary fused attention runs on them, and a second
all-to-all turns the result back (Jacobs et al., "DeepSpeed Ulysses", 2023). Chunks are contiguous: every rank
sees the whole sequence, so causal work is even by itself.

Compared with the ring (shardwise/parallel/ring.py), messages are fewer and larger, and one kernel takes the
place of C blocks, but messages do not overlap with computation, and `heads` must be a multiple of C. For n
bytes of queries and b of keys and values on one rank, forward sends (C-1)/C of 2 n + b, and backward the
same: independent of C, where the ring sends (C-1) b. During attention a rank holds those n + b bytes once
more, and with documents a mask of S² bytes for each row of the batch.

Keys and values may have fewer heads than queries. If these do not divide over the devices, each kv head is
first repeated, so that the number of heads becomes lcm(kv_heads, C), which always divides `heads`; its
gradient is the sum over the copies.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from shardwise.comm import Comm
from shardwise.comm.autograd import all_to_all, eager
from shardwise.errors import UserError
from shardwise.parallel.blockwise import whole_attention

AXIS = "context"


def contiguous_positions(length: int, size: int, rank: int) -> Tensor:
    """Return the positions of this rank's tokens in the whole sequence: the `rank`-th of `size` equal
    chunks."""
    if length % size:
        raise UserError(
            f"context = {size} cuts a sequence into {size} equal chunks, and {length} tokens cannot be "
            f"divided by {size}: make data.sequence_length a multiple of {size}"
        )
    return torch.arange(length).view(size, -1)[rank]


@eager
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    comm: Comm,
    documents: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention over a sequence that is split in contiguous chunks over the `context` axis.

    `query` is (batch, heads, tokens, head_dim), `key` and `value` likewise with as many or fewer heads. With
    `documents` (batch, tokens), a token sees only its own document; `window` is how many tokens it sees at
    most, and `softcap` the bound of scores. All ranks of the axis must call it, in the same order.
    """
    size = comm.mesh.size(AXIS)
    if size == 1:
        return whole_attention(query, key, value, documents, window, softcap)
    if query.shape[1] % size:
        raise UserError(
            f"Ulysses splits the heads evenly over context = {size}, and {query.shape[1]} heads cannot be "
            f"divided by {size}: choose a context that divides the heads, or ring attention"
        )
    repeats = size // math.gcd(size, key.shape[1])
    parts = [query, _repeat(key, repeats), _repeat(value, repeats)]
    heads = [part.shape[1] // size for part in parts]
    leaving = torch.cat([_split_heads(part, size) for part in parts], 3)  # one message for all three
    arrived = torch.split(all_to_all(leaving, comm, AXIS), heads, 3)
    queries, keys, values = (_join_tokens(part) for part in arrived)
    whole_documents = None if documents is None else _gather(documents, comm)
    mixed = whole_attention(queries, keys, values, whole_documents, window, softcap)
    return _join_heads(all_to_all(_split_tokens(mixed, size), comm, AXIS))


def _repeat(heads: Tensor, repeats: int) -> Tensor:
    return heads if repeats == 1 else heads.repeat_interleave(repeats, 1)


def _split_heads(tensor: Tensor, size: int) -> Tensor:
    """Turn (batch, heads, tokens, head_dim) into (rank, batch, tokens, heads of that rank, head_dim)."""
    batch, heads, tokens, head_dim = tensor.shape
    return tensor.transpose(1, 2).reshape(batch, tokens, size, heads // size, head_dim).movedim(2, 0)


def _join_tokens(split: Tensor) -> Tensor:
    """Turn (rank, batch, its tokens, heads, head_dim) into (batch, heads, all tokens, head_dim)."""
    return split.movedim(0, 1).flatten(1, 2).transpose(1, 2)


def _split_tokens(tensor: Tensor, size: int) -> Tensor:
    """Do the reverse of `_join_tokens`, for `size` ranks."""
    batch, heads, tokens, head_dim = tensor.shape
    return tensor.transpose(1, 2).reshape(batch, size, tokens // size, heads, head_dim).movedim(1, 0)


def _join_heads(split: Tensor) -> Tensor:
    """Do the reverse of `_split_heads`, for the heads of all ranks."""
    return split.movedim(0, 2).flatten(2, 3).transpose(1, 2)


def _gather(documents: Tensor, comm: Comm) -> Tensor:
    """Gather (batch, tokens) of each rank to (batch, all tokens) on every rank."""
    return comm.all_gather(documents, AXIS).movedim(0, 1).flatten(1)
