"""The model of a step: seconds and bytes of every candidate, term by term.

A step is m micro-batches through the blocks of each pipeline rank, then the optimizer. The seconds of the
slowest rank, with what the links add and nothing can hide, times m, and the bubble of the schedule:

    total = m x (computing + exposed communication of a micro-batch on the slowest rank)
            + bubble + what runs once a step

What is computed comes from `compute.py`. What is communicated comes from `traffic.py`: the flows that the
ledger of a real run is held to, priced collective by collective (`price.py`); no volume is derived here. They
are rank 0's, and every block of every rank sends what one of rank 0's does, so seconds inside blocks are
taken for one block and micro-batch, whatever rank has it.

*Exposed* is what is left of a collective after hiding behind the work beside it, which its flow names:

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

Where gradients are compressed, encoding and decoding them is part of their flow, and on a GPU hides with it
(`codec_work.py`). On a CPU what hides is the data axis' wait for a network. While both run, the computing is
a little slower (`CONTENTION`), because collectives use the same memory and cores.

Nothing hides behind what takes less time than itself. Each flow has its own work to hide behind, but flows
share links, so all of a link's bytes over its bandwidth are held against the whole step too: what they take
longer is the term `links`. The link to the host hides nothing. How a pipeline's ranks, its links and what
runs once a step come together is in `pipeline_time.py`.

Every term is an array over the candidates of a `Space`. Nothing here is fitted to a model or a row; what
differs between devices is in `cost/clusters.py`, what differs between programs in `cost/software.py`.
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
from shardwise.cost.space import Array, Bools, Ints, Space, Workload, concatenate, makes_blocks_again
from shardwise.cost.traffic import flows
from shardwise.errors import UserError
from shardwise.plan.compilation import compiles_blocks
from shardwise.plan.engine import engine_of

STRAGGLING = 0.01
"""Share of the computing that is lost wherever nodes must all arrive before a block can go on, for every
doubling of their number (llm-foundry's runs on 16 to 512 devices, whose gathers are hidden, lose 1 to 2 % a
doubling)."""
LOCKSTEP = 0.003
"""The same of all nodes, which meet once a step (NeMo's runs on 128 and 512 GB200: 0 to 1.4 % a doubling)."""
HOST_MEMORY = 2.0
"""What a device's share of the host's memory moves at most in an update, over its link to the host (1.7 s a
step, offloaded, on an H200)."""
RING_BYTES = 46.0
"""Traffic of merging one block of a ring into what was attended to before, for each query value, forward and
backward (benchmarks/ring.py: 6.4 ms for 4 x 4 blocks of 8192 x 4096 on an H200)."""


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
    """All but what depends on how long the ranks of a pipeline take."""
    least: Array
    """Seconds of a step below which its schedule cannot be played, however its stages are cut; `total`
    without a pipeline."""
    sent: dict[str, Array]
    """Bytes of the collectives that were priced, of rank 0 in a step, by axis: those of its flows, and of its
    ledger."""

    @property
    def total(self) -> Array:
        """Total seconds of a step."""
        return total(self.seconds)

    @property
    def peak(self) -> Array:
        """Bytes of the fullest device."""
        return total(self.memory)


def predict(work: Workload, space: Space, cluster: Cluster, stack: Software = SHARDWISE) -> Prediction:
    """Seconds and bytes of every candidate, worked out for as many at once as lie in a processor's cache."""
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

    # One micro-batch in one block, (candidates,) each: what is computed, what is exposed, and what starting
    # kernels adds.
    repeated = _repeated(work, block, space, stack)
    host = _host(work, space, cluster, stack)
    computing = block.forward + block.backward + repeated
    tensor = _Tensor.of(work, links, per_block, space, cluster, stack, computing, host)
    context = _context(work, space, cluster, block, links.inside_blocks("context") * per_block)
    expert = _Exchanges.of(links, per_block, cluster, stack)
    data = _data_each(space, cluster, stack, block, repeated, tensor, expert, links, per_block)
    waits = {axis: share * computing for axis, share in _waits(space, cluster, links).items()}
    layer = computing + tensor.block + context + expert.block + data + total(waits)
    launch = _launch(work, space, cluster, stack, layer, host)
    layer = layer + launch

    # One micro-batch at the ends of the model. In a pipeline one rank has the embedding and another the head,
    # and what they send hides in the waits for the ranks between.
    both = np.where(held.cut.folded | (space.pipeline == 1), 1.0, 0.0)
    tensor_ends = both * tensor.ends / m
    data_ends = both * _exposed(links, "data", "ends", 1 / m, products, stack)
    lookup = compute.embedding(work, space, cluster)
    embedding, head = lookup + tensor_ends + data_ends, products + loss

    # The whole step on an average pipeline rank; what the slowest takes longer is `imbalance`, and what it
    # waits is `bubble`.
    passes, edges = m * layers / space.pipeline, m / space.pipeline
    slowest, average = _slowest(layer, embedding, head, held, space, layers)
    narrow = _float8_numbers(work, space, held)
    looking = compute.streamed(
        BYTES[work.state_dtype] * narrow * held.sharded / held.parameters, space, cluster
    )
    terms = {
        "matmul": passes * 3 * block.matmul + edges * products,
        "attention": passes * (block.attention + block.attention_backward),
        "elementwise": passes * (block.elementwise + block.elementwise_backward)
        + edges * (lookup + loss)
        + _accumulate(work, space, cluster, stack, held, narrow)
        + looking,
        "launch": passes * launch + cluster.device.launch * stack.step_kernels * layers / space.pipeline,
        "recompute": passes * repeated,
        "optimizer": _optimizer(work, space, cluster, stack, held),
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
    """Return the cluster with a float8 speed for CPUs, which multiply float8 numbers in float32."""
    device = cluster.device
    if work.precision != "float8" or cluster.device_type != "cpu" or "float8" in device.peak:
        return cluster
    peak = {**device.peak, "float8": device.peak["float32"]}
    return replace(cluster, device=replace(device, peak=peak, matmul_float8=device.matmul))


def _check_precision(work: Workload, cluster: Cluster) -> None:
    """Raise an error if the device's speed in the job's precision is unknown."""
    if work.precision not in cluster.device.peak:
        known = ", ".join(name for name in get_args(Precision) if name in cluster.device.peak)
        raise UserError(
            f"train.precision = {work.precision!r}: how fast {cluster.device.name} computes in it is not "
            f"known; use one of {known}, or give device.peak.{work.precision} in a cluster.file"
        )


def _repeated(work: Workload, block: compute.BlockSeconds, space: Space, stack: Software) -> Array:
    """Seconds of forward work done again in backward, in one block."""
    selective = (
        stack.selective_matmul * block.matmul
        + stack.selective_attention * block.attention
        + block.elementwise
    )
    full = block.forward - (0.0 if stack.recompute_all else block.last)
    model, attention = work.model, full
    if (
        model.experts
    ):  # which are kept; of attention and of shared experts all but the last product. Weights by their inputs
        heads, wide = model.heads * model.head_dim, 2 if model.gated else 1
        again = heads + 2 * model.kv_heads * model.head_dim + wide * model.expert_width * model.shared_experts
        ends = heads + model.expert_width * model.shared_experts
        routed = (1 + wide) * model.expert_width * model.experts_per_token + model.experts
        attention = block.matmul * again / (again + ends + routed) + block.attention + block.elementwise
    if model.attention_softcap is None:
        attention = attention - block.attention
    return np.choose(space.recompute, [np.zeros_like(full), selective, attention, full])


def _host(work: Workload, space: Space, cluster: Cluster, stack: Software) -> Array:
    """Seconds in which the host starts the kernels of a block and micro-batch."""
    return cluster.device.launch * _kernels(work, space, stack, stack.starts)


def _kernels(work: Workload, space: Space, stack: Software, starts: float = 1.0) -> Array:
    """Kernels of a block and micro-batch, forward and backward; those of the block itself `starts` times."""
    full = np.where(makes_blocks_again(work, space), 1.0, 0.0)
    collectives = np.where(space.tensor > 1, 8.0 + 4 * full, 0.0) + np.where(space.zero == 3, 3.0, 0.0)
    routing = stack.expert_kernels if work.model.experts else 0.0
    outside = (
        stack.micro_batch_kernels * space.pipeline / work.model.layers
        + stack.collective_kernels * collectives
    )
    kernels: Array = (stack.kernels * starts + routing) * (3 + full) + starts * float8_kernels(work) + outside
    return kernels


def _launch(
    work: Workload, space: Space, cluster: Cluster, stack: Software, layer: Array, host: Array
) -> Array:
    """Seconds that starting kernels adds to a block and micro-batch of so many seconds: the rests between
    kernels, or what the host takes longer than the device; all of the host's work where one core does
    both.
    """
    return (
        np.maximum(stack.kernel_gap * _kernels(work, space, stack), host - layer)
        if cluster.device.overlap
        else host
    )


@dataclass(frozen=True)
class _Tensor:
    """Exposed seconds of the tensor axis: in one block's forward and backward, and at the ends of the model
    in a whole step."""

    forward: Array
    backward: Array
    ends: Array

    @property
    def block(self) -> Array:
        """Exposed seconds of both passes of a block."""
        return self.forward + self.backward

    @classmethod
    def of(
        cls,
        work: Workload,
        links: Priced,
        per_block: Array,
        space: Space,
        cluster: Cluster,
        stack: Software,
        computing: Array,
        host: Array,
    ) -> _Tensor:
        """What the program does not hide, and in a pipeline what its hosts, which cannot run ahead there,
        take longer to start a block and to meet for its collectives than the device to compute it; half of
        that in each pass."""
        shown = 1 - stack.overlap_tensor * cluster.device.overlap
        forward, backward = (
            shown * links.seconds("tensor", when) * per_block for when in ("forward", "backward")
        )
        calls = np.where(makes_blocks_again(work, space), 12.0, 8.0)
        meeting = host + stack.pipeline_jitter * space.tensor * calls
        late = np.maximum(meeting - computing - forward - backward, 0.0)
        late = np.where((space.pipeline > 1) & (space.tensor > 1) & (stack.pipeline_jitter > 0), late, 0.0)
        return cls(forward + late / 2, backward + late / 2, shown * links.seconds("tensor", "ends"))


@dataclass(frozen=True)
class _Exchanges:
    """Exposed seconds of the experts' exchanges in one block."""

    forward: Array
    backward: Array

    @property
    def block(self) -> Array:
        """Exposed seconds of both passes of a block."""
        return self.forward + self.backward

    @classmethod
    def of(cls, links: Priced, per_block: Array, cluster: Cluster, stack: Software) -> _Exchanges:
        """Return the seconds that the program does not hide behind another micro-batch."""
        shown = (1 - stack.overlap_expert * cluster.device.overlap) * per_block
        return cls(shown * links.seconds("expert", "forward"), shown * links.seconds("expert", "backward"))


def _context(
    work: Workload, space: Space, cluster: Cluster, block: compute.BlockSeconds, sent: Array
) -> Array:
    """Exposed seconds of the context axis in one block. A ring passes keys and values on while it attends to
    those it has, and merges what it attended to; Ulysses sends queries, keys, values and outputs to their
    heads and back, and waits.
    """
    model, tokens = work.model, tokens_here(work, space)
    beside = (
        (block.attention + block.attention_backward) * (space.context - 1) / space.context
    )  # the last part comes from nobody
    merged = space.context * tokens * model.heads / space.tensor * model.head_dim * RING_BYTES
    ring = sent - np.minimum(sent, beside) * cluster.device.overlap + compute.streamed(merged, space, cluster)
    return np.where(_rings(space), ring, sent)


def _rings(space: Space) -> Bools:
    rings: Bools = (space.ring == 1) & (space.context > 1)
    return rings


def _data_each(
    space: Space, cluster: Cluster, stack: Software, block: compute.BlockSeconds, repeated: Array,
    tensor: _Tensor,
    expert: _Exchanges, links: Priced, per_block: Array,
) -> Array:  # fmt: skip
    """Exposed seconds of the data axis in a block, for each micro-batch. Attention in a ring has its own
    messages beside it, and a CPU worker sends those of the tensor axis and of experts over the same
    network."""
    idle, others = np.where(_rings(space), 0.0, 1.0), 1.0 if cluster.device.overlap else 0.0
    forward = (
        block.matmul + block.elementwise + idle * block.attention + others * (tensor.forward + expert.forward)
    )
    backward = 2 * block.matmul + block.elementwise_backward + idle * block.attention_backward + repeated
    backward = backward + others * (tensor.backward + expert.backward)
    return _exposed(links, "data", "forward", per_block, forward, stack) + _exposed(
        links, "data", "backward", per_block, backward, stack
    )


def _waits(space: Space, cluster: Cluster, links: Priced) -> dict[str, Array]:
    """Share of a block's computing for which devices wait for the slowest node, by the term it is part of.

    Devices that gather a block's weights wait once in every pass, those of the tensor axis five times, and
    those of a ring for a neighbour alone. All devices of a run meet once a step. That wait is part of the
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
    """What is left of an axis' communication, scaled from that of a step, beside so much work, and what it
    slows that work by."""
    return exposed(links.seconds(axis, when) * scale, links.beside(axis, when) * scale, work, stack)


def _accumulate(
    work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings, narrow: Array | float
) -> Array:
    """Seconds of adding up gradients and of casting weights, in every micro-batch. In float8, `narrow` of
    them are cast to that by their blocks; compiled ones cast the others twice instead of keeping them
    (`recompute_casts`)."""
    adding = np.where(space.accumulation > 1, 2 + 2 * stack.gradient_bytes, stack.gradient_bytes)
    engine = engine_of(space, work.model.experts)
    whole = (
        (engine.zero == 0)
        | engine.keeps_whole_gradients(space.accumulation)
        | ((engine.zero == 1) & stack.keeps_gradients)
    )
    added = np.where(whole, held.parameters, held.sharded)
    wide = (
        held.parameters
        if work.float8 is None
        else 2 * np.maximum(held.parameters - held.first_edge - narrow, 0.0)
    )
    cast = np.where(engine.zero == 0, wide, 0.0) * (stack.cast_bytes if compute.casts(work) else 0.0)
    return space.accumulation * compute.streamed(adding * added + cast, space, cluster)


def _float8_numbers(work: Workload, space: Space, held: Holdings) -> Array | float:
    """Weights of shardwise's products in float8 on the first pipeline rank, before ZeRO. Their largest
    magnitudes are taken after each step."""
    if work.float8 is None:
        return 0.0
    numbers = held.cut.first * float8_weights(work, products_of(work, space))
    if not work.float8.head:
        return numbers
    here = (space.pipeline == 1) | held.cut.folded
    return numbers + np.where(here, work.model.vocabulary * work.model.hidden / space.tensor, 0.0)


def _optimizer(work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings) -> Array:
    """Seconds of the update, and of the norm that is taken before: what the optimizer says it moves."""
    width, rounds = BYTES[work.state_dtype], work.state_dtype == "bfloat16"
    compiled = compiles_blocks(work.compile, cluster.device_type, False, space)
    moved = np.where(
        compiled,
        work.optimizer.update_bytes(width, rounds, compiled=True),
        work.optimizer.update_bytes(width, rounds, compiled=False),
    )
    return np.where(space.offload == 1, 0.0, compute.streamed(moved * held.sharded, space, cluster))


def _slowest(
    layer: Array, embedding: Array, head: Array, held: Holdings, space: Space, layers: float
) -> tuple[Array, Array]:
    """Seconds of a micro-batch on the slowest pipeline rank, and on average."""
    alone = space.pipeline == 1
    first = held.cut.first * layer + embedding + np.where(held.cut.folded, head, 0.0)
    last = np.where(held.cut.folded, 0.0, held.cut.last * layer + head)
    middle = held.cut.middle * layer
    average = (layers * layer + embedding + head) / space.pipeline
    slowest = np.maximum(np.maximum(np.maximum(first, last), middle), average)
    return np.where(alone, average, slowest), average


def _offload(work: Workload, space: Space, cluster: Cluster, held: Holdings) -> Array:
    """Seconds of moving weights in and gradients out of the host's memory, and of updating there. The devices
    of a node share what that memory moves."""
    share = cluster.host_memory_bandwidth / np.minimum(cluster.devices_per_node, space.world)
    link = cluster.device.host_bandwidth
    moved = 8.0 * held.sharded * (1 + space.accumulation) / np.minimum(link, share)
    update_bytes = BYTES["float32"] * work.optimizer.numbers_moved
    updated = update_bytes * held.sharded / np.minimum(HOST_MEMORY * link, share)
    return np.where(space.offload == 1, moved + updated, 0.0)
