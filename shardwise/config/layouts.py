"""Which layouts a model and its data allow, and the nearest one that works when asked for another.

A layout is refused here, before any worker starts, only where devices could not share the work evenly or at all. Everything
else may be combined: any product of the axes, with any ZeRO stage, schedule, precision and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from math import lcm, log2, prod
from typing import Any, Literal

from shardwise.config.check import divisors, problems_of_batch
from shardwise.config.schema import Data, Layout, Model, Train

SPLIT_BACKWARD = ("zb1p", "zbv", "dualpipev")
BY_OPERATOR = ("selective", "all-but-attention")
"""Recomputation that keeps what some operators put out, and allows one pass backward."""
"""Schedules that compute the gradients of inputs and of weights apart."""
IN_A_V = ("zbv", "dualpipev")
"""Schedules with two stages a device: the model goes down the devices and comes back."""
MOST_TRIED = 100_000
"""Layouts that are looked at for the nearest one: a few seconds of them."""
BORROWED_FROM = ("tensor", "context", "data")
"""Axes whose devices hold the experts, in the order in which they are taken."""


def problems_of_layout(model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None) -> list[str]:
    """Every rule that the layout breaks, and below the last the nearest layout that breaks none, on as many devices where that
    number is known. Rules about how many devices read other sequences wait for it.
    """
    broken, batch = _rules(model, data, train, layout), _batch(train, layout)
    nearest = nearest_layout(model, data, train, layout, devices) if broken else None
    if nearest:
        broken[-1] += f"\n  the nearest layout that works: {nearest}"
    return [*batch, *broken]


def _rules(model: Model, data: Data, train: Train, layout: Layout) -> list[str]:
    return [
        *_tensor(model, layout),
        *_sequence(model, data, layout),
        *_pipeline(model, layout),
        *_recompute(train, layout),
        *_shares(train, layout),
        *_expert(model, layout),
        *problems_of_nearby(layout),
    ]


def problems_of_nearby(layout: Layout) -> Iterator[str]:
    """What keeps neighbours from holding a copy of the weights among them for backward."""
    if layout.backward_shards is None:
        return
    what = f"layout.backward_shards = {layout.backward_shards}"
    if layout.pipeline * layout.expert > 1:
        yield f"{what}: not with pipeline or expert axes; leave it out"
    if layout.data > 0 and layout.data * layout.context % layout.backward_shards:
        yield f"{what}: does not divide the {layout.data * layout.context} devices that share the weights (data x context)"


def with_nearby_that_divides(layout: Layout, data: int) -> Layout:
    """The layout with as many neighbours, of those asked for, as divide the devices that share the weights on this data axis."""
    if layout.backward_shards is None or data < 1:
        return layout
    sizes = [size for size in divisors(data * layout.context) if size <= layout.backward_shards]
    return layout.model_copy(update={"backward_shards": max(sizes)})


def _batch(train: Train, layout: Layout) -> list[str]:
    return list(problems_of_batch(train, layout)) if layout.data > 0 else []


def context_attention(model: Model, layout: Layout) -> Literal["ring", "ulysses"]:
    """How `context` devices attend: as asked; or Ulysses where query heads and key heads divide over them, else the ring. Of a
    model that the ring may not do, key heads need not divide: they are repeated."""
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
    """How many devices a layout with an open data axis needs at least: those of the other axes, and enough for the experts."""
    return layout.fixed * -(-layout.expert // (layout.context * layout.tensor))


def workers_without_gpus(layout: Layout) -> int:
    """How many workers a machine without GPUs starts for a layout with an open data axis.

    As few as the other axes need: one worker uses all cores. Where a job writes `data = -1`, it asks for data parallelism, and
    gets two workers if no other axis has several.
    """
    asked = "data" in layout.model_fields_set and layout.fixed == 1
    return max(fewest_devices(layout), 2 if asked else 1)


def sequence_multiple(model: Model, layout: Layout) -> int:
    """What the length of a sequence must be a multiple of: each context device has one chunk of it, or two in a ring, and
    the tensor devices share a context device's tokens."""
    if layout.context == 1:
        return layout.tensor
    chunks = 2 if context_attention(model, layout) == "ring" else 1
    return layout.context * lcm(layout.tensor, chunks)


def _tensor(model: Model, layout: Layout) -> Iterator[str]:
    tensor = layout.tensor
    if model.heads % tensor:
        yield f"layout.tensor = {tensor}: does not divide model.heads = {model.heads}, and heads stay whole"
    elif model.kv_heads % tensor and tensor % model.kv_heads:
        yield (
            f"layout.tensor = {tensor}: {model.kv_heads} key heads can neither be split nor repeated evenly over it; "
            "one must divide the other"
        )
    if model.vocabulary < tensor:
        yield f"layout.tensor = {tensor}: more than model.vocabulary = {model.vocabulary}"


def _sequence(model: Model, data: Data, layout: Layout) -> Iterator[str]:
    heads = model.heads // layout.tensor
    if layout.context > 1 and layout.attention == "ulysses" and heads % layout.context:
        yield (
            f"layout.attention = 'ulysses': {heads} heads a tensor device do not divide over context {layout.context}; "
            "use 'ring', which works with any number of heads"
        )
        return
    lacks = ring_lacks(model, data.sequence_length)
    if lacks and layout.context > 1 and context_attention(model, layout) == "ring":
        yield (
            f"layout.context = {layout.context}: passing keys around a ring cannot keep to {lacks}; use layout.attention = "
            f"'ulysses', and as many context devices as divide the {heads} heads of a tensor device"
        )
        return
    multiple = sequence_multiple(model, layout)
    if data.sequence_length % multiple:
        below, above = data.sequence_length // multiple * multiple, -(-data.sequence_length // multiple) * multiple
        shared = f"context {layout.context} x tensor {layout.tensor} devices share a sequence, in parts of equal length"
        nearest = " or ".join(str(value) for value in (below, above) if value)
        yield f"data.sequence_length = {data.sequence_length}: {shared}; use a multiple of {multiple}, such as {nearest}"


def _pipeline(model: Model, layout: Layout) -> Iterator[str]:
    stages = layout.pipeline * stages_on_a_rank(layout)
    fixed = 2 if layout.schedule in IN_A_V else 1
    if layout.schedule != "interleaved" and layout.stages_per_rank not in (None, fixed):
        yield (
            f"layout.stages_per_rank = {layout.stages_per_rank}: {layout.schedule} has {fixed} a device; leave it out, or use "
            "layout.schedule = 'interleaved'"
        )
    elif layout.pipeline > 1 and stages > model.layers:
        yield (
            f"layout.pipeline = {layout.pipeline}: {layout.schedule} cuts the model into {stages} stages of at least one block, "
            f"and model.layers = {model.layers} makes at most {model.layers} stages"
        )
    elif layout.pipeline > 1 and layout.stages and (len(layout.stages), sum(layout.stages)) != (stages, model.layers):
        yield (
            f"layout.stages = {list(layout.stages)}: give {stages} numbers that add up to model.layers = {model.layers}, "
            "or leave it out"
        )


def _recompute(train: Train, layout: Layout) -> Iterator[str]:
    if layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD and train.recompute in BY_OPERATOR:
        yield (
            f"train.recompute = {train.recompute!r}: {layout.schedule} goes through backward in two halves, and recomputation "
            "by operators allows one pass; use 'full', a number from 0 to 1, or layout.schedule = '1f1b'"
        )


def _shares(train: Train, layout: Layout) -> Iterator[str]:
    if train.shares == "by speed" and layout.pipeline > 1:
        yield (
            f"train.shares = 'by speed': the stages of a pipeline (layout.pipeline = {layout.pipeline}) send each other messages "
            "of one size; use train.shares = 'even', or another axis"
        )


def _expert(model: Model, layout: Layout) -> Iterator[str]:
    if layout.expert == 1:
        return
    if not model.experts:
        yield f"layout.expert = {layout.expert}: the model has no experts; use layout.data or layout.tensor"
    elif model.experts % layout.expert:
        yield f"layout.expert = {layout.expert}: does not divide model.experts = {model.experts}"
    elif layout.data > 0 and not can_borrow(layout):
        yield (
            f"layout.expert = {layout.expert}: borrows devices from tensor {layout.tensor}, then context {layout.context}, then "
            f"data {layout.data}, whole axes first, and cannot be made of these"
        )


def can_borrow(layout: Layout) -> bool:
    """Whether the expert axis can be made of whole axes, innermost first, and a part of the next."""
    taken = borrowed(layout)
    return prod(taken.values()) == layout.expert and all(getattr(layout, axis) % share == 0 for axis, share in taken.items())


def borrowed(degrees: Any) -> dict[str, Any]:
    """How many devices the expert axis borrows from each axis, innermost first: all of them, or what is still needed.

    Written for the ints of a Layout and the arrays of the cost model's Space alike.
    """
    needed, taken = degrees.expert, {}
    for axis in BORROWED_FROM:
        size = getattr(degrees, axis)
        taken[axis] = needed + (needed % size == 0) * (size - needed)
        needed = needed // taken[axis]
    return taken


def nearest_layout(model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None) -> str | None:
    """The layout on as many devices that works and changes the degrees least, in the words of the command line."""
    best = nearest_to(model, data, train, layout, devices)
    if best is None:
        return None
    changed = {field: value for field, value in best.model_dump().items() if value != getattr(layout, field)}
    settings = [f"layout.{field}={value}" for field, value in changed.items() if value is not None]
    left_out = [f"without layout.{field}" for field, value in changed.items() if value is None]
    return " ".join([*settings, *left_out])


def nearest_to(model: Model, data: Data, train: Train, layout: Layout, devices: int | None = None) -> Layout | None:
    """The layout on as many devices that works and changes the degrees least."""
    world = devices or (layout.world if layout.data > 0 else None)
    others = islice(_others(model, layout, world), MOST_TRIED)
    works = [other for other in others if not _rules(model, data, train, other) and not _batch(train, other)]
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
            degrees_of_other = {"pipeline": pipeline, "data": data, "context": context, "tensor": tensor, "expert": expert}
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
    """How far the degrees are from those asked for: first the axes, then the data axis, then the rest of the choices."""
    axes = sum(abs(log2(getattr(other, axis) / getattr(layout, axis))) for axis in ("pipeline", "context", "tensor", "expert"))
    above = sum(getattr(other, axis) > getattr(layout, axis) for axis in ("pipeline", "context", "tensor", "expert"))
    added = sum(getattr(layout, axis) == 1 < getattr(other, axis) for axis in ("pipeline", "context", "tensor", "expert"))
    choices = sum(
        getattr(other, name) != getattr(layout, name) for name in ("schedule", "attention", "stages_per_rank", "stages")
    )
    return (axes + added + choices / 4, above, other.tensor)
