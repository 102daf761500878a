"""Flows of activations and their gradients: in blocks, between stages, and in the embedding and the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import comb

import numpy as np

from shardwise.config.axes import SEQUENCE_AXES
from shardwise.config.model import Model
from shardwise.cost.first_rank import FirstRank
from shardwise.cost.flow import Flow, When, calls
from shardwise.cost.space import Array, Ints
from shardwise.plans.chunks import chunk_tokens, largest_part


def tensor_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the collectives of the tensor axis.

    Forward gathers the sequence before each pair of matrices and reduce-scatters after it; backward does the
    reverse. Backward may also gather both inputs again, by the program's choice or by recomputation.
    Recomputation repeats the sum after attention, but not the block's last sum, whose result is not needed.
    In a block with experts, selective recomputation begins after the gathers, and a balancing loss comes
    after the last sum. Without sequence parallelism, one all-reduce replaces a gather and a sum.
    """
    model, stack, several = rank.work.model, rank.stack, rank.space.tensor > 1
    pairs = 1 + (model.shared_experts > 0 if model.experts else 1)
    passes, m = rank.passes * pairs * several, rank.space.accumulation * several
    selective = 0.0 if model.experts else stack.selective_repeats
    repeated = (rank.full + selective * rank.by_operator) * rank.recomputed * several
    has_router_loss = bool(model.balance_loss or model.router_z_loss)
    attached = bool(model.experts and model.shared_experts) and has_router_loss
    sums = repeated * (pairs if stack.recompute_all or not stack.sequence_parallel else 1 + attached)
    if not stack.sequence_parallel:
        yield calls("all_reduce", "tensor", "forward", passes, rank.activations)
        yield calls("all_reduce", "tensor", "backward", passes + sums, rank.activations)
        yield calls("all_reduce", "tensor", "ends", m + m * rank.cut.first_has_head, rank.activations)
        return
    gathers = (repeated + rank.gathers_again * rank.backward_passes * several) * pairs
    yield calls("all_gather", "tensor", "forward", passes, rank.activations)
    yield calls("reduce_scatter", "tensor", "forward", passes, rank.activations)
    yield calls("all_gather", "tensor", "backward", passes + gathers, rank.activations)
    yield calls("reduce_scatter", "tensor", "backward", passes + sums, rank.activations)
    # The embedding and the head have one of these in forward and the other in backward.
    for kind in ("all_gather", "reduce_scatter"):
        yield calls(kind, "tensor", "ends", m + m * rank.cut.first_has_head, rank.activations)


def loss_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the all-reduces of the loss over tensor devices.

    For each chunk these are the largest logit of each token, then its sum of exponentials and its target's
    logit.
    """
    space, several = rank.space, (rank.space.tensor > 1) & rank.cut.first_has_head
    tokens, rows = space.micro_batch * rank.length, largest_part(rank.work.model.vocabulary, space.tensor)
    narrow = rank.work.float8 is not None and rank.work.float8.head
    chunks = -(-tokens // chunk_tokens(tokens, rows, rank.computed, rank.device, narrow))
    numbers = calls(
        "all_reduce", "tensor", "ends", 2 * space.accumulation * several, tokens * 3 * rank.wide / 2
    )
    yield Flow("all_reduce", "tensor", "ends", numbers.count * chunks, numbers.bytes)


def context_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the messages of attention over context devices.

    A ring sends keys and values around once in each pass, and in backward their gradients too; recomputation
    by operators keeps the ring's result. Ulysses exchanges sequences for heads, and the results back.
    """
    space, model, several = rank.space, rank.work.model, rank.space.context > 1
    ring, ulysses = several & (space.ring == 1), several & (space.ring == 0)
    heads, keys = model.heads // space.tensor, np.maximum(1, model.kv_heads // space.tensor)
    one_head = space.micro_batch * rank.length * model.head_dim
    hops, key = 2 * (space.context - 1) * ring, one_head * keys
    full, by_operator = rank.full * rank.recomputed, rank.by_operator * rank.recomputed
    yield calls("send", "context", "forward", hops * rank.passes, key * rank.computed)
    yield calls("send", "context", "backward", hops * (rank.passes + full), key * rank.computed)
    yield calls("send", "context", "backward", hops * rank.passes, key * rank.wide)
    # Key heads are repeated so that every context device has one.
    repeats = space.context // np.gcd(space.context, keys)
    # The mean of two exchanges: queries, keys and values; and the results.
    exchanged = one_head * (heads + keys * repeats) * rank.computed
    yield calls("all_to_all", "context", "forward", 2 * ulysses * rank.passes, exchanged)
    yield calls(
        "all_to_all", "context", "backward", 2 * ulysses * (rank.passes + full + by_operator), exchanged
    )


def expert_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the all-to-alls of experts.

    These are the numbers of rows, the rows to the experts, and the results back; and the choices of experts,
    if a row goes once to each device and not once to each expert (parallel/expert.py). Backward has the same
    without the numbers. The router decides how many rows there are; they are given for an even load. A
    balancing loss adds all-reduces where several devices share a sequence.
    """
    space, model = rank.space, rank.work.model
    if not model.experts:
        return
    several, full = space.expert > 1, rank.full * rank.recomputed
    stack, copies = rank.stack, model.experts_per_token if rank.stack.once_to_node else 1
    tokens = space.micro_batch * rank.length // space.tensor
    visits = np.rint(tokens * devices_per_token(model, space.expert))
    once = visits * model.hidden * rank.computed
    to_each = rank.activations // space.tensor * model.experts_per_token
    choice = 3 * rank.wide  # its weight, its expert, and whether it is the first one of its row
    passes: tuple[tuple[When, Array, Array], ...] = (
        ("forward", rank.passes, rank.passes),
        ("backward", full, rank.passes + full),
    )
    for when, times, exchanges in passes:
        sent = (
            (times, 2 * 8 * space.expert if stack.once_to_device else 8 * model.experts),
            (2 * exchanges, once if stack.once_to_device else to_each),
            (exchanges * stack.once_to_device, tokens * model.experts_per_token * choice),
        )
        for count, size in sent:
            yield replace(calls("all_to_all", "expert", when, count * several, size), copies=copies)
    if model.balance_loss:
        loads = 2 * space.micro_batch * model.experts * rank.wide
        for axis in SEQUENCE_AXES:
            shared = getattr(space, axis) > 1
            yield calls("all_reduce", axis, "forward", rank.passes * shared, loads)
            yield calls("all_reduce", axis, "backward", full * shared, loads)


def devices_per_token(model: Model, devices: Ints) -> Array:
    """Return on how many of these devices a token has experts, on average if any choice of experts is equally
    likely: e (1 - C(E - E/e, k) / C(E, k)) of e devices for k of E experts."""
    choices = comb(model.experts, model.experts_per_token)
    degrees, index = np.unique(devices, return_inverse=True)
    visited = [
        each * (1 - comb(model.experts - model.experts // each, model.experts_per_token) / choices)
        for each in degrees.tolist()
    ]
    return np.asarray(visited)[index]


def stage_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the messages between stages: hidden states to the next one, their gradients to the one before."""
    space, several, stages = rank.space, rank.space.pipeline > 1, rank.cut.stages
    onwards = np.where(rank.cut.is_in_a_v, 1, stages) * space.accumulation * several
    backwards = (stages - 1) * space.accumulation * several
    yield calls("send", "pipeline", "pipeline", onwards + backwards, rank.activations // space.tensor)
