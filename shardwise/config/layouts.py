"""What to write instead of a layout that cannot be: the values that work, and the nearest layout that does.

The rules themselves are in `config/layout_rules.py`. A layout that breaks one is refused before any worker
starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import log2
from typing import NamedTuple

from shardwise.config.axes import MODEL_AXES
from shardwise.config.check import divisors, found_by
from shardwise.config.layout import Layout
from shardwise.config.layout_rules import (
    BATCH,
    RULES,
    SEQUENCE,
    TENSOR,
    JobTables,
    Rule,
    broken_rules,
    cut_fits,
    first_broken,
    ring_can_all,
)
from shardwise.config.model import Model
from shardwise.config.schedules import DEFAULT_SCHEDULE
from shardwise.config.schema import Data, Train

MOST_TRIED = 100_000
"""Layouts that are looked at for the nearest one: a few seconds of them."""


class Broken(NamedTuple):
    """A rule that a layout breaks."""

    problem: str
    fields: tuple[str, ...] = ()
    """Degrees of the layout of which another value may help, the likeliest first."""

    @property
    def has_advice(self) -> bool:
        """Whether the problem ends with advice already, so that other values are a second way."""
        return "; use " in self.problem


def problems_of_layout(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> list[str]:
    """Every rule that the layout breaks, with the values that would break none.

    The last one also names the nearest layout that works, on `devices` where that number is known. Rules
    about the data-parallel devices are checked once layout.data is a number.
    """
    job = JobTables(model, data, train, layout)
    broken, batch = list(_broken(job)), [problem for _, problem in found_by(first_broken, BATCH, job)]
    problems = [rule.problem for rule in broken]
    if broken and all(section.is_whole for section in job):
        problems = [rule.problem + _values(job, rule, broken, devices) for rule in broken]
        if nearest := nearest_layout(model, data, train, layout, devices):
            problems[-1] += f"\n  the nearest layout that works: {nearest}"
    return [*batch, *problems]


def layout_is_possible(model: Model, data: Data, train: Train, layout: Layout) -> bool:
    """Whether the layout breaks no rule."""
    job = JobTables(model, data, train, layout)
    return not any(rule.is_broken(job, layout) for rules in RULES for rule in rules)


def _broken(job: JobTables) -> Iterator[Broken]:
    """The rules that the job's layout breaks. Where `tensor` is refused, the sequence is checked without a
    tensor axis: it has to divide by another number, once that is mended."""
    refused: list[Rule] = []
    for rules in RULES:
        checked = job
        if rules is SEQUENCE and any(rule in TENSOR for rule in refused):
            checked = job._replace(layout=job.layout.model_copy(update={"tensor": 1}))
        for rule, problem in found_by(first_broken, rules, checked):
            refused.append(rule)
            yield Broken(problem, tuple(field for field in rule.fields if getattr(checked.layout, field) > 1))


def _values(job: JobTables, rule: Broken, broken: Sequence[Broken], devices: int | None) -> str:
    """The end of a message: for the first degree that can be changed, all values with which no rule is
    broken.

    Other degrees that are refused too are taken as 1, since they have to change as well.
    """
    others = {field: 1 for other in broken for field in other.fields[:1]}
    model, data, train, layout = job
    for field in rule.fields:
        relaxed = layout.model_copy(
            update={name: one for name, one in others.items() if name not in rule.fields}
        )
        tried = (
            relaxed.model_copy(update={field: value}) for value in _candidates(field, model, data, layout)
        )
        works = [
            other
            for other in tried
            if _divides(other, devices) and layout_is_possible(model, data, train, other)
        ]
        if works:
            values = _in_words([getattr(other, field) for other in works])
            end = "" if rule.problem.startswith(f"layout.{field} ") else f" as layout.{field}"
            return f"{'; or use' if rule.has_advice else '; use'} {values}{end}"
    return ""


def _candidates(field: str, model: Model, data: Data, layout: Layout) -> Sequence[int]:
    """Every value that a degree of a layout could have for this model and these data."""
    match field:
        case "tensor":
            return divisors(model.heads)
        case "context":
            return divisors(data.sequence_length)
        case "pipeline":
            return range(1, model.layers + 1)
        case "expert":
            return divisors(model.experts)
    return divisors(layout.data * layout.context)  # neighbours that keep a copy for backward


def _divides(layout: Layout, devices: int | None) -> bool:
    """Whether as many devices, where their number is known, can be shared out with an open data axis."""
    return devices is None or layout.data > 0 or devices % layout.fixed == 0


def _in_words(values: Sequence[int]) -> str:
    """Values to choose from, ascending: "3", "1 or 2", "one of 1, 2, 4", "1 to 80"."""
    if len(values) > 3 and values[-1] - values[0] == len(values) - 1:
        return f"{values[0]} to {values[-1]}"
    return f"one of {', '.join(map(str, values))}" if len(values) > 2 else " or ".join(map(str, values))


def fewest_devices(layout: Layout) -> int:
    """How many devices a layout with an open data axis needs at least: those of the other axes, and enough
    for the experts."""
    return layout.fixed * -(-layout.expert // (layout.context * layout.tensor))


def workers_without_gpus(layout: Layout) -> int:
    """How many workers a machine without GPUs starts for a layout with an open data axis.

    As few as the other axes need: one worker uses all cores. Where a job writes `data = -1`, it asks for data
    parallelism, and gets two workers if no other axis has several.
    """
    asked = "data" in layout.model_fields_set and layout.fixed == 1
    return max(fewest_devices(layout), 2 if asked else 1)


def nearest_layout(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> str | None:
    """The layout on as many devices that works and changes the degrees least, in the words of the command
    line."""
    best = nearest_to(model, data, train, layout, devices)
    if best is None:
        return None
    changed = {field: value for field, value in best.model_dump().items() if value != getattr(layout, field)}
    settings = [f"layout.{field}={value}" for field, value in changed.items() if value is not None]
    left_out = [f"without layout.{field}" for field, value in changed.items() if value is None]
    return " ".join([*settings, *left_out])


def nearest_to(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> Layout | None:
    """The layout on as many devices that works and changes the degrees least."""
    world = devices or (layout.world if layout.data > 0 else None)
    others = islice(_others(model, layout, world), MOST_TRIED)
    works = [
        other
        for other in others
        if layout_is_possible(model, data, train, other)
        and not any(broken_rules(BATCH, JobTables(model, data, train, other)))
    ]
    return min(works, key=lambda other: _distance(layout, other), default=None)


def _others(model: Model, layout: Layout, world: int | None) -> Iterator[Layout]:
    """Layouts with other degrees and simpler choices, on as many devices where that number is known."""
    powers = {2**power for power in range(11)} | {layout.tensor, layout.context, layout.pipeline}
    degrees = divisors(world) if world else sorted(powers)
    experts = divisors(model.experts) if model.experts else [1]
    open_ = layout.attention == "ulysses" or not ring_can_all(model)
    attentions = {layout.attention, "auto" if open_ else layout.attention}
    schedules = {(layout.schedule, layout.stages_per_rank), (DEFAULT_SCHEDULE, None)}
    for pipeline, context, tensor in _triples(degrees, world // layout.replica if world else 0):
        fixed = pipeline * context * tensor * layout.replica
        if world and world % fixed:
            continue
        data = world // fixed if world else -1
        for expert, attention, (schedule, per_rank) in product(experts, attentions, schedules):
            degrees_of_other = {
                "pipeline": pipeline,
                "data": data,
                "context": context,
                "tensor": tensor,
                "expert": expert,
            }
            choices = {"attention": attention, "schedule": schedule, "stages_per_rank": per_rank}
            other = layout.model_copy(update={**degrees_of_other, **choices})
            fits = layout.stages and cut_fits(layout.stages, model, other)
            yield other if fits else other.model_copy(update={"stages": None})


def _triples(degrees: list[int], whole: int) -> Iterator[tuple[int, int, int]]:
    """Every three of the degrees whose product divides the whole; every three where it is 0."""
    for first in (degree for degree in degrees if whole % degree == 0):
        for second in (degree for degree in degrees if whole // first % degree == 0):
            yield from ((first, second, third) for third in degrees if whole // (first * second) % third == 0)


def _distance(layout: Layout, other: Layout) -> tuple[float, ...]:
    """How far the degrees are from those asked for: first the axes, then the data axis, then the rest of the
    choices."""
    axes = sum(abs(log2(getattr(other, axis) / getattr(layout, axis))) for axis in MODEL_AXES)
    above = sum(getattr(other, axis) > getattr(layout, axis) for axis in MODEL_AXES)
    added = sum(getattr(layout, axis) == 1 < getattr(other, axis) for axis in MODEL_AXES)
    choices = sum(
        getattr(other, name) != getattr(layout, name)
        for name in ("schedule", "attention", "stages_per_rank", "stages")
    )
    return (axes + added + choices / 4, above, other.tensor)
