"""Bytes of model states on a device: weights, gradients and optimizer states, for each ZeRO stage.

A device has P parameters before ZeRO, which N devices hold (data x context). A stored value has s bytes (4,
float32), a value in computation c bytes (2 for bfloat16), and a reduced gradient r bytes (4). When the last
micro-batch of a step begins, there are:

| zero | whole on each device                     | sharded over data          | bfloat16 mixed    |
| ---- | ---------------------------------------- | -------------------------- | ----------------- |
| 0    | weights s, gradients s, states ks        |                            | 16P               |
| 1    | computed weights c, gradients r          | weights s, states ks       | 6P + 12P/N        |
| 2    | computed weights c                       | s + gradients s + ks       | 2P + 16P/N        |
| 3    |                                          | s + gradients s + ks       | 16P/N             |

An optimizer keeps k states of each parameter (`Optimizer.slots`); the last column is that of AdamW, with two.
If gradients are compressed, their errors take r P more in every stage (comm/compressed_sums.py).

The ZeRO paper (Rajbhandari et al., 2020) keeps gradients in 16 bits: 4P + 12P/N and 2P + 14P/N. Here
gradients are summed over micro-batches and devices in float32. That costs 2 bytes more per gradient, and
small contributions are not rounded away. ZeRO-1 with a single micro-batch needs no whole gradients, because
each is reduced as soon as it is made. Then it costs as much as ZeRO-2.

Some memory is in use only inside a micro-batch, and counts as activations. Without sharding these are the
copies of the weights in the computing dtype, which backward needs (c P at the end of forward, 2P in
bfloat16). With sharding they are the gathered units and the buffers of one unit.
`python benchmarks/memory.py` measures both.

P and P/N stand for counts weight by weight (plans/slices.py). ZeRO pads rows until they divide, so gathered
weights and shards are a little larger than P and P/N. Routers of experts are gathered in r bytes. If FSDP2
runs on shards of one device (zero = 0 beside other axes), gradients wait for the last micro-batch in r bytes.
With these corrections the table is exact to the byte (tests/parallel/test_predictions.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config import Config, Layout
from shardwise.config.compression import SumCompression
from shardwise.config.dtype_names import BYTES
from shardwise.config.parameters import ModuleParameters
from shardwise.config.schedules import Numbers, is_in_a_v, stages_per_rank
from shardwise.plans.cut_stages import stage_blocks
from shardwise.plans.dtypes import Dtypes
from shardwise.plans.engine import Choices, Engine, engine_of
from shardwise.plans.grid import expert_shards
from shardwise.plans.schedule import rank_of_stage
from shardwise.plans.slices import Part, parts_of, with_peers


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state on one device; for the cost model, arrays with one entry per candidate."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    residuals: Numbers = 0.0
    """Bytes of the errors of compressed gradients."""

    @property
    def total(self) -> float:
        """Total bytes of model state."""
        total: float = self.weights + self.gradients + self.optimizer + self.residuals
        return total


def state_bytes(
    config: Config, layout: Layout, accumulation: int, parameters: ModuleParameters | None = None
) -> StateBytes:
    """Return the bytes of model states on the fullest device, counted weight by weight.

    The parameters of a user's module are assumed to be split evenly, because only their number is known.
    Frozen parameters have neither gradients nor optimizer states.
    """
    engine = engine_of(layout, config.model.experts)
    dtypes = Dtypes.of(config.train)
    form = StateFormat(
        stored=BYTES[dtypes.states],
        computed=BYTES[dtypes.compute],
        wide=BYTES[dtypes.sums],
        summed=BYTES[dtypes.sums],
        optimizer=config.optimizer.state_bytes(BYTES[dtypes.states]),
        keeps_whole_gradients=engine.keeps_whole_gradients(accumulation),
        compression=SumCompression.of(layout),
        backward_shards=layout.backward_shards,
    )
    if parameters is not None:
        held, trained = (_even_part(count, layout) for count in (parameters.total, parameters.trained))
        return form.state_bytes(held, trained, layout, engine)
    states = (form.state_bytes(part, part, layout, engine) for part in _rank_parts(config, layout))
    return max(states, key=lambda states: states.total)


@dataclass(frozen=True)
class StateFormat:
    """How a program stores model states. Its numbers may be arrays with one entry per candidate."""

    stored: Numbers
    """Bytes of a number between uses: of a weight, a reduced gradient or an optimizer state."""
    computed: Numbers
    """Bytes of a gathered weight."""
    wide: Numbers
    """Bytes of a gathered weight that is used in the wide dtype."""
    summed: Numbers
    """Bytes of an unreduced gradient, and of a compression error."""
    optimizer: float
    """Bytes of the optimizer states of a weight."""
    keeps_whole_gradients: Numbers
    """Whether unreduced gradients are kept between the micro-batches of a step."""
    compression: SumCompression | None
    backward_shards: int | None
    """Number of neighbours that keep a copy of the weights for backward with ZeRO-3; None: no copy."""

    def state_bytes(self, held: Part, trained: Part, layout: Choices, engine: Engine) -> StateBytes:
        """Return the bytes of states of the weights that a device holds, of which some are trained."""
        wider, unreduced = self.wide - self.computed, self.keeps_whole_gradients
        gathered = self.computed * held.gathered
        weights = self.stored * held.shard + engine.keeps_gathered * (gathered + wider * held.wide)
        if self.backward_shards is not None:
            weights = weights + (layout.zero == 3) * (gathered / self.backward_shards)
        gradients = self.summed * trained.whole * unreduced + self.stored * trained.shard * (unreduced == 0)
        residuals = residual_numbers(trained, self.compression, layout.zero, layout.replica)
        return StateBytes(weights, gradients, self.optimizer * trained.shard, self.summed * residuals)


def residual_numbers(
    part: Part, compression: SumCompression | None, zero: Numbers, replica: Numbers
) -> Numbers:
    """Return the number of compression errors that a device keeps: one per element that it sends."""
    if compression is None or not compression.feedback:
        return 0.0
    sent = part.compressed * ((zero == 0) | (compression.axes == "all"))
    return sent + part.compressed_shard * ((zero > 0) & (replica > 1))


def _rank_parts(config: Config, layout: Layout) -> list[Part]:
    """Return the weights on a device of each pipeline rank: blocks with their experts, embedding and head."""
    dense, experts = layout.shards, expert_shards(layout)
    shards, shards_of_experts = (dense, experts) if layout.zero else (1, 1)
    parts = parts_of(config.model, layout.tensor, shards, layout.expert, shards_of_experts)
    parts = with_peers(parts, dense, experts, layout.zero or 0, layout.replica)
    ranks = rank_of_stage(layout.pipeline, stages_per_rank(layout), is_in_a_v(layout))
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
        if layout.pipeline > 1 and stage in (0, len(ranks) - 1):
            # Gradients that two stages sum are not compressed.
            copy = Part(compressed=parts.copy.compressed, compressed_shard=parts.copy.compressed_shard)
            held[rank] += copy * -1
    return held


def _even_part(count: int, layout: Layout) -> Part:
    """Return a device's part of parameters that are split evenly."""
    whole, devices = count / (layout.pipeline * layout.tensor), layout.shards if layout.zero else 1
    return Part(whole, whole / devices, whole, 0.0, whole, whole / devices)
