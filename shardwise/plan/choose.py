"""From what was asked to what will run: a `Plan` is a complete layout with the numbers that justify it.

The degrees that the user leaves open are filled in: `data` takes the devices that are left, `zero` is the lowest stage whose
model states fit in the memory given (a lower stage communicates less). A Plan is plain data; a run keeps it as plan.json.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.config import Config, Layout, Train, divisors, nearest_layout, nearest_to, problems_of_layout
from shardwise.errors import ConfigError
from shardwise.plan.engine import shares_weights
from shardwise.plan.flops import FLOP_CONVENTION, OWN_FLOP_CONVENTION, flops_per_token
from shardwise.plan.memory import StateBytes, state_bytes
from shardwise.plan.parameters import count

GIB = 2**30
MICRO_BATCHES_A_STAGE = 4
STATE_SHARE = 0.6
"""Share of a device's memory that model states may take when `zero` is chosen; the rest is for activations."""


@dataclass(frozen=True)
class Plan:
    """A layout and the predictions that justify it."""

    layout: Layout
    micro_batch: int
    accumulation: int
    parameters: int
    flops_per_token: float
    state_bytes: StateBytes
    reason: str
    flop_convention: str = FLOP_CONVENTION
    predicted: dict[str, Any] | None = None
    """What a step will take (search/forecast.py), where the cluster is known."""

    def to_json(self) -> dict[str, Any]:
        """What plan.json holds."""
        memory = {name: value / GIB for name, value in asdict(self.state_bytes).items()}
        return {
            "layout": self.layout.model_dump(),
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "parameters": self.parameters,
            "flops_per_token": self.flops_per_token,
            "flop_convention": self.flop_convention,
            "memory_gib": {**memory, "states": self.state_bytes.total / GIB},
            "reason": self.reason,
            "predicted": self.predicted,
        }


def choose(config: Config, devices: int, memory_bytes: float | None = None, parameters: int | None = None) -> Plan:
    """The plan for this job on this many devices, each with this much memory (None: unknown). `parameters`: as counted in a
    user's own module; None: as the configuration says.
    """
    layout = _with_data(config, devices)
    problems = problems_of_layout(config.model, config.data, config.train, layout)
    if problems:
        raise ConfigError(f"the job on {devices} devices", problems)
    share = config.train.global_batch // layout.data_parallel
    micro_batch = micro_batch_size(config.train, layout)
    accumulation = share // micro_batch
    zero, reason = _zero(config, layout, accumulation, memory_bytes, parameters)
    states = state_bytes(config, layout.model_copy(update={"zero": zero}), accumulation, parameters)
    if memory_bytes is not None and states.total > memory_bytes and not layout.offload:
        raise ConfigError(f"the job on {devices} devices", [_too_large(states.total, memory_bytes, zero)])
    return Plan(
        layout=layout.model_copy(update={"zero": zero}),
        micro_batch=micro_batch,
        accumulation=accumulation,
        parameters=parameters or count(config.model),
        flops_per_token=6.0 * parameters if parameters else flops_per_token(config.model, config.data.sequence_length),
        state_bytes=states,
        reason=reason,
        flop_convention=OWN_FLOP_CONVENTION if parameters else FLOP_CONVENTION,
    )


def fit(config: Config, devices: int, least: int, memory_bytes: float | None = None) -> Plan | None:
    """The plan for as many of these devices as a layout near the one asked for can use; None if that is fewer than `least`.

    A run that lost devices goes on under it. On each number of devices, from all of them down, only the data axis is changed
    if that will do; else the nearest layout is taken.
    """
    for count_of in range(devices, least - 1, -1):
        relaxed = config.layout.model_copy(update={"data": -1})
        nearest = nearest_to(config.model, config.data, config.train, relaxed, count_of)
        for layout in (config.layout, relaxed, *([nearest] if nearest else [])):
            with suppress(ConfigError):
                return choose(config.model_copy(update={"layout": layout}), count_of, memory_bytes)
    return None


def micro_batch_size(train: Train, layout: Layout) -> int:
    """As asked; or a device's whole share, cut for a pipeline into at least four micro-batches a stage where it can be."""
    share = train.global_batch // layout.data_parallel
    if train.micro_batch or layout.pipeline == 1:
        return train.micro_batch or share
    return share // next(count for count in divisors(share) if count >= min(share, MICRO_BATCHES_A_STAGE * layout.pipeline))


def _with_data(config: Config, devices: int) -> Layout:
    layout = config.layout
    if layout.data == -1 and devices % layout.fixed:
        nearest = nearest_layout(config.model, config.data, config.train, layout, devices)
        advice = f"\n  the nearest layout that works: {nearest}" if nearest else ""
        problem = f"layout: the other axes take {layout.fixed} devices, which does not divide {devices}{advice}"
        raise ConfigError(f"the job on {devices} devices", [problem])
    if layout.data == -1:
        layout = layout.model_copy(update={"data": devices // layout.fixed})
    if layout.world != devices:
        problem = (
            f"layout: {_product(layout)} = {layout.world} devices, but {devices} are there; "
            f"start {layout.world} workers (--workers {layout.world}), or write layout.data=-1 to use them all"
        )
        raise ConfigError(f"the job on {devices} devices", [problem])
    return layout


def _product(layout: Layout) -> str:
    axes = ("pipeline", "replica", "data", "context", "tensor")
    return " x ".join(f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1) or "data 1"


def _too_large(states: float, memory: float, zero: int) -> str:
    return (
        f"model: weights, gradients and optimizer state take {states / GIB:,.1f} GiB on each device under zero = {zero}, and a "
        f"device has {memory / GIB:,.1f} GiB; use more devices, a higher layout.zero, bfloat16 states, or a smaller model"
    )


def _zero(
    config: Config, layout: Layout, accumulation: int, memory_bytes: float | None, parameters: int | None
) -> tuple[int, str]:
    if not shares_weights(layout, config.model.experts) and not layout.offload:
        return 0, "nothing to shard: no other device holds the same weights"
    if layout.zero is not None:
        return layout.zero, f"zero = {layout.zero} as asked"
    if layout.replica > 1:
        return 3, "zero = 3: replica is above 1, which asks for hybrid sharding"
    if layout.offload:
        return 3, "zero = 3: offload needs sharded states"
    if memory_bytes is None:
        return 0, "zero = 0: device memory unknown, so nothing is sharded unless asked"
    room = STATE_SHARE * memory_bytes
    for zero in range(4):
        sharded = layout.model_copy(update={"zero": zero})
        states = state_bytes(config, sharded, accumulation, parameters).total
        if states <= room:
            break
    fits = f"states take {states / GIB:.3g} GiB of the {room / GIB:.3g} GiB meant for them on each device"
    return zero, f"zero = {zero} is the lowest stage that fits: {fits}" if states <= room else f"zero = 3, yet {fits}"
