"""Bytes of the fullest device at the peak of a step, by kind, for every candidate at once.

Model states follow the table in `plans/memory.py`. Activations are counted per token and block. Backward of a
compiled block with flash attention needs, in values of the computing dtype:

    (4 h + 2 a d + 2 k d + 3 f) / tensor

These are the inputs and outputs of the two norms (4 h), queries and attention's output (2 a d), keys and
values (2 k d), gate, up and their product (3 f; 2 f without a gate). Norms after attention and feed-forward
add 2 h. Capped scores, which no flash kernel supports, add some values for each pair of tokens and each head.
In float8 the outputs of norms and activation are recomputed for their 8-bit copies (2 h and f less), and the
head has chunks and copies of its own (`cost/float8_work.py`).

Recomputation changes this. `full` keeps a block's input, and one block's activations exist at a time.
`selective` keeps products and attention. `all-but-attention` keeps a block's input and attention's output.
With experts the last two recompute a block part by part (norms, attention, shared experts): they keep the
inputs of the parts (for `selective` 2 h more than for a whole block), and all that routed experts need. A
pipeline multiplies activations by the micro-batches that a rank has in flight (`plans/schedule.py`).

Weights that are not gathered have copies in the computing dtype, which exist until backward, except in
recomputed blocks. With a single micro-batch, gradients take the place of activations that backward frees.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from shardwise.config.dtype_names import BYTES
from shardwise.config.model import Model
from shardwise.config.schedules import schedule_value
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.float8_work import head_bytes, kept_weights
from shardwise.cost.matmuls import tokens_here
from shardwise.cost.software import SHARDWISE, Software
from shardwise.cost.space import (
    FULL,
    NONE,
    Array,
    Space,
    Workload,
    concatenate,
    distinct,
    is_compiled,
    repeats_products,
    take,
)
from shardwise.cost.stage_blocks import Cut, cut
from shardwise.plans.chunks import chunk_bytes
from shardwise.plans.dtypes import wide
from shardwise.plans.engine import MAX_DEFERRED_SUMS, Engine, engine_of
from shardwise.plans.grid import expert_shards
from shardwise.plans.memory import StateFormat
from shardwise.plans.slices import Part, Parts, parts_of, with_peers


@dataclass(frozen=True)
class Holdings:
    """The parameters and states on devices, for every candidate."""

    cut: Cut
    """The blocks of the pipeline ranks."""
    parameters: Array
    """Number of parameters of the fullest device before ZeRO, with its experts."""
    sharded: Array
    """Number of parameters whose optimizer states that device has."""
    states: dict[str, Array]
    """Bytes of its weights, gradients and optimizer states, in its own memory or that of the host."""
    block: Array
    """Number of parameters of one block on one device before ZeRO, with its experts."""
    first_edge: Array
    """Number of parameters before the blocks (embedding)."""
    last_edge: Array
    """Number of parameters after the blocks (norm, head)."""


def hold(work: Workload, space: Space, stack: Software) -> Holdings:
    """Return the parameters and states on devices.

    They depend only on the layout, and on whether a step has several micro-batches. So they are computed for
    the distinct layouts, in both cases, and looked up.
    """
    layouts, index = space.layouts
    several = replace(layouts, accumulation=np.full(len(layouts), 2))
    both = concatenate([_hold_layouts(work, layouts, stack), _hold_layouts(work, several, stack)])
    return take(both, index + len(layouts) * (space.accumulation > 1))


def _hold_layouts(work: Workload, layouts: Space, stack: Software) -> Holdings:
    """Return the same for distinct layouts. The fullest rank is the first, the last, or one between them."""
    parts, stages = _parts(work.model, layouts), cut(work, layouts, stack)
    engine, has_head, in_a_v = engine_of(layouts, work.model.experts), stages.first_has_head, stages.is_in_a_v
    piped = (layouts.pipeline > 1).astype(float)
    block, end = parts.block + parts.experts, parts.last + parts.copy * piped
    copy = Part(compressed=parts.copy.compressed, compressed_shard=parts.copy.compressed_shard)
    not_compressed = copy * -piped  # gradients that two stages sum are not compressed
    end_of_rank = end + not_compressed
    ranks = [
        block * stages.first + parts.first + not_compressed + end_of_rank * has_head.astype(float),
        block * stages.middle,
        block * np.where(in_a_v, 0.0, stages.last) + end_of_rank * (~in_a_v).astype(float),
    ]
    states = [_states(work, layouts, stack, engine, rank) for rank in ranks]
    totals = np.stack([sum(kinds.values(), np.zeros(len(layouts))) for kinds in states])  # (3, layouts)
    fullest = totals.argmax(axis=0)
    whole = np.choose(fullest, [rank.whole for rank in ranks])
    shard = np.choose(fullest, [rank.shard for rank in ranks])
    chosen = {name: np.choose(fullest, [kinds[name] for kinds in states]) for name in states[0]}
    return Holdings(stages, whole, shard, chosen, block.whole, parts.first.whole, end.whole)


def _parts(model: Model, layouts: Space) -> Parts:
    """Return the parts of the model on one device, computed once for each distinct way to slice it."""
    sharded = layouts.zero > 0
    shards, of_experts = np.where(sharded, layouts.shards, 1), np.where(sharded, expert_shards(layouts), 1)
    columns = [layouts.tensor, shards, layouts.expert, of_experts]
    first, index = distinct(columns)
    ways = zip(*(column[first].tolist() for column in columns), strict=True)
    parts_of_ways = [parts_of(model, *way) for way in ways]

    def part(name: str) -> Part:
        counts = [getattr(parts, name).counts for parts in parts_of_ways]
        table = np.asarray(counts).reshape(-1, len(fields(Part)))  # (ways, counts)
        return Part(*table[index].T)

    parts = Parts(**{field.name: part(field.name) for field in fields(Parts)})
    return with_peers(parts, layouts.shards, expert_shards(layouts), layouts.zero, layouts.replica)


def in_flight(space: Space) -> tuple[Array, Array]:
    """Return the number of micro-batches whose activations the first and the last pipeline rank hold at
    once."""
    m, p, v = space.accumulation, space.pipeline, space.stages_per_rank
    first = schedule_value(space.schedule, lambda facts: facts.held_by_first(m, p, v))
    last = schedule_value(space.schedule, lambda facts: facts.held_by_last(m, p, v))
    alone = p == 1
    return np.where(alone, 1.0, np.minimum(m, first)), np.where(alone, 1.0, np.minimum(m, last))


def activation_bytes(
    work: Workload, space: Space, stack: Software, device_type: str = "cuda"
) -> tuple[Array, Array]:
    """Return the bytes of activations of one micro-batch in one block: those kept until backward, and those
    that exist while the block runs backward."""
    model, tokens, tensor = work.model, tokens_here(work, space), space.tensor
    # Values per token, (candidates,) each, as in the docstring of this module.
    inputs = 2 if model.gated else 1  # of the activation
    queries = model.heads * model.head_dim / tensor
    keys = 2 * np.maximum(model.kv_heads / tensor, 1) * model.head_dim
    residual = model.hidden / (tensor if stack.sequence_parallel else 1)
    inner, products = (1 + inputs) * model.ffn / tensor, inputs * model.ffn / tensor
    if model.experts:
        # A token's row is copied to each of its experts and back. Shared experts use it in place.
        width, rows = (1 + inputs) * model.expert_width, model.experts_per_token / tensor
        inner = rows * (width + 2 * model.hidden) + model.shared_experts * width / tensor
    gathered = np.where(tensor > 1, stack.inputs_kept * model.hidden, 0.0)
    scores = 0.0 if stack.flash else 2.5 * work.sequence_length * model.heads / tensor
    if capped := model.attention_softcap is not None:
        scores = _capped_scores(work) * work.sequence_length * model.heads / tensor
    block = stack.activation * ((6 if model.post_norms else 4) * residual + 2 * queries + keys + inner)
    none = block + scores + gathered - _not_kept_for_float8(work, space, stack, device_type)
    if stack.flash:
        selective = residual + queries + stack.selective_kept * (2 * residual + queries + keys + products)
    else:  # only the scores are recomputed (Korthikanti et al. 2022)
        selective = block
    full = residual if stack.sequence_parallel else model.hidden / (tensor if stack.shard_inputs else 1)
    attention = full + (0.0 if capped else queries)
    if model.experts:
        # Each part is recomputed by itself and keeps its input. Attention and shared experts have whole ones.
        whole = model.hidden * (1 + ((tensor > 1) & (model.shared_experts > 0)))
        parts = 2 * residual + whole + rows * (width + 2 * model.hidden)
        attention = attention + parts
        if stack.flash:
            # Outputs of attention and of shared experts, before tensor devices sum and split them.
            outputs = model.hidden * (1 + (model.shared_experts > 0))
            made = queries + keys + outputs + model.shared_experts * inputs * model.expert_width / tensor
            selective = full + queries + parts + stack.selective_kept * made
    if stack.flash and capped:  # the scores before the cap are the output of a product
        selective = selective + work.sequence_length * model.heads / tensor
    modes = [np.broadcast_to(value, tokens.shape) for value in (none, selective, attention, full)]
    kept = np.choose(space.recompute, modes)
    # Recomputed activations exist beside the kept ones: those of the whole block, or those that recomputation
    # by operators did not keep.
    repeated = np.where(space.recompute == FULL, none, np.maximum(none - kept, 0.0))
    live = np.where(space.recompute == NONE, 0.0, repeated)
    size = compute.value_bytes(work)
    return tokens * size * kept, tokens * size * live


def _not_kept_for_float8(work: Workload, space: Space, stack: Software, device_type: str) -> Array | float:
    """Return the values per token that a compiled block with products in float8 does not keep.

    The outputs of norms and of the activation are needed only in 8 bits, so backward makes them again from
    tensors that are kept anyway (`recompute_casts`). A router needs the output of the second norm.
    """
    shares, model = work.float8, work.model
    if shares is None:
        return 0.0
    residual = model.hidden / (space.tensor if stack.sequence_parallel else 1)
    inner = (model.shared_experts * model.expert_width if model.experts else model.ffn) / space.tensor
    norms = shares.before_attention + (0.0 if model.experts else shares.before_inner)
    return np.where(is_compiled(work, space, device_type), norms * residual + shares.down * inner, 0.0)


def _capped_scores(work: Workload) -> float:
    """Return the number of values that backward needs for each score with a cap.

    These are the tanh and the softmax in the dtype of sums, and the softmax in the dtype of computation.
    """
    size = compute.value_bytes(work)
    return 2 * BYTES[wide(work.precision)] / size + (1 if size == 2 else 0)


def footprint(
    work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings
) -> dict[str, Array]:
    """Return the bytes of the fullest device, by kind.

    States are those of the fullest rank. Activations are those of the first pipeline rank, which has most
    micro-batches in flight, or of the last, which has the logits.
    """
    model, alone, offloaded = work.model, space.pipeline == 1, space.offload == 1
    activations, logits = _activations(work, space, cluster, stack, held)
    engine = engine_of(space, model.experts)
    gathered, reducing = _units(work, space, cluster, stack, engine, held)
    unsharded = engine.zero == 0
    # Weights that are never gathered are cast for each use, and backward needs the copies, except in blocks
    # that are recomputed, or that are compiled in float8 and cast again. The copies of a head in float8 are
    # counted among the logits.
    in_float8 = work.float8 is not None
    casts_again = is_compiled(work, space, cluster.device_type) & in_float8
    float8_head = work.float8 is not None and work.float8.head
    copies = stack.cast_held if compute.casts(work) else 0.0
    head = model.vocabulary * model.hidden / space.tensor
    not_kept = repeats_products(work, space) | casts_again
    needed = np.where(not_kept, 0.0 if float8_head else head, held.parameters)
    casts = np.where(unsharded, copies * needed, 0.0) + kept_weights(work, space, held.cut.first)
    whole_inputs = stack.whole_inputs * tokens_here(work, space) * model.hidden * compute.value_bytes(work)
    # With a single micro-batch, each gradient takes the place of activations that backward has freed by then,
    # and of the tensors of a head in float8, which are large.
    in_place = alone & (space.accumulation == 1) & unsharded & (not stack.keeps_gradients)
    gradients, freed = held.states["gradients"], activations + (logits if float8_head else 0.0)
    states = {**held.states, "gradients": np.where(in_place, np.maximum(0.0, gradients - freed), gradients)}
    alive = {
        "activations": activations,
        "logits": logits,
        "gathered": gathered + casts,
        "buffers": reducing
        + np.where(space.tensor > 1, whole_inputs, 0.0)
        + np.where(logits > 0, 4.0 * head, 0.0),
    }
    return {
        **(_on_the_device(work, space, states, held) if offloaded.any() else states),
        **{kind: value * stack.fragmentation for kind, value in alive.items()},
        "overhead": np.full_like(activations, cluster.device.overhead),
    }


def _activations(
    work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings
) -> tuple[Array, Array]:
    """Return the bytes of activations and of logits on the fuller of the first and the last pipeline rank."""
    model, size, tokens = work.model, compute.value_bytes(work), tokens_here(work, space)
    kept, live = activation_bytes(work, space, stack, cluster.device_type)
    in_first, in_last = in_flight(space)
    stage_input = tokens * model.hidden * size / space.tensor  # for each micro-batch in flight
    logits = tokens * model.vocabulary / space.tensor * stack.logit_bytes
    if stack.logit_bytes == 0:  # the loss is computed in chunks
        logits = np.minimum(tokens * model.vocabulary / space.tensor * size, chunk_bytes(cluster.device_type))
        if work.float8 is not None and work.float8.head:
            # They are freed before the first block is recomputed, which takes their place.
            logits = np.maximum(head_bytes(work, space, cluster.device_type, tokens) - live, 0.0)
    first = in_first * held.cut.first * kept + live + in_first * stage_input
    last = in_last * held.cut.last * kept + live + stage_input
    first_is_fuller = held.cut.first_has_head | (first >= last + logits)
    activations = np.where(first_is_fuller, first, last)
    return activations, np.where(held.cut.first_has_head | ~first_is_fuller, logits, 0.0)


def _units(
    work: Workload, space: Space, cluster: Cluster, stack: Software, engine: Engine, held: Holdings
) -> tuple[Array, Array]:
    """Return the bytes of the weights that FSDP2 has gathered at once, and of the buffers of its sums.

    It has gathered the block in use, the next one and the largest unit. The buffers have the largest unit's
    gradients, as they were made and as they are summed. CPU workers sum several units at once, each with
    buffers for what it sends and receives.
    """
    edges = np.where(space.pipeline == 1, np.maximum(held.first_edge, held.last_edge), 0.0)
    largest = np.maximum(held.block, edges)
    weight, gradient = compute.weight_bytes(work, stack), compute.reduce_bytes(work, stack)
    gathered = np.where(engine.zero == 3, weight * (2 * held.block + largest), 0.0)
    reducing = (gradient + weight) * largest
    if cluster.device_type == "cpu":
        reducing = reducing + gradient * (
            largest + 2 * np.minimum(MAX_DEFERRED_SUMS, held.cut.first) * held.block
        )
    return gathered, np.where(engine.zero >= 2, reducing, 0.0)


def _on_the_device(
    work: Workload, space: Space, states: dict[str, Array], held: Holdings
) -> dict[str, Array]:
    """Return the bytes of states in the memory of the device itself. If states are offloaded, these are only
    weights that stay gathered and gradients that stay whole between micro-batches."""
    offloaded, values = space.offload == 1, BYTES[work.state_dtype] * held.sharded
    gradients = np.where((space.zero == 1) & (space.accumulation > 1), 0.0, values)
    optimizer = work.optimizer.state_bytes(float(BYTES[work.state_dtype])) * held.sharded
    on_host = {"weights": values, "gradients": gradients, "optimizer": optimizer}
    return {
        name: np.where(offloaded, np.maximum(value - on_host.get(name, 0.0), 0.0), value)
        for name, value in states.items()
    }


def host_bytes(work: Workload, space: Space, cluster: Cluster, held: Holdings) -> Array:
    """Return the bytes of offloaded weights, gradients and optimizer states in the memory of one node, if all
    its devices have as many as the fullest."""
    on_node = np.minimum(cluster.devices_per_node, space.world)
    stored = float(BYTES[work.state_dtype])
    width = 2.0 * stored + work.optimizer.state_bytes(stored)
    return np.where(space.offload == 1, width * held.sharded * on_node, 0.0)


def _states(work: Workload, space: Space, stack: Software, engine: Engine, held: Part) -> dict[str, Array]:
    """Return the bytes of weights, gradients, optimizer states and residuals, by the table of plans/memory.py
    with the widths of this program."""
    if not stack.one_copy:
        return _two_copies(work, space, stack, engine, held)
    computed = compute.weight_bytes(work, stack)
    whole = engine.keeps_whole_gradients(space.accumulation) | (space.zero == 1) & stack.keeps_gradients
    form = StateFormat(
        stored=float(BYTES[work.state_dtype]),
        computed=computed,
        wide=BYTES[wide(work.precision)] if stack.wide_routers else computed,
        summed=BYTES[work.reduce_dtype] * stack.gradient_bytes / SHARDWISE.gradient_bytes,
        optimizer=work.optimizer.state_bytes(float(BYTES[work.state_dtype])),
        keeps_whole_gradients=whole,
        compression=work.compression,
        backward_shards=None if work.gathers is None else work.gathers.backward_shards,
    )
    states = form.state_bytes(held, held, space, engine)
    return {name: value + np.zeros(len(space)) for name, value in vars(states).items()}


def _two_copies(
    work: Workload, space: Space, stack: Software, engine: Engine, held: Part
) -> dict[str, Array]:
    """Return the same for a program that computes with a copy of its weights, unless ZeRO-3 shards them."""
    stored = float(BYTES[work.state_dtype])
    sharded, split = engine.zero > 0, engine.splits_backward
    only_shards = sharded & (space.zero == 3) & ~split
    whole = (space.zero == 1) & (stack.keeps_gradients | (space.accumulation > 1)) | split
    width = stack.gradient_bytes
    return {
        "weights": np.where(only_shards, 0.0, stack.weight_bytes * held.whole) + stored * held.shard,
        "gradients": np.where(sharded & ~whole, width * held.shard, width * held.whole),
        "optimizer": work.optimizer.state_bytes(stored) * held.shard,
    }
