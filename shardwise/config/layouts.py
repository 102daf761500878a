"""What to write instead of an impossible layout: the values that work, and the nearest possible layout.

The rules themselves are in `config/layout_rules.py`. A layout that breaks one is refused before any worker
starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import gcd, log2
from typing import NamedTuple

from shardwise.config.axes import MODEL_AXES
from shardwise.config.check import divisors, run_check
from shardwise.config.layout import Layout
from shardwise.config.layout_rules import (
    BATCH,
    EXPERT,
    PIPELINE,
    RULES,
    RULES_WITHOUT_MODEL,
    SEQUENCE,
    TENSOR,
    JobTables,
    Rule,
    broken_rules,
    cut_fits,
    first_broken_rule,
    ring_supports_any_length,
)
from shardwise.config.model import Model
from shardwise.config.schedules import DEFAULT_SCHEDULE
from shardwise.config.schema import Data, Train

MAX_LAYOUTS_TRIED = 100_000
"""Largest number of layouts that are compared for the nearest one, which takes a few seconds."""


class BrokenRule(NamedTuple):
    """A rule that a layout breaks."""

    problem: str
    """Message about what is wrong."""
    fields: tuple[str, ...] = ()
    """Degrees of the layout that could be changed, the best one first."""

    @property
    def has_advice(self) -> bool:
        """Whether the message already gives advice."""
        return "; use " in self.problem


def problems_of_layout(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> list[str]:
    """Return a message for every rule that the layout breaks, with the values that would work.

    The last message also names the nearest possible layout, on `devices` if that number is known. Rules about
    data-parallel devices are checked once layout.data is known.
    """
    job = JobTables(model, data, train, layout)
    broken, batch = list(_broken(job)), [problem for _, problem in run_check(first_broken_rule, BATCH, job)]
    if "module" in model.__dict__ and model.is_of_program and "global_batch" not in train.model_fields_set:
        batch = []  # the program says how large its batches are
    problems = [rule.problem for rule in broken]
    if broken and all(section.is_whole for section in job):
        problems = [rule.problem + _advice(job, rule, broken, devices) for rule in broken]
        if nearest := nearest_layout_settings(model, data, train, layout, devices):
            problems[-1] += f"\n  the nearest layout that works: {nearest}"
    return [*batch, *problems]


def layout_is_possible(model: Model, data: Data, train: Train, layout: Layout) -> bool:
    """Whether the layout breaks no rule."""
    job = JobTables(model, data, train, layout)
    return not any(rule.is_broken(job, layout) for rules in _rules_for(model) for rule in rules)


def _rules_for(model: Model) -> tuple[tuple[Rule, ...], ...]:
    if "module" not in model.__dict__ or not model.is_of_program:
        return RULES
    known = {"layers": PIPELINE, "experts": EXPERT}  # the program has said these sizes
    return (*RULES_WITHOUT_MODEL, *(rules for key, rules in known.items() if key in model.model_fields_set))


def _broken(job: JobTables) -> Iterator[BrokenRule]:
    """Yield the rules that the job's layout breaks.

    If `tensor` is refused, the sequence is checked without a tensor axis, because that degree will change.
    """
    refused: list[Rule] = []
    for rules in _rules_for(job.model):
        checked = job
        if rules is SEQUENCE and any(rule in TENSOR for rule in refused):
            checked = job._replace(layout=job.layout.model_copy(update={"tensor": 1}))
        for rule, problem in run_check(first_broken_rule, rules, checked):
            refused.append(rule)
            yield BrokenRule(
                problem, tuple(field for field in rule.fields if getattr(checked.layout, field) > 1)
            )


def _advice(job: JobTables, rule: BrokenRule, broken: Sequence[BrokenRule], devices: int | None) -> str:
    """Return the end of a message: all possible values of the first degree that can be changed.

    Other degrees that are refused too are set to 1, since they have to change as well.
    """
    refused = {field for other in broken for field in other.fields[:1]}
    relaxed = job.layout.model_copy(update=dict.fromkeys(refused.difference(rule.fields), 1))
    for field in rule.fields:
        if values := _possible_values(job, field, relaxed, devices):
            end = "" if rule.problem.startswith(f"layout.{field} ") else f" as layout.{field}"
            return f"{'; or use' if rule.has_advice else '; use'} {_in_words(values)}{end}"
    return ""


def _possible_values(job: JobTables, field: str, relaxed: Layout, devices: int | None) -> list[int]:
    """Return the values of a degree with which the relaxed layout breaks no rule."""
    model, data, train, layout = job
    values = _candidates(field, model, data, layout)
    layouts = ((value, relaxed.model_copy(update={field: value})) for value in values)
    return [
        value
        for value, other in layouts
        if _divides(other, devices) and layout_is_possible(model, data, train, other)
    ]


def _candidates(field: str, model: Model, data: Data, layout: Layout) -> Sequence[int]:
    """Return every value that a degree of a layout could have for this model and these data."""
    match field:
        case "tensor":
            return divisors(model.heads)
        case "context":
            return divisors(data.sequence_length)
        case "pipeline":
            return range(1, model.layers + 1)
        case "expert":
            return divisors(model.experts)
    return divisors(layout.data * layout.context)  # backward_shards


def _divides(layout: Layout, devices: int | None) -> bool:
    """Whether an open data axis can use all devices, if their number is known."""
    return devices is None or layout.data > 0 or devices % layout.degrees_without_data == 0


def _in_words(values: Sequence[int]) -> str:
    """Return ascending values in words: "3", "1 or 2", "one of 1, 2, 4", "1 to 80"."""
    if len(values) > 3 and values[-1] - values[0] == len(values) - 1:
        return f"{values[0]} to {values[-1]}"
    return f"one of {', '.join(map(str, values))}" if len(values) > 2 else " or ".join(map(str, values))


def fewest_devices(layout: Layout) -> int:
    """Return the smallest number of devices for a layout with an open data axis: those of the other axes, and
    enough for the experts."""
    return layout.degrees_without_data * (layout.expert // gcd(layout.expert, layout.context * layout.tensor))


def workers_without_gpus(layout: Layout) -> int:
    """Return the number of workers that a machine without GPUs starts for a layout with an open data axis.

    These are as few as the other axes need, because one worker uses all cores. A job that writes `data = -1`
    asks for data parallelism, and gets two workers if no other axis has several.
    """
    asked = "data" in layout.model_fields_set and layout.degrees_without_data == 1
    return max(fewest_devices(layout), 2 if asked else 1)


def nearest_layout_settings(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> str | None:
    """Return the nearest possible layout as settings for the command line."""
    best = nearest_possible_layout(model, data, train, layout, devices)
    if best is None:
        return None
    changed = {field: value for field, value in best.model_dump().items() if value != getattr(layout, field)}
    settings = [f"layout.{field}={value}" for field, value in changed.items() if value is not None]
    left_out = [f"without layout.{field}" for field, value in changed.items() if value is None]
    return " ".join([*settings, *left_out])


def nearest_possible_layout(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> Layout | None:
    """Return the possible layout on as many devices that changes the degrees least; None if there is none."""
    world = devices or (layout.world if layout.data > 0 else None)
    others = islice(_others(model, layout, world), MAX_LAYOUTS_TRIED)
    works = [
        other
        for other in others
        if layout_is_possible(model, data, train, other)
        and not any(broken_rules(BATCH, JobTables(model, data, train, other)))
    ]
    return min(works, key=lambda other: _distance(layout, other), default=None)


def _others(model: Model, layout: Layout, world: int | None) -> Iterator[Layout]:
    """Yield layouts with other degrees and simpler choices, on `world` devices if that number is known."""
    experts = divisors(model.experts) if model.experts else [1]
    open_ = layout.attention == "ulysses" or not ring_supports_any_length(model)
    attentions = dict.fromkeys((layout.attention, "auto" if open_ else layout.attention))
    schedules = dict.fromkeys(((layout.schedule, layout.stages_per_rank), (DEFAULT_SCHEDULE, None)))
    for degrees in _other_degrees(layout, world):
        for expert, attention, (schedule, per_rank) in product(experts, attentions, schedules):
            choices = {"attention": attention, "schedule": schedule, "stages_per_rank": per_rank}
            other = layout.model_copy(update={**degrees, "expert": expert, **choices})
            fits = layout.stages and cut_fits(layout.stages, model, other)
            yield other if fits else other.model_copy(update={"stages": None})


def _other_degrees(layout: Layout, world: int | None) -> Iterator[dict[str, int]]:
    """Yield the degrees of all axes but `replica` and `expert` whose product is the number of devices."""
    powers = {2**power for power in range(11)} | {layout.tensor, layout.context, layout.pipeline}
    sizes = divisors(world) if world else sorted(powers)
    for pipeline, context, tensor in _triples(sizes, world // layout.replica if world else 0):
        fixed = pipeline * context * tensor * layout.replica
        if not world or world % fixed == 0:
            data = world // fixed if world else -1
            yield {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor}


def _triples(degrees: list[int], whole: int) -> Iterator[tuple[int, int, int]]:
    """Yield every three of the degrees whose product divides `whole`; every three if `whole` is 0."""
    for first in (degree for degree in degrees if whole % degree == 0):
        for second in (degree for degree in degrees if whole // first % degree == 0):
            yield from ((first, second, third) for third in degrees if whole // (first * second) % third == 0)


def _distance(layout: Layout, other: Layout) -> tuple[float, ...]:
    """Return how far another layout is from the one asked for, as a tuple that sorts the nearest first."""
    axes = sum(abs(log2(getattr(other, axis) / getattr(layout, axis))) for axis in MODEL_AXES)
    above = sum(getattr(other, axis) > getattr(layout, axis) for axis in MODEL_AXES)
    added = sum(getattr(layout, axis) == 1 < getattr(other, axis) for axis in MODEL_AXES)
    choices = sum(
        getattr(other, name) != getattr(layout, name)
        for name in ("schedule", "attention", "stages_per_rank", "stages")
    )
    return (axes + added + choices / 4, above, other.tensor)
