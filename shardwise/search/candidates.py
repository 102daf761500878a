"""Every layout a job could run under, as one `Space`, and how many were refused for which reason.

Degrees are the ways to write the number of devices as pipeline x replica x data x context x tensor. Each is
held against the rules that `shardwise train` would hold it against (`config/layouts.py`), then multiplied by
the choices inside it: ZeRO stage, micro-batch, schedule, recomputation, ring or Ulysses, experts. What the
user has fixed is fixed here; what makes no difference is left out (sharding over one device, a schedule
without a pipeline).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, product
from typing import Any

import numpy as np

from shardwise.config import (
    BY_OPERATOR,
    IN_A_V,
    SPLIT_BACKWARD,
    Config,
    Layout,
    divisors,
    least_zero,
    problems_of_compression,
)
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.config.layouts import can_borrow, problems_of_nearby, ring_lacks
from shardwise.cost.space import BUT_ATTENTION, RECOMPUTE, Space, recompute_mode
from shardwise.plan.engine import shares_weights
from shardwise.plan.flops import flops_per_token, matmul_weights
from shardwise.plan.grid import RANK_AXES
from shardwise.plan.schedule import SCHEDULES

LARGEST_MICRO_BATCH = 256
STAGES_PER_RANK = (2, 3, 4, 5, 6, 8, 10)
"""Of the interleaved schedule, where the model has the blocks for it."""


@dataclass(frozen=True)
class Candidates:
    """The space, and what was refused before it was costed: reason to number of layouts."""

    space: Space
    refused: dict[str, int]


def fixed_fields(config: Config) -> dict[str, Any]:
    """What the user has decided: fields of the layout that were given, the micro-batch, the recomputation.
    Degrees that multiply to a positive data axis fix the ones left out at 1.
    """
    layout = config.layout
    given = {name: getattr(layout, name) for name in layout.model_fields_set}
    if given.get("data") == -1:
        del given["data"]
    for name, is_open in (("attention", "auto"), ("compression", AUTO)):
        if given.get(name) == is_open:
            del given[name]
    fixed = {name: value for name, value in given.items() if value is not None}
    if config.train.micro_batch is not None:
        fixed["micro_batch"] = config.train.micro_batch
    if "recompute" in config.train.model_fields_set:
        fixed["recompute"] = recompute_mode(config.train.recompute)
    return fixed


def is_whole(fixed: Mapping[str, Any], devices: int) -> bool:
    """Whether the degrees given use all devices already, so that the others are 1."""
    given = [fixed[axis] for axis in RANK_AXES if axis in fixed]
    return bool(given) and int(np.prod(given)) == devices


def candidates(
    config: Config, devices: int, fixed: Mapping[str, Any], offloading: bool = False
) -> Candidates:
    """All layouts of this job on so many devices; where the user does not say, those with `offloading` too,
    or without alone."""
    refused: Counter[str] = Counter()
    if is_whole(fixed, devices):
        fixed = {**dict.fromkeys(RANK_AXES, 1), **fixed}
    offloads = [bool(fixed["offload"])] if "offload" in fixed else [False, True] if offloading else [False]
    modes = _modes(config, fixed)
    parts = [
        part
        for degrees in _degrees(devices, fixed)
        if not _refused(config, degrees, refused)
        for part in _expanded(config, degrees, fixed, offloads, modes, refused)
    ]
    names = [field.name for field in fields(Space)]
    columns = {
        name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, np.int64)
        for name in names
    }
    return Candidates(Space(**columns), dict(refused))


def _degrees(devices: int, fixed: Mapping[str, Any]) -> Iterator[dict[str, int]]:
    def choices(axis: str, left: int) -> list[int]:
        if axis in fixed:
            return [fixed[axis]] if left % fixed[axis] == 0 else []
        return divisors(left)

    # A schedule is asked for with a pipeline, and a way to attend with context devices, where there can be
    # any.
    several = [
        axis
        for axis, key in (("pipeline", "schedule"), ("context", "attention"))
        if key in fixed and axis not in fixed
    ]
    several = several if devices > 1 else []
    for pipeline in choices("pipeline", devices):
        for tensor in choices("tensor", devices // pipeline):
            for context in choices("context", devices // pipeline // tensor):
                left = devices // pipeline // tensor // context
                for replica in choices("replica", left):
                    data = left // replica
                    degrees = {
                        "pipeline": pipeline,
                        "replica": replica,
                        "data": data,
                        "context": context,
                        "tensor": tensor,
                    }
                    if fixed.get("data", data) == data and all(degrees[axis] > 1 for axis in several):
                        yield degrees


def _refused(config: Config, degrees: Mapping[str, int], refused: Counter[str]) -> bool:
    """The first rule that these degrees break, counted."""
    reason = _reason(config, degrees)
    if reason:
        refused[reason] += 1
    return reason is not None


def _reason(config: Config, degrees: Mapping[str, int]) -> str | None:
    model, tensor, context = config.model, degrees["tensor"], degrees["context"]
    if model.heads % tensor:
        return f"tensor does not divide {model.heads} heads"
    if model.kv_heads % tensor and tensor % model.kv_heads:
        return f"tensor neither divides {model.kv_heads} key heads nor is divided by them"
    if model.vocabulary < tensor:
        return "tensor is more than the vocabulary"
    if degrees["pipeline"] > model.layers:
        return f"pipeline has more stages than the model's {model.layers} blocks"
    if degrees["pipeline"] > 1 and config.train.shares == "by speed":
        return "pipelines need even shares"
    if config.data.sequence_length % (tensor * context):
        return f"a sequence of {config.data.sequence_length} does not divide over context x tensor"
    if config.train.global_batch % (degrees["replica"] * degrees["data"]):
        return f"a global batch of {config.train.global_batch} does not divide over replica x data"
    return None


def _expanded(
    config: Config,
    degrees: dict[str, int],
    fixed: Mapping[str, Any],
    offloads: Sequence[bool],
    modes: Sequence[int],
    refused: Counter[str],
) -> Iterator[dict[str, np.ndarray[Any, np.dtype[np.int64]]]]:
    """The choices inside these degrees, as columns."""
    share = config.train.global_batch // (degrees["replica"] * degrees["data"])
    experts = _experts(config, degrees, fixed)
    attentions = _attentions(config, degrees, fixed)
    if not experts:
        refused["expert cannot be made of these axes"] += 1
        return
    obstacles = {expert: _obstacle(config, degrees, expert) for expert in experts}
    experts = [expert for expert in experts if obstacles[expert] is None]
    if not experts:
        refused.update(problem for problem in obstacles.values() if problem)
        return
    if not attentions:
        refused["context splits neither the heads nor the sequence evenly"] += 1
        return
    asked = fixed.get("micro_batch")
    micro_batches = [
        size for size in divisors(share) if (size <= LARGEST_MICRO_BATCH if asked is None else size == asked)
    ]
    if not micro_batches:
        share_of = f"a device's share of a global batch of {config.train.global_batch}"
        refused[f"train.micro_batch = {asked} does not divide {share_of}"] += 1
        return
    shared = {expert: shares_weights(_layout(degrees, expert), config.model.experts) for expert in experts}
    states = [(zero, offload) for offload in offloads for zero in _zeros(config, degrees, fixed, offload)]
    rows = product(states, _schedules(config, degrees, fixed), experts, attentions)
    choices = [
        (zero, offload, SCHEDULES.index(schedule), per_rank, expert, ring, mode)
        for (zero, offload), (schedule, per_rank), expert, ring in rows
        if zero == 0 or offload or shared[expert]
        for mode in modes
        if not (mode and degrees["pipeline"] > 1 and schedule in SPLIT_BACKWARD and _pointless(mode, fixed))
    ]
    if not choices:
        return
    table = np.repeat(
        np.asarray(choices, dtype=np.int64).T, len(micro_batches), axis=1
    )  # (names, choices x micro-batches)
    names = ("zero", "offload", "schedule", "stages_per_rank", "expert", "ring", "recompute")
    columns = dict(zip(names, table, strict=True))
    columns |= {axis: np.full(table.shape[1], degree, np.int64) for axis, degree in degrees.items()}
    columns["micro_batch"] = np.tile(np.asarray(micro_batches, dtype=np.int64), len(choices))
    columns["accumulation"] = share // columns["micro_batch"]
    if "zero" not in fixed:  # of a single micro-batch, stage 1 reduces gradients as stage 2 does
        differs = (columns["zero"] != 2) | (columns["accumulation"] > 1)
        columns = {name: column[differs] for name, column in columns.items()}
    yield columns


def _modes(config: Config, fixed: Mapping[str, Any]) -> list[int]:
    """To keep attention alone is tried where attention is a fourth of the work: elsewhere it gains little on
    keeping nothing."""
    if "recompute" in fixed:
        return [RECOMPUTE.index(fixed["recompute"])]
    whole = flops_per_token(config.model, config.data.sequence_length)
    worth = config.model.attention_softcap is None and 6 * matmul_weights(config.model) < 3 / 4 * whole
    return [place for place in range(len(RECOMPUTE)) if place != BUT_ATTENTION or worth]


def _pointless(mode: int, fixed: Mapping[str, Any]) -> bool:
    """Recomputation by operators allows one pass backward, not two halves; full recomputation repeats a block
    for each of its weights in the second half, so it is not proposed, but costed where the user asks for
    both.
    """
    return RECOMPUTE[mode] in BY_OPERATOR or not {"schedule", "recompute"} <= set(fixed)


def _layout(degrees: Mapping[str, Any], expert: int = 1) -> Layout:
    return Layout(**degrees, expert=expert)


def _obstacle(config: Config, degrees: Mapping[str, Any], expert: int) -> str | None:
    """What keeps these axes from sending less, as the job asks for it."""
    how = {name: getattr(config.layout, name) for name in (*SETTINGS, "backward_shards")}
    layout = _layout(degrees, expert).model_copy(update=how)
    nearby = (rule.problem for rule in problems_of_nearby(layout))
    return next(chain(problems_of_compression(layout), nearby), None)


def _zeros(config: Config, degrees: Mapping[str, int], fixed: Mapping[str, Any], offload: bool) -> list[int]:
    highest = 0 if config.optimizer.needs_whole_states(config.layout) else 3
    if offload and 0 in (highest, fixed.get("zero")):  # only sharded states can be offloaded
        return []
    if not shares_weights(_layout(degrees), config.model.experts):  # whatever `expert` will be
        alone = degrees["replica"] == 1 or "replica" in fixed
        return ([fixed.get("zero", 3)] if offload else [0]) if alone else []
    stages = [
        stage for stage in range(least_zero(config.layout), highest + 1) if fixed.get("zero", stage) == stage
    ]
    if offload and "zero" not in fixed:  # the lower stages keep whole weights on the device
        return [3]
    if degrees["replica"] > 1 or offload:  # copies of whole states are what the data axis does already
        stages = [stage for stage in stages if stage > 0]
    return stages


def _schedules(config: Config, degrees: Mapping[str, int], fixed: Mapping[str, Any]) -> list[tuple[str, int]]:
    if degrees["pipeline"] == 1:
        return [("1f1b", 1)]
    most = config.model.layers // degrees["pipeline"]
    schedules: list[tuple[str, int]] = []
    for schedule in SCHEDULES:
        if "schedule" in fixed and schedule != fixed["schedule"]:
            continue
        if schedule == "gpipe" and "schedule" not in fixed:
            continue  # 1f1b does the same in the same time, and holds less
        per_rank = [2] if schedule in IN_A_V else STAGES_PER_RANK if schedule == "interleaved" else [1]
        if schedule == "interleaved" and "stages_per_rank" in fixed:
            per_rank = [fixed["stages_per_rank"]]
        schedules += [(schedule, count) for count in per_rank if count <= most]
    if "stages" in fixed:  # cut by hand, into so many
        schedules = [
            (schedule, count)
            for schedule, count in schedules
            if count * degrees["pipeline"] == len(fixed["stages"])
        ]
    return schedules


def _experts(config: Config, degrees: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[int]:
    if not config.model.experts:
        return [1] if fixed.get("expert", 1) == 1 else []
    wanted = [fixed["expert"]] if "expert" in fixed else divisors(config.model.experts)
    return [expert for expert in wanted if can_borrow(_layout(degrees, expert))]


def _attentions(config: Config, degrees: Mapping[str, int], fixed: Mapping[str, Any]) -> list[int]:
    """1: a ring, 0: Ulysses, where query heads divide over the context devices; key heads are repeated if
    they must."""
    model, context, tensor = config.model, degrees["context"], degrees["tensor"]
    if context == 1:
        return [0]
    ways = []
    if model.heads // tensor % context == 0 and fixed.get("attention") != "ring":
        ways.append(0)
    length = config.data.sequence_length
    if (
        length % (2 * context) == 0
        and fixed.get("attention") != "ulysses"
        and ring_lacks(model, length) is None
    ):
        ways.append(1)
    return ways
