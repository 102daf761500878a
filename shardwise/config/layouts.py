"""Which layouts a model and its data allow, and the nearest one that works when asked for another.

A layout is refused here, before any worker starts, only where devices could not share the work evenly or at
all. Everything else may be combined: any product of the axes, with any ZeRO stage, schedule, precision and
recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product
from math import lcm, log2, prod
from typing import Any, Literal, NamedTuple

from shardwise.config.axes import MODEL_AXES
from shardwise.config.check import divisors, found_by, nearest_multiples, problems_of_batch
from shardwise.config.schema import Data, Layout, Model, Train
from shardwise.drivers.registry import driver_named

SPLIT_BACKWARD = ("zb1p", "zbv", "dualpipev")
"""Schedules that compute the gradients of inputs and of weights apart."""
BY_OPERATOR = ("selective", "all-but-attention")
"""Recomputation that keeps what some operators put out, and allows one pass backward."""
IN_A_V = ("zbv", "dualpipev")
"""Schedules with two stages a device: the model goes down the devices and comes back."""
MOST_TRIED = 100_000
"""Layouts that are looked at for the nearest one: a few seconds of them."""
BORROWED_FROM = ("tensor", "context", "data")
"""Axes whose devices hold the experts, in the order in which they are taken."""


class Broken(NamedTuple):
    """A rule that a layout breaks."""

    problem: str
    fields: tuple[str, ...] = ()
    """Degrees of the layout of which another value may help, the likeliest first."""
    has_advice: bool = False
    """Whether the problem ends with advice already, so that the values are a second way."""


def problems_of_layout(
    model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None
) -> list[str]:
    """Every rule that the layout breaks, with the values that would break none.

    The last one also names the nearest layout that works, on `devices` where that number is known. Rules
    about the data-parallel devices are checked once layout.data is a number.
    """
    broken, batch = list(_rules(model, data, train, layout)), list(found_by(_batch, train, layout))
    problems = [rule.problem for rule in broken]
    if broken and all(section.is_whole for section in (model, data, train, layout)):
        problems = [
            rule.problem + _values(model, data, train, layout, rule, broken, devices) for rule in broken
        ]
        if nearest := nearest_layout(model, data, train, layout, devices):
            problems[-1] += f"\n  the nearest layout that works: {nearest}"
    return [*batch, *problems]


def layout_is_possible(model: Model, data: Data, train: Train, layout: Layout) -> bool:
    """Whether the layout breaks no rule."""
    return next(_rules(model, data, train, layout), None) is None


def _rules(model: Model, data: Data, train: Train, layout: Layout) -> Iterator[Broken]:
    yield from found_by(_tensor, model, layout)
    yield from found_by(_sequence, model, data, layout)
    yield from found_by(_pipeline, model, layout)
    yield from found_by(_recompute, train, layout)
    yield from found_by(_driver, train, layout)
    yield from found_by(_expert, model, layout)
    yield from found_by(problems_of_nearby, layout)


def _values(
    model: Model,
    data: Data,
    train: Train,
    layout: Layout,
    rule: Broken,
    broken: Sequence[Broken],
    devices: int | None,
) -> str:
    """The end of a message: for the first degree that can be changed, all values with which no rule is
    broken.

    Other degrees that are refused too are taken as 1, since they have to change as well.
    """
    others = {field: 1 for other in broken for field in other.fields[:1]}
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


def problems_of_nearby(layout: Layout) -> Iterator[Broken]:
    """What keeps neighbours from holding a copy of the weights among them for backward."""
    if layout.backward_shards is None:
        return
    what = f"layout.backward_shards = {layout.backward_shards}"
    if layout.pipeline * layout.expert > 1:
        yield Broken(f"{what}: not with pipeline or expert axes; leave it out")
    elif layout.data > 0 and layout.shards % layout.backward_shards:
        problem = (
            f"{what}: does not divide the {layout.shards} devices that share the weights (data x context)"
        )
        yield Broken(problem, ("backward_shards",))


def with_nearby_that_divides(layout: Layout, data: int) -> Layout:
    """The layout with as many neighbours, of those asked for, as divide the devices that share the weights on
    this data axis."""
    if layout.backward_shards is None or data < 1:
        return layout
    sizes = [size for size in divisors(data * layout.context) if size <= layout.backward_shards]
    return layout.model_copy(update={"backward_shards": max(sizes)})


def _batch(train: Train, layout: Layout) -> list[str]:
    return list(problems_of_batch(train, layout)) if layout.data > 0 else []


def context_attention(model: Model, layout: Layout) -> Literal["ring", "ulysses"]:
    """How `context` devices attend: as asked; or Ulysses where query heads and key heads divide over them,
    else the ring. Of a model that the ring may not do, key heads need not divide: they are repeated."""
    if layout.attention != "auto":
        return layout.attention
    heads, kv_heads = model.heads // layout.tensor, max(1, model.kv_heads // layout.tensor)
    both = heads % layout.context == 0 and (kv_heads % layout.context == 0 or not _ring_can_all(model))
    return "ulysses" if both else "ring"


def _ring_can_all(model: Model) -> bool:
    return model.window is None and model.attention_softcap is None


def ring_lacks(model: Model, sequence_length: int) -> str | None:
    """What of a model's attention a ring cannot do, as the user wrote it; None: it can do all."""
    if model.attention_softcap is not None:
        return f"model.attention_softcap = {model.attention_softcap:g}"
    if any(model.sees(layer, sequence_length) < sequence_length for layer in range(min(2, model.layers))):
        return f"model.window = {model.window}"
    return None


def stages_on_a_rank(layout: Layout) -> int:
    """Pipeline stages that a device holds."""
    return layout.stages_per_rank or (2 if layout.schedule in (*IN_A_V, "interleaved") else 1)


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


def sequence_multiple(model: Model, layout: Layout) -> int:
    """What the length of a sequence must be a multiple of: each context device has one chunk of it, or two in
    a ring, and the tensor devices share a context device's tokens."""
    if layout.context == 1:
        return layout.tensor
    chunks = 2 if context_attention(model, layout) == "ring" else 1
    return layout.context * lcm(layout.tensor, chunks)


def _tensor(model: Model, layout: Layout) -> Iterator[Broken]:
    what, tensor = f"layout.tensor = {layout.tensor}", layout.tensor
    if model.heads % tensor:
        yield Broken(
            f"{what}: does not divide model.heads = {model.heads}, and heads stay whole", ("tensor",)
        )
    elif model.kv_heads % tensor and tensor % model.kv_heads:
        yield Broken(
            f"{what}: {model.kv_heads} key heads can neither be split nor repeated evenly over it; one must "
            f"divide the other",
            ("tensor",),
        )
    elif model.vocabulary < tensor:
        yield Broken(f"{what}: more than model.vocabulary = {model.vocabulary}", ("tensor",))


def _sequence(model: Model, data: Data, layout: Layout) -> Iterator[Broken]:
    if list(_tensor(model, layout)):
        layout = layout.model_copy(
            update={"tensor": 1}
        )  # the sequence must divide by another number, once that is mended
    heads, length = model.heads // layout.tensor, data.sequence_length
    if layout.context > 1 and layout.attention == "ulysses" and heads % layout.context:
        ring = layout.model_copy(update={"attention": "ring"})
        advice = (
            "; use 'ring', which works with any number of heads"
            if not list(_sequence(model, data, ring))
            else ""
        )
        yield Broken(
            f"layout.attention = 'ulysses': {heads} heads a tensor device do not divide over context "
            f"{layout.context}{advice}",
            ("context",),
            has_advice=bool(advice),
        )
        return
    lacks = ring_lacks(model, length)
    if lacks and layout.context > 1 and context_attention(model, layout) == "ring":
        yield Broken(
            f"layout.context = {layout.context}: passing keys around a ring cannot keep to {lacks}; use "
            f"layout.attention = "
            f"'ulysses', and as many context devices as divide the {heads} heads of a tensor device",
            ("context",),
            has_advice=True,
        )
        return
    multiple = sequence_multiple(model, layout)
    if length % multiple:
        axes = " x ".join(
            f"{axis} {getattr(layout, axis)}" for axis in ("context", "tensor") if getattr(layout, axis) > 1
        )
        nearest = nearest_multiples(length, multiple, model.max_positions)
        yield Broken(
            f"data.sequence_length = {length}: {axes} devices share a sequence, in parts of equal length; "
            f"use a multiple of "
            f"{multiple}, such as {nearest}",
            ("context", "tensor") if layout.context > 1 else ("tensor",),
            has_advice=True,
        )


def _pipeline(model: Model, layout: Layout) -> Iterator[Broken]:
    stages = layout.pipeline * stages_on_a_rank(layout)
    fixed = 2 if layout.schedule in IN_A_V else 1
    if layout.schedule != "interleaved" and layout.stages_per_rank not in (None, fixed):
        yield Broken(
            f"layout.stages_per_rank = {layout.stages_per_rank}: {layout.schedule} has {fixed} a device; "
            f"leave it out, or use "
            "layout.schedule = 'interleaved'"
        )
    elif layout.pipeline > 1 and stages > model.layers:
        yield Broken(
            f"layout.pipeline = {layout.pipeline}: {layout.schedule} cuts the model into {stages} stages of "
            f"at least one block, "
            f"and model.layers = {model.layers} makes at most {model.layers} stages",
            ("pipeline",),
        )
    elif (
        layout.pipeline > 1
        and layout.stages
        and (len(layout.stages), sum(layout.stages)) != (stages, model.layers)
    ):
        yield Broken(
            f"layout.stages = {list(layout.stages)}: give {stages} numbers that add up to model.layers = "
            f"{model.layers}, "
            "or leave it out"
        )


def _recompute(train: Train, layout: Layout) -> Iterator[Broken]:
    if layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD and train.recompute in BY_OPERATOR:
        yield Broken(
            f"train.recompute = {train.recompute!r}: {layout.schedule} goes through backward in two halves, "
            f"and recomputation "
            "by operators allows one pass; use 'full', a number from 0 to 1, or layout.schedule = '1f1b'"
        )


def _driver(train: Train, layout: Layout) -> Iterator[Broken]:
    for axis, why in driver_named(train.driver).refused_axes.items():
        if getattr(layout, axis) > 1:
            yield Broken(
                f"train.driver = {train.driver!r}: not with layout.{axis} = {getattr(layout, axis)}, because "
                f"{why}; use train.driver = 'synchronous', or another axis"
            )


def _expert(model: Model, layout: Layout) -> Iterator[Broken]:
    if layout.expert == 1:
        return
    what = f"layout.expert = {layout.expert}"
    if not model.experts:
        yield Broken(f"{what}: the model has no experts; use layout.data or layout.tensor")
    elif model.experts % layout.expert:
        yield Broken(f"{what}: does not divide model.experts = {model.experts}", ("expert",))
    elif layout.data > 0 and not can_borrow(layout):
        yield Broken(
            f"{what}: borrows devices from tensor {layout.tensor}, then context {layout.context}, then data "
            f"{layout.data}, whole "
            "axes first, and cannot be made of these",
            ("expert",),
        )


def can_borrow(layout: Layout) -> bool:
    """Whether the expert axis can be made of whole axes, innermost first, and a part of the next."""
    taken = borrowed(layout)
    return prod(taken.values()) == layout.expert and all(
        getattr(layout, axis) % share == 0 for axis, share in taken.items()
    )


def borrowed(degrees: Any) -> dict[str, Any]:
    """How many devices the expert axis borrows from each axis, innermost first: all of them, or what is still
    needed.

    Written for the ints of a Layout and the arrays of the cost model's Space alike.
    """
    needed, taken = degrees.expert, {}
    for axis in BORROWED_FROM:
        size = getattr(degrees, axis)
        taken[axis] = needed + (needed % size == 0) * (size - needed)
        needed = needed // taken[axis]
    return taken


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
        if layout_is_possible(model, data, train, other) and not _batch(train, other)
    ]
    return min(works, key=lambda other: _distance(layout, other), default=None)


def _others(model: Model, layout: Layout, world: int | None) -> Iterator[Layout]:
    """Layouts with other degrees and simpler choices, on as many devices where that number is known."""
    powers = {2**power for power in range(11)} | {layout.tensor, layout.context, layout.pipeline}
    degrees = divisors(world) if world else sorted(powers)
    experts = divisors(model.experts) if model.experts else [1]
    open_ = layout.attention == "ulysses" or not _ring_can_all(model)
    attentions = {layout.attention, "auto" if open_ else layout.attention}
    schedules = {(layout.schedule, layout.stages_per_rank), ("1f1b", None)}
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
            fits = layout.stages and (len(layout.stages), sum(layout.stages)) == (
                pipeline * stages_on_a_rank(other),
                model.layers,
            )
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
