"""Bytes of the fullest device at the peak of a step, by kind, for every candidate at once.

Model states follow the table in `plan/memory.py`. Activations are counted per token and block: what backward
needs of a compiled block with flash attention, in values of the computing dtype:

    (4 h + 2 a d + 2 k d + 3 f) / tensor

that is: the inputs and outputs of the two norms (4 h), queries and attention's output (2 a d), keys and
values (2 k d), gate, up and their product (3 f; 2 f without a gate). Norms after attention and feed-forward
add 2 h; capped scores, which no flash kernel makes, some for each pair of tokens and head. In float8 what
norms and activation put out is made once more for its 8-bit copy (2 h and f less), and the head has chunks
and copies of its own (`cost/float8_work.py`). `full` keeps a block's input and has one block alive;
`selective` keeps products and attention, `all-but-attention` a block's input and attention's output. With
experts these two recompute a block part by part (norms, attention, shared experts): they keep the inputs of
the parts, 2 h more than of a whole block for `selective`, and all that routed experts need. A schedule
multiplies this by the micro-batches a rank has in flight (`plan/schedule.py` explains it).

Where weights are not gathered, their copies in the computing dtype wait for backward (not those of a
recomputed block). With a single micro-batch, gradients take the place of the activations that backward
frees.
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
    makes_blocks_again,
    take,
)
from shardwise.cost.stage_blocks import Cut, cut
from shardwise.plan.chunks import chunk_bytes
from shardwise.plan.dtypes import wide
from shardwise.plan.engine import MAX_DEFERRED_SUMS, Engine, engine_of
from shardwise.plan.grid import expert_shards
from shardwise.plan.memory import residual_numbers
from shardwise.plan.slices import Part, Parts, parts_of, with_peers


@dataclass(frozen=True)
class Holdings:
    """The parameters and states on devices, for every candidate."""

    cut: Cut
    """The blocks of the pipeline ranks."""
    parameters: Array
    """Parameters of the device with most before ZeRO, experts included."""
    sharded: Array
    """Parameters whose optimizer state that device has."""
    states: dict[str, Array]
    """Bytes of weights, gradients and optimizer state there, wherever they lie."""
    block: Array
    """Parameters of one block on one device before ZeRO, experts included."""
    first_edge: Array
    """Parameters before the blocks (embedding)."""
    last_edge: Array
    """Parameters after the blocks (norm, head)."""


def hold(work: Workload, space: Space, stack: Software) -> Holdings:
    """Return the parameters and states on devices, from the layout and whether there are several
    micro-batches."""
    layouts, index = space.layouts
    several = replace(layouts, accumulation=np.full(len(layouts), 2))
    both = concatenate([_hold_layouts(work, layouts, stack), _hold_layouts(work, several, stack)])
    return take(both, index + len(layouts) * (space.accumulation > 1))


def _hold_layouts(work: Workload, layouts: Space, stack: Software) -> Holdings:
    """Return the same for distinct layouts; the rank with most is the first, the last, or one between
    them."""
    parts, stages = _parts(work.model, layouts), cut(work, layouts, stack)
    engine, alone, folded = engine_of(layouts, work.model.experts), layouts.pipeline == 1, stages.folded
    own, end = parts.block + parts.experts, parts.last + parts.copy * (~alone).astype(float)
    shared = (
        replace(Part(), compressed=parts.copy.compressed, compressed_shard=parts.copy.compressed_shard) * -1.0
    )
    shared *= (~alone).astype(float)  # what two stages sum is not compressed
    ranks = [
        own * stages.first + parts.first + shared + (end + shared) * (alone | folded).astype(float),
        own * stages.middle,
        own * np.where(folded, 0.0, stages.last) + (end + shared) * (~folded).astype(float),
    ]
    states = [_states(work, layouts, stack, engine, rank) for rank in ranks]
    totals = np.stack([sum(kinds.values(), np.zeros(len(layouts))) for kinds in states])  # (3, layouts)
    most = totals.argmax(axis=0)
    whole, shard = (np.choose(most, [getattr(rank, name) for rank in ranks]) for name in ("whole", "shard"))
    chosen = {name: np.choose(most, [kinds[name] for kinds in states]) for name in states[0]}
    return Holdings(stages, whole, shard, chosen, own.whole, parts.first.whole, end.whole)


def _parts(model: Model, layouts: Space) -> Parts:
    """Return the parts of the model on one device, computed once for every distinct way to slice it."""
    sharded = layouts.zero > 0
    shards, of_experts = np.where(sharded, layouts.shards, 1), np.where(sharded, expert_shards(layouts), 1)
    columns = [layouts.tensor, shards, layouts.expert, of_experts]
    first, index = distinct(columns)
    ways = [
        parts_of(model, *way) for way in zip(*(column[first].tolist() for column in columns), strict=True)
    ]

    def part(name: str) -> Part:
        parts = [getattr(way, name) for way in ways]
        table = np.asarray([part.counts for part in parts]).reshape(-1, len(fields(Part)))[
            index
        ]  # (layouts, counts)
        return Part(*table.T)

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
    # Values a token, (candidates,) each: the module's table.
    wide = 2 if model.gated else 1
    queries, keys = (
        model.heads * model.head_dim / tensor,
        2 * np.maximum(model.kv_heads / tensor, 1) * model.head_dim,
    )
    residual = model.hidden / (tensor if stack.sequence_parallel else 1)
    inner, products = (1 + wide) * model.ffn / tensor, wide * model.ffn / tensor
    if (
        model.experts
    ):  # a token's row is copied to each of its experts and comes back; shared experts see it where it is
        width, rows = (1 + wide) * model.expert_width, model.experts_per_token / tensor
        inner = rows * (width + 2 * model.hidden) + model.shared_experts * width / tensor
    gathered = np.where(tensor > 1, stack.inputs_kept * model.hidden, 0.0)
    scores = 0.0 if stack.flash else 2.5 * work.sequence_length * model.heads / tensor
    if capped := model.attention_softcap is not None:
        scores = _capped_scores(work) * work.sequence_length * model.heads / tensor
    block = stack.activation * ((6 if model.post_norms else 4) * residual + 2 * queries + keys + inner)
    none = block + scores + gathered - _cast_anew(work, space, stack, device_type)
    # Without flash attention, "selective" means that the scores alone are computed again (Korthikanti et al.
    # 2022).
    selective = (
        residual + queries + stack.selective_kept * (2 * residual + queries + keys + products)
        if stack.flash
        else block
    )
    full = residual if stack.sequence_parallel else model.hidden / (tensor if stack.shard_inputs else 1)
    attention = full + (0.0 if capped else queries)
    if (
        model.experts
    ):  # parts are recomputed each by itself, and keep their inputs: shared experts and attention whole ones
        whole = model.hidden * (1 + ((tensor > 1) & (model.shared_experts > 0)))
        parts = 2 * residual + whole + rows * (width + 2 * model.hidden)
        attention = attention + parts
        if (
            stack.flash
        ):  # outputs of attention and of shared experts, before tensor devices sum and split them
            outputs = model.hidden * (1 + (model.shared_experts > 0))
            made = queries + keys + outputs + model.shared_experts * wide * model.expert_width / tensor
            selective = full + queries + parts + stack.selective_kept * made
    if stack.flash and capped:  # a product's output, as they are before the cap
        selective = selective + work.sequence_length * model.heads / tensor
    stays = np.choose(
        space.recompute,
        [np.broadcast_to(value, tokens.shape) for value in (none, selective, attention, full)],
    )
    # What is computed again lives beside what stayed: all of the block, or what recomputation by operators
    # let go.
    live = np.where(
        space.recompute == NONE, 0.0, np.where(space.recompute == FULL, none, np.maximum(none - stays, 0.0))
    )
    size = compute.value_bytes(work)
    return tokens * size * stays, tokens * size * live


def _cast_anew(work: Workload, space: Space, stack: Software, device_type: str) -> Array | float:
    """Values a token that a compiled block with products in float8 does not keep: outputs of the norms and of
    the activation are needed in 8 bits alone, and made once more from what is there anyway
    (`recompute_casts`). A router needs the second norm's."""
    shares, model = work.float8, work.model
    if shares is None:
        return 0.0
    residual = model.hidden / (space.tensor if stack.sequence_parallel else 1)
    inner = (model.shared_experts * model.expert_width if model.experts else model.ffn) / space.tensor
    norms = shares.before_attention + (0.0 if model.experts else shares.before_inner)
    return np.where(is_compiled(work, space, device_type), norms * residual + shares.down * inner, 0.0)


def _capped_scores(work: Workload) -> float:
    """Values that backward needs of each score that goes through a tanh: its tanh and its share, wide, and
    the share that multiplies values."""
    size = compute.value_bytes(work)
    return 2 * BYTES[wide(work.precision)] / size + (1 if size == 2 else 0)


def footprint(
    work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings
) -> dict[str, Array]:
    """Bytes of the fullest device, by kind. States are the fullest rank's; activations those of the first
    pipeline rank, which has most in flight, or of the last, which has the logits."""
    model, alone, offloaded = work.model, space.pipeline == 1, space.offload == 1
    activations, logits = _activations(work, space, cluster, stack, held)
    engine = engine_of(space, model.experts)
    gathered, reducing = _units(work, space, cluster, stack, engine, held)
    unsharded = engine.zero == 0
    # Weights that are never gathered are cast for each use; backward needs the copies, but for those of
    # recomputed blocks. In float8 compiled blocks cast them again, and a head in float8 has its copies among
    # the logits.
    anew, narrow = (
        (False, False)
        if work.float8 is None
        else (is_compiled(work, space, cluster.device_type), work.float8.head)
    )
    copies = stack.cast_held if compute.casts(work) else 0.0
    head = model.vocabulary * model.hidden / space.tensor
    needed = np.where(makes_blocks_again(work, space) | anew, 0.0 if narrow else head, held.parameters)
    casts = np.where(unsharded, copies * needed, 0.0) + kept_weights(work, space, held.cut.first)
    whole_inputs = stack.whole_inputs * tokens_here(work, space) * model.hidden * compute.value_bytes(work)
    # With a single micro-batch each gradient takes the place of activations that backward has freed by then,
    # and of what a head in float8 had, which is no little.
    in_place = alone & (space.accumulation == 1) & unsharded & (not stack.keeps_gradients)
    gradients, freed = held.states["gradients"], activations + (logits if narrow else 0.0)
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
        **(_without_the_hosts(work, space, states, held) if offloaded.any() else states),
        **{kind: value * stack.fragmentation for kind, value in alive.items()},
        "overhead": np.full_like(activations, cluster.device.overhead),
    }


def _activations(
    work: Workload, space: Space, cluster: Cluster, stack: Software, held: Holdings
) -> tuple[Array, Array]:
    """Bytes of activations and of logits on the fuller of the first and the last pipeline rank."""
    model, size, tokens = work.model, compute.value_bytes(work), tokens_here(work, space)
    stays, live = activation_bytes(work, space, stack, cluster.device_type)
    flying, flying_last = in_flight(space)
    edge = tokens * model.hidden * size / space.tensor  # a stage's input, for each micro-batch in flight
    logits = tokens * model.vocabulary / space.tensor * stack.logit_bytes
    if stack.logit_bytes == 0:  # the loss is computed in chunks
        logits = np.minimum(tokens * model.vocabulary / space.tensor * size, chunk_bytes(cluster.device_type))
        if work.float8 is not None and work.float8.head:
            # gone before the first block is computed again, which takes their place
            logits = np.maximum(head_bytes(work, space, cluster.device_type, tokens) - live, 0.0)
    first = flying * held.cut.first * stays + live + flying * edge
    last = flying_last * held.cut.last * stays + live + edge
    both = (space.pipeline == 1) | held.cut.folded  # the first rank has the head too
    fuller = both | (first >= last + logits)
    return np.where(fuller, first, last), np.where(both | ~fuller, logits, 0.0)


def _units(
    work: Workload, space: Space, cluster: Cluster, stack: Software, engine: Engine, held: Holdings
) -> tuple[Array, Array]:
    """Bytes of what FSDP2 has gathered at once (the block in use, the next one, the largest unit), and of the
    buffers in which it reduces: the largest unit's gradients as they were made, and as they are summed. CPU
    workers sum several units at once, each with room for what comes."""
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


def _without_the_hosts(
    work: Workload, space: Space, states: dict[str, Array], held: Holdings
) -> dict[str, Array]:
    """What the device itself holds of the states: where they are offloaded, only what stays gathered or whole
    between micro-batches."""
    offloaded, stored = space.offload == 1, float(BYTES[work.state_dtype])
    on_host = {
        "weights": stored * held.sharded,
        "gradients": stored * held.sharded,
        "optimizer": len(work.optimizer.slots) * stored * held.sharded,
    }
    whole = (space.zero == 1) & (space.accumulation > 1)
    on_host["gradients"] = np.where(whole, 0.0, on_host["gradients"])
    return {
        name: np.where(offloaded, np.maximum(value - on_host.get(name, 0.0), 0.0), value)
        for name, value in states.items()
    }


def host_bytes(work: Workload, space: Space, cluster: Cluster, held: Holdings) -> Array:
    """Bytes of offloaded weights, gradients and optimizer states in the memory of one node, whose devices all
    have the fullest one's."""
    on_node = np.minimum(cluster.devices_per_node, space.world)
    numbers = 2.0 + len(work.optimizer.slots)
    return np.where(space.offload == 1, numbers * BYTES[work.state_dtype] * held.sharded * on_node, 0.0)


def _states(work: Workload, space: Space, stack: Software, engine: Engine, held: Part) -> dict[str, Array]:
    """Weights, gradients and optimizer state: the table of plan/memory.py, with this stack's widths."""
    stored = float(BYTES[work.state_dtype])
    computed = compute.value_bytes(work) * stack.weight_bytes / SHARDWISE.weight_bytes
    reduced = BYTES[work.reduce_dtype] * stack.gradient_bytes / SHARDWISE.gradient_bytes
    if not stack.one_copy:
        return _two_copies(work, space, stack, engine, held)
    whole = engine.keeps_whole_gradients(space.accumulation) | (space.zero == 1) & stack.keeps_gradients
    wider = BYTES[wide(work.precision)] - computed if stack.wide_routers else 0.0
    weights = stored * held.shard + np.where(
        engine.keeps_gathered, computed * held.gathered + wider * held.wide, 0.0
    )
    if work.gathers is not None and work.gathers.backward_shards is not None:
        weights = weights + np.where(
            space.zero == 3, computed * held.gathered / work.gathers.backward_shards, 0.0
        )
    gradients = np.where(whole, reduced * held.whole, stored * held.shard)
    residuals = reduced * residual_numbers(held, work.compression, space.zero, space.replica) + np.zeros(
        len(space)
    )
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": len(work.optimizer.slots) * stored * held.shard,
        "residuals": residuals,
    }


def _two_copies(
    work: Workload, space: Space, stack: Software, engine: Engine, held: Part
) -> dict[str, Array]:
    """The same for a program that computes with a copy of its weights whatever is sharded."""
    stored = float(BYTES[work.state_dtype])
    sharded, split = engine.zero > 0, engine.splits_backward
    weights = (
        np.where(sharded & (space.zero == 3) & ~split, 0.0, stack.weight_bytes * held.whole)
        + stored * held.shard
    )
    whole = (space.zero == 1) & (stack.keeps_gradients | (space.accumulation > 1)) | split
    gradients = np.where(
        sharded & ~whole, stack.gradient_bytes * held.shard, stack.gradient_bytes * held.whole
    )
    states = len(work.optimizer.slots) * stored * held.shard
    return {"weights": weights, "gradients": gradients, "optimizer": states}
