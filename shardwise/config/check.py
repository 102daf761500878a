"""Rules about several fields or several tables, which pydantic cannot check one field at a time.

Each rule yields the problems that it finds: the key, the value that was given, and what would work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from typing import TypeVar

from shardwise.codecs import Codec, parse_codec, weight_codecs
from shardwise.config import no_effect
from shardwise.config.compression import AUTO, SumCompression
from shardwise.config.layout import Layout
from shardwise.config.machine import ClusterSection
from shardwise.config.model import Model
from shardwise.config.parameters import count, parameter_shapes
from shardwise.config.schema import Data, Run, Train
from shardwise.drivers.registry import DRIVERS, driver_named, drivers
from shardwise.optimizers import Optimizer
from shardwise.optimizers.groups import unmatched
from shardwise.section import Section

T = TypeVar("T")
MAX_WEIGHTS = 10**15
"""Largest number of weights that a model may have."""
MODEL_SOURCES = ("preset", "module", "pretrained")
"""Keys of [model] that each name where the whole model comes from."""


def problems_across(sections: Mapping[str, Section]) -> list[str]:
    """Return a message for every broken rule.

    The parameters of a rule are the tables that it needs. A rule is skipped if one of them is missing.
    """
    problems: list[str] = []
    for rule in (*RULES, *_rules_of_driver(sections)):
        needed = [sections.get(name) for name in signature(rule).parameters]
        if None not in needed:
            problems += run_check(rule, *needed)
    return problems + list(run_check(_unused_tables, sections))


def _rules_of_driver(sections: Mapping[str, Section]) -> tuple[Callable[..., Iterator[str]], ...]:
    """Return the rules of the job's driver; none if the driver's name is wrong."""
    train = sections.get("train")
    return driver_named(train.driver).rules if isinstance(train, Train) and "driver" in train.__dict__ else ()


def _unused_tables(sections: Mapping[str, Section]) -> Iterator[str]:
    """Refuse settings of drivers that the job does not use."""
    train = sections.get("train")
    if not isinstance(train, Train):
        return
    unused = DRIVERS.keys() - {train.driver}
    for name in [name for name in DRIVERS if name in unused and name in sections]:
        yield from no_effect.settings_of_driver(name, sections[name])


def run_check(check: Callable[..., Iterable[T]], *arguments: object) -> Iterator[T]:
    """Yield what a check finds, up to where it reads a value that its table lacks (`Section.without`).

    Such a value is wrong and already reported. The rest of the check depends on its correction.
    """
    try:
        yield from check(*arguments)
    except AttributeError as error:
        if not isinstance(error.obj, Section) or error.name not in type(error.obj).model_fields:
            raise


def sources_of_model(model: Mapping[str, object]) -> list[str]:
    """Return the keys that name a source of the model if `pretrained` is one of them, else an empty list.

    `pretrained` must be the only source. A module may have a preset beside it.
    """
    given = [key for key in MODEL_SOURCES if model.get(key) is not None]
    return given if "pretrained" in given else []


def _keep_one(key: str, other: str) -> str:
    return (
        f"{key} and {other} are both given; keep one: on the command line, {key}= or {other}= leaves it out"
    )


def _one_source(model: Model) -> Iterator[str]:
    match [f"model.{key}" for key in sources_of_model(model.__dict__)]:
        case [key, other]:
            yield _keep_one(key, other)
        case [preset, module, pretrained]:
            yield (
                f"{preset}, {module} and {pretrained} are all given; keep {pretrained} alone, or the other "
                f"two, which may stand together: on the command line, {pretrained}= leaves out the first, "
                f"and {preset}= with {module}= the others"
            )


def _one_cluster(cluster: ClusterSection) -> Iterator[str]:
    if cluster.preset and cluster.file:
        yield _keep_one("cluster.preset", "cluster.file") + " (a file may itself start from a preset)"


def _float8_module(model: Model, train: Train) -> Iterator[str]:
    if model.module is not None and train.precision == "float8":
        yield (
            "train.precision = 'float8': is for the transformer of [model], whose products are known; use "
            "'bfloat16' where model.module is given"
        )


def _float8_on_the_wire(train: Train, layout: Layout, optimizer: Optimizer) -> Iterator[str]:
    if train.precision != "float8":
        return
    if layout.weight_compression:
        yield (
            f"layout.weight_compression = {layout.weight_compression!r}: with train.precision = 'float8' "
            "weights are gathered in 8 bits already; leave it out"
        )
    sums, momentum = SumCompression.of(layout), optimizer.summed_momentum is not None
    asked = "optimizer.name" if momentum else "layout.compression"
    feedback = layout.compression == AUTO or (sums is not None and sums.feedback)
    if train.float8_scaling == "delayed" and (feedback or momentum):
        yield (
            f"{asked}: what a compressed sum leaves out comes later, but with train.float8_scaling = "
            "'delayed' a step may be made again, and that part of it would count twice; set "
            "train.float8_scaling = 'dynamic'"
        )


def _heads(model: Model) -> Iterator[str]:
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads}: does not divide model.heads = {model.heads}; use one of "
            f"{', '.join(map(str, divisors(model.heads)))}"
        )


def _head_dim(model: Model) -> Iterator[str]:
    if model.positions == "rotary" and model.head_dim % 2:
        yield f"model.head_dim = {model.head_dim}: rotary positions need an even head_dim"


def _size(model: Model) -> Iterator[str]:
    if (weights := count(model)) > MAX_WEIGHTS:
        yield (
            f"model: {weights:.1e} weights, of at most {MAX_WEIGHTS:.0e}; give fewer model.layers, or less "
            "of another size"
        )


def _experts(model: Model) -> Iterator[str]:
    if not model.is_of_program:  # which makes its own router
        yield from _mixture(model) if model.experts else no_effect.expert_settings(model)


def _mixture(model: Model) -> Iterator[str]:
    if not 1 <= model.experts_per_token <= model.experts:
        yield (
            f"model.experts_per_token = {model.experts_per_token}: a token visits at least 1 and at most all "
            f"model.experts = {model.experts}; 2 is usual"
        )
    if model.experts_per_token == 1 and model.normalise_routing:
        yield (
            "model.experts_per_token = 1 with model.normalise_routing = true: the weight of a token's only "
            "expert is always 1, so the router learns nothing from the loss; use model.normalise_routing = "
            "false (as Switch does, and Llama 4 with model.router = 'sigmoid'), or model.experts_per_token = "
            "2"
        )
    if model.activation != "swiglu":
        yield (
            f"model.activation = {model.activation!r}: experts are gated; use 'swiglu', or model.experts = 0"
        )
    if model.bias is True:
        yield "model.bias = true: experts have no biases; use false, or model.experts = 0"


def _data(data: Data, run: Run) -> Iterator[str]:
    if data.source is None and not data.sources and run.program is None:
        yield "data.source: missing; give a text, JSONL or Parquet file, a folder, or prepared shards"
    if data.source is not None and data.sources:
        yield _keep_one("data.source", "data.sources")


def _program(train: Train, run: Run) -> Iterator[str]:
    """Refuse drivers whose gradients cannot come from a program."""
    if run.program is not None and not driver_named(train.driver).runs_programs:
        able = [repr(driver.name) for driver in drivers() if driver.runs_programs]
        yield (
            f"train.driver = {train.driver!r}: cannot run a program (run.program); leave train.driver out, "
            f"or use one of {', '.join(able)}"
        )


def _recompute(train: Train) -> Iterator[str]:
    if isinstance(train.recompute, float) and not 0 <= train.recompute <= 1:
        yield (
            f"train.recompute = {train.recompute}: a memory budget lies between 0 (recompute all) and 1 "
            "(keep all)"
        )


def _state_dtype(train: Train) -> Iterator[str]:
    if train.precision == "float64" and train.state_dtype not in ("auto", "float64"):
        yield (
            f"train.state_dtype = {train.state_dtype!r}: float64 precision keeps float64 states; leave it out"
        )
    if train.precision != "float64" and train.state_dtype == "float64":
        yield (
            "train.state_dtype = 'float64': only with train.precision = 'float64' (given "
            f"{train.precision!r})"
        )
    if train.precision in ("float32", "float16") and train.state_dtype == "bfloat16":
        yield (
            "train.state_dtype = 'bfloat16': needs train.precision = 'bfloat16' or 'float8' (given "
            f"{train.precision!r})"
        )


def _data_degree(layout: Layout) -> Iterator[str]:
    if layout.data == 0:
        yield "layout.data = 0: give a number of devices, or -1 for the rest of them"


def _offload(layout: Layout) -> Iterator[str]:
    if layout.offload and layout.zero == 0:
        yield "layout.offload = true: only sharded states can be offloaded; use layout.zero = 1, 2 or 3"


def _weight_gathers(layout: Layout) -> Iterator[str]:
    if layout.weight_compression is not None:
        if layout.zero == 0:
            yield (
                "layout.weight_compression: with layout.zero = 0 no weights are gathered; use zero = 1, 2 or "
                "3, or leave it out"
            )
        if layout.weight_compression not in weight_codecs():
            yield (
                f"layout.weight_compression = {layout.weight_compression!r}: weights may be "
                f"{', '.join(weight_codecs())}"
            )
    if layout.backward_shards is not None and layout.zero not in (3, None):
        what = f"layout.backward_shards = {layout.backward_shards}"
        yield f"{what}: only zero = 3 gathers weights for backward; use layout.zero = 3, or leave it out"


def least_zero(layout: Layout) -> int:
    """Return the lowest ZeRO stage that gathers weights as the layout asks."""
    return 3 if layout.backward_shards is not None else 1 if layout.weight_compression is not None else 0


def problems_of_compression(layout: Layout) -> Iterator[str]:
    """Yield what is wrong with the settings that compress gradients."""
    if layout.compression == AUTO:
        return
    if layout.compression is None:
        yield from no_effect.compression_settings(layout)
        return
    yield from _problems_of_codec(layout, parse_codec(layout.compression))


def _problems_of_codec(layout: Layout, codec: Codec) -> Iterator[str]:
    if layout.compression_axes == "replica" and layout.replica == 1:
        yield (
            "layout.compression_axes = 'replica': there is one replica; give layout.replica, or compress "
            "over 'all' axes"
        )
    elif layout.compression_axes == "replica" and layout.zero == 0:
        yield (
            "layout.compression_axes = 'replica': with layout.zero = 0 all copies are summed at once; use "
            "layout.zero = 1, 2 or 3, or compress over 'all' axes"
        )
    if layout.error_feedback and not codec.shrinks_errors:
        yield (
            f"layout.error_feedback = true: {codec}'s errors are larger than the gradient, so what is left "
            "out would grow without end; leave it out: they average out over steps"
        )
    if codec.whole_matrices and layout.tensor * layout.expert > 1:
        yield (
            f"layout.compression = {layout.compression!r}: needs whole matrices, and layout.tensor = "
            f"{layout.tensor}, layout.expert = {layout.expert} split them; use another codec, 'int8' say"
        )


def _optimizer(optimizer: Optimizer, train: Train, layout: Layout) -> Iterator[str]:
    yield from optimizer.problems(train, layout, layout.zero or least_zero(layout))


def _groups(model: Model, optimizer: Optimizer) -> Iterator[str]:
    """Refuse patterns that match no weight. The names of a user's module are known once it is built
    (train/check_module.py)."""
    if optimizer.groups and model.module is None:
        yield from unmatched(optimizer.groups, list(parameter_shapes(model)))


def _positions(model: Model, data: Data) -> Iterator[str]:
    if data.sequence_length > model.max_positions:
        # The positions of a pretrained model cannot be changed.
        or_raise = "" if model.pretrained else " or raise model.max_positions"
        yield (
            f"data.sequence_length = {data.sequence_length}: longer than model.max_positions = "
            f"{model.max_positions}; shorten the sequence{or_raise}"
        )


def nearest_multiples(number: int, factor: int, most: int | None = None) -> str:
    """Return the multiples of `factor` next to `number` in words; `most` is the largest allowed value."""
    below = number // factor * factor
    around = [value for value in (below, below + factor) if value and (most is None or value <= most)]
    return " or ".join(map(str, around or [factor]))


def divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


RULES: tuple[Callable[..., Iterator[str]], ...] = (
    _one_source,
    _heads,
    _head_dim,
    no_effect.window_settings,
    _size,
    _experts,
    _data,
    _program,
    no_effect.sample_of_program,
    _recompute,
    _state_dtype,
    no_effect.float8_settings,
    _data_degree,
    _offload,
    problems_of_compression,
    _weight_gathers,
    _optimizer,
    _groups,
    _one_cluster,
    _positions,
    _float8_on_the_wire,
    _float8_module,
    no_effect.names_of_mirrors,
)
"""Rules between fields and tables. Each needs few values, because it ends at a wrong one (`run_check`)."""
