"""The rules of layouts, each written once for a job's layout and for the planner's candidates.

A layout is refused only if devices cannot share the work evenly, or not at all. Everything else may be
combined: any product of the axes, with any ZeRO stage, schedule, precision and recomputation.

A rule is written with `%`, comparisons, `&` and `|`. It returns a bool for a `Layout`, and an array for the
cost model's `Space`, which has fields of the same names with one entry per candidate. The planner keeps the
candidates that break no rule, so training accepts whatever it proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from math import prod
from operator import and_
from typing import Any, Literal, NamedTuple, get_args

from shardwise.config.axes import AXES, SEQUENCE_AXES
from shardwise.config.check import divisors, nearest_multiples
from shardwise.config.layout import Layout
from shardwise.config.machine import Recompute
from shardwise.config.model import Model
from shardwise.config.schedules import Numbers, problem_of_stages, splits_backward, stage_count
from shardwise.config.schema import Data, Train
from shardwise.drivers.registry import driver_named

BY_OPERATOR = ("selective", "all-but-attention")
"""Recomputation that keeps the outputs of some operators, and allows only one backward pass."""
BORROWED_FROM = ("tensor", "context", "data")
"""Axes whose devices hold the experts, in the order in which they are taken."""
AnyLayout = Any
"""A `Layout`, whose numbers are ints, or the cost model's `Space`, whose numbers are arrays."""


class JobTables(NamedTuple):
    """The tables of a job that decide which layouts are possible."""

    model: Model
    data: Data
    train: Train
    layout: Layout


@dataclass(frozen=True)
class Rule:
    """A condition that makes a layout impossible, and the message that says so."""

    is_broken: Callable[[JobTables, AnyLayout], Numbers]
    """Whether a layout breaks the rule; for a `Space` an array with one entry per candidate."""
    problem: Callable[[JobTables], str]
    """Returns what is wrong with the job's layout and, if known, what to write instead."""
    fields: tuple[str, ...] = ()
    """Degrees of the layout that could be changed, the best one first."""
    short: Callable[[JobTables], str] | None = None
    """Returns the problem in few words, for the planner's list of refused degrees; None if the rule depends
    on more than the degrees."""


def _template(text: str) -> Callable[[JobTables], str]:
    """Return a function that fills the values of a job into a message."""
    return lambda job: text.format(**job._asdict())


def broken_rules(rules: tuple[Rule, ...], job: JobTables) -> Iterator[Rule]:
    """Return the rules that the job's layout breaks."""
    return (rule for rule in rules if rule.is_broken(job, job.layout))


def first_broken_rule(rules: tuple[Rule, ...], job: JobTables) -> Iterator[tuple[Rule, str]]:
    """Return the first rule that the job's layout breaks, with its message; nothing if it breaks none."""
    return ((rule, rule.problem(job)) for rule in islice(broken_rules(rules, job), 1))


# -- heads and vocabulary over `tensor` ----------------------------------------------------------------------


def splits_evenly(parts: int, devices: Numbers) -> Numbers:
    """Whether each device gets the same number of whole parts."""
    return parts % devices == 0


def splits_or_repeats(parts: int, devices: Numbers) -> Numbers:
    """Whether parts divide evenly over devices, or each part has a copy on the same number of devices."""
    return (parts % devices == 0) | (devices % parts == 0)


TENSOR = (
    Rule(
        lambda job, layout: splits_evenly(job.model.heads, layout.tensor) == 0,
        _template(
            "layout.tensor = {layout.tensor}: does not divide model.heads = {model.heads}, and heads stay "
            "whole"
        ),
        ("tensor",),
        _template("tensor does not divide {model.heads} heads"),
    ),
    Rule(
        lambda job, layout: splits_or_repeats(job.model.kv_heads, layout.tensor) == 0,
        _template(
            "layout.tensor = {layout.tensor}: {model.kv_heads} key heads can neither be split nor repeated "
            "evenly over it; one must divide the other"
        ),
        ("tensor",),
        _template("tensor neither divides {model.kv_heads} key heads nor is divided by them"),
    ),
    Rule(
        lambda job, layout: job.model.vocabulary < layout.tensor,
        _template("layout.tensor = {layout.tensor}: more than model.vocabulary = {model.vocabulary}"),
        ("tensor",),
        _template("tensor is more than the vocabulary"),
    ),
)


# -- stages of a pipeline ------------------------------------------------------------------------------------


def cut_fits(stages: tuple[int, ...], model: Model, layout: AnyLayout) -> Numbers:
    """Whether the stages that the user gave match the pipeline's number of stages and contain all blocks."""
    return (stage_count(layout) == len(stages)) & (sum(stages) == model.layers)


def _cut_is_wrong(job: JobTables, layout: AnyLayout) -> Numbers:
    stages = job.layout.stages
    return bool(stages) & (layout.pipeline > 1) & (cut_fits(stages or (), job.model, layout) == 0)


PIPELINE = (
    Rule(
        lambda job, layout: problem_of_stages(job.layout.schedule, job.layout.stages_per_rank) is not None,
        lambda job: problem_of_stages(job.layout.schedule, job.layout.stages_per_rank) or "",
    ),
    Rule(
        lambda job, layout: (layout.pipeline > 1) & (stage_count(layout) > job.model.layers),
        lambda job: (
            f"layout.pipeline = {job.layout.pipeline}: {job.layout.schedule} cuts the model into "
            f"{stage_count(job.layout)} stages of at least one block, and model.layers = {job.model.layers} "
            f"makes at most {job.model.layers} stages"
        ),
        ("pipeline",),
        _template("pipeline has more stages than the model's {model.layers} blocks"),
    ),
    Rule(
        _cut_is_wrong,
        lambda job: (
            f"layout.stages = {list(job.layout.stages or ())}: give {stage_count(job.layout)} numbers that "
            f"add up to model.layers = {job.model.layers}, or leave it out"
        ),
    ),
)


def _by_operator(train: Train, layout: AnyLayout) -> Numbers:
    """Whether recomputation selects operators. A `Space` holds the index of its mode, or if the job gives a
    share of the activations, that of the nearest mode; a share selects no operators."""
    if isinstance(layout, Layout) or not isinstance(train.recompute, str):
        return train.recompute in BY_OPERATOR
    return layout.recompute.choose([mode in BY_OPERATOR for mode in get_args(Recompute)])


RECOMPUTE = (
    Rule(
        lambda job, layout: splits_backward(layout) & _by_operator(job.train, layout),
        _template(
            "train.recompute = {train.recompute!r}: {layout.schedule} goes through backward in two halves, "
            "and recomputation by operators allows one pass; use 'full', a number from 0 to 1, or "
            "layout.schedule = '1f1b'"
        ),
    ),
)


# -- axes that a driver does not support ---------------------------------------------------------------------


def _driver_rule(axis: str) -> Rule:
    """Return the rule that the job's driver supports several devices along an axis."""

    def why(job: JobTables) -> str | None:
        return driver_named(job.train.driver).refused_axes.get(axis)

    return Rule(
        lambda job, layout: (getattr(layout, axis) > 1) & (why(job) is not None),
        lambda job: (
            f"train.driver = {job.train.driver!r}: not with layout.{axis} = {getattr(job.layout, axis)}, "
            f"because {why(job)}; use train.driver = 'synchronous', or another axis"
        ),
        short=lambda job: f"{axis} is above 1, and {why(job)}",
    )


DRIVER = tuple(_driver_rule(axis) for axis in AXES)


# -- a sequence over `context` and `tensor` ------------------------------------------------------------------


def context_attention(model: Model, layout: Layout) -> Literal["ring", "ulysses"]:
    """Return how `context` devices share attention: as the layout says, else Ulysses if the heads divide,
    else a ring.

    Key heads need not divide (they are repeated) if a ring does not support the model's attention.
    """
    if layout.attention != "auto":
        return layout.attention
    kv_heads = max(1, model.kv_heads // layout.tensor)
    repeats = not ring_supports_any_length(model) or kv_heads % layout.context == 0
    return "ulysses" if heads_divide_over_context(model, layout) and repeats else "ring"


def ring_supports_any_length(model: Model) -> bool:
    """Whether a ring supports the model's attention for sequences of any length."""
    return model.window is None and model.attention_softcap is None


def unsupported_by_ring(model: Model, sequence_length: int) -> str | None:
    """Return the setting of a model's attention that a ring does not support; None if it supports all."""
    if model.attention_softcap is not None:
        return f"model.attention_softcap = {model.attention_softcap:g}"
    if model.window_cuts(sequence_length):
        return f"model.window = {model.window}"
    return None


def heads_divide_over_context(model: Model, layout: AnyLayout) -> Numbers:
    """Whether the query heads of a tensor device divide over the `context` devices, as Ulysses needs."""
    return model.heads // layout.tensor % layout.context == 0


def is_ring(model: Model, layout: AnyLayout) -> Numbers:
    """Whether there are several `context` devices and they compute attention in a ring."""
    if isinstance(layout, Layout):
        return layout.context > 1 and context_attention(model, layout) == "ring"
    return (layout.context > 1) & (layout.ring == 1)


def sequence_multiple(model: Model, layout: AnyLayout) -> Numbers:
    """Return the number that must divide the length of a sequence.

    Tensor devices share the tokens of a context device, and a ring cuts those into two chunks of equal
    length.
    """
    cuts_in_half = is_ring(model, layout) & (layout.tensor % 2 == 1)
    return layout.context * layout.tensor * (1 + cuts_in_half)


def _heads_problem(job: JobTables) -> str:
    heads, layout = job.model.heads // job.layout.tensor, job.layout
    ring = job._replace(layout=layout.model_copy(update={"attention": "ring"}))
    works = next(broken_rules(SEQUENCE, ring), None) is None
    advice = "; use 'ring', which works with any number of heads" if works else ""
    return (
        f"layout.attention = 'ulysses': {heads} heads a tensor device do not divide over context "
        f"{layout.context}{advice}"
    )


def _ring_problem(job: JobTables) -> str:
    lacks = unsupported_by_ring(job.model, job.data.sequence_length)
    return (
        f"layout.context = {job.layout.context}: passing keys around a ring cannot keep to {lacks}; use "
        "layout.attention = 'ulysses', and as many context devices as divide the "
        f"{job.model.heads // job.layout.tensor} heads of a tensor device"
    )


def _sequence_problem(job: JobTables) -> str:
    model, length = job.model, job.data.sequence_length
    degrees = {axis: getattr(job.layout, axis) for axis in SEQUENCE_AXES}
    axes = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
    multiple = sequence_multiple(model, job.layout)
    return (
        f"data.sequence_length = {length}: {axes} devices share a sequence, in parts of equal length; use a "
        f"multiple of {multiple}, such as {nearest_multiples(length, multiple, model.max_positions)}"
    )


SEQUENCE = (
    Rule(
        lambda job, layout: (
            (layout.context > 1)
            & (is_ring(job.model, layout) == 0)
            & (heads_divide_over_context(job.model, layout) == 0)
        ),
        _heads_problem,
        ("context",),
    ),
    Rule(
        lambda job, layout: (
            is_ring(job.model, layout)
            & (unsupported_by_ring(job.model, job.data.sequence_length) is not None)
        ),
        _ring_problem,
        ("context",),
    ),
    Rule(
        lambda job, layout: job.data.sequence_length % (layout.context * layout.tensor) != 0,
        _sequence_problem,
        SEQUENCE_AXES,
        _template("a sequence of {data.sequence_length} does not divide over context x tensor"),
    ),
    Rule(
        lambda job, layout: job.data.sequence_length % sequence_multiple(job.model, layout) != 0,
        _sequence_problem,
        SEQUENCE_AXES,
    ),
)


# -- experts -------------------------------------------------------------------------------------------------


def borrowed_devices(degrees: AnyLayout) -> dict[str, Numbers]:
    """Return how many devices the expert axis borrows from each axis: all, or as many as are still needed."""
    needed, borrowed = degrees.expert, {}
    for axis in BORROWED_FROM:
        size = getattr(degrees, axis)
        borrowed[axis] = needed + (needed % size == 0) * (size - needed)
        needed = needed // borrowed[axis]
    return borrowed


def can_borrow(degrees: AnyLayout) -> Numbers:
    """Whether the expert axis is a product of whole axes, in the order of BORROWED_FROM, and a part of the
    next."""
    borrowed = borrowed_devices(degrees)
    parts = (getattr(degrees, axis) % share == 0 for axis, share in borrowed.items())
    return reduce(and_, parts, prod(borrowed.values()) == degrees.expert)


def _data_is_open(layout: AnyLayout) -> bool:
    """Whether the number of data-parallel devices is not known yet."""
    return isinstance(layout, Layout) and layout.data < 1


EXPERT = (
    Rule(
        lambda job, layout: (layout.expert > 1) & (job.model.experts == 0),
        _template(
            "layout.expert = {layout.expert}: the model has no experts; use layout.data or layout.tensor"
        ),
    ),
    Rule(
        lambda job, layout: job.model.experts % layout.expert != 0,
        _template("layout.expert = {layout.expert}: does not divide model.experts = {model.experts}"),
        ("expert",),
    ),
    Rule(
        lambda job, layout: (layout.expert > 1) & (not _data_is_open(layout) and can_borrow(layout) == 0),
        _template(
            "layout.expert = {layout.expert}: borrows devices from tensor {layout.tensor}, then context "
            "{layout.context}, then data {layout.data}, whole axes first, and cannot be made of these"
        ),
        ("expert",),
    ),
)


# -- neighbours that keep a copy of the weights for backward -------------------------------------------------


def with_dividing_backward_shards(layout: Layout, data: int) -> Layout:
    """Return the layout with `backward_shards` lowered to a divisor of the devices that share the weights."""
    if layout.backward_shards is None or data < 1:
        return layout
    sizes = [size for size in divisors(data * layout.context) if size <= layout.backward_shards]
    return layout.model_copy(update={"backward_shards": max(sizes)})


def _cuts_neighbours(job: JobTables, layout: AnyLayout) -> Numbers:
    shards = job.layout.backward_shards
    return shards is not None and not _data_is_open(layout) and layout.data * layout.context % shards != 0


BACKWARD_SHARDS = (
    Rule(
        lambda job, layout: (job.layout.backward_shards is not None) & (layout.pipeline * layout.expert > 1),
        _template(
            "layout.backward_shards = {layout.backward_shards}: not with pipeline or expert axes; leave it "
            "out"
        ),
    ),
    Rule(
        _cuts_neighbours,
        _template(
            "layout.backward_shards = {layout.backward_shards}: does not divide the {layout.shards} devices "
            "that share the weights (data x context)"
        ),
        ("backward_shards",),
    ),
)


# -- the batch over the data-parallel devices ----------------------------------------------------------------


def _share(job: JobTables, layout: AnyLayout) -> Numbers:
    """Return the number of sequences that a data-parallel device reads in a step."""
    return job.train.global_batch // (layout.replica * layout.data)


def _cuts_micro_batch(job: JobTables, layout: AnyLayout) -> Numbers:
    size = job.train.micro_batch
    return size is not None and not _data_is_open(layout) and _share(job, layout) % size != 0


def _global_batch_problem(job: JobTables) -> str:
    train, layout = job.train, job.layout
    multiple = layout.data_parallel * (train.micro_batch or 1)
    return (
        f"train.global_batch = {train.global_batch}: does not divide over {layout.data_parallel} "
        f"data-parallel devices (replica {layout.replica} x data {layout.data}); use "
        f"{nearest_multiples(train.global_batch, multiple)}"
    )


def _micro_batch_problem(job: JobTables) -> str:
    share = _share(job, job.layout)
    return (
        f"train.micro_batch = {job.train.micro_batch}: does not divide a device's share of {share} "
        f"sequences; use one of {', '.join(map(str, divisors(share)))}"
    )


BATCH = (
    Rule(
        lambda job, layout: (
            not _data_is_open(layout) and job.train.global_batch % (layout.replica * layout.data) != 0
        ),
        _global_batch_problem,
        short=_template("a global batch of {train.global_batch} does not divide over replica x data"),
    ),
    Rule(_cuts_micro_batch, _micro_batch_problem),
)

RULES = (TENSOR, PIPELINE, RECOMPUTE, *((rule,) for rule in DRIVER), SEQUENCE, EXPERT, BACKWARD_SHARDS)
"""Groups of rules. Only the first broken rule of a group is reported, because the later ones assume it."""
RULES_WITHOUT_MODEL = (RECOMPUTE, *((rule,) for rule in DRIVER), BACKWARD_SHARDS)
"""Groups of rules for the module of a program, before its sizes are known."""
DEGREE_RULES = tuple(rule for group in (*RULES, BATCH) for rule in group if rule.short)
"""Rules that depend on degrees only, which the planner checks before it tries other choices."""
