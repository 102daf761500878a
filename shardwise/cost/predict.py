"""The model of a step: seconds and bytes of every candidate, term by term.

A step is m micro-batches through the blocks of each pipeline rank, then the optimizer. The seconds of the slowest rank, with what
the links add and nothing can hide, times m, and the bubble of the schedule:

    total = m x (computing + exposed communication of a micro-batch on the slowest rank) + bubble + once a step

*Exposed* is what is left of a collective after hiding behind the work beside it: gathers of weights behind the block before,
sums of gradients behind backward; the tensor axis' collectives stand between two products and hide behind neither. While both
run, the computing is a little slower (`CONTENTION`), because collectives use the same memory and cores.

Every term is an array over the candidates of a `Space`. Nothing here is fitted to a model or a row; what differs between
devices is in `cost/clusters.py`, what differs between programs in `cost/stack.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from shardwise.config import Precision
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.collectives import Group, group_of, seconds
from shardwise.cost.footprint import Holdings, footprint, hold
from shardwise.cost.space import Array, Bools, Space, Work
from shardwise.cost.stack import SHARDWISE, Stack
from shardwise.errors import UserError
from shardwise.plan.engine import splits_backward
from shardwise.plan.schedule import SCHEDULES

CONTENTION = 0.12
"""Share of the hidden communication's time by which it slows the computing beside it (Calculon: 0.15 on NVLink, 0.02 on the
network)."""


BACKWARD = 0.7
"""Of a block's seconds, those of backward: twice the products, two and a half times the attention."""
UPDATE_BYTES = 40.0
"""Traffic of a parameter's update in float32: 16 read and 12 written, and the norm's passes before."""
HOST_MEMORY = 2.0
"""What a device's share of the host's memory moves in an update, over its link to the host (1.7 s a step, offloaded, on an
H200)."""
RING_BYTES = 46.0
"""Traffic of merging one block of a ring into what was attended to before, for each query value, forward and backward
(benchmarks/ring.py: 6.4 ms for 4 x 4 blocks of 8192 x 4096 on an H200)."""


@dataclass(frozen=True)
class Prediction:
    """What each candidate will take."""

    seconds: dict[str, Array]
    """Of a step, by term; they sum to `total`."""
    memory: dict[str, Array]
    """Bytes at the peak of the fullest device, by kind; they sum to `peak`."""
    block_seconds: Array
    """Of one micro-batch through one block, forward and backward: what a timeline is played with."""
    head_seconds: Array
    embedding_seconds: Array

    @property
    def total(self) -> Array:
        """Seconds of a step."""
        return sum(self.seconds.values(), np.zeros_like(self.block_seconds))

    @property
    def peak(self) -> Array:
        """Bytes of the fullest device."""
        return sum(self.memory.values(), np.zeros_like(self.block_seconds))


def predict(work: Work, space: Space, cluster: Cluster, stack: Stack = SHARDWISE) -> Prediction:
    """Seconds and bytes of every candidate."""
    _check_precision(work, cluster)
    held = hold(work, space, stack)
    one = compute.block(work, space, cluster, stack)
    products, loss = compute.head(work, space, cluster, stack)
    head, embedding = products + loss, compute.embedding(work, space, cluster)
    count, layers = space.accumulation.astype(float), float(work.model.layers)

    again = _again(one, space, stack)
    tensor = _tensor(work, space, cluster, stack)
    context = _context(work, space, cluster, one)
    expert = _expert(work, space, cluster)
    rings = np.where((space.ring == 1) & (space.context > 1), 1.0, 0.0)  # whose own messages run beside attention
    busy_forward = one.forward - rings * one.attention + tensor / 2
    busy_backward = one.backward - rings * one.attention_backward + again + tensor / 2
    moved = _moved(work, space, cluster, stack, held)
    data_each = _data_each(cluster, stack, moved, busy_forward, busy_backward)
    layer = one.forward + one.backward + again + tensor + context + expert + data_each
    host, kernels = _host(work, space, cluster, stack)
    launch = np.maximum(stack.kernel_gap * kernels, host - layer)
    launch = launch if cluster.device.overlap else host  # where one core does both, nothing hides
    layer = layer + launch
    data_once, replica = _data_once(space, cluster, stack, held, moved, layer)

    scale = count * layers / space.pipeline
    edges = count / space.pipeline
    accumulate = _accumulate(work, space, cluster, stack, held)
    seconds_of = {
        "matmul": scale * 3 * one.matmul + edges * products,
        "attention": scale * (one.attention + one.attention_backward),
        "elementwise": scale * 3 * one.elementwise + edges * (embedding + loss) + accumulate,
        "launch": scale * launch + stack.step_kernels * cluster.device.launch * layers / space.pipeline,
        "recompute": scale * again,
        "optimizer": _optimizer(work, space, cluster, stack, held),
        "tensor": scale * tensor,
        "context": scale * context,
        "expert": scale * expert,
        "data": scale * data_each + data_once,
        "replica": replica,
    }
    slowest, average = _slowest(layer, embedding, head, held, space, layers)
    seconds_of["imbalance"] = count * (slowest - average)
    seconds_of["bubble"] = _bubble(space, slowest)
    seconds_of["pipeline_sends"] = _sends(work, space, cluster, stack)
    seconds_of["offload"] = _offload(space, cluster, held)
    seconds_of = {name: value * cluster.corrections.get(name, 1.0) for name, value in seconds_of.items()}
    memory = footprint(work, space, cluster, stack, held)
    return Prediction(seconds_of, memory, layer, head, embedding)


def _check_precision(work: Work, cluster: Cluster) -> None:
    """No other precision's speed is taken in place of one that is not known."""
    if work.precision not in cluster.device.peak:
        known = ", ".join(name for name in get_args(Precision) if name in cluster.device.peak)
        raise UserError(
            f"train.precision = {work.precision!r}: how fast {cluster.device.name} computes in it is not known; use one of "
            f"{known}, or give device.peak.{work.precision} in a cluster.file"
        )


def _again(one: compute.Block, space: Space, stack: Stack) -> Array:
    """Seconds of forward work done again in backward."""
    selective = stack.selective_matmul * one.matmul + stack.selective_attention * one.attention + one.elementwise
    modes = [np.zeros_like(one.forward), selective, one.forward - (0.0 if stack.recompute_all else one.last)]
    return np.select([space.recompute == mode for mode in range(3)], modes)


def _host(work: Work, space: Space, cluster: Cluster, stack: Stack) -> tuple[Array, Array]:
    """Seconds in which the host starts the work of one block and micro-batch (where the device is quicker, it waits for the
    host), and how many kernels that are.
    """
    again = np.where(space.recompute == 2, 1.0, 0.0)
    collectives = np.where(space.tensor > 1, 8.0 + 4 * again, 0.0) + np.where(space.zero == 3, 3.0, 0.0)
    routing = stack.expert_kernels if work.model.experts else 0.0
    each = stack.micro_batch_kernels * space.pipeline / work.model.layers + stack.collective_kernels * collectives
    host = (stack.kernels * stack.starts + routing) * (3 + again) + each
    return cluster.device.launch * host, (stack.kernels + routing) * (3 + again) + each


def _tensor(work: Work, space: Space, cluster: Cluster, stack: Stack) -> Array:
    """Exposed seconds of the tensor axis in one block: two all-gathers and two reduce-scatters forward, as much backward with the
    inputs gathered again, and forward's once more where a block is recomputed.
    """
    group = group_of("tensor", space, cluster)
    tensor = compute.tokens_here(work, space) * work.model.hidden * compute.value_bytes(work)
    once = 2 * seconds("all_gather", tensor, group, cluster) + 2 * seconds("reduce_scatter", tensor, group, cluster)
    if not stack.sequence_parallel:
        once = 2 * seconds("all_reduce", tensor, group, cluster)
    again = np.where(space.recompute == 2, 1.0, 0.0)
    regathers = stack.sequence_parallel and (stack.gathers_again or not cluster.device.overlap)
    gathered = 2 * seconds("all_gather", tensor, group, cluster) if regathers else 0.0
    repeated = np.where(space.recompute == 1, again + stack.selective_repeats, again)
    if stack.sequence_parallel and not stack.recompute_all:  # the last product, and what sums it, is not done again
        repeated = repeated * (1 - seconds("reduce_scatter", tensor, group, cluster) / np.maximum(once, 1e-30))
    hidden = stack.overlap_tensor * cluster.device.overlap
    late = stack.pipeline_jitter * np.where((space.pipeline > 1) & (space.tensor > 1), space.tensor * (8 + 4 * again), 0.0)
    return (1 - hidden) * (2 + repeated) * once + (1 - max(hidden, stack.overlap_gather_again)) * gathered + late


def _context(work: Work, space: Space, cluster: Cluster, one: compute.Block) -> Array:
    """Exposed seconds of the context axis in one block. A ring passes keys and values on while it attends to those it has;
    Ulysses sends queries, keys, values and outputs to their heads and back.
    """
    model, group = work.model, group_of("context", space, cluster)
    tokens, size = compute.tokens_here(work, space), compute.value_bytes(work)
    keys = tokens * 2 * np.maximum(model.kv_heads / space.tensor, 1) * model.head_dim * size
    hop = seconds("send", keys, group, cluster)
    again = np.where(space.recompute == 2, 1.0, 0.0)  # what forward sends is sent once more
    hops = np.maximum(space.context - 1, 0)
    part = (one.attention + one.attention_backward) / np.maximum(space.context, 1)
    merged = space.context * tokens * model.heads / space.tensor * model.head_dim * RING_BYTES
    sent = (3 + again) * hop
    ring = hops * (sent - np.minimum(sent, part) * cluster.device.overlap) + compute.streamed(merged, space, cluster)
    own = np.maximum(model.kv_heads // space.tensor, 1)
    repeated = own * space.context // np.gcd(space.context, own)  # so that each context device has a key head
    heads = tokens * (2 * model.heads / space.tensor + 2 * repeated) * model.head_dim * size
    ulysses = (2 + again) * seconds("all_to_all", heads, group, cluster)
    return np.where(space.context > 1, np.where(space.ring == 1, ring, ulysses), 0.0)


def _expert(work: Work, space: Space, cluster: Cluster) -> Array:
    """Seconds of sending tokens to their experts and back, forward and backward, in one block."""
    model = work.model
    if not model.experts:
        return np.zeros(len(space))
    sent = compute.tokens_here(work, space) / space.tensor * model.experts_per_token * model.hidden
    times = 4 + np.where(space.recompute == 2, 2.0, 0.0)
    return times * seconds("all_to_all", sent * compute.value_bytes(work), group_of("expert", space, cluster), cluster)


@dataclass(frozen=True)
class _Moved:
    """Seconds of what the data axis may move of one block, and of joining all replicas' gradients."""

    gather: Array
    scatter: Array
    whole: Array
    """An all-reduce of unsharded gradients."""
    joined: Array
    each_gather: Bools
    """Where weights are gathered in each micro-batch."""
    each_scatter: Bools
    """Where gradients are scattered in each."""


def _moved(work: Work, space: Space, cluster: Cluster, stack: Stack, held: Holdings) -> _Moved:
    shards, copies, replicas = (group_of(axis, space, cluster) for axis in ("shards", "copies", "replica"))
    experts = group_of("expert_shards", space, cluster)
    gathered, reduced = compute.weight_bytes(work, stack), compute.reduce_bytes(work, stack)

    def moved(kind: str, width: float, group: Group) -> Array:
        """Of one block's parameters, the experts' over their own group."""
        dense = seconds(kind, width * held.block_dense, group, cluster)
        return dense + (seconds(kind, width * held.block_experts, experts, cluster) if work.model.experts else 0.0)

    joined = seconds("all_reduce", reduced * held.sharded, replicas, cluster)
    split = splits_backward(space)
    three, two = (space.zero == 3) & ~split, (space.zero == 2) & ~split
    return _Moved(
        moved("all_gather", gathered, shards),
        moved("reduce_scatter", reduced, shards),
        moved("all_reduce", reduced, copies),
        joined,
        three,
        three | two | (stack.reduce_each & (space.zero > 0) & ~split),
    )


def _data_each(cluster: Cluster, stack: Stack, moved: _Moved, forward: Array, backward: Array) -> Array:
    """Exposed seconds of the data axis in a block, for each micro-batch."""
    overlap = cluster.device.overlap * stack.overlap_data
    gather = np.where(moved.each_gather, moved.gather, 0.0)
    scatter = np.where(moved.each_scatter, moved.scatter, 0.0)
    return _exposed(gather, forward, overlap) + _exposed(gather + scatter, backward, overlap)


def _data_once(space: Space, cluster: Cluster, stack: Stack, held: Holdings, moved: _Moved, layer: Array) -> tuple[Array, Array]:
    """Exposed seconds of the data axis once a step, and of joining replicas: both hide behind the last backward and its waits."""
    overlap, blocks = cluster.device.overlap * stack.overlap_data, held.blocks
    after = np.where((space.zero == 0) | moved.each_gather, 0.0, moved.gather)
    late = np.zeros(len(space))
    if stack.gathers_after:  # each weight by itself, once the optimizer is done with it
        start = seconds("all_gather", np.zeros(len(space)), group_of("shards", space, cluster), cluster)
        late, after = np.where(after > 0, moved.gather + (stack.gathers_after - 1) * start, 0.0), late
    once = np.where(space.zero == 0, moved.whole, after + np.where(moved.each_scatter, 0.0, moved.scatter))
    room = BACKWARD * layer * blocks * np.where(space.pipeline > 1, np.minimum(space.accumulation, 2), 1)
    sums = _exposed((blocks + held.edge_ratio) * once, room, overlap) + (blocks + held.edge_ratio) * late
    return sums, _exposed(moved.joined, np.maximum(room - blocks * once, 0.0), overlap)


def _exposed(communication: Array, work: Array, overlap: float) -> Array:
    hidden = overlap * np.minimum(communication, work)
    return communication - hidden + CONTENTION * hidden


def _accumulate(work: Work, space: Space, cluster: Cluster, stack: Stack, held: Holdings) -> Array:
    """Seconds of adding up gradients and of casting weights, in every micro-batch."""
    adding = np.where(space.accumulation > 1, 2 + 2 * stack.gradient_bytes, stack.gradient_bytes)
    adding = adding * np.where((space.zero >= 2) & (space.shards > 1), 1 / np.maximum(space.shards, 1), 1.0)
    casting = np.where((space.zero == 0) | (space.shards == 1), stack.cast_bytes if compute.casts(work) else 0.0, 0.0)
    return space.accumulation * compute.streamed((adding + casting) * held.parameters, space, cluster)


def _optimizer(work: Work, space: Space, cluster: Cluster, stack: Stack, held: Holdings) -> Array:
    """Seconds of the update: weights, gradients and two moments read, all but the gradients written, the norm taken before."""
    ratio = 0.5 if work.state_dtype == "bfloat16" else 2.0 if work.state_dtype == "float64" else 1.0
    return np.where(space.offload == 1, 0.0, compute.streamed(UPDATE_BYTES * ratio * held.sharded, space, cluster))


def _slowest(layer: Array, embedding: Array, head: Array, held: Holdings, space: Space, layers: float) -> tuple[Array, Array]:
    """Seconds of a micro-batch on the slowest pipeline rank, and on average."""
    alone = space.pipeline == 1
    first = held.first_blocks * layer + embedding + np.where(held.folded, head, 0.0)
    last = np.where(held.folded, 0.0, held.last_blocks * layer + head)
    middle = held.middle_blocks * layer
    average = (layers * layer + embedding + head) / space.pipeline
    slowest = np.maximum(np.maximum(np.maximum(first, last), middle), average)
    return np.where(alone, average, slowest), average


_BUBBLES = {"gpipe": 1.0, "1f1b": 1.0, "interleaved": 1.0, "zb1p": 1 / 3, "zbv": 1 / 6, "dualpipev": 1 / 4}
"""Idle time of a rank over (p - 1) times a micro-batch's seconds on a rank, for equal stages; the finalists of a search are
played through by their own list of actions (plan/timeline.py)."""


def _bubble(space: Space, slowest: Array) -> Array:
    factor = np.asarray([_BUBBLES[name] for name in SCHEDULES])[space.schedule]
    looped = space.schedule == SCHEDULES.index("interleaved")
    idle: Array = (space.pipeline - 1) * slowest * factor / np.where(looped, space.stages_per_rank, 1)
    return idle


def _sends(work: Work, space: Space, cluster: Cluster, stack: Stack) -> Array:
    """Seconds of sending activations on and gradients back that nothing hides: the messages of filling and draining, and of the
    rest what the program waits for.
    """
    sent = compute.tokens_here(work, space) * work.model.hidden * compute.value_bytes(work) / space.tensor
    one = seconds("send", sent, group_of("pipeline", space, cluster), cluster)
    hidden = stack.overlap_sends * cluster.device.overlap
    waits = 2 * (space.pipeline - 1) + 2 * (1 - hidden) * space.accumulation * space.stages_per_rank
    return np.where(space.pipeline > 1, waits * one, 0.0)


def _offload(space: Space, cluster: Cluster, held: Holdings) -> Array:
    """Seconds of moving weights in and gradients out of the host's memory, and of updating there."""
    moved = 8.0 * held.sharded * (1 + space.accumulation) / cluster.device.host_bandwidth
    updated = UPDATE_BYTES * held.sharded / (HOST_MEMORY * cluster.device.host_bandwidth)
    return np.where(space.offload == 1, moved + updated, 0.0)
