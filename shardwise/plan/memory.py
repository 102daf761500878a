"""Bytes of model state a device holds: weights, gradients and optimizer state, under each ZeRO stage.

With P parameters on a device before ZeRO, N devices that hold the same (data x context), s bytes a stored value (4, float32),
c bytes a computed value (2 for bfloat16) and r bytes a reduced gradient (4), as the last micro-batch of a step begins:

| zero | whole on each device                     | sharded over data          | bfloat16 mixed    |
| ---- | ---------------------------------------- | -------------------------- | ----------------- |
| 0    | weights s, gradients s, two moments 2s   |                            | 16P               |
| 1    | computed weights c, gradients r          | weights s, moments 2s      | 6P + 12P/N        |
| 2    | computed weights c                       | s + gradients s + 2s       | 2P + 16P/N        |
| 3    |                                          | s + gradients s + 2s       | 16P/N             |

The ZeRO paper (Rajbhandari et al., 2020) keeps gradients in 16 bits: 4P + 12P/N and 2P + 14P/N. Here gradients are summed
over micro-batches and devices in float32, which costs 2 bytes more a gradient and keeps small contributions from being
rounded away. ZeRO-1 with a single micro-batch needs no whole gradients, because each is reduced as soon as it is made; it
then costs what ZeRO-2 does.

Inside a micro-batch more is alive for a while, and belongs to the activations: without sharding, the copies of the weights in
the computing dtype that backward will need (c P at the end of forward, 2P in bfloat16); with it, the units gathered just then
and one unit's buffers. `python benchmarks/memory.py` measures both; the table above holds there within 3 %.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwise.config import SPLIT_BACKWARD, Config, Layout, Train
from shardwise.plan.parameters import parameter_shapes
from shardwise.plan.schedule import rank_of_stage
from shardwise.plan.stages import stage_blocks

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state on one device."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def state_dtype(train: Train) -> str:
    """The dtype weights and optimizer state are stored in."""
    if train.state_dtype != "auto":
        return train.state_dtype
    return "float64" if train.precision == "float64" else "float32"


def reduce_dtype(train: Train) -> str:
    """The dtype gradients are summed in, over micro-batches and over devices."""
    return "float64" if train.precision == "float64" else "float32"


def state_bytes(config: Config, layout: Layout, accumulation: int, parameters: int | None = None) -> StateBytes:
    """The table above, for the fullest device: of its stages, its part of the matrices and its experts. Of a model that is not
    ours only the number of parameters is known, and they are taken to be split evenly.
    """
    held = [(parameters / (layout.pipeline * layout.tensor), 0.0)] if parameters is not None else _held(config, layout)
    return max((_states(config, layout, accumulation, *own) for own in held), key=lambda states: states.total)


def _states(config: Config, layout: Layout, accumulation: int, dense: float, experts: float) -> StateBytes:
    zero = layout.zero or 0
    one = zero_bytes(dense, config.train, zero, layout.shards, accumulation)
    other = zero_bytes(experts, config.train, zero, layout.shards * layout.tensor // layout.expert, accumulation)
    weights, gradients = one.weights + other.weights, one.gradients + other.gradients
    if zero and layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD:
        # Backward in two halves: weights stay gathered and gradients whole until the step ends (parallel/pipeline.py).
        gathered = BYTES[config.train.precision] if zero == 3 else 0
        weights += gathered * (dense + experts)
        gradients = BYTES[reduce_dtype(config.train)] * (dense + experts)
    return StateBytes(weights, gradients, one.optimizer + other.optimizer)


def _held(config: Config, layout: Layout) -> list[tuple[float, float]]:
    """Parameters that a device of each pipeline rank holds before ZeRO: shared matrices, and experts."""
    shapes = {name: prod(shape) for name, shape in parameter_shapes(config.model).items()}
    experts = sum(size for name, size in shapes.items() if ".experts." in name)
    blocks = sum(size for name, size in shapes.items() if name.startswith("blocks.")) - experts
    first = sum(size for name, size in shapes.items() if name.startswith(("embedding.", "positions.")))
    last = sum(shapes.values()) - experts - blocks - first
    if layout.pipeline > 1 and config.model.tied:
        last += shapes["embedding.weight"]  # both ends have a copy
    ranks = rank_of_stage(layout.schedule, layout.pipeline, layout.stages_per_rank)
    counts = stage_blocks(config.model, config.data.sequence_length, len(ranks), layout.stages if layout.pipeline > 1 else None)
    dense = [0.0] * layout.pipeline
    own = [0.0] * layout.pipeline
    for stage, (rank, count) in enumerate(zip(ranks, counts, strict=True)):
        share = count / config.model.layers
        dense[rank] += blocks * share + (first if stage == 0 else 0) + (last if stage == len(ranks) - 1 else 0)
        own[rank] += experts * share
    return [(one / layout.tensor, other / layout.expert) for one, other in zip(dense, own, strict=True)]


def zero_bytes(parameters: float, train: Train, zero: int, devices: int, accumulation: int) -> StateBytes:
    """The table above, of so many parameters on so many devices."""
    stored, computed = BYTES[state_dtype(train)], BYTES[train.precision]
    whole, shard = parameters, parameters / devices
    if zero == 0 or devices == 1:
        return StateBytes(stored * whole, stored * whole, 2 * stored * whole)
    weights = stored * shard + (computed * whole if zero < 3 else 0)
    gradients = stored * shard
    if zero == 1 and accumulation > 1:
        gradients = BYTES[reduce_dtype(train)] * whole
    return StateBytes(weights, gradients, 2 * stored * shard)
