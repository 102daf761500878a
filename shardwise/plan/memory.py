"""Bytes of model state on a device: weights, gradients and optimizer state, for each ZeRO stage.

If gradients are compressed, their errors take r P more in every stage (comm/compressed_sums.py).

With P parameters on a device before ZeRO, N devices that hold the same (data x context), s bytes a stored
value (4, float32), c bytes a computed value (2 for bfloat16) and r bytes a reduced gradient (4), as the last
micro-batch of a step begins:

| zero | whole on each device                     | sharded over data          | bfloat16 mixed    |
| ---- | ---------------------------------------- | -------------------------- | ----------------- |
| 0    | weights s, gradients s, states ks        |                            | 16P               |
| 1    | computed weights c, gradients r          | weights s, states ks       | 6P + 12P/N        |
| 2    | computed weights c                       | s + gradients s + ks       | 2P + 16P/N        |
| 3    |                                          | s + gradients s + ks       | 16P/N             |

An optimizer keeps k states of each parameter (`Optimizer.slots`); the last column is AdamW's, with two.

The ZeRO paper (Rajbhandari et al., 2020) keeps gradients in 16 bits: 4P + 12P/N and 2P + 14P/N. Here
gradients are summed over micro-batches and devices in float32, which costs 2 bytes more a gradient and keeps
small contributions from being rounded away. ZeRO-1 with a single micro-batch needs no whole gradients,
because each is reduced as soon as it is made; it then costs what ZeRO-2 does.

Inside a micro-batch more is alive for a while, and belongs to the activations: without sharding, the copies
of the weights in the computing dtype that backward will need (c P at the end of forward, 2P in bfloat16);
with it, the units gathered just then and one unit's buffers. `python benchmarks/memory.py` measures both.

P and P/N stand for counts weight by weight (plan/slices.py): ZeRO pads rows until they divide, so gathered
weights and shards are a little more than P and P/N, and routers of experts are computed with in r bytes.
Where FSDP2 runs on shards of one device (zero = 0 beside other axes), gradients wait for the last micro-batch
in r bytes. With these the table is what ranks hold, to the byte (tests/parallel/test_predictions.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Config, Layout
from shardwise.config.compression import SumCompression
from shardwise.config.dtype_names import BYTES
from shardwise.config.parameters import ModuleParameters
from shardwise.config.schedules import Numbers
from shardwise.plan.cut_stages import stage_blocks
from shardwise.plan.dtypes import Dtypes
from shardwise.plan.engine import engine_of
from shardwise.plan.grid import expert_shards
from shardwise.plan.schedule import rank_of_stage
from shardwise.plan.slices import Part, parts_of, with_peers


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state on one device."""

    weights: float
    gradients: float
    optimizer: float
    residuals: float = 0.0
    """Bytes of the errors of compressed gradients."""

    @property
    def total(self) -> float:
        """Total bytes of model state."""
        return self.weights + self.gradients + self.optimizer + self.residuals


def state_bytes(
    config: Config, layout: Layout, accumulation: int, parameters: ModuleParameters | None = None
) -> StateBytes:
    """Return the bytes of model state on the device that has most, counted weight by weight.

    Of a user's module only the number of parameters is known, and they are assumed to be split evenly. Frozen
    parameters have neither gradients nor optimizer states.
    """
    engine = engine_of(layout, config.model.experts)
    whole = _Whole(weights=engine.keeps_gathered, gradients=engine.keeps_whole_gradients(accumulation))
    if parameters is not None:
        held, trained = (_even_part(count, layout) for count in (parameters.total, parameters.trained))
        return _states(held, trained, config, layout, whole)
    states = (_states(part, part, config, layout, whole) for part in _rank_parts(config, layout))
    return max(states, key=lambda states: states.total)


@dataclass(frozen=True)
class _Whole:
    """Whether tensors are kept unsharded between the micro-batches of a step."""

    weights: bool
    """Whether gathered weights are kept, in the dtype of computation."""
    gradients: bool
    """Whether unreduced gradients are kept, in the dtype of sums."""


def _states(part: Part, trained: Part, config: Config, layout: Layout, whole: _Whole) -> StateBytes:
    dtypes = Dtypes.of(config.train)
    stored, computed, reduced = BYTES[dtypes.states], BYTES[dtypes.compute], BYTES[dtypes.sums]
    wider = reduced - computed
    weights = stored * part.shard + (computed * part.gathered + wider * part.wide if whole.weights else 0)
    if layout.zero == 3 and layout.backward_shards is not None:
        weights += computed * part.gathered / layout.backward_shards  # the neighbours' copy for backward
    gradients = reduced * trained.whole if whole.gradients else stored * trained.shard
    residuals = reduced * residual_numbers(trained, SumCompression.of(layout), layout.zero, layout.replica)
    optimizer = len(config.optimizer.slots) * stored * trained.shard
    return StateBytes(weights, gradients, optimizer, residuals)


def residual_numbers(part: Part, how: SumCompression | None, zero: Numbers, replica: Numbers) -> Numbers:
    """Return the number of compression errors that a device keeps: one per number that it sends."""
    if how is None or not how.feedback:
        return 0.0
    sent = part.compressed * ((zero == 0) | (how.axes == "all"))
    return sent + part.compressed_shard * ((zero > 0) & (replica > 1))


def _rank_parts(config: Config, layout: Layout) -> list[Part]:
    """Return the weights on a device of each pipeline rank: blocks with their experts, embedding and head."""
    sharded = bool(layout.zero)
    shards = (layout.shards, expert_shards(layout)) if sharded else (1, 1)
    parts = parts_of(config.model, layout.tensor, shards[0], layout.expert, shards[1])
    parts = with_peers(parts, layout.shards, expert_shards(layout), layout.zero or 0, layout.replica)
    ranks = rank_of_stage(layout.schedule, layout.pipeline, layout.stages_per_rank)
    counts = stage_blocks(
        config.model, config.data.sequence_length, len(ranks), layout.stages if layout.pipeline > 1 else None
    )
    held = [Part()] * layout.pipeline
    for stage, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
        held[rank] += (parts.block + parts.experts) * count
        if stage == 0:
            held[rank] += parts.first
        if stage == len(ranks) - 1:
            held[rank] += parts.last + (parts.copy if layout.pipeline > 1 else Part())
        if layout.pipeline > 1 and stage in (0, len(ranks) - 1):  # what two stages sum is not compressed
            held[rank] += Part(
                compressed=-parts.copy.compressed, compressed_shard=-parts.copy.compressed_shard
            )
    return held


def _even_part(count: int, layout: Layout) -> Part:
    """Return a device's part of parameters that are split evenly."""
    whole, devices = count / (layout.pipeline * layout.tensor), layout.shards if layout.zero else 1
    return Part(whole, whole / devices, whole, 0.0, whole, whole / devices)
