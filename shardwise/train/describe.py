"""What a run really does, in words: what was chosen, not what was asked for."""

from __future__ import annotations

import torch

from shardwise.config import Checkpoint, Config, Model, Train, context_attention
from shardwise.config.compression import SumCompression
from shardwise.config.layouts import ring_lacks
from shardwise.mesh import device_name, local_gpus
from shardwise.models import describe_attention
from shardwise.models.dtypes import DTYPES
from shardwise.models.products import multiplies_in_float32
from shardwise.observe import peak_flops
from shardwise.optim import OneBitAdam
from shardwise.optim.rounding import RoundedAdamW
from shardwise.parallel import is_compiled
from shardwise.plan import COPIES, compute_dtype, engine_of, reduce_dtype, simulate, state_dtype
from shardwise.plan.float8 import in_float8, products, unfit
from shardwise.plan.grid import describe_degrees
from shardwise.plurals import counted
from shardwise.train.build import Training


def describe_run(training: Training) -> dict[str, str]:
    """The lines of the header that a run prints, by name."""
    config, plan, device = training.config, training.plan, training.mesh.device
    train = config.train
    data = training.dataset.describe()
    return {
        "model": f"{_named(config.model)}, {plan.parameters:,} parameters"
        + (f", {plan.frozen:,} frozen" if plan.frozen else ""),
        "data": f"{counted(data.tokens, 'token')}, {counted(data.documents, 'document')}, "
        f"{counted(data.held_out, 'sequence')} held out"
        + (f", {data.cut:,} longer than a sequence and cut" if data.cut else ""),
        **_devices(training),
        "precision": f"{_computed(config)} computation{_emulated(config, device)}, "
        f"{_stored(train)} weights and optimizer state, gradients summed in {_summed(training)}",
        **_pipeline(training),
        "attention": _attention(training),
        "compile": "each block"
        if is_compiled(config, plan.layout, device) and training.parallel.table.blocks
        else "off",
        "recompute": str(plan.recompute),
        "optimizer": _optimizer(training),
        **_repeatable(training),
        "MFU": _convention(training),
        "saving": _saving(config.checkpoint),
        **_without_effect(training),
        **_warning(training),
    }


def _computed(config: Config) -> str:
    train = config.train
    if train.precision != "float8" or not in_float8(config.model, train):
        return compute_dtype(train)
    left = unfit(config.model, train)
    some = (
        f", but for {counted(len(left), 'product')} of sizes that are no multiples of 16 ({left[0]}, …)"
        if left
        else ""
    )
    return f"float8 products ({train.float8_scaling} scales{some}) in bfloat16"


def _emulated(config: Config, device: torch.device) -> str:
    """That products are made in another dtype than the one asked for. A user's module makes its own
    products."""
    if config.model.module is not None or not multiplies_in_float32(
        DTYPES[compute_dtype(config.train)], device.type
    ):
        return ""
    return " (products in float32, rounded: this processor has none in bfloat16)"


def _optimizer(training: Training) -> str:
    """The optimizer, and what clipping acts on where it sums momenta instead of gradients."""
    config = training.config
    name = describe_optimizer(training.optimizer, None if training.outer is None else config.local.steps)
    if not isinstance(training.optimizer, OneBitAdam):
        return name
    clipped = (
        "train.clip and the logged gradient norm are those"
        if config.train.clip
        else "the logged gradient norm is that"
    )
    return f"{name}; after step {training.plan.layout.compression_warmup} {clipped} of summed momenta"


def peak_of_device(training: Training) -> float | None:
    """FLOP/s that one device could do: the maker's figure, or the cluster file's, where that is of such a
    device."""
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


def _named(model: Model) -> str:
    return model.module or model.preset or model.pretrained or "custom"


def _devices(training: Training) -> dict[str, str]:
    config, plan, device = training.config, training.plan, training.mesh.device
    batch = f"{counted(config.train.global_batch, 'sequence')} of {config.data.sequence_length}"
    if config.train.driver == "server":
        return {
            "servers": f"{training.mesh.worker.world}, in host memory; workers as they come",
            "batch": f"{batch} in {counted(config.server.portions or 1, 'portion')}; staleness "
            f"{_bound(config)}",
        }
    return {
        "devices": f"{training.mesh.worker.world} x {device_name(device)}{_threads(device)}",
        "layout": describe_layout(training),
        "chosen": plan.chosen(),
        "batch": f"{batch}: {counted(plan.groups * plan.layout.data_parallel, 'device')} x "
        f"{counted(plan.accumulation, 'micro-batch')} of {plan.micro_batch}{_updates(config)}",
    }


def _updates(config: Config) -> str:
    if config.train.driver != "hogwild":
        return ""
    return f", each an update {'under a lock' if config.hogwild.locked else 'without a lock'}"


def _bound(config: Config) -> str:
    bound = config.server.staleness_bound
    return "unbounded" if bound is None else f"{bound} at most"


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


def describe_optimizer(optimizer: torch.optim.AdamW, outer_every: int | None) -> str:
    """The optimizer that makes the updates, and after how many steps groups make an outer one, if they do."""
    if isinstance(optimizer, OneBitAdam):
        name = (
            "1-bit Adam: AdamW at first, then momentum that devices exchange compressed, with a constant "
            "variance"
        )
    elif isinstance(optimizer, RoundedAdamW):
        name = "AdamW on bfloat16 weights and moments, rounded by chance"
    else:
        name = "AdamW, fused kernel"
    if outer_every is None:
        return name
    return (
        f"{name}; an outer step of all groups every "
        f"{'step' if outer_every == 1 else counted(outer_every, 'step')}"
    )


def _stored(train: Train) -> str:
    dtype = state_dtype(train)
    return f"{dtype} (8 bits, rounded by chance)" if dtype == "bfloat16" else dtype


def _summed(training: Training) -> str:
    """The dtype in which gradients are summed: FSDP2's reduce dtype, elsewhere that of the weights."""
    config = training.config
    sharded = engine_of(training.plan.layout, config.model.experts).sharded
    return reduce_dtype(config.train) if sharded else state_dtype(config.train)


def _attention(training: Training) -> str:
    config = training.config
    if config.model.module is not None:
        return "the module's own"
    dtype, length, documents = (
        DTYPES[compute_dtype(config.train)],
        config.data.sequence_length,
        config.data.reset_attention,
    )
    windowed = ring_lacks(config.model, length) is not None
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
    """How the model is cut, and how long devices will wait for each other if stages take equal time."""
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
    """How alike the same run is on the same GPUs; on CPUs it is the same."""
    if training.mesh.device.type == "cpu":
        return {}
    if training.config.train.deterministic:
        return {"repeatable": "to the last bit, on the same number of the same GPUs"}
    return {
        "repeatable": "to rounding: kernels may add in another order (train.deterministic=true: to the last "
        "bit, slower)"
    }


def describe_layout(training: Training) -> str:
    """The degrees above one, and the stage of sharding."""
    layout, groups = training.plan.layout, training.plan.groups
    return (
        f"{f'{groups} groups of ' if groups > 1 else ''}{describe_degrees(dict(layout))}, zero {layout.zero}"
    )


def _threads(device: torch.device) -> str:
    return f", {counted(torch.get_num_threads(), 'thread')} each" if device.type == "cpu" else ""


def _without_effect(training: Training) -> dict[str, str]:
    """Settings that change nothing here are named, never ignored in silence."""
    layout, config, train = training.plan.layout, training.config, training.config.train
    on_cpu, on_host = training.mesh.device.type == "cpu", train.driver in ("server", "hogwild")
    idle = {
        "layout.offload: states are in host memory already": layout.offload and on_cpu,
        f"layout.zero = {config.layout.zero}: no other device holds the same weights": bool(
            config.layout.zero
        )
        and layout.zero == 0,
        f"layout.schedule = {layout.schedule!r}: there is no pipeline": layout.pipeline == 1
        and layout.schedule != "1f1b",
        "layout.stages: there is no pipeline": layout.pipeline == 1
        and bool(layout.stages or layout.stages_per_rank),
        f"layout.attention = {layout.attention!r}: no devices share a sequence": layout.context == 1
        and layout.attention != "auto",
        "GPUs: there are more workers than GPUs, so all compute on the CPU; with run.device=cuda "
        "they share": on_cpu and local_gpus() > 0 and config.run.device == "auto" and not on_host,
        "GPUs: workers share the memory of the host, and compute on its CPUs": train.driver == "hogwild"
        and local_gpus() > 0,
        "train.shares: on GPUs only with data alone and zero = 0 can a device's work be told from its "
        "waiting": not on_cpu
        and train.shares == "by speed"
        and not (layout.zero == 0 and layout.world == layout.data_parallel),
        "train.deterministic: CPUs add in one order anyway": on_cpu and train.deterministic,
        "train.evaluate_every: data.held_out is 0": train.evaluate_every > 0 and config.data.held_out == 0,
        "train.decay: only the wsd schedule has it": train.decay is not None and train.schedule != "wsd",
        f"train.schedule: warm-up lasts {train.warmup} of {train.steps} steps": train.warmup >= train.steps,
        "observe.trace: the first step is left out, and there is no other": config.observe.trace > 0
        and train.steps == 1,
    }
    notes = [note for note, true in idle.items() if true] + _idle_float8(config)
    return {"no effect": "; ".join(notes)} if notes else {}


def _idle_float8(config: Config) -> list[str]:
    """Why a job with float8 makes no product in it; empty: it makes some."""
    if config.train.precision != "float8" or in_float8(config.model, config.train):
        return []
    left = unfit(config.model, config.train)
    if not left:
        return ["train.precision = 'float8': the job leaves out all products"]
    asked = " that the job does not leave out" if len(left) < len(list(products(config.model))) else ""
    return [
        f"train.precision = 'float8': the sizes of all products{asked} are no multiples of 16 ({left[0]}, …)"
    ]


def _warning(training: Training) -> dict[str, str]:
    """Settings that work, and are known to train worse than others."""
    sums = SumCompression.of(training.plan.layout)
    if sums is None or training.mesh.size(COPIES) == 1:
        return {}
    if sums.codec.name == "sign" and sums.feedback and training.config.train.optimizer == "adamw":
        worse = (
            "layout.compression = 'sign': with AdamW and error feedback, one run did worse than without "
            "feedback"
        )
        return {"warning": f"{worse}; use train.optimizer = '1bit-adam' (docs/compression.md)"}
    return {}
