"""Shrink a job that is too large for this machine, without changing what can go wrong in its layout.

Mistakes of a layout are in its structure: which device holds what, what is summed over which devices, what is
split unevenly. They do not depend on 80 layers or 8192 features, but on the axes, the grouped heads and the
short last slice. So a large job is proven on the smallest job that has the same *properties*: yes-or-no
statements such as "there are fewer kv heads than tensor devices" or "the vocabulary does not divide by their
number". For each group of numbers (degrees with heads and experts, depth, batch, widths, vocabulary), a
search finds the smallest numbers with all properties of the original. If no small numbers have all of them,
the properties listed last are given up. Settings that are not numbers (norms, router, schedule,
recomputation, ...) and `zero` stay as they are.

Example: llama3-70b on pipeline 4, data 2, context 2, tensor 8, where each tensor device has one of the 8 kv
heads, becomes 4 layers of 32 features with 2 kv heads on pipeline 2, data 2, context 2, tensor 2. That takes
16 processes and a few seconds. Mistakes that only large numbers cause cannot be seen this way: an index that
overflows, a kernel that fails at its largest size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import TypeVar

from shardwise.config import (
    AXES,
    Config,
    Layout,
    Model,
    Train,
    can_borrow,
    context_attention,
    divisors,
    fewest_devices,
    from_tables,
    sequence_multiple,
    stage_count,
)
from shardwise.config.layout_rules import heads_divide_over_context, splits_evenly, splits_or_repeats
from shardwise.config.parameters import count
from shardwise.files import Json
from shardwise.plans import flops_per_token, micro_batch_size
from shardwise.proof.random_text import can_use_own_data, with_random_text

Properties = tuple[bool, ...]
"""Yes-or-no statements about a job, the most important first."""
Changes = dict[str, tuple[object, object]]
"""By "section.key", the value before and the value after."""

MAX_DEVICES = 16
MOST_PARAMETERS = 2_000_000
MOST_FLOPS = 1e11
"""Largest number of operations of one step, forward and backward, for the whole batch: a few seconds in
float64 on two cores."""

DEGREES = (2, 4)
EXPERT_DEGREES = (2, 4, 8)
MOST_HEADS = 16
MOST_EXPERTS = 16
SEQUENCE = 32
HEAD_DIMS = (8, 16)
HIDDEN = 16
INNER = 4
BYTE_IDS = 257

_Value = TypeVar("_Value")


def shrink(
    config: Config, most_devices: int = MAX_DEVICES, folder: Path | None = None
) -> tuple[Config, Changes | None]:
    """Return the job, or if it is too large to prove here, the smallest job with its structure; and what
    changed (None if nothing did).

    `folder` is where random text is written if the job's own data cannot be used; by default it is the job's
    `data.cache`.
    """
    if config.model.is_of_program:  # its model and data cannot be changed
        return config, None
    small, large = config, is_large(config, most_devices)
    if large:
        small = _smallest(config, most_devices)
    if not can_use_own_data(config.data, only_bytes=large):
        if small.model.vocabulary < BYTE_IDS:
            layout = with_smallest_data(small)
            small = _changed(small, "model", {"vocabulary": _vocabulary(small.model, layout, layout)})
        data = with_random_text(small.data, folder or Path(config.data.cache))
        small = _changed(small, "data", data.model_dump())
    small = _checked(small)
    return small, changes(config, small) or None


def is_large(config: Config, most_devices: int = MAX_DEVICES) -> bool:
    """Return whether a proof would need too many processes, too much memory or too much time."""
    layout, tokens = config.layout, config.train.global_batch * config.data.sequence_length
    devices = layout.degrees_without_data * max(1, layout.data)
    flops = flops_per_token(config.model, config.data.sequence_length) * tokens
    return devices > most_devices or count(config.model) > MOST_PARAMETERS or flops > MOST_FLOPS


def changes(before: Config, after: Config) -> Changes:
    """Return every value that differs between two jobs, before and after."""
    old, new = before.model_dump(), after.model_dump()
    values = [(name, key, value) for name, table in old.items() for key, value in table.items()]
    return {
        f"{name}.{key}": (value, new[name][key]) for name, key, value in values if value != new[name][key]
    }


def _smallest(config: Config, most_devices: int) -> Config:
    layout = with_smallest_data(config)
    if layout.context > 1:  # the meaning of `auto` must not change with the number of heads
        layout = layout.model_copy(update={"attention": context_attention(config.model, layout)})
    model, small_layout = _degrees(config.model, layout, most_devices)
    model, small_layout = _depth(config.model, layout, model, small_layout)
    length = _sequence_length(config.data.sequence_length, model, small_layout)
    model = _widths(config.model, layout, model, small_layout)
    model = model.model_copy(update=_positions(config, layout, length, small_layout))
    model = model.model_copy(update=_window(config, length))
    small = _changed(config, "model", model.model_dump())
    small = _changed(small, "layout", small_layout.model_dump())
    small = _changed(small, "data", {"sequence_length": length})
    return _changed(small, "train", _batch(config.train, layout, small_layout))


def _checked(config: Config) -> Config:
    """Return the job after the checks that every job must pass."""
    tables = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in config.model_dump().items()
    }
    tables["train"].setdefault("clip", False)
    return from_tables(tables, "the shrunk job")


def _changed(config: Config, section: str, values: Json) -> Config:
    table = getattr(config, section)
    return config.model_copy(update={section: type(table).model_validate({**table.model_dump(), **values})})


def _closest(
    candidates: Iterable[_Value],
    properties: Callable[[_Value], Properties],
    wanted: Properties,
    cost: Callable[[_Value], object] = lambda value: value,
) -> _Value:
    """Return the cheapest of the candidates whose properties are closest to the wanted ones."""
    return min(candidates, key=lambda candidate: (_missed(properties(candidate), wanted), cost(candidate)))


def _missed(properties: Properties, wanted: Properties) -> Properties:
    """Return True for each property that differs.

    Such tuples compare like binary numbers: the most important property decides.
    """
    return tuple(has != want for has, want in zip(properties, wanted, strict=True))


# -- degrees, heads and experts, which must fit each other ---------------------------------------------------


def with_smallest_data(config: Config) -> Layout:
    """Return the layout with a definite data axis.

    `data = -1` means all remaining devices. Here it becomes as few as the experts need, or two if there is no
    other axis to prove and the global batch is even.
    """
    layout = config.layout
    if layout.data > 0:
        return layout
    needed = fewest_devices(layout) // layout.degrees_without_data
    several = 2 if layout.degrees_without_data == 1 and config.train.global_batch % 2 == 0 else 1
    return layout.model_copy(update={"data": max(needed, several)})


def _degrees(model: Model, layout: Layout, most_devices: int) -> tuple[Model, Layout]:
    """Return the model and the layout with small degrees of every axis, heads and experts.

    The limit on processes is more important than a missed property.
    """

    def missed(pair: tuple[Model, Layout]) -> Properties:
        return _missed(_group_properties(*pair), wanted)

    wanted = _group_properties(model, layout)
    pairs = [
        (_experts(model, layout, _heads(model, layout, smaller), smaller), smaller)
        for smaller in _layouts(layout)
    ]
    fitting = [pair for pair in pairs if fits(*pair)] or pairs
    fewest = min(pair[1].world for pair in fitting)
    allowed = [pair for pair in fitting if pair[1].world <= max(most_devices, fewest)]
    return min(
        allowed,
        key=lambda pair: (missed(pair), pair[1].world, pair[1].expert, pair[0].heads, pair[0].experts),
    )


def _layouts(layout: Layout) -> Iterator[Layout]:
    """Yield the layout with every choice of small degrees. An axis above 1 stays above 1."""
    names = [axis for axis in AXES if getattr(layout, axis) > 1]
    small = [EXPERT_DEGREES if axis == "expert" else DEGREES for axis in names]
    choices = [
        [degree for degree in degrees if degree <= getattr(layout, axis)]
        for axis, degrees in zip(names, small, strict=True)
    ]
    for degrees in product(*choices):
        yield _with_nearby(layout, layout.model_copy(update=dict(zip(names, degrees, strict=True))))
    yield layout  # a difficult case may have no smaller form


def _with_nearby(layout: Layout, smaller: Layout) -> Layout:
    """Return the smaller layout with `backward_shards` set to the same case as in the original: all devices
    that share the weights, one of them, or some."""
    if layout.backward_shards is None:
        return smaller
    everyone = smaller.data * smaller.context
    some = next((size for size in divisors(everyone) if 1 < size < everyone), 1)
    on_all = layout.backward_shards == layout.data * layout.context
    shards = everyone if on_all else min(some, layout.backward_shards)
    return smaller.model_copy(update={"backward_shards": shards})


def fits(model: Model, layout: Layout) -> bool:
    """Return whether heads and experts can be distributed over these degrees at all."""
    return can_borrow(layout) and model.experts % layout.expert == 0 and _heads_fit(model, layout)


def _heads_fit(model: Model, layout: Layout) -> bool:
    dealt = layout.attention != "ulysses" or heads_divide_over_context(model, layout)
    alike = splits_or_repeats(model.kv_heads, layout.tensor)
    return bool(splits_evenly(model.heads, layout.tensor) and alike and dealt)


def _group_properties(model: Model, layout: Layout) -> Properties:
    return (
        *_head_properties(model, layout),
        *_expert_properties(model, layout),
        *_borrowing_properties(layout),
    )


def _head_properties(model: Model, layout: Layout) -> Properties:
    heads, kv_heads, tensor, context = model.heads, model.kv_heads, layout.tensor, layout.context
    local_heads, local_kv = heads // tensor, max(1, kv_heads // tensor)
    shared = (kv_heads == heads, kv_heads < tensor, kv_heads == tensor)
    ulysses = context_attention(model, layout) == "ulysses"
    even = (local_kv % context == 0, local_heads % context == 0)
    return (*shared, ulysses, kv_heads == 1, heads == tensor, *even)


def _heads(given: Model, layout: Layout, smaller: Layout) -> Model:
    pairs = [
        (heads, kv)
        for heads in range(1, min(given.heads, MOST_HEADS) + 1)
        for kv in divisors(heads)
        if kv <= given.kv_heads
    ]
    shapes = [
        given.model_copy(update={"heads": heads, "kv_heads": kv})
        for heads, kv in [*pairs, (given.heads, given.kv_heads)]
    ]
    return _closest(
        [shape for shape in shapes if _heads_fit(shape, smaller)] or shapes[-1:],
        lambda model: _head_properties(model, smaller),
        _head_properties(given, layout),
        lambda model: (model.heads, model.kv_heads),
    )


def _expert_properties(model: Model, layout: Layout) -> Properties:
    if not model.experts:
        return ()
    # Devices with the same experts, which share their states.
    holders = layout.tensor * layout.context * layout.data // layout.expert
    local_experts = model.experts // layout.expert
    chosen = (model.experts_per_token == 1, model.experts_per_token == model.experts)
    return (*chosen, local_experts == 1, local_experts % max(1, holders) == 0)


def _experts(given: Model, layout: Layout, model: Model, smaller: Layout) -> Model:
    """Return the model with fewer experts. A token that visits several experts then visits two."""
    if not given.experts:
        return model
    numbers = range(smaller.expert, min(given.experts, MOST_EXPERTS) + 1, smaller.expert)
    pairs = [
        (number, chosen)
        for number in numbers
        for chosen in range(1, min(number, given.experts_per_token) + 1)
    ]
    pairs.append((given.experts, given.experts_per_token))
    shrunk = _closest(
        [
            model.model_copy(update={"experts": number, "experts_per_token": chosen})
            for number, chosen in pairs
        ],
        lambda model: _expert_properties(model, smaller),
        _expert_properties(given, layout),
        lambda model: (model.experts, model.experts_per_token),
    )
    return shrunk.model_copy(update={"shared_experts": min(2, given.shared_experts)})


def _borrowing_properties(layout: Layout) -> Properties:
    """Return from which axes the experts take their ranks, and whether they take all of an axis or a part."""
    tensor = layout.tensor
    context, data = tensor * layout.context, tensor * layout.context * layout.data
    return tuple(
        holds for size in (tensor, context, data) for holds in (layout.expert < size, layout.expert == size)
    )


# -- depth and batch -----------------------------------------------------------------------------------------


def _depth(given: Model, layout: Layout, model: Model, smaller: Layout) -> tuple[Model, Layout]:
    """Return the model and the layout with as few layers as keep the kind of cut into stages: even or not,
    one block per stage or more."""
    stages, fewer = stage_count(layout), stage_count(smaller)
    if layout.stages is not None:
        by_hand = _cut_by_hand(layout.stages, fewer)
        model = model.model_copy(update={"layers": sum(by_hand)})
        return model, smaller.model_copy(update={"stages": by_hand})
    layers = _closest(
        range(1, given.layers + 1),
        lambda layers: (layers >= fewer, layers % fewer == 0, layers // fewer > 1),
        (given.layers >= stages, given.layers % stages == 0, given.layers // stages > 1),
    )
    return model.model_copy(update={"layers": layers}), smaller


def _cut_by_hand(blocks: tuple[int, ...], stages: int) -> tuple[int, ...]:
    """Return a cut with fewer stages: the first and the last of the original, with the same order of sizes.

    A cut that was uneven stays uneven.
    """
    front = blocks[: stages - stages // 2]
    ends = (*front, *blocks[len(blocks) - (stages - len(front)) :])
    sizes = sorted(set(ends))
    ranked = tuple(1 + sizes.index(size) for size in ends)
    flattened = len(sizes) == 1 and len(set(blocks)) > 1
    return (*ranked[:-1], ranked[-1] + 1) if flattened else ranked


def _batch(train: Train, layout: Layout, smaller: Layout) -> Json:
    """Return a batch of one or two sequences per micro-batch, and of as few micro-batches as keep their
    relation to the length of the pipeline."""
    sized = train.micro_batch is not None
    sizes = product(range(1, 8 * smaller.pipeline + 1), (1, 2) if sized else (None,))
    batches = [
        train.model_copy(update={"global_batch": share * smaller.data_parallel, "micro_batch": rows})
        for share, rows in sizes
        if rows is None or share % rows == 0
    ]
    smallest = _closest(
        [batch for batch in batches if batch.global_batch <= train.global_batch] or [train],
        lambda batch: _batch_properties(batch, smaller),
        _batch_properties(train, layout),
        lambda batch: batch.global_batch,
    )
    return {"global_batch": smallest.global_batch, "micro_batch": smallest.micro_batch}


def _batch_properties(train: Train, layout: Layout) -> Properties:
    rows = micro_batch_size(train, layout)
    micro_batches, pipeline = train.global_batch // layout.data_parallel // rows, layout.pipeline
    enough = micro_batches > pipeline
    return (
        rows > 1,
        micro_batches == 1,
        enough,
        enough and micro_batches % pipeline == 0,
        micro_batches >= 2 * pipeline,
    )


def _sequence_length(length: int, model: Model, layout: Layout) -> int:
    """Return the shortest sequence length that is a multiple of what `context` and `tensor` need and gives
    each device more than a token or two."""
    unit = int(sequence_multiple(model, layout))
    short = -(-SEQUENCE // unit) * unit
    return short if short <= length else max(1, length // unit) * unit


def _positions(config: Config, layout: Layout, length: int, smaller: Layout) -> dict[str, int]:
    """Return the size of a learned table of positions.

    The table takes memory, and its rows are split over the devices that share states.
    """
    model = config.model
    if model.positions != "learned":
        return {}
    longer = model.max_positions > config.data.sequence_length
    return {
        "max_positions": _closest(
            range(length, model.max_positions + 1)[: 2 * SEQUENCE],
            lambda rows: (rows > length, rows % smaller.shards == 0),
            (longer, model.max_positions % layout.shards == 0),
        )
    }


def _window(config: Config, length: int) -> dict[str, int]:
    """Return the attention window.

    A window shorter than the sequence stays shorter, and does not end at a boundary between devices. A longer
    one stays at least as long as the sequence.
    """
    window = config.model.window
    if window is None:
        return {}
    return {
        "window": min(window, max(1, length * 5 // 8 - 1) if window < config.data.sequence_length else length)
    }


# -- widths --------------------------------------------------------------------------------------------------


def _widths(given: Model, layout: Layout, model: Model, smaller: Layout) -> Model:
    model = model.model_copy(update=_hidden(given, layout, model, smaller))
    model = model.model_copy(update={"ffn": _inner("ffn", given, layout, model, smaller)})
    if given.expert_ffn is not None:
        model = model.model_copy(update={"expert_ffn": _inner("expert_ffn", given, layout, model, smaller)})
    return model.model_copy(update={"vocabulary": _vocabulary(given, layout, smaller)})


def _hidden(given: Model, layout: Layout, model: Model, smaller: Layout) -> dict[str, int]:
    """Return the features of the residual stream and of a head, with the relation that they had to each
    other."""
    head_dims = range(min(given.head_dim, HEAD_DIMS[0]), min(given.head_dim, HEAD_DIMS[1]) + 1)
    widest = min(given.hidden, 2 * model.heads * HEAD_DIMS[1] + HIDDEN)
    pairs = list(product(head_dims, range(min(given.hidden, HIDDEN), widest + 1)))

    def properties(head_dim: int, hidden: int, heads: int, shards: int) -> Properties:
        joined = heads * head_dim
        return (head_dim % 2 == 0, hidden < joined, hidden == joined, hidden % shards == 0, hidden % 2 == 0)

    head_dim, hidden = _closest(
        [*pairs, (given.head_dim, given.hidden)],
        lambda pair: properties(*pair, model.heads, smaller.shards),
        properties(given.head_dim, given.hidden, given.heads, layout.shards),
        lambda pair: (pair[1], pair[0]),
    )
    return {"head_dim": head_dim, "hidden": hidden}


def _inner(field: str, given: Model, layout: Layout, model: Model, smaller: Layout) -> int:
    """Return the inner features of the feed-forward layer, or of an expert.

    Shared experts are one layer of their joint width.
    """
    old: int = getattr(given, field)

    def properties(width: int, shape: Model, layout: Layout) -> Properties:
        return (
            *_split_properties(width * max(1, shape.shared_experts), layout),
            width < shape.hidden,
            width == shape.hidden,
        )

    most = min(old, 2 * model.hidden + 2 * smaller.tensor * smaller.shards)
    candidates: list[int] = [*range(min(old, INNER), most + 1), old]
    return _closest(
        candidates, lambda width: properties(width, model, smaller), properties(old, given, layout)
    )


def _vocabulary(given: Model, layout: Layout, smaller: Layout) -> int:
    """Return the vocabulary size: at least that of the byte tokenizer, split as evenly or unevenly as
    before."""
    candidates = range(BYTE_IDS, BYTE_IDS + 2 * smaller.tensor * smaller.shards)
    return _closest(
        candidates, lambda ids: _split_properties(ids, smaller), _split_properties(given.vocabulary, layout)
    )


def _split_properties(rows: int, layout: Layout) -> Properties:
    """Return whether rows divide by the number of tensor devices, and each device's part by the number of
    devices that share its states."""
    return (rows % layout.tensor == 0, -(-rows // layout.tensor) % layout.shards == 0)
