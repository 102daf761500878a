"""Rules about settings that have no effect, of two kinds.

A setting that has no effect on any devices is refused, because its author expects one (config/check.py lists
those rules). A setting that has no effect with the layout and the devices of one run is named in the header
of that run instead, because the same job may run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.config.compression import SETTINGS
from shardwise.config.layout import Layout
from shardwise.config.model import Model
from shardwise.config.schedules import DEFAULT_SCHEDULE
from shardwise.config.schema import Config, Data, Observe, Run, Train, brings_data
from shardwise.drivers.registry import driver_of
from shardwise.section import Section

_EXPERT_SETTINGS = (
    "experts_per_token",
    "expert_ffn",
    "shared_experts",
    "balance_loss",
    "balance_bias",
    "router_z_loss",
)
_FLOAT8_SETTINGS = ("float8_scaling", "float8_head", "float8_leave_out")


# -- refused: no effect on any devices -----------------------------------------------------------------------


def window_settings(model: Model) -> Iterator[str]:
    """Refuse a choice of blocks for a window if there is no window."""
    if model.window is None and model.window_layers != "all":
        yield (
            f"model.window_layers = {model.window_layers!r}: has no effect without model.window; give that, "
            "or leave both out"
        )


def expert_settings(model: Model) -> Iterator[str]:
    """Refuse settings of experts; the model has no experts."""
    for name in _EXPERT_SETTINGS:
        if value := getattr(model, name):
            yield (
                f"model.{name} = {value}: has no effect without experts; leave it out, or give model.experts"
            )


def float8_settings(train: Train) -> Iterator[str]:
    """Refuse settings of float8 in any other precision."""
    given = [name for name in _FLOAT8_SETTINGS if not _is_default(train, name)]
    if given and train.precision != "float8":
        yield f"train.{given[0]}: has no effect without train.precision = 'float8'; leave it out, or set that"


def compression_settings(layout: Layout) -> Iterator[str]:
    """Refuse settings of compression; the layout has no codec."""
    for name in SETTINGS:
        if not _is_default(layout, name):
            yield (
                f"layout.{name} = {getattr(layout, name)!r}: has no effect without layout.compression; leave "
                "it out, or name a codec"
            )


def names_of_mirrors(observe: Observe) -> Iterator[str]:
    """Refuse names for services that the run is not mirrored to."""
    if observe.wandb_entity is not None and observe.wandb is None:
        yield "observe.wandb_entity: has no effect without observe.wandb; leave it out, or name a project"
    for name in ("name", "group", "tags"):
        if not _is_default(observe, name) and observe.wandb is None and observe.mlflow is None:
            yield f"observe.{name}: has no effect without observe.wandb or observe.mlflow; leave it out"


def sample_of_program(observe: Observe, model: Model, data: Data, run: Run) -> Iterator[str]:
    """Refuse a text to continue where a program brings the model or the data."""
    own_data = data.source is None and not data.sources
    if observe.sample and run.program is not None and (model.is_of_program or own_data):
        yield (
            "observe.sample: has no effect with the model or the dataset of a program, which knows no "
            "tokenizer; leave it out"
        )


def settings_of_driver(driver: str, section: Section) -> Iterator[str]:
    """Refuse settings of a driver that the job does not use."""
    for name in section.changed_keys():
        yield f"{driver}.{name}: has no effect without train.driver = {driver!r}; leave it out, or set that"


def _is_default(section: Section, name: str) -> bool:
    return bool(getattr(section, name) == type(section).model_fields[name].default)


# -- named in a run's header: no effect in this run ----------------------------------------------------------


def idle_settings(config: Config, layout: Layout, on_cpu: bool, gpus: int) -> list[str]:
    """Return the settings that have no effect with this run's layout and devices, and why.

    `gpus` is the number of GPUs of the machine, which workers on the CPU do not use.
    """
    idle = {
        **_idle_in_layout(config, layout),
        **_idle_on_devices(config, layout, on_cpu, gpus),
        **_idle_in_training(config),
        **_idle_in_program(config),
    }
    return [note for note, is_idle in idle.items() if is_idle]


def _idle_in_layout(config: Config, layout: Layout) -> dict[str, bool]:
    asked, alone = config.layout.zero, layout.pipeline == 1
    return {
        f"layout.zero = {asked}: no other device holds the same weights": bool(asked) and layout.zero == 0,
        f"layout.schedule = {layout.schedule!r}: there is no pipeline": alone
        and layout.schedule != DEFAULT_SCHEDULE,
        "layout.stages: there is no pipeline": alone and bool(layout.stages or layout.stages_per_rank),
        f"layout.attention = {layout.attention!r}: no devices share a sequence": layout.context == 1
        and layout.attention != "auto",
    }


def _idle_on_devices(config: Config, layout: Layout, on_cpu: bool, gpus: int) -> dict[str, bool]:
    unused_gpus = on_cpu and gpus > 0 and config.run.device == "auto" and not driver_of(config).ranks_on_host
    return {
        "layout.offload: states are in host memory already": layout.offload and on_cpu,
        "GPUs: there are more workers than GPUs, so all compute on the CPU; with run.device=cuda they "
        "share": unused_gpus,
        "train.deterministic: CPUs add in one order anyway": on_cpu and config.train.deterministic,
    }


def _idle_in_training(config: Config) -> dict[str, bool]:
    train = config.train
    return {
        "train.evaluate_every: data.held_out is 0": train.evaluate_every > 0
        and config.data.held_out == 0
        and not _evaluates_itself(config),
        "train.decay: only the wsd schedule has it": train.decay is not None and train.schedule != "wsd",
        f"train.schedule: warm-up lasts {train.warmup} of {train.steps} steps": train.warmup >= train.steps,
        "observe.trace: the first step is left out, and there is no other": config.observe.trace > 0
        and train.steps == 1,
    }


def _idle_in_program(config: Config) -> dict[str, bool]:
    """Return the settings in whose place a program calls the engine."""
    train, itself = config.train, _evaluates_itself(config)
    return {
        "train.clip: a program limits gradients with engine.clip_grad_norm": config.run.program is not None
        and "clip" in train.model_fields_set,
        "train.evaluate_every: the program evaluates with engine.evaluate": itself
        and train.evaluate_every > 0,
        "train.evaluate_sequences: the program evaluates with engine.evaluate": itself
        and not _is_default(train, "evaluate_sequences"),
    }


def _evaluates_itself(config: Config) -> bool:
    """Whether held-out data are evaluated by the program alone, because it brings the model or the data."""
    return config.run.program is not None and (config.model.is_of_program or brings_data(config))
