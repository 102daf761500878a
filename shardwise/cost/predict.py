"""Predict a step: seconds and bytes of every candidate, term by term.

A step is m micro-batches through the blocks of each pipeline rank, and then the optimizer:

    total = m x (computing + exposed communication of a micro-batch on the slowest rank)
            + bubble + what runs once a step

`compute.py` gives the seconds of computing. Communication is the flows of `traffic.py`, which tests compare
with the ledger of real runs; `price.py` gives their seconds. The flows are those of rank 0. Every block of
every rank sends what a block of rank 0 sends, so seconds inside blocks are computed for one block and one
micro-batch.

The *exposed* part of a collective is what does not hide behind the work beside it, which its flow names:

| flows                               | hide behind                                                        |
| ----------------------------------- | ------------------------------------------------------------------ |
| weights, gradients: each pass       | the block's forward or backward, including its other collectives   |
| weights, gradients: once a step     | the last backward, and in a pipeline the wait before it; sums over |
|                                     | replicas come after the others                                     |
| weights, gradients: embedding, head | the head's matrix products                                         |
| tensor, expert, Ulysses             | nothing: the next product needs their result. Programs that split  |
|                                     | products hide a share of the tensor axis' (`overlap_tensor`)       |
| ring                                | attention to the keys that are already here                        |
| pipeline                            | computing (`overlap_sends`), as long as it takes longer; nothing   |
|                                     | while the pipeline fills and drains                                |
| with the optimizer                  | nothing; those of the pipeline axis hide behind its draining       |

If gradients are compressed, encoding and decoding are part of their flow, and hide with it on a GPU
(`codec_work.py`). On a CPU only the data axis' wait for a network hides. While a collective hides, computing
is a little slower (`CONTENTION`), because both use the same memory and cores.

At most as much of a collective hides as the work beside it takes. Each flow has its own work to hide behind,
but flows share links. So for each link, its bytes over its bandwidth are compared with the whole step too; if
they take longer, the difference is the term `links`. Nothing hides transfers to the host. `pipeline_time.py`
combines the ranks of a pipeline, its links and what runs once a step.

Every term is an array over the candidates of a `Space`. No constant here is fitted to a model or to a single
measurement; what differs between devices is in `cost/clusters.py`, what differs between programs in
`cost/software.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from shardwise.config.dtype_names import BYTES, Precision
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.float8_work import kernels as float8_kernels
from shardwise.cost.flow import When
from shardwise.cost.footprint import Holdings, footprint, hold, host_bytes
from shardwise.cost.matmuls import float8_weights, products_of, tokens_here
from shardwise.cost.pipeline_time import StepTerms, bubble, exposed, least_ranks, step_of, total
from shardwise.cost.price import Priced, price
from shardwise.cost.software import SHARDWISE, Software
from shardwise.cost.space import Array, Bools, Ints, Space, Workload, concatenate, repeats_products
from shardwise.cost.traffic import flows
from shardwise.errors import UserError
from shardwise.plans.engine import engine_of

STRAGGLING = 0.01
"""Share of the computing that is lost for every doubling of the number of nodes, if all of them must arrive
before a block can continue (llm-foundry's runs on 16 to 512 devices, whose gathers are hidden, lose 1 to 2 %
per doubling)."""
LOCKSTEP = 0.003
"""The same for nodes that meet once a step (NeMo's runs on 128 and 512 GB200: 0 to 1.4 % per doubling)."""
HOST_MEMORY = 2.0
"""Largest bandwidth of a device's share of the host's memory in an update, over that of the device's link to
the host (1.7 s a step, offloaded, on an H200)."""
RING_BYTES = 46.0
"""Bytes moved per query value, forward and backward, to merge the attention to one block of a ring into the
result (benchmarks/ring.py: 6.4 ms for 4 x 4 blocks of 8192 x 4096 on an H200)."""


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of each candidate."""

    seconds: dict[str, Array]
    """Seconds of a step by term; they sum to `total`."""
    memory: dict[str, Array]
    """Bytes at the peak of the fullest device, by kind; they sum to `peak`."""
    host: Array
    """Bytes of a node's own memory."""
    block_seconds: Array
    """Seconds of both passes of one micro-batch through one block, for simulations of the schedule."""
    head_seconds: Array
    embedding_seconds: Array
    step: StepTerms
    """The parts of a step that do not depend on how long the ranks of a pipeline need for their stages."""
    least: Array
    """Lower bound on the seconds of a step, for any cut of the stages; `total` without a pipeline."""
    sent: dict[str, Array]
    """Bytes of rank 0's collectives in a step, by axis, as in its ledger."""

    @property
    def total(self) -> Array:
        """Total seconds of a step."""
        return total(self.seconds)

    @property
    def peak(self) -> Array:
        """Bytes of the fullest device."""
        return total(self.memory)


def predict(work: Workload, space: Space, cluster: Cluster, stack: Software = SHARDWISE) -> Prediction:
    """Return the prediction of every candidate, computed for as many at a time as fit in a CPU's cache."""
    cluster = _emulating(work, cluster)
    _check_precision(work, cluster)
    parts = [_predict(work, part, cluster, stack) for part in space.parts()]
    return concatenate(parts) if len(parts) > 1 else parts[0]


def _predict(work: Workload, space: Space, cluster: Cluster, stack: Software) -> Prediction:
    held, block = hold(work, space, stack), compute.block(work, space, cluster, stack)
    products, loss = compute.head(work, space, cluster, stack)
    links = price(flows(work, space, stack, cluster.device_type), work, space, cluster)
    m, layers = space.accumulation.astype(float), float(work.model.layers)
    per_block = 1 / (m * held.cut.first)  # from a step of rank 0 to one pass through one block

    # One micro-batch in one block, (candidates,) each: computing, exposed communication, starting kernels.
    repeated = _repeated(work, block, space, stack)
    host = _host(work, space, cluster, stack)
    computing = block.forward + block.backward + repeated
    tensor = _tensor(work, links, per_block, space, cluster, stack, computing, host)
    context = _context(work, space, cluster, block, links.inside_blocks("context") * per_block)
    expert = _expert(links, per_block, cluster, stack)
    data = _data_each(space, cluster, stack, block, repeated, tensor, expert, links, per_block)
    waits = {axis: share * computing for axis, share in _waits(space, cluster, links).items()}
    layer = computing + tensor.block + context + expert.block + data + total(waits)
    launch = _launch(work, space, cluster, stack, layer, host)
    layer = layer + launch

    # One micro-batch in the embedding and the head. If different ranks of a pipeline have them, their
    # collectives hide in the waits for the ranks between.
    both = np.where(held.cut.first_has_head, 1.0, 0.0)
    tensor_ends = both * _shown(stack, cluster) * links.seconds("tensor", "ends") / m
    data_ends = both * _exposed(links, "data", "ends", 1 / m, products, stack)
    lookup = compute.embedding(work, space, cluster)
    embedding, head = lookup + tensor_ends + data_ends, products + loss

    # The whole step on an average pipeline rank. The additional seconds of the slowest rank are `imbalance`,
    # and its waits are `bubble`.
    passes, edges = m * layers / space.pipeline, m / space.pipeline
    slowest, average = _slowest(layer, embedding, head, held, space, layers)
    in_float8 = _float8_weights(work, space, held)
    read_for_maxima = BYTES[work.state_dtype] * in_float8 * held.sharded / held.parameters
    terms = {
        "matmul": passes * 3 * block.matmul + edges * products,
        "attention": passes * (block.attention + block.attention_backward),
        "elementwise": passes * (block.elementwise + block.elementwise_backward)
        + edges * (lookup + loss)
        + _accumulate(work, space, cluster, stack, held, in_float8)
        + compute.streamed(read_for_maxima, space, cluster),
        "launch": passes * launch + cluster.device.launch * stack.step_kernels * layers / space.pipeline,
        "recompute": passes * repeated,
        "optimizer": _optimizer(work, space, cluster, held),
        "tensor": passes * (tensor.block + waits["tensor"])
        + edges * tensor_ends
        + links.seconds("tensor", "step"),
        "context": passes * (context + waits["context"]) + links.seconds("context", "step"),
        "expert": passes * expert.block + links.seconds("expert", "step"),
        "data": passes * (data + waits["data"]) + edges * data_ends + links.seconds("data", "step"),
        "pipeline_sends": passes * waits["pipeline_sends"],
        "replica": links.seconds("replica", "step"),
        "offload": _offload(work, space, cluster, held),
    }
    step = step_of(terms, average, embedding + head, space, cluster, stack, held, links)
    least = least_ranks(space, held, layer, embedding, head, slowest)
    seconds, least_seconds = (
        step.seconds(m * slowest, ranks, cluster, stack)
        for ranks in (m * slowest + bubble(space, slowest), least)
    )
    memory, on_host = footprint(work, space, cluster, stack, held), host_bytes(work, space, cluster, held)
    return Prediction(
        seconds, memory, on_host, layer, head, embedding, step, total(least_seconds), links.bytes
    )


def _emulating(work: Workload, cluster: Cluster) -> Cluster:
    """Return the cluster with a speed in float8 for CPUs, which multiply float8 numbers in float32."""
    device = cluster.device
    if work.precision != "float8" or cluster.device_type != "cpu" or "float8" in device.peak:
        return cluster
    peak = {**device.peak, "float8": device.peak["float32"]}
    return replace(cluster, device=replace(device, peak=peak, matmul_float8=device.matmul))


def _check_precision(work: Workload, cluster: Cluster) -> None:
    """Raises an error if the device's speed in the job's precision is unknown."""
    if work.precision not in cluster.device.peak:
        known = ", ".join(name for name in get_args(Precision) if name in cluster.device.peak)
        raise UserError(
            f"train.precision = {work.precision!r}: how fast {cluster.device.name} computes in it is not "
            f"known; use one of {known}, or give device.peak.{work.precision} in a cluster.file"
        )


def _repeated(work: Workload, block: compute.BlockSeconds, space: Space, stack: Software) -> Array:
    """Return the seconds of forward work that backward repeats in one block."""
    selective = (
        stack.selective_matmul * block.matmul
        + stack.selective_attention * block.attention
        + block.elementwise
    )
    full = block.forward - (0.0 if stack.recompute_all else block.last)
    model, attention = work.model, full
    if model.experts:
        # Products of routed experts are kept. Of attention and of shared experts, all but the last product
        # are repeated. The number of weights is in units of the hidden width.
        heads, inputs = model.heads * model.head_dim, 2 if model.gated else 1
        shared = model.expert_width * model.shared_experts
        again = heads + 2 * model.kv_heads * model.head_dim + inputs * shared
        routed = (1 + inputs) * model.expert_width * model.experts_per_token + model.experts
        share = again / (again + heads + shared + routed)
        attention = block.matmul * share + block.attention + block.elementwise
    if model.attention_softcap is None:
        attention = attention - block.attention
    return np.choose(space.recompute, [np.zeros_like(full), selective, attention, full])


def _host(work: Workload, space: Space, cluster: Cluster, stack: Software) -> Array:
    """Return the seconds in which the host starts the kernels of one block for one micro-batch."""
    return cluster.device.launch * _kernels(work, space, stack, stack.starts)


def _kernels(work: Workload, space: Space, stack: Software, starts: float = 1.0) -> Array:
    """Return the number of kernels of one block for one micro-batch, in both passes. Those of the block
    itself count `starts` times."""
    full = np.where(repeats_products(work, space), 1.0, 0.0)
    collectives = np.where(space.tensor > 1, 8.0 + 4 * full, 0.0) + np.where(space.zero == 3, 3.0, 0.0)
    routing = stack.expert_kernels if work.model.experts else 0.0
    of_block = (stack.kernels * starts + routing) * (3 + full) + starts * float8_kernels(work)
    of_micro_batch = stack.micro_batch_kernels * space.pipeline / work.model.layers
    kernels: Array = of_block + of_micro_batch + stack.collective_kernels * collectives
    return kernels


def _launch(
    work: Workload, space: Space, cluster: Cluster, stack: Software, layer: Array, host: Array
) -> Array:
    """Return the seconds that starting kernels adds to one block for one micro-batch.

    On a GPU these are the rests between kernels, or the time by which the host needs longer than the device
    (`layer`). On a CPU, where the same core does both, they are all of the host's work.
    """
    if cluster.device_type == "cpu":
        return host
    return np.maximum(stack.kernel_gap * _kernels(work, space, stack), host - layer)


@dataclass(frozen=True)
class _Exposed:
    """Exposed seconds of an axis in one block for one micro-batch."""

    forward: Array
    backward: Array

    @property
    def block(self) -> Array:
        """Exposed seconds of both passes."""
        return self.forward + self.backward


def _shown(stack: Software, cluster: Cluster) -> float:
    """Return the share of the tensor axis' collectives that the program does not hide."""
    return 1 - stack.overlap_tensor * cluster.device.overlap


def _tensor(
    work: Workload,
    links: Priced,
    per_block: Array,
    space: Space,
    cluster: Cluster,
    stack: Software,
    computing: Array,
    host: Array,
) -> _Exposed:
    """Return the exposed seconds of the tensor axis.

    In a pipeline the hosts cannot run ahead. There the result includes the time by which the hosts need
    longer to start a block and to meet for its collectives than the device to compute it, half in each pass.
    """
    shown = _shown(stack, cluster) * per_block
    forward, backward = (shown * links.seconds("tensor", when) for when in ("forward", "backward"))
    calls = np.where(repeats_products(work, space), 12.0, 8.0)
    meeting = host + stack.pipeline_jitter * space.tensor * calls
    late = np.maximum(meeting - computing - forward - backward, 0.0)
    late = np.where((space.pipeline > 1) & (space.tensor > 1) & (stack.pipeline_jitter > 0), late, 0.0)
    return _Exposed(forward + late / 2, backward + late / 2)


def _expert(links: Priced, per_block: Array, cluster: Cluster, stack: Software) -> _Exposed:
    """Return the seconds of experts' exchanges that the program does not hide behind another micro-batch."""
    shown = (1 - stack.overlap_expert * cluster.device.overlap) * per_block
    return _Exposed(shown * links.seconds("expert", "forward"), shown * links.seconds("expert", "backward"))


def _context(
    work: Workload, space: Space, cluster: Cluster, block: compute.BlockSeconds, sent: Array
) -> Array:
    """Return the exposed seconds of the context axis in one block, of which `sent` are communication.

    A ring passes keys and values on while it attends to those that it has, and merges the results. Ulysses
    exchanges queries, keys, values and outputs, and waits.
    """
    model, tokens = work.model, tokens_here(work, space)
    # No message runs beside the attention to the last part.
    beside = (block.attention + block.attention_backward) * (space.context - 1) / space.context
    merged = space.context * tokens * model.heads / space.tensor * model.head_dim * RING_BYTES
    ring = sent - np.minimum(sent, beside) * cluster.device.overlap + compute.streamed(merged, space, cluster)
    return np.where(_rings(space), ring, sent)


def _rings(space: Space) -> Bools:
    rings: Bools = (space.ring == 1) & (space.context > 1)
    return rings


def _data_each(
    space: Space, cluster: Cluster, stack: Software, block: compute.BlockSeconds, repeated: Array,
    tensor: _Exposed, expert: _Exposed, links: Priced, per_block: Array,
) -> Array:  # fmt: skip
    """Return the exposed seconds of the data axis in a block, for each micro-batch.

    The data axis does not hide behind attention in a ring, which has its own messages. On a CPU worker it
    does not hide behind collectives of the tensor axis and of experts, which use the same network.
    """
    attends, others = np.where(_rings(space), 0.0, 1.0), 1.0 if cluster.device_type == "cuda" else 0.0
    forward = block.matmul + block.elementwise + attends * block.attention
    forward = forward + others * (tensor.forward + expert.forward)
    backward = 2 * block.matmul + block.elementwise_backward + attends * block.attention_backward + repeated
    backward = backward + others * (tensor.backward + expert.backward)
    exposed_forward = _exposed(links, "data", "forward", per_block, forward, stack)
    return exposed_forward + _exposed(links, "data", "backward", per_block, backward, stack)


def _waits(space: Space, cluster: Cluster, links: Priced) -> dict[str, Array]:
    """Return the share of a block's computing for which devices wait for the slowest node, by term.

    Devices that gather a block's weights wait once in every pass, those of the tensor axis five times, and
    those of a ring only for a neighbour. All devices of a run meet once a step. That wait is part of the
    outermost axis that has more than one device, so an axis of one device never has seconds.
    """

    def doublings(devices: Ints) -> Array:
        return np.log2(np.maximum(devices / cluster.devices_per_node, 1.0))

    gathering = np.where(links.seconds("data", "forward") > 0, doublings(space.shards * space.tensor), 0.0)
    sharing = np.where(space.context > 1, doublings(space.context * space.tensor), 0.0)
    lockstep = LOCKSTEP * doublings(space.world)
    data = space.replica * space.data > 1
    pipeline = ~data & (space.pipeline > 1)
    context = ~data & ~pipeline & (space.context > 1)
    return {
        "data": STRAGGLING * gathering + np.where(data, lockstep, 0.0),
        "pipeline_sends": np.where(pipeline, lockstep, 0.0),
        "context": STRAGGLING * sharing / 2 + np.where(context, lockstep, 0.0),
        "tensor": STRAGGLING * 5 * doublings(space.tensor)
        + np.where(data | pipeline | context, 0.0, lockstep),
    }


def _exposed(
    links: Priced, axis: str, when: When, scale: Array | float, work: Array, stack: Software
) -> Array:
    """Return the seconds that an axis adds to this work: what is exposed, and what the rest slows it by.

    `scale` converts the seconds of a step to those that run beside the work.
    """
    return exposed(links.seconds(axis, when) * scale, links.beside(axis, when) * scale, work, stack)


def _accumulate(
    work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings, in_float8: Array | float
) -> Array:
    """Return the seconds of adding up gradients and of casting weights in all micro-batches.

    Blocks cast `in_float8` of the weights to float8 themselves. Compiled blocks cast the others twice instead
    of keeping the copies (`recompute_casts`).
    """
    adding = np.where(space.accumulation > 1, 2 + 2 * stack.gradient_bytes, stack.gradient_bytes)
    engine = engine_of(space, work.model.experts)
    whole = (
        (engine.zero == 0)
        | engine.keeps_whole_gradients(space.accumulation)
        | ((engine.zero == 1) & stack.keeps_gradients)
    )
    added = np.where(whole, held.parameters, held.sharded)
    casts = held.parameters
    if work.float8 is not None:
        casts = 2 * np.maximum(held.parameters - held.first_edge - in_float8, 0.0)
    cast_bytes = np.where(engine.zero == 0, casts, 0.0) * (stack.cast_bytes if compute.casts(work) else 0.0)
    return space.accumulation * compute.streamed(adding * added + cast_bytes, space, cluster)


def _float8_weights(work: Workload, space: Space, held: Holdings) -> Array | float:
    """Return the number of weights of products in float8 on the first pipeline rank, before ZeRO.

    Their largest magnitudes are computed after each step.
    """
    if work.float8 is None:
        return 0.0
    weights = held.cut.first * float8_weights(work, products_of(work, space))
    if not work.float8.head:
        return weights
    head = work.model.vocabulary * work.model.hidden / space.tensor
    return weights + np.where(held.cut.first_has_head, head, 0.0)


def _optimizer(work: Workload, space: Space, cluster: Cluster, held: Holdings) -> Array:
    """Return the seconds of the update, with the norm before it, by the bytes that the optimizer says it
    moves."""
    width, rounds = BYTES[work.state_dtype], work.state_dtype == "bfloat16"
    moved = work.optimizer.update_bytes(width, rounds, cluster.device_type)
    return np.where(space.offload == 1, 0.0, compute.streamed(moved * held.sharded, space, cluster))


def _slowest(
    layer: Array, embedding: Array, head: Array, held: Holdings, space: Space, layers: float
) -> tuple[Array, Array]:
    """Return the seconds of a micro-batch on the slowest pipeline rank, and on average."""
    alone = space.pipeline == 1
    first = held.cut.first * layer + embedding + np.where(held.cut.is_in_a_v, head, 0.0)
    last = np.where(held.cut.is_in_a_v, 0.0, held.cut.last * layer + head)
    middle = held.cut.middle * layer
    average = (layers * layer + embedding + head) / space.pipeline
    slowest = np.maximum(np.maximum(np.maximum(first, last), middle), average)
    return np.where(alone, average, slowest), average


def _offload(work: Workload, space: Space, cluster: Cluster, held: Holdings) -> Array:
    """Return the seconds of moving weights from the host's memory and gradients to it, and of the update
    there. The devices of a node share the bandwidth of that memory."""
    width = BYTES[work.state_dtype]
    share = cluster.host_memory_bandwidth / np.minimum(cluster.devices_per_node, space.world)
    link = cluster.device.host_bandwidth
    moved = 2 * width * held.sharded * (1 + space.accumulation) / np.minimum(link, share)
    update_bytes = work.optimizer.update_bytes(width, work.state_dtype == "bfloat16", device_type="cpu")
    updated = update_bytes * held.sharded / np.minimum(HOST_MEMORY * link, share)
    return np.where(space.offload == 1, moved + updated, 0.0)
