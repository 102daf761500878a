"""Bytes of the fullest device at the peak of a step, by kind, for every candidate at once.

Model states follow the table in `plan/memory.py`. Activations are counted per token and block: what backward needs of a compiled
block with flash attention, in values of the computing dtype:

    (4 h + 2 a d + 2 k d + 3 f) / tensor

that is: the inputs and outputs of the two norms (4 h), queries and attention's output (2 a d), keys and values (2 k d), gate,
up and their product (3 f; 2 f without a gate). `full` keeps a block's input and has one block alive; `selective` keeps products
and attention. A schedule multiplies this by the micro-batches a rank has in flight (`plan/schedule.py` has the table).

Where weights are not gathered, their copies in the computing dtype wait for backward (not those of a recomputed block). With a
single micro-batch, gradients take the place of the activations that backward frees.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from shardwise.config import Model
from shardwise.cost import compute
from shardwise.cost.cluster import Cluster
from shardwise.cost.space import Array, Space, Work, concatenate, distinct, take
from shardwise.cost.stack import SHARDWISE, Stack
from shardwise.cost.stages import Cut, cut
from shardwise.plan.chunks import chunk_bytes
from shardwise.plan.dtypes import BYTES
from shardwise.plan.engine import Engine, engine_of
from shardwise.plan.grid import expert_shards
from shardwise.plan.schedule import SCHEDULES
from shardwise.plan.slices import Part, Parts, parts_of


@dataclass(frozen=True)
class Holdings:
    """What devices hold of the model."""

    cut: Cut
    """The blocks of the pipeline ranks."""
    fullest: Part
    """Weights of the fullest device, experts included."""
    states: dict[str, Array]
    """Bytes of weights, gradients and optimizer state there, wherever they lie."""
    block: Array
    """Parameters of one block on one device before ZeRO, experts included."""
    first_edge: Array
    """Parameters before the blocks (embedding), and behind them (norm, head)."""
    last_edge: Array

    @property
    def parameters(self) -> Array:
        """The fullest device's before ZeRO."""
        whole: Array = self.fullest.whole
        return whole

    @property
    def sharded(self) -> Array:
        """Those whose optimizer state it has."""
        shard: Array = self.fullest.shard
        return shard


def hold(work: Work, space: Space, stack: Stack) -> Holdings:
    """What each candidate's devices hold. It follows from the layout, and from whether gradients wait for other micro-batches."""
    layouts, index = space.layouts
    several = replace(layouts, accumulation=np.full(len(layouts), 2))
    both = concatenate([_hold_layouts(work, layouts, stack), _hold_layouts(work, several, stack)])
    return take(both, index + len(layouts) * (space.accumulation > 1))


def _hold_layouts(work: Work, layouts: Space, stack: Stack) -> Holdings:
    """The rank with most is the first, the last, or one between them."""
    parts, stages = _parts(work.model, layouts), cut(work, layouts, stack)
    engine, alone, folded = engine_of(layouts, work.model.experts), layouts.pipeline == 1, stages.folded
    own, end = parts["block"] + parts["experts"], parts["last"] + parts["copy"] * (~alone).astype(float)
    ranks = [
        own * stages.first + parts["first"] + end * (alone | folded).astype(float),
        own * stages.middle,
        own * np.where(folded, 0.0, stages.last) + end * (~folded).astype(float),
    ]
    states = [_states(work, layouts, stack, engine, rank) for rank in ranks]
    most = np.stack([sum(kinds.values(), np.zeros(len(layouts))) for kinds in states]).argmax(
        axis=0
    )  # (3, layouts) -> (layouts,)
    return Holdings(
        stages,
        Part(*(np.choose(most, [getattr(rank, field.name) for rank in ranks]) for field in fields(Part))),
        {name: np.choose(most, [kinds[name] for kinds in states]) for name in states[0]},
        own.whole, parts["first"].whole, end.whole,
    )  # fmt: skip


def _parts(model: Model, layouts: Space) -> dict[str, Part]:
    """The parts of the model on one device, worked out once for every way to slice it."""
    sharded = layouts.zero > 0
    shards, of_experts = np.where(sharded, layouts.shards, 1), np.where(sharded, expert_shards(layouts), 1)
    columns = [layouts.tensor, shards, layouts.expert, of_experts]
    first, index = distinct(columns)
    ways = [parts_of(model, *way) for way in zip(*(column[first].tolist() for column in columns), strict=True)]

    def part(name: str) -> Part:
        parts = [getattr(way, name) for way in ways]
        table = np.asarray([(part.whole, part.shard, part.gathered) for part in parts]).reshape(-1, 3)[index]  # (layouts, 3)
        return Part(*table.T)

    return {field.name: part(field.name) for field in fields(Parts)}


def in_flight(space: Space) -> tuple[Array, Array]:
    """Micro-batches (of a whole rank's blocks) whose activations the first and the last pipeline rank hold at once."""
    m, p, v = space.accumulation, space.pipeline, space.stages_per_rank
    one = np.ones(len(space))
    first = {"gpipe": m, "interleaved": (p * (v + 1) - 1) / v, "dualpipev": p + 0.5}
    last = {"gpipe": m, "1f1b": one, "interleaved": (p * (v - 1) + 1) / v, "dualpipev": p + 0.5}
    return tuple(  # type: ignore[return-value]
        np.where(p == 1, 1.0, np.minimum(m, np.choose(space.schedule, [held.get(name, p) for name in SCHEDULES])))
        for held in (first, last)
    )


def kept(work: Work, space: Space, stack: Stack) -> tuple[Array, Array]:
    """Bytes of activations of one micro-batch in one block: kept until backward, and while the block runs backward."""
    model, size = work.model, compute.value_bytes(work)
    tokens, tensor = compute.tokens_here(work, space), space.tensor
    wide = 2 if model.activation == "swiglu" else 1
    queries, keys = model.heads * model.head_dim / tensor, 2 * np.maximum(model.kv_heads / tensor, 1) * model.head_dim
    residual = model.hidden / (tensor if stack.sequence_parallel else 1)
    inner = (1 + wide) * model.ffn / tensor
    products = wide * model.ffn / tensor
    if model.experts:
        rows = model.experts_per_token / tensor
        inner = rows * ((1 + wide) * model.expert_width + 2 * model.hidden) + (1 + wide) * model.shared_experts * (
            model.expert_width / tensor
        )
        products = inner
    gathered = np.where(tensor > 1, stack.inputs_kept * model.hidden, 0.0)
    scores = 0.0 if stack.flash else 2.5 * work.sequence_length * model.heads / tensor
    none = stack.activation * (4 * residual + 2 * queries + keys + inner) + scores + gathered
    selective = residual + queries + stack.selective_kept * (2 * residual + queries + keys + products)
    if not stack.flash:
        selective = stack.activation * (4 * residual + 2 * queries + keys + inner)
    full = residual if stack.sequence_parallel else model.hidden / (tensor if stack.shard_inputs else 1)
    choices = [np.broadcast_to(value, tokens.shape) for value in (none, selective, full)]
    stays = np.choose(space.recompute, choices)
    live = np.where(space.recompute == 2, none, np.where(space.recompute == 1, none - selective, 0.0))
    return tokens * size * stays, tokens * size * live


def footprint(work: Work, space: Space, cluster: Cluster, stack: Stack, held: Holdings) -> dict[str, Array]:
    """Bytes of the fullest device, by kind: the first pipeline rank, which has most in flight, or the last, which has the
    logits."""
    model, size = work.model, compute.value_bytes(work)
    stays, live = kept(work, space, stack)
    tokens = compute.tokens_here(work, space)
    alone = space.pipeline == 1
    flying, flying_last = in_flight(space)
    edge = tokens * model.hidden * size / space.tensor
    logits = tokens * model.vocabulary / space.tensor * stack.logit_bytes
    if stack.logit_bytes == 0:
        chunk = chunk_bytes(cluster.device_type)
        logits = np.minimum(tokens * model.vocabulary / space.tensor * size, chunk)
    first = flying * held.cut.first * stays + live + flying * edge
    last = flying_last * held.cut.last * stays + live + edge
    fuller = alone | held.cut.folded | (first >= last + logits)
    activations = np.where(fuller, first, last)
    logits = np.where(alone | held.cut.folded | ~fuller, logits, 0.0)
    unit = held.block
    offloaded = space.offload == 1
    three = (space.zero == 3) & ((space.shards > 1) | offloaded)
    largest = np.maximum(unit, np.where(alone, np.maximum(held.first_edge, held.last_edge), 0.0))
    weight, gradient = compute.weight_bytes(work, stack), compute.reduce_bytes(work, stack)
    gathered = np.where(three, weight * (2 * unit + largest), 0.0)
    reducing = np.where((space.zero >= 2) & ((space.shards > 1) | offloaded), (gradient + weight) * largest, 0.0)
    held_copies = stack.cast_held if compute.casts(work) else 0.0
    casts = held_copies * np.where(space.recompute == 2, model.vocabulary * model.hidden / space.tensor, held.parameters)
    casts = np.where((space.zero == 0) | (space.shards == 1), casts, 0.0)
    whole_inputs = np.where(space.tensor > 1, stack.whole_inputs * tokens * model.hidden * size, 0.0)
    once = alone & (space.accumulation == 1) & ((space.zero == 0) | (space.shards == 1)) & (not stack.keeps_gradients)
    gradients = held.states["gradients"]
    states = {**held.states, "gradients": np.where(once, np.maximum(0.0, gradients - activations), gradients)}
    result = {
        **_without_the_hosts(work, space, states, held),
        "activations": activations,
        "logits": logits,
        "gathered": gathered + casts,
        "buffers": reducing + whole_inputs + np.where(logits > 0, 4.0 * model.vocabulary * model.hidden / space.tensor, 0.0),
        "overhead": np.full_like(activations, cluster.device.overhead),
    }
    slack = stack.fragmentation
    return {
        name: value * (slack if name in ("activations", "logits", "gathered", "buffers") else 1.0)
        for name, value in result.items()
    }


def _without_the_hosts(work: Work, space: Space, states: dict[str, Array], held: Holdings) -> dict[str, Array]:
    """What the device itself holds of the states: where they are offloaded, only what stays gathered or whole between
    micro-batches."""
    offloaded, stored = space.offload == 1, float(BYTES[work.state_dtype])
    on_host = {"weights": stored * held.sharded, "gradients": stored * held.sharded, "optimizer": 2 * stored * held.sharded}
    whole = (space.zero == 1) & (space.accumulation > 1)
    on_host["gradients"] = np.where(whole, 0.0, on_host["gradients"])
    return {name: np.where(offloaded, np.maximum(value - on_host[name], 0.0), value) for name, value in states.items()}


def _states(work: Work, space: Space, stack: Stack, engine: Engine, held: Part) -> dict[str, Array]:
    """Weights, gradients and optimizer state: the table of plan/memory.py, with this stack's widths."""
    stored = float(BYTES[work.state_dtype])
    computed = compute.value_bytes(work) * stack.weight_bytes / SHARDWISE.weight_bytes
    reduced = BYTES[work.reduce_dtype] * stack.gradient_bytes / SHARDWISE.gradient_bytes
    if not stack.one_copy:
        return _two_copies(space, stack, engine, held, stored)
    whole = engine.keeps_whole_gradients(space.accumulation) | (space.zero == 1) & stack.keeps_gradients
    weights = stored * held.shard + np.where(engine.keeps_gathered, computed * held.gathered, 0.0)
    gradients = np.where(whole, reduced * held.whole, stored * held.shard)
    return {"weights": weights, "gradients": gradients, "optimizer": 2 * stored * held.shard}


def _two_copies(space: Space, stack: Stack, engine: Engine, held: Part, stored: float) -> dict[str, Array]:
    """The same for a program that computes with a copy of its weights whatever is sharded."""
    sharded, split = engine.zero > 0, engine.splits_backward
    weights = np.where(sharded & (space.zero == 3) & ~split, 0.0, stack.weight_bytes * held.whole) + stored * held.shard
    whole = (space.zero == 1) & (stack.keeps_gradients | (space.accumulation > 1)) | split
    gradients = np.where(sharded & ~whole, stack.gradient_bytes * held.shard, stack.gradient_bytes * held.whole)
    return {"weights": weights, "gradients": gradients, "optimizer": 2 * stored * held.shard}
