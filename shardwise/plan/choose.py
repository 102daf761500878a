"""From what was asked to what will run: `choose` makes a `Plan` for so many devices, `fit` for as many of
them as can be used.

What the user leaves open is filled in: `data` takes the devices that are left, `zero` is the lowest stage
whose model states fit in the memory given (a lower stage communicates less), stages are cut evenly by time. A
search (search/) may have filled in more before; then `asked` is the job as it was given, so that the plan can
say of each setting who decided it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardwise.config import (
    RANK_AXES,
    Config,
    Layout,
    Train,
    context_attention,
    divisors,
    least_zero,
    nearest_layout,
    nearest_to,
    problems_of_layout,
    stages_per_rank,
    with_nearby_that_divides,
)
from shardwise.config.check import problems_across
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.config.parameters import OwnParameters, count
from shardwise.drivers.registry import driver_of
from shardwise.errors import ConfigError
from shardwise.plan.cut_stages import stage_blocks
from shardwise.plan.engine import shares_weights
from shardwise.plan.float8_choice import unknown_patterns
from shardwise.plan.flops import FLOP_CONVENTION, OWN_FLOP_CONVENTION, flops_per_token, own_flops_per_token
from shardwise.plan.memory import state_bytes
from shardwise.plan.model_spec import ModelSpec
from shardwise.plan.plan import DEFAULT, Decision, Plan
from shardwise.plurals import counted
from shardwise.units import GIB

MICRO_BATCHES_A_STAGE = 4
STATE_SHARE = 0.6
"""Share of a device's memory that model states may take when `zero` is chosen; the rest is for
activations."""
OPEN = (None, -1, "auto")
"""Values of a setting that leave it open, like leaving it out."""


@dataclass(frozen=True)
class Asked:
    """A job as it was given, where something else than `choose` decided some of it since, and why that
    did."""

    config: Config
    why: str
    whys: Mapping[str, str] = field(default_factory=dict)
    """Of single settings of the layout, where the reason is another."""


def choose(
    config: Config,
    devices: int,
    memory_bytes: float | None = None,
    parameters: OwnParameters | None = None,
    asked: Asked | None = None,
) -> Plan:
    """The plan for this job on this many devices, each with this much memory (None: unknown). `parameters`:
    as counted in a user's own module; None: as the configuration says. `asked`: the job before something else
    decided some of it.
    """
    layout = _with_data(config, devices)
    problems = [
        *unknown_patterns(config.model, config.train),
        *problems_of_layout(config.model, config.data, config.train, layout),
    ]
    if problems:
        raise ConfigError(f"the job on {counted(devices, 'device')}", problems)
    whys = {"data": "the devices that the other axes leave"}
    micro_batch, whys["micro_batch"] = _micro_batch(config.train, layout)
    accumulation = config.train.global_batch // layout.data_parallel // micro_batch
    zero, whys["zero"] = _zero(config, layout, accumulation, memory_bytes, parameters)
    states = state_bytes(config, layout.model_copy(update={"zero": zero}), accumulation, parameters)
    if memory_bytes is not None and states.total > memory_bytes and not layout.offload:
        smaller = _what_fits(
            config, layout.model_copy(update={"zero": zero}), accumulation, memory_bytes, parameters
        )
        problem = _too_large(states.total, memory_bytes, zero, smaller)
        raise ConfigError(f"the job on {counted(devices, 'device')}", [problem])
    layout, more = _completed(config, layout.model_copy(update={"zero": zero}))
    length = config.data.sequence_length
    values = {**layout.model_dump(), "micro_batch": micro_batch, "recompute": config.train.recompute}
    return Plan(
        model=ModelSpec.of(config),
        layout=layout,
        micro_batch=micro_batch,
        accumulation=accumulation,
        recompute=config.train.recompute,
        decisions=_decisions(config, values, whys | more, asked),
        optimizer=config.optimizer,
        compile=config.train.compile,
        varies_rows=driver_of(config).varies_rows,
        one_copy=driver_of(config).why_unsharded is not None,
        parameters=parameters.total if parameters else count(config.model),
        frozen=parameters.frozen if parameters else 0,
        flops_per_token=own_flops_per_token(parameters)
        if parameters
        else flops_per_token(config.model, length),
        state_bytes=states,
        flop_convention=OWN_FLOP_CONVENTION if parameters else FLOP_CONVENTION,
    )


def fit(
    config: Config,
    devices: int,
    least: int,
    memory_bytes: float | None = None,
    parameters: OwnParameters | None = None,
    asked: Asked | None = None,
) -> Plan | None:
    """The plan for as many of these devices as a layout near the one asked for can use; None if that is fewer
    than `least`.

    A run that lost devices goes on under it. On each number of devices, from all of them down, only the data
    axis is changed if that will do; else the nearest layout is taken. A micro-batch that was not asked for is
    cut to what divides the share that a device has here: else devices would idle for a number that nobody
    gave.
    """
    most = config.train.micro_batch if asked and asked.config.train.micro_batch is None else None
    train = config.train.model_copy(update={"micro_batch": None}) if most else config.train
    for world in range(devices, least - 1, -1):
        relaxed = with_nearby_that_divides(
            config.layout.model_copy(update={"data": -1}), world // config.layout.fixed
        )
        nearest = nearest_to(config.model, config.data, train, relaxed, world)
        near = f"the nearest that works on {world} of {devices} devices"
        changed = Asked(asked.config if asked else config, near, asked.whys if asked else {})
        for layout in (config.layout, relaxed, *([nearest] if nearest else [])):
            with suppress(ConfigError):
                why = asked if layout is config.layout else changed
                job = config.model_copy(update={"layout": layout})
                return choose(
                    _with_micro_batch(job, world, most) if most else job, world, memory_bytes, parameters, why
                )
    return None


def _with_micro_batch(config: Config, devices: int, most: int) -> Config:
    """The job with the largest micro-batch up to `most` that divides a device's share of the batch."""
    share = max(1, config.train.global_batch // _with_data(config, devices).data_parallel)
    size = max(size for size in divisors(share) if size <= most)
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": size})})


def micro_batch_size(train: Train, layout: Layout) -> int:
    """As asked; or a device's whole share, cut for a pipeline into at least four micro-batches a stage where
    it can be."""
    return _micro_batch(train, layout)[0]


def _micro_batch(train: Train, layout: Layout) -> tuple[int, str]:
    share = train.global_batch // layout.data_parallel
    if train.micro_batch or layout.pipeline == 1:
        return train.micro_batch or share, "a device's whole share of the batch"
    parts = next(
        count for count in divisors(share) if count >= min(share, MICRO_BATCHES_A_STAGE * layout.pipeline)
    )
    return (
        share // parts,
        f"the batch in {parts} parts, where {MICRO_BATCHES_A_STAGE} a pipeline stage keep the bubble small",
    )


def _completed(config: Config, layout: Layout) -> tuple[Layout, dict[str, str]]:
    """The layout with what a pipeline and context devices need said in full, and why it is so."""
    values: dict[str, Any] = {}
    whys: dict[str, str] = {}
    if layout.compression == AUTO:
        values |= Layout().model_dump(include=set(SETTINGS))  # type: ignore[call-arg]
        whys["compression"] = "no search was made that could tell whether it pays"
    if layout.compression_axes == "replica" and not shares_weights(layout, config.model.experts):
        values["compression_axes"] = "all"
        whys["compression_axes"] = "a replica is one device here, so all sums are between replicas"
    if layout.pipeline > 1:
        stages = stages_per_rank(layout)
        blocks = stage_blocks(
            config.model, config.data.sequence_length, stages * layout.pipeline, layout.stages
        )
        values |= {"stages_per_rank": stages, "stages": blocks}
        whys |= {
            "stages_per_rank": f"what {layout.schedule} takes",
            "stages": "cut so that the slowest is as fast as can be",
        }
    if layout.context > 1:
        attention = context_attention(config.model, layout)
        values["attention"] = attention
        whys["attention"] = (
            f"heads {'divide' if attention == 'ulysses' else 'do not divide'} over the context devices"
        )
    return layout.model_copy(update=values), whys


def _decisions(
    config: Config, values: Mapping[str, Any], whys: Mapping[str, str], asked: Asked | None
) -> dict[str, Decision]:
    """Who decided each setting. What was given and came out otherwise was chosen too."""
    given = given_settings(asked.config if asked else config)
    put_in = given_settings(config) if asked else {}
    decisions = {}
    for key, value in values.items():
        name = setting_of(key)
        why = asked.why if asked and name in put_in and put_in[name] == value else whys.get(key, DEFAULT)
        why = asked.whys.get(key, why) if asked else why
        if name in given and given[name] == value:
            decisions[name] = Decision(value, True, "as asked")
        else:
            decisions[name] = Decision(
                value, False, f"{given[name]} was asked for; {why}" if name in given else why
            )
    return decisions


def setting_of(field: str) -> str:
    """The name in a job of what a plan decides."""
    return f"train.{field}" if field in ("micro_batch", "recompute") else f"layout.{field}"


def given_settings(config: Config) -> dict[str, Any]:
    """The settings that a plan decides and that this job does not leave open."""
    given = {field: getattr(config.layout, field) for field in config.layout.model_fields_set}
    given |= {
        field: getattr(config.train, field)
        for field in ("micro_batch", "recompute")
        if field in config.train.model_fields_set
    }
    return {setting_of(field): value for field, value in given.items() if value not in OPEN}


def _with_data(config: Config, devices: int) -> Layout:
    layout = config.layout
    if layout.data == -1 and devices % layout.fixed:
        nearest = nearest_layout(config.model, config.data, config.train, layout, devices)
        advice = f"\n  the nearest layout that works: {nearest}" if nearest else ""
        problem = (
            f"layout: the other axes take {counted(layout.fixed, 'device')}, which does not divide "
            f"{devices}{advice}"
        )
        raise ConfigError(f"the job on {counted(devices, 'device')}", [problem])
    if layout.data == -1:
        layout = layout.model_copy(update={"data": devices // layout.fixed})
    if layout.world != devices:
        problem = (
            f"layout: {_product(layout)} = {counted(layout.world, 'device')}, but {devices} are there; "
            f"start {counted(layout.world, 'worker')} (--workers {layout.world}), or write layout.data=-1 to "
            f"use them all"
        )
        raise ConfigError(f"the job on {counted(devices, 'device')}", [problem])
    return layout


def _product(layout: Layout) -> str:
    used = [f"{axis} {getattr(layout, axis)}" for axis in RANK_AXES if getattr(layout, axis) > 1]
    return " x ".join(used) or "data 1"


def _what_fits(
    config: Config, layout: Layout, accumulation: int, memory: float, parameters: OwnParameters | None
) -> list[str]:
    """Single settings with which the states of a model that is too large for its devices would fit on
    them."""

    def fits(job: Config, zero: int) -> bool:
        return (
            state_bytes(job, layout.model_copy(update={"zero": zero}), accumulation, parameters).total
            <= memory
        )

    assert layout.zero is not None, "it is chosen"
    shards = shares_weights(layout, config.model.experts) and driver_of(config).why_unsharded is None
    most = 0 if config.optimizer.needs_whole_states(layout) or not shards else 3
    zero = next((zero for zero in range(layout.zero + 1, most + 1) if fits(config, zero)), None)
    half = config.model_copy(update={"train": config.train.model_copy(update={"state_dtype": "bfloat16"})})
    can_halve = config.train.precision in ("bfloat16", "float8") and not list(problems_across(dict(half)))
    return [
        *([f"layout.zero = {zero}"] if zero is not None else []),
        *(["train.state_dtype = 'bfloat16'"] if can_halve and fits(half, layout.zero) else []),
    ]


def _too_large(states: float, memory: float, zero: int, smaller: Sequence[str]) -> str:
    advice = ", ".join(["more devices", *smaller, "or a smaller model"])
    return (
        f"model: weights, gradients and optimizer state take {states / GIB:,.1f} GiB on each device under "
        f"zero = {zero}, and a "
        f"device has {memory / GIB:,.1f} GiB; use {advice}"
    )


def _zero(
    config: Config,
    layout: Layout,
    accumulation: int,
    memory_bytes: float | None,
    parameters: OwnParameters | None,
) -> tuple[int, str]:
    if not shares_weights(layout, config.model.experts) and not layout.offload:
        return 0, "nothing to shard: no other device holds the same weights"
    if why := driver_of(config).why_unsharded:
        return 0, why
    if layout.zero is not None:
        return layout.zero, "as asked"
    if config.optimizer.needs_whole_states(layout):
        return 0, f"{config.optimizer.title} compresses whole momenta"
    if layout.replica > 1:
        return 3, "replica is above 1, which asks for hybrid sharding"
    if layout.offload:
        return 3, "offload needs sharded states"
    least = least_zero(layout)
    if memory_bytes is None:
        return (
            least,
            f"device memory is unknown, so {'no more' if least else 'nothing'} is sharded unless asked",
        )
    room = STATE_SHARE * memory_bytes
    for zero in range(least, 4):
        sharded = layout.model_copy(update={"zero": zero})
        states = state_bytes(config, sharded, accumulation, parameters).total
        if states <= room:
            break
    fits = f"states take {states / GIB:.3g} GiB of the {room / GIB:.3g} GiB meant for them on each device"
    return zero, f"the lowest stage that fits: {fits}" if states <= room else f"the highest stage, yet {fits}"
