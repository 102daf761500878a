"""Make a `Plan` from a job: `choose` for a number of devices, `fit` for as many of them as can be used.

Settings that the user leaves out are filled in: `data` takes the remaining devices, `zero` is the lowest
stage whose model states fit in a share of the memory (`STATE_SHARE`; a lower stage communicates less), or 3
with several replicas or offloading, and stages are cut evenly by time.
If a search (search/) has decided settings before, `asked` is the job as the user wrote it, so that the plan
can record who decided each setting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from shardwise.config import (
    RANK_AXES,
    Config,
    Layout,
    Train,
    context_attention,
    divisors,
    least_zero,
    nearest_layout_settings,
    nearest_possible_layout,
    problems_of_layout,
    stage_count,
    stages_per_rank,
    with_dividing_backward_shards,
)
from shardwise.config.check import problems_across
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.config.parameters import ModuleParameters, count
from shardwise.drivers.registry import driver_of
from shardwise.errors import ConfigError
from shardwise.files import Json
from shardwise.plans.cut_stages import stage_blocks
from shardwise.plans.engine import shares_weights
from shardwise.plans.float8_choice import unknown_patterns
from shardwise.plans.flops import (
    FLOP_CONVENTION,
    MODULE_FLOP_CONVENTION,
    flops_per_token,
    module_flops_per_token,
)
from shardwise.plans.memory import state_bytes
from shardwise.plans.model_spec import ModelSpec
from shardwise.plans.plan import DEFAULT, Decision, Plan
from shardwise.plurals import counted
from shardwise.units import GIB

MICRO_BATCHES_PER_STAGE = 4
"""Number of micro-batches per pipeline stage that keeps the bubble small."""
STATE_SHARE = 0.6
"""Share of a device's memory for model states when `zero` is chosen; the rest is for activations."""
OPEN = (None, -1, "auto")
"""Values of a setting that mean the same as leaving it out."""


@dataclass(frozen=True)
class OriginalJob:
    """A job as the user wrote it, before a search or a change of devices decided some settings."""

    config: Config
    why: str
    """Reason for the settings that were decided."""
    whys: Mapping[str, str] = field(default_factory=dict)
    """Reasons for single settings of the layout, where they differ from `why`."""


def choose(
    config: Config,
    devices: int,
    memory_bytes: float | None = None,
    parameters: ModuleParameters | None = None,
    asked: OriginalJob | None = None,
) -> Plan:
    """Return the plan for a job on a number of devices with this much memory each (None: unknown).

    `parameters` are the counts of a user's module; None: the transformer's. `asked` is the job as the user
    wrote it, if something else decided some settings since.
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
    layout = layout.model_copy(update={"zero": zero})
    states = state_bytes(config, layout, accumulation, parameters)
    if memory_bytes is not None and states.total > memory_bytes and not layout.offload:
        smaller = _what_fits(config, layout, accumulation, memory_bytes, parameters)
        problem = _too_large(states.total, memory_bytes, zero, smaller)
        raise ConfigError(f"the job on {counted(devices, 'device')}", [problem])
    layout, more = _completed(config, layout)
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
        flops_per_token=module_flops_per_token(parameters)
        if parameters
        else flops_per_token(config.model, config.data.sequence_length),
        state_bytes=states,
        flop_convention=MODULE_FLOP_CONVENTION if parameters else FLOP_CONVENTION,
    )


def fit(
    config: Config,
    devices: int,
    least: int,
    memory_bytes: float | None = None,
    parameters: ModuleParameters | None = None,
    asked: OriginalJob | None = None,
) -> Plan | None:
    """Return the plan for the largest number of these devices on which the job's layout, or one near it, is
    possible; None if that number is below `least`.

    A run that lost devices continues with this plan. The numbers of devices are tried from all of them down.
    If the job's layout does not work on a number, the data axis is changed; if that does not help, the
    nearest layout is taken. A micro-batch that the user did not give is lowered to a divisor of a device's
    share, so that no device is left out because of it.
    """
    most = config.train.micro_batch if asked and asked.config.train.micro_batch is None else None
    train = config.train.model_copy(update={"micro_batch": None}) if most else config.train
    for world in range(devices, least - 1, -1):
        relaxed = with_dividing_backward_shards(
            config.layout.model_copy(update={"data": -1}), world // config.layout.degrees_without_data
        )
        nearest = nearest_possible_layout(config.model, config.data, train, relaxed, world)
        near = f"the nearest that works on {world} of {devices} devices"
        changed = OriginalJob(asked.config if asked else config, near, asked.whys if asked else {})
        for layout in filter(None, (config.layout, relaxed, nearest)):
            with suppress(ConfigError):
                why = asked if layout is config.layout else changed
                job = config.model_copy(update={"layout": layout})
                job = _with_micro_batch(job, world, most) if most else job
                return choose(job, world, memory_bytes, parameters, why)
    return None


def _with_micro_batch(config: Config, devices: int, most: int) -> Config:
    """Return the job with the largest micro-batch up to `most` that divides a device's share of the batch."""
    share = max(1, config.train.global_batch // _with_data(config, devices).data_parallel)
    size = max(size for size in divisors(share) if size <= most)
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch": size})})


def micro_batch_size(train: Train, layout: Layout) -> int:
    """Return the job's micro-batch, or a device's share of the batch, which a pipeline cuts into several."""
    return _micro_batch(train, layout)[0]


def _micro_batch(train: Train, layout: Layout) -> tuple[int, str]:
    share = train.global_batch // layout.data_parallel
    if train.micro_batch or layout.pipeline == 1:
        return train.micro_batch or share, "a device's whole share of the batch"
    wanted = min(share, MICRO_BATCHES_PER_STAGE * layout.pipeline)
    parts = next(count for count in divisors(share) if count >= wanted)
    per_stage = f"{MICRO_BATCHES_PER_STAGE} a pipeline stage"
    why = f"the batch in {parts} parts, where {per_stage} keep the bubble small"
    return share // parts, why


def _completed(config: Config, layout: Layout) -> tuple[Layout, dict[str, str]]:
    """Return the layout with its compression, pipeline and attention filled in, and the reasons."""
    values: Json = {}
    whys: dict[str, str] = {}
    if layout.compression == AUTO:
        values |= Layout().model_dump(include=set(SETTINGS))  # type: ignore[call-arg]
        whys["compression"] = "no search was made that could tell whether it pays"
    if layout.compression_axes == "replica" and not shares_weights(layout, config.model.experts):
        values["compression_axes"] = "all"
        whys["compression_axes"] = "a replica is one device here, so all sums are between replicas"
    if layout.pipeline > 1:
        blocks = stage_blocks(config.model, config.data.sequence_length, stage_count(layout), layout.stages)
        values |= {"stages_per_rank": stages_per_rank(layout), "stages": blocks}
        whys |= {
            "stages_per_rank": f"the default of schedule {layout.schedule}",
            "stages": "cut so that the slowest stage takes the least time",
        }
    if layout.context > 1:
        attention = context_attention(config.model, layout)
        values["attention"] = attention
        whys["attention"] = (
            f"heads {'divide' if attention == 'ulysses' else 'do not divide'} over the context devices"
        )
    return layout.model_copy(update=values), whys


def _decisions(
    config: Config, values: Mapping[str, object], whys: Mapping[str, str], asked: OriginalJob | None
) -> dict[str, Decision]:
    """Return who decided each setting. A setting that differs from the user's value counts as chosen."""
    given = given_settings(asked.config if asked else config)
    decided = given_settings(config) if asked else {}
    decisions = {}
    for key, value in values.items():
        name, why = setting_of(key), whys.get(key, DEFAULT)
        if asked:
            is_decided = name in decided and decided[name] == value
            why = asked.whys.get(key, asked.why if is_decided else why)
        if name not in given:
            decisions[name] = Decision(value, False, why)
        elif given[name] == value:
            decisions[name] = Decision(value, True, "as asked")
        else:
            decisions[name] = Decision(value, False, f"{given[name]} was asked for; {why}")
    return decisions


def setting_of(field: str) -> str:
    """Return the name that a field of a plan has in a job."""
    return f"train.{field}" if field in ("micro_batch", "recompute") else f"layout.{field}"


def given_settings(config: Config) -> Json:
    """Return those settings that a job gives although a plan could decide them."""
    given = {field: getattr(config.layout, field) for field in config.layout.model_fields_set}
    given |= {
        field: getattr(config.train, field)
        for field in ("micro_batch", "recompute")
        if field in config.train.model_fields_set
    }
    return {setting_of(field): value for field, value in given.items() if value not in OPEN}


def _with_data(config: Config, devices: int) -> Layout:
    layout = config.layout
    if layout.data == -1 and devices % layout.degrees_without_data:
        nearest = nearest_layout_settings(config.model, config.data, config.train, layout, devices)
        advice = f"\n  the nearest layout that works: {nearest}" if nearest else ""
        problem = (
            f"layout: the other axes take {counted(layout.degrees_without_data, 'device')}, which does not "
            f"divide {devices}{advice}"
        )
        raise ConfigError(f"the job on {counted(devices, 'device')}", [problem])
    if layout.data == -1:
        layout = layout.model_copy(update={"data": devices // layout.degrees_without_data})
    if layout.world != devices:
        problem = (
            f"layout: {_product(layout)} = {counted(layout.world, 'device')}, but {devices} are there; start "
            f"{counted(layout.world, 'worker')} (--workers {layout.world}), or write layout.data=-1 to use "
            "them all"
        )
        raise ConfigError(f"the job on {counted(devices, 'device')}", [problem])
    return layout


def _product(layout: Layout) -> str:
    used = [f"{axis} {getattr(layout, axis)}" for axis in RANK_AXES if getattr(layout, axis) > 1]
    return " x ".join(used) or "data 1"


def _what_fits(
    config: Config, layout: Layout, accumulation: int, memory: float, parameters: ModuleParameters | None
) -> list[str]:
    """Return the single settings that would make the states of this model fit."""

    def fits(job: Config, zero: int) -> bool:
        sharded = layout.model_copy(update={"zero": zero})
        return state_bytes(job, sharded, accumulation, parameters).total <= memory

    assert layout.zero is not None, "zero is chosen"
    shards = shares_weights(layout, config.model.experts) and driver_of(config).why_unsharded is None
    most = 0 if config.optimizer.needs_whole_states(layout) or not shards else 3
    zero = next((zero for zero in range(layout.zero + 1, most + 1) if fits(config, zero)), None)
    half = config.model_copy(update={"train": config.train.model_copy(update={"state_dtype": "bfloat16"})})
    can_halve = not problems_across(dict(half))
    settings = [] if zero is None else [f"layout.zero = {zero}"]
    if can_halve and fits(half, layout.zero):
        settings.append("train.state_dtype = 'bfloat16'")
    return settings


def _too_large(states: float, memory: float, zero: int, smaller: Sequence[str]) -> str:
    advice = ", ".join(["more devices", *smaller, "or a smaller model"])
    return (
        f"model: weights, gradients and optimizer state take {states / GIB:,.1f} GiB on each device under "
        f"zero = {zero}, and a device has {memory / GIB:,.1f} GiB; use {advice}"
    )


def _zero(
    config: Config,
    layout: Layout,
    accumulation: int,
    memory_bytes: float | None,
    parameters: ModuleParameters | None,
) -> tuple[int, str]:
    """Return the ZeRO stage of a layout, and the reason for it."""
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
        nothing = "no more" if least else "nothing"
        return least, f"device memory is unknown, so {nothing} is sharded unless asked"
    return _lowest_zero(config, layout, accumulation, STATE_SHARE * memory_bytes, parameters)


def _lowest_zero(
    config: Config, layout: Layout, accumulation: int, allowed: float, parameters: ModuleParameters | None
) -> tuple[int, str]:
    """Return the lowest ZeRO stage whose states take at most `allowed` bytes, or 3; and the reason for it."""
    for zero in range(least_zero(layout), 4):
        sharded = layout.model_copy(update={"zero": zero})
        states = state_bytes(config, sharded, accumulation, parameters).total
        if states <= allowed:
            break
    fits = f"states take {states / GIB:.3g} GiB of the {allowed / GIB:.3g} GiB meant for them on each device"
    reason = "the lowest stage that fits: " if states <= allowed else "the highest stage, yet "
    return zero, reason + fits
