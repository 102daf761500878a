"""Every layout a job could run under, as one `Space`, and how many were refused for which reason.

Degrees are the ways to write the number of devices as pipeline x replica x data x context x tensor. They are
multiplied by the choices inside them: ZeRO stage, micro-batch, schedule, recomputation, ring or Ulysses,
experts. Degrees and choices are kept if they break none of the rules that `shardwise train` holds a layout to
(`config/layout_rules.py`), which here answer for all of them at once. What the user has fixed is fixed here;
what makes no difference is left out (sharding over one device, a schedule without a pipeline).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from itertools import chain, compress, product

import numpy as np

from shardwise.config import (
    RANK_AXES,
    Config,
    Layout,
    divisors,
    least_zero,
    problems_of_compression,
)
from shardwise.config.compression import AUTO, SETTINGS
from shardwise.config.layout_rules import (
    BACKWARD_SHARDS,
    DEGREE_RULES,
    DRIVER,
    EXPERT,
    PIPELINE,
    SEQUENCE,
    JobTables,
    Rule,
    first_broken_rule,
)
from shardwise.config.layout_rules import RECOMPUTE as OF_RECOMPUTATION
from shardwise.config.schedules import DEFAULT_SCHEDULE, SCHEDULE_FACTS, SCHEDULES, ScheduleName
from shardwise.cost.space import BUT_ATTENTION, FULL, RECOMPUTE, Bools, Ints, Space, recompute_mode, space_of
from shardwise.files import Json
from shardwise.plans.engine import shares_weights
from shardwise.plans.flops import flops_per_token, matmul_weights

Choices = Sequence[tuple[int, ...]]
"""Values of several fields of a candidate, one tuple per combination."""
LARGEST_MICRO_BATCH = 256
STAGES_PER_RANK = (2, 3, 4, 5, 6, 8, 10)
"""Numbers of stages per rank that are tried for the interleaved schedule, where the model has enough
blocks."""


@dataclass(frozen=True)
class Candidates:
    """The space of candidates, and the number of layouts that were refused, by reason."""

    space: Space
    refused: dict[str, int]


def fixed_fields(config: Config) -> Json:
    """Return what the user has decided: fields of the layout that were given, the micro-batch, the
    recomputation."""
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


def is_whole(fixed: Mapping[str, object], devices: int) -> bool:
    """Return whether the given degrees use all devices already, so that the others are 1."""
    given = [degree for axis in RANK_AXES if (degree := _number(fixed, axis)) is not None]
    return bool(given) and int(np.prod(given)) == devices


def _number(fixed: Mapping[str, object], name: str) -> int | None:
    """Return the number that the user gave for a field, or None."""
    value = fixed.get(name)
    assert value is None or isinstance(value, int)
    return value


@dataclass(frozen=True)
class _Grid:
    """One way to write the number of devices as a product of degrees, and the choices inside it that break no
    rule."""

    degrees: dict[str, int]
    obstacles: dict[int, str | None]
    """For each size of the expert axis, why the axes cannot send as the job asks; None if they can."""
    attentions: list[int]
    """Ways of attention to try: 1 means a ring, 0 means Ulysses."""
    modes: dict[tuple[int, int], list[int]]
    """For each schedule and number of stages per rank, the ways to recompute."""

    @property
    def experts(self) -> list[int]:
        """Sizes of the expert axis that are possible."""
        return [expert for expert, problem in self.obstacles.items() if problem is None]


def candidates(
    config: Config, devices: int, fixed: Mapping[str, object], offloading: bool = False
) -> Candidates:
    """Return all layouts of this job on this many devices. With `offloading`, those with offloaded states are
    included where the user leaves that open."""
    refused: Counter[str] = Counter()
    if is_whole(fixed, devices):
        fixed = {**dict.fromkeys(RANK_AXES, 1), **fixed}
    offloads = [bool(fixed["offload"])] if "offload" in fixed else [False, True] if offloading else [False]
    job = JobTables(config.model, config.data, config.train, config.layout)
    possible = _possible(job, space_of([*map(_open, _degrees(devices, fixed))]), refused)
    parts = [
        part
        for grid in _grids(job, possible, fixed)
        for part in _expanded(config, grid, fixed, offloads, refused)
    ]
    names = [field.name for field in fields(Space)]
    columns = {
        name: np.concatenate([part[name] for part in parts]) if parts else np.zeros(0, np.int64)
        for name in names
    }
    return Candidates(Space(**columns), dict(refused))


def may_divide(config: Config, devices: int) -> bool:
    """Return whether blocks, batch and sequence can be divided over this many devices.

    Only layouts without tensor and replica axes are tried. In these rules `context` and `data` stand for
    them too. Heads are not checked, so this may be true although no layout is possible.
    """
    job = JobTables(config.model, config.data, config.train, config.layout)
    degrees = _products(devices, {"tensor": 1, "replica": 1})
    return len(_possible(job, space_of([*map(_open, degrees)]), Counter())) > 0


def _degrees(devices: int, fixed: Mapping[str, object]) -> Iterator[dict[str, int]]:
    """Yield every way to write the number of devices as a product of degrees, with those that are fixed."""
    # Who fixes a schedule wants a pipeline, and who fixes a way of attention wants context devices.
    keys = {"pipeline": "schedule", "context": "attention"} if devices > 1 else {}
    several = [axis for axis, key in keys.items() if key in fixed and axis not in fixed]
    for degrees in _products(devices, fixed):
        if all(degrees[axis] > 1 for axis in several):
            yield degrees


def _products(devices: int, fixed: Mapping[str, object]) -> Iterator[dict[str, int]]:
    for pipeline in _factors("pipeline", devices, fixed):
        for tensor in _factors("tensor", devices // pipeline, fixed):
            for context in _factors("context", devices // pipeline // tensor, fixed):
                left = devices // pipeline // tensor // context
                for replica in _factors("replica", left, fixed):
                    data = left // replica
                    if fixed.get("data", data) == data:
                        yield {
                            "pipeline": pipeline,
                            "replica": replica,
                            "data": data,
                            "context": context,
                            "tensor": tensor,
                        }


def _factors(axis: str, left: int, fixed: Mapping[str, object]) -> list[int]:
    """Return the degrees of an axis that divide the devices which are left."""
    degree = _number(fixed, axis)
    if degree is None:
        return divisors(left)
    return [degree] if left % degree == 0 else []


def _open(degrees: Mapping[str, int]) -> dict[str, int]:
    """Return degrees as the simplest candidate: a schedule with one stage per rank, and no experts."""
    return {**degrees, "schedule": SCHEDULES.index(DEFAULT_SCHEDULE)}


def _possible(job: JobTables, grids: Space, refused: Counter[str]) -> Space:
    """Return the grids that break no rule. Each of the others is counted under the first rule that it
    breaks."""
    for rule in DEGREE_RULES:
        broken = _is_broken((rule,), job, grids)
        if rule.short and broken.any():
            refused[rule.short(job)] += int(broken.sum())
            grids = grids.take(np.flatnonzero(~broken))
    return grids


def _is_broken(rules: Sequence[Rule], job: JobTables, space: Space) -> Bools:
    """Return, for each candidate, whether it breaks one of the rules."""
    broken = (rule.is_broken(job, space) for rule in rules)
    return reduce(np.logical_or, broken, np.zeros(len(space), np.bool_))


def _grids(job: JobTables, grids: Space, fixed: Mapping[str, object]) -> Iterator[_Grid]:
    """Yield each grid with the choices inside it that break no rule."""
    all_experts = divisors(job.model.experts) if job.model.experts else [1]
    asked = _number(fixed, "expert")
    wanted = [(expert,) for expert in (all_experts if asked is None else [asked])]
    ways = {"ulysses": [(0,)], "ring": [(1,)]}.get(str(fixed.get("attention", "")), [(0,), (1,)])
    runs, tried = ("schedule", "stages_per_rank", "recompute"), _modes(job, fixed)
    of_grids = zip(
        _allowed(job, grids, (*EXPERT, *DRIVER), ("expert",), wanted),
        _allowed(job, grids, SEQUENCE, ("ring",), ways),
        _allowed(job, grids, (*PIPELINE, *OF_RECOMPUTATION), runs, _runs(tried, fixed)),
        strict=True,
    )
    alone = [(SCHEDULES.index(DEFAULT_SCHEDULE), 1, mode) for mode in tried]
    for place, (experts, attentions, of_pipeline) in enumerate(of_grids):
        degrees = {axis: int(getattr(grids, axis)[place]) for axis in RANK_AXES}
        yield _Grid(
            degrees,
            {expert: _obstacle(job, degrees, expert) for (expert,) in experts},
            [ring for (ring,) in attentions] if degrees["context"] > 1 else [0],
            _modes_by_schedule(of_pipeline if degrees["pipeline"] > 1 else alone),
        )


def _modes_by_schedule(runs: Choices) -> dict[tuple[int, int], list[int]]:
    modes: dict[tuple[int, int], list[int]] = {}
    for schedule, per_rank, mode in runs:
        modes.setdefault((schedule, per_rank), []).append(mode)
    return modes


def _allowed(
    job: JobTables, grids: Space, rules: Sequence[Rule], names: Sequence[str], values: Choices
) -> list[Choices]:
    """Return, for each grid, the values of these fields with which it breaks none of the rules."""
    rows = grids.take(np.repeat(np.arange(len(grids)), len(values)))
    columns = np.tile(np.asarray(values, np.int64), (len(grids), 1)).T  # (fields, grids x values)
    broken = _is_broken(rules, job, replace(rows, **dict(zip(names, columns, strict=True))))
    return [list(compress(values, row)) for row in (~broken).reshape(len(grids), len(values)).tolist()]


def _problems(config: Config, grid: _Grid, micro_batches: Sequence[int], asked: int | None) -> list[str]:
    """Return why no candidate has these degrees, for each expert axis that it could have; empty if there is a
    candidate."""
    if not grid.obstacles:
        return ["expert cannot be made of these axes"]
    if not grid.experts:
        return [problem for problem in grid.obstacles.values() if problem]
    if not grid.attentions:
        return ["context splits neither the heads nor the sequence evenly"]
    if not micro_batches:
        share = f"a device's share of a global batch of {config.train.global_batch}"
        return [f"train.micro_batch = {asked} does not divide {share}"]
    return []


def _expanded(
    config: Config, grid: _Grid, fixed: Mapping[str, object], offloads: Sequence[bool], refused: Counter[str]
) -> Iterator[dict[str, Ints]]:
    """Yield the candidates with these degrees, as columns."""
    degrees, asked = grid.degrees, _number(fixed, "micro_batch")
    share = config.train.global_batch // (degrees["replica"] * degrees["data"])
    micro_batches = _micro_batches(share, asked)
    if problems := _problems(config, grid, micro_batches, asked):
        refused.update(problems)
        return
    choices = list(_choices(config, grid, fixed, offloads))
    if not choices:
        return
    # (names, choices x micro-batches)
    table = np.repeat(np.asarray(choices, dtype=np.int64).T, len(micro_batches), axis=1)
    names = ("zero", "offload", "schedule", "stages_per_rank", "expert", "ring", "recompute")
    columns = dict(zip(names, table, strict=True))
    columns |= {axis: np.full(table.shape[1], degree, np.int64) for axis, degree in degrees.items()}
    columns["micro_batch"] = np.tile(np.asarray(micro_batches, dtype=np.int64), len(choices))
    columns["accumulation"] = share // columns["micro_batch"]
    if "zero" not in fixed:  # with a single micro-batch, stage 1 reduces gradients as stage 2 does
        differs = (columns["zero"] != 2) | (columns["accumulation"] > 1)
        columns = {name: column[differs] for name, column in columns.items()}
    yield columns


def _micro_batches(share: int, asked: int | None) -> list[int]:
    """Return the micro-batches to try that divide a device's share of the global batch."""
    if asked is None:
        return [size for size in divisors(share) if size <= LARGEST_MICRO_BATCH]
    return [asked] if asked in divisors(share) else []


def _choices(
    config: Config, grid: _Grid, fixed: Mapping[str, object], offloads: Sequence[bool]
) -> Iterator[tuple[int, ...]]:
    """Yield every combination of the choices inside a grid: ZeRO stage, offloading, schedule, stages per
    rank, experts, ring and recomputation."""
    experts = config.model.experts
    shared = {expert: shares_weights(_layout(grid.degrees, expert), experts) for expert in grid.experts}
    zeros = {offload: _zeros(config, grid.degrees, fixed, offload) for offload in offloads}
    states = [(zero, offload) for offload in offloads for zero in zeros[offload]]
    for (zero, offload), run, expert, ring in product(states, grid.modes, grid.experts, grid.attentions):
        if zero == 0 or offload or shared[expert]:
            yield from ((zero, offload, *run, expert, ring, mode) for mode in grid.modes[run])


def _modes(job: JobTables, fixed: Mapping[str, object]) -> list[int]:
    """Return the ways to recompute that are tried.

    To store the outputs of attention alone is tried where attention is a fourth of the work: elsewhere it
    gains little over storing nothing.
    """
    if "recompute" in fixed:
        return [RECOMPUTE.index(fixed["recompute"])]
    whole = flops_per_token(job.model, job.data.sequence_length)
    worth = job.model.attention_softcap is None and 6 * matmul_weights(job.model) < 3 / 4 * whole
    return [place for place in range(len(RECOMPUTE)) if place != BUT_ATTENTION or worth]


def _runs(modes: Sequence[int], fixed: Mapping[str, object]) -> Choices:
    """Return the ways to run a pipeline: schedule, stages per rank and recomputation.

    Full recomputation repeats a block for each of its weights where backward is split. So it is not proposed
    there, but it is costed if the user asks for both.
    """
    asks_for_both = {"schedule", "recompute"} <= set(fixed)
    return [
        (SCHEDULES.index(schedule), count, mode)
        for schedule, count in _schedules(fixed)
        for mode in modes
        if asks_for_both or mode != FULL or not SCHEDULE_FACTS[schedule].splits_backward
    ]


def _schedules(fixed: Mapping[str, object]) -> Iterator[tuple[ScheduleName, int]]:
    """Yield the schedules to try, with the numbers of stages per rank to try."""
    for schedule in SCHEDULES:
        facts = SCHEDULE_FACTS[schedule]
        if fixed["schedule"] == schedule if "schedule" in fixed else facts.is_proposed:
            chosen = _number(fixed, "stages_per_rank")
            several = STAGES_PER_RANK if chosen is None else (chosen,)
            counts = dict.fromkeys(facts.stages_of_rank(count) for count in several)
            yield from ((schedule, count) for count in counts)


def _layout(degrees: Mapping[str, int], expert: int = 1) -> Layout:
    return Layout.model_validate({**degrees, "expert": expert})


def _obstacle(job: JobTables, degrees: Mapping[str, int], expert: int) -> str | None:
    """Return why these axes cannot send less data as the job asks; None if they can."""
    how = {name: getattr(job.layout, name) for name in (*SETTINGS, "backward_shards")}
    layout = _layout(degrees, expert).model_copy(update=how)
    nearby = (problem for _, problem in first_broken_rule(BACKWARD_SHARDS, job._replace(layout=layout)))
    return next(chain(problems_of_compression(layout), nearby), None)


def _zeros(
    config: Config, degrees: Mapping[str, int], fixed: Mapping[str, object], offload: bool
) -> list[int]:
    """Return the ZeRO stages to try with these degrees."""
    highest = 0 if config.optimizer.needs_whole_states(config.layout) else 3
    asked = _number(fixed, "zero")
    if offload and 0 in (highest, asked):  # only sharded states can be offloaded
        return []
    if shares_weights(_layout(degrees), config.model.experts):  # whatever `expert` will be
        # Copies of whole states are what the data axis has already.
        lowest = max(least_zero(config.layout), int(degrees["replica"] > 1 or offload))
        return _sharded_stages(range(lowest, highest + 1), asked, offload)
    if degrees["replica"] > 1 and "replica" not in fixed:
        return []
    return [3 if asked is None else asked] if offload else [0]


def _sharded_stages(stages: Sequence[int], asked: int | None, offload: bool) -> list[int]:
    """Return the ZeRO stages to try, of those that are possible, where devices share weights."""
    if asked is not None:
        return [asked] if asked in stages else []
    return [3] if offload else list(stages)  # the lower stages keep whole weights on the device
