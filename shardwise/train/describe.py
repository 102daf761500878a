"""The header of a run: what was chosen, which may differ from what the job asked for."""

from __future__ import annotations

import torch

from shardwise.config import Checkpoint, Config, brings_data, context_attention
from shardwise.config.no_effect import idle_settings
from shardwise.config.parameters import parameter_shapes
from shardwise.cost.device_peaks import peak_flops
from shardwise.data.samples import Samples
from shardwise.drivers.registry import driver_of
from shardwise.mesh import device_name, local_gpus
from shardwise.models import describe_attention
from shardwise.models.products import multiplies_in_float32
from shardwise.models.torch_dtypes import DTYPES
from shardwise.optimizers.groups import describe_groups
from shardwise.parallel import build_plain
from shardwise.plans import COPIES, ModelSpec, Plan, simulate
from shardwise.plans.float8_choice import idle_float8, multiplied_in_float32
from shardwise.plans.grid import describe_degrees
from shardwise.plurals import counted
from shardwise.train.build import Training


def describe_run(training: Training) -> dict[str, str]:
    """Return the lines of the header that a run prints, by name."""
    config, plan, device = training.config, training.plan, training.mesh.device
    return {
        "model": f"{_named(config)}, {plan.parameters:,} parameters"
        + (f", {plan.frozen:,} frozen" if plan.frozen else ""),
        "data": _data(training),
        **_devices(training),
        "precision": f"{_computed(plan.model)} computation{_emulated(plan.model, device)}"
        f"{_slow_products(plan, device)}, {_stored(plan.model)} weights and optimizer state, "
        f"gradients summed in {plan.model.dtypes.summed_by(plan.engine)}",
        **_pipeline(training),
        "attention": _attention(training),
        "compile": _compiled(training),
        "recompute": str(plan.recompute),
        "optimizer": _optimizer(training),
        **_groups(training),
        **_repeatable(training),
        "MFU": _convention(training),
        "saving": _saving(config.checkpoint),
        **_without_effect(training),
        **_warning(training),
    }


def _data(training: Training) -> str:
    data = training.dataset
    if isinstance(data, Samples):
        return f"{counted(len(data.dataset), 'sample')} of {type(data.dataset).__name__}"
    counts = data.describe()
    return (
        f"{counted(counts.tokens, 'token')}, {counted(counts.documents, 'document')}, "
        f"{counted(counts.held_out, 'sequence')} held out"
        + (f", {counts.cut:,} longer than a sequence and cut" if counts.cut else "")
    )


def _compiled(training: Training) -> str:
    """Return what is compiled, or why nothing is."""
    why_not = training.plan.why_not_compiled(training.mesh.device.type)
    if why_not is None and not training.parallel.table.blocks:
        why_not = "no sharding table names the blocks"
    return f"off ({why_not})" if why_not else "each block"


def _computed(model: ModelSpec) -> str:
    if model.float8 is None or not model.float8.products:
        return model.dtypes.compute
    unfit = model.float8.unfit
    exceptions = (
        f", but for {counted(len(unfit), 'product')} of sizes that are no multiples of 16 ({unfit[0]}, …)"
        if unfit
        else ""
    )
    return f"float8 products ({model.float8.scaling} scales{exceptions}) in bfloat16"


def _emulated(model: ModelSpec, device: torch.device) -> str:
    """Return a note if this processor makes products in another dtype than the compute dtype. A user's module
    makes its own products."""
    if model.is_user_module or not multiplies_in_float32(DTYPES[model.dtypes.compute], device.type):
        return ""
    return " (products in float32, rounded: this processor has none in bfloat16)"


def _slow_products(plan: Plan, device: torch.device) -> str:
    """Return a note if a GPU multiplies 8-bit numbers in float32, because of the sizes on one device."""
    if device.type == "cpu" or plan.model.float8 is None:
        return ""
    tokens = plan.micro_batch * plan.model.sequence_length // plan.layout.context
    slow = multiplied_in_float32(plan.model.shape, plan.model.float8.products, plan.layout, tokens)
    if not slow:
        return ""
    return (
        f" ({counted(len(slow), 'product')} of 8-bit numbers in float32, which is slow: {tokens} tokens or "
        f"a device's part of the weight are no multiple of 16; {slow[0]}, …)"
    )


def _optimizer(training: Training) -> str:
    """Return the optimizer, when groups make an outer step, and the norm that is clipped and logged if
    momenta are summed."""
    config = training.config
    line = config.optimizer.describe(rounds=training.plan.model.dtypes.states == "bfloat16")
    name = driver_of(config).describe_optimizer(config, line)
    if config.optimizer.summed_momentum is None:
        return name
    clipped = (
        "train.clip and the logged gradient norm are those"
        if config.train.clip
        else "the logged gradient norm is that"
    )
    return f"{name}; after step {training.plan.layout.compression_warmup} {clipped} of summed momenta"


def _groups(training: Training) -> dict[str, str]:
    """Return how many weights of the whole model are in each parameter group, and what it sets."""
    config, groups = training.config, training.config.optimizer.groups
    if not groups:
        return {}
    if config.model.module is None:
        return {"groups": describe_groups(groups, list(parameter_shapes(config.model)))}
    named = build_plain(training.plan.model).named_parameters()
    return {"groups": describe_groups(groups, [name for name, each in named if each.requires_grad])}


def peak_of_device(training: Training) -> float | None:
    """Return the peak FLOP/s of one device: the manufacturer's figure, or that of the cluster file if the
    file was measured on such a device. None: not known."""
    device, plan = training.mesh.device, training.plan
    known = peak_flops(device_name(device), training.config.train.precision)
    measured_here = plan.cluster_file is not None and (plan.predicted or {}).get("device") == device_name(
        device
    )
    return known if known is not None or not measured_here else (plan.predicted or {}).get("peak_flops")


def _convention(training: Training) -> str:
    peak, plan = peak_of_device(training), training.plan
    if peak is None:
        return "n/a: no known peak for this device"
    makers = peak_flops(device_name(training.mesh.device), training.config.train.precision)
    return plan.flop_convention + ("" if makers else f"; of the peak in {plan.cluster_file}")


def _named(config: Config) -> str:
    model = config.model
    if model.is_of_program:
        return f"prepared by {config.run.program}"
    return model.module or model.preset or model.pretrained or "custom"


def _devices(training: Training) -> dict[str, str]:
    config, plan, device = training.config, training.plan, training.mesh.device
    rows, length = config.train.global_batch, config.data.sequence_length
    batch = counted(rows, "sample") if brings_data(config) else f"{counted(rows, 'sequence')} of {length}"
    lines = {
        "devices": f"{training.mesh.worker.world} x {device_name(device)}{_threads(device)}",
        "layout": describe_layout(training),
        "chosen": plan.chosen(),
        "batch": f"{batch}: {counted(plan.groups * plan.layout.data_parallel, 'device')} x "
        f"{counted(plan.accumulation, 'micro-batch')} of {plan.micro_batch}",
    }
    return driver_of(config).describe_devices(training, lines)


def _saving(checkpoint: Checkpoint) -> str:
    end = "at the end and when asked to stop"
    if checkpoint.every:
        return f"every {counted(checkpoint.every, 'step')}, {end}"
    return (
        f"every {_minutes(checkpoint.every_minutes)} (checkpoint.every_minutes), {end}"
        if checkpoint.every_minutes
        else end
    )


def _minutes(minutes: float) -> str:
    return "minute" if minutes == 1 else f"{minutes:g} minutes"


def _stored(model: ModelSpec) -> str:
    dtype = model.dtypes.states
    return f"{dtype} (stochastically rounded)" if dtype == "bfloat16" else dtype


def _attention(training: Training) -> str:
    config = training.config
    if config.model.module is not None:
        return "the module's own"
    dtype, length, documents = (
        DTYPES[training.plan.model.dtypes.compute],
        config.data.sequence_length,
        config.data.reset_attention,
    )
    windowed = config.model.window_cuts(length)
    kernel = describe_attention(
        config.model, training.mesh.device.type, dtype, length, masked=documents or windowed
    )
    parts = [
        kernel,
        *(["within documents"] if documents else []),
        *([f"windows of {config.model.window}"] if windowed else []),
    ]
    if training.plan.layout.context > 1:
        parts.append(f"{context_attention(config.model, training.plan.layout)} over context devices")
    return ", ".join(parts)


def _pipeline(training: Training) -> dict[str, str]:
    """Return how the model is cut into stages, and the idle share of devices if stages take equal time."""
    stages = training.parallel.pipeline
    if stages is None:
        return {}
    blocks = ", ".join(str(len(blocks_of_stage)) for blocks_of_stage in stages.blocks)
    bubble = simulate(stages.schedule).bubble
    return {
        "pipeline": f"{stages.schedule.name}, stages of {blocks} blocks, idle share {bubble:.2f} if they "
        f"take equal time"
    }


def _repeatable(training: Training) -> dict[str, str]:
    """Return how closely a repeated run gives the same numbers on GPUs; on CPUs they are identical."""
    if training.mesh.device.type == "cpu":
        return {}
    if training.config.train.deterministic:
        return {"repeatable": "to the last bit, on the same number of the same GPUs"}
    return {
        "repeatable": "to rounding: kernels may add in another order (train.deterministic=true: to the last "
        "bit, slower)"
    }


def describe_layout(training: Training) -> str:
    """Return the degrees above one, and the stage of ZeRO."""
    layout, groups = training.plan.layout, training.plan.groups
    return (
        f"{f'{groups} groups of ' if groups > 1 else ''}{describe_degrees(dict(layout))}, zero {layout.zero}"
    )


def _threads(device: torch.device) -> str:
    return f", {counted(torch.get_num_threads(), 'thread')} each" if device.type == "cpu" else ""


def _without_effect(training: Training) -> dict[str, str]:
    """Return a line about the settings that have no effect in this run, so that none is silently ignored."""
    config, on_cpu = training.config, training.mesh.device.type == "cpu"
    notes = idle_settings(config, training.plan.layout, on_cpu, local_gpus())
    notes += driver_of(config).settings_without_effect(training)
    notes += idle_float8(config.model, config.train)
    return {"no effect": "; ".join(notes)} if notes else {}


def _warning(training: Training) -> dict[str, str]:
    """Return a warning about compression that is known to train worse than another setting."""
    sums = training.plan.gradient_sums
    if sums is None or training.mesh.size(COPIES) == 1:
        return {}
    warning = training.config.optimizer.warning(sums.codec.name, sums.feedback)
    return {} if warning is None else {"warning": f"layout.compression = '{sums.codec}': {warning}"}
