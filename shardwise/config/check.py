"""Rules that join several fields or several tables: what pydantic cannot see one field at a time.

Each rule returns the problems it finds, in the user's words: the key, what was given, what would work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import signature
from typing import Any, TypeVar

from shardwise.config.compression import AUTO, SETTINGS, WEIGHT_CODECS, Compression, SumCompression
from shardwise.config.schema import (
    ClusterSection,
    Data,
    Hogwild,
    Layout,
    Local,
    Model,
    Recovery,
    Server,
    Train,
)
from shardwise.optimizers import BUILT_IN, Optimizer
from shardwise.section import Section

MOST_WEIGHTS = 10**15
T = TypeVar("T")


MODEL_SOURCES = ("preset", "module", "pretrained")
"""Keys of [model] that each say where the whole model comes from."""


def problems_across(sections: Mapping[str, Section]) -> list[str]:
    """Every broken rule among the tables that are given.

    A rule names the tables that it needs as its parameters, and is left out where one of them is not there.
    """
    problems: list[str] = []
    for rule in RULES:
        needed = [sections.get(name) for name in signature(rule).parameters]
        if None not in needed:
            problems += found_by(rule, *needed)
    return problems


def found_by(check: Callable[..., Iterable[T]], *arguments: Any) -> Iterator[T]:
    """The problems that a check finds, up to where it reads a value that its table lacks (`Section.without`).

    Such a value is itself wrong and already reported; what else the check would find depends on what it is
    set to.
    """
    try:
        yield from check(*arguments)
    except AttributeError as error:
        if not isinstance(error.obj, Section) or error.name not in type(error.obj).model_fields:
            raise


def sources_of_model(model: Mapping[str, Any]) -> list[str]:
    """The keys given that say where the model comes from, if a folder is one of them; empty otherwise.

    A folder must be the only one. A module may have a preset beside it.
    """
    given = [key for key in MODEL_SOURCES if model.get(key) is not None]
    return given if "pretrained" in given else []


def _keep_one(*keys: str) -> str:
    *others, last = keys
    every, ways = "both" if len(keys) == 2 else "all", " or ".join(f"{key}=" for key in keys)
    return (
        f"{', '.join(others)} and {last} are {every} given; keep one: on the command line, {ways} leaves "
        f"it out"
    )


def _one_source(model: Model) -> Iterator[str]:
    if len(given := sources_of_model(model.__dict__)) > 1:
        yield _keep_one(*(f"model.{key}" for key in given))


def _one_cluster(cluster: ClusterSection) -> Iterator[str]:
    if cluster.preset and cluster.file:
        yield _keep_one("cluster.preset", "cluster.file") + " (a file may itself start from a preset)"


def _float8_module(model: Model, train: Train) -> Iterator[str]:
    if model.module is not None and train.precision == "float8":
        yield (
            "train.precision = 'float8': is for the transformer of [model], whose products are known; use "
            "'bfloat16' where "
            "model.module is given"
        )


def _leave_out(what: str, section: str, table: Section, names: Sequence[str], why: str = "") -> Iterator[str]:
    """The problem that some of these keys were given, where this driver has no use for them."""
    given = [
        f"{section}.{name}"
        for name in names
        if getattr(table, name) != type(table).model_fields[name].default
    ]
    if given:
        yield f"{what}: leave {' and '.join(given)} out{why}"


def _float8_on_the_wire(train: Train, layout: Layout, optimizer: Optimizer) -> Iterator[str]:
    if train.precision != "float8":
        return
    if layout.weight_compression:
        yield (
            f"layout.weight_compression = {layout.weight_compression!r}: with train.precision = 'float8' "
            f"weights are gathered in "
            "8 bits already; leave it out"
        )
    sums, momentum = SumCompression.of(layout), optimizer.summed_momentum is not None
    asked = "optimizer.name" if momentum else "layout.compression"
    feedback = layout.compression == AUTO or (sums is not None and sums.feedback)
    if train.float8_scaling == "delayed" and (feedback or momentum):
        yield (
            f"{asked}: what a compressed sum leaves out comes later, but with train.float8_scaling = "
            f"'delayed' a step may be "
            "made again, and that part of it would count twice; set train.float8_scaling = 'dynamic'"
        )


def _heads(model: Model) -> Iterator[str]:
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads = {model.kv_heads}: does not divide model.heads = {model.heads}; "
            f"use one of {', '.join(map(str, divisors(model.heads)))}"
        )


def _head_dim(model: Model) -> Iterator[str]:
    if model.positions == "rotary" and model.head_dim % 2:
        yield f"model.head_dim = {model.head_dim}: rotary positions need an even head_dim"


def _window(model: Model) -> Iterator[str]:
    if model.window is None and model.window_layers != "all":
        yield (
            f"model.window_layers = {model.window_layers!r}: has no effect without model.window; give that, "
            f"or leave both out"
        )


def _size(model: Model) -> Iterator[str]:
    if (weights := _weights(model)) > MOST_WEIGHTS:
        yield (
            f"model: {weights:.1e} weights, of at most {MOST_WEIGHTS:.0e}; give fewer model.layers, or less "
            f"of another size"
        )


def _weights(model: Model) -> int:
    """About as many as the model has: its matrices."""
    attention = 2 * (model.heads + model.kv_heads) * model.head_dim
    ffn = (model.experts + model.shared_experts) * model.expert_width if model.experts else model.ffn
    return model.hidden * (
        model.vocabulary + model.max_positions * (model.positions == "learned")
    ) + model.layers * (model.hidden * (attention + 3 * ffn))


def _experts(model: Model) -> Iterator[str]:
    yield from _mixture(model) if model.experts else _dense(model)


def _mixture(model: Model) -> Iterator[str]:
    if not 1 <= model.experts_per_token <= model.experts:
        yield (
            f"model.experts_per_token = {model.experts_per_token}: a token visits at least 1 and at most all "
            f"model.experts = {model.experts}; 2 is usual"
        )
    if model.experts_per_token == 1 and model.normalise_routing:
        yield (
            "model.experts_per_token = 1 with model.normalise_routing = true: the weight of a token's only "
            "expert is always 1, "
            "so the router learns nothing from the loss; use model.normalise_routing = false (as Switch "
            "does, and Llama 4 with "
            "model.router = 'sigmoid'), or model.experts_per_token = 2"
        )
    if model.activation != "swiglu":
        yield (
            f"model.activation = {model.activation!r}: experts are gated; use 'swiglu', or model.experts = 0"
        )
    if model.bias is True:
        yield "model.bias = true: experts have no biases; use false, or model.experts = 0"


def _dense(model: Model) -> Iterator[str]:
    fields = (
        "experts_per_token",
        "expert_ffn",
        "shared_experts",
        "balance_loss",
        "balance_bias",
        "router_z_loss",
    )
    for name in fields:
        if value := getattr(model, name):
            yield (
                f"model.{name} = {value}: has no effect without experts; leave it out, or give model.experts"
            )


def _data(data: Data) -> Iterator[str]:
    if data.source is None and not data.sources:
        yield "data.source: missing; give a text, JSONL or Parquet file, a folder, or prepared shards"
    if data.source is not None and data.sources:
        yield _keep_one("data.source", "data.sources")


def _recompute(train: Train) -> Iterator[str]:
    if isinstance(train.recompute, float) and not 0 <= train.recompute <= 1:
        yield (
            f"train.recompute = {train.recompute}: a memory budget lies between 0 (recompute all) and 1 "
            f"(keep all)"
        )


def _state_dtype(train: Train) -> Iterator[str]:
    if train.precision == "float64" and train.state_dtype not in ("auto", "float64"):
        yield (
            f"train.state_dtype = {train.state_dtype!r}: float64 precision keeps float64 states; leave it out"
        )
    if train.precision != "float64" and train.state_dtype == "float64":
        yield (
            f"train.state_dtype = 'float64': only with train.precision = 'float64' (given "
            f"{train.precision!r})"
        )
    if train.precision in ("float32", "float16") and train.state_dtype == "bfloat16":
        yield (
            f"train.state_dtype = 'bfloat16': needs train.precision = 'bfloat16' or 'float8' (given "
            f"{train.precision!r})"
        )


def _float8_settings(train: Train) -> Iterator[str]:
    own = ("float8_scaling", "float8_head", "float8_leave_out")
    given = [name for name in own if getattr(train, name) != Train.model_fields[name].default]
    if given and train.precision != "float8":
        yield f"train.{given[0]}: has no effect without train.precision = 'float8'; leave it out, or set that"


def _open_data(layout: Layout) -> Iterator[str]:
    if layout.data == 0:
        yield "layout.data = 0: give a number of devices, or -1 for the rest of them"


def _offload(layout: Layout) -> Iterator[str]:
    if layout.offload and layout.zero == 0:
        yield "layout.offload = true: only sharded states can be offloaded; use layout.zero = 1, 2 or 3"


def _gathers(layout: Layout) -> Iterator[str]:
    if layout.weight_compression is not None:
        if layout.zero == 0:
            yield (
                "layout.weight_compression: with layout.zero = 0 no weights are gathered; use zero = 1, 2 or "
                "3, or leave it out"
            )
        if layout.weight_compression not in WEIGHT_CODECS:
            yield (
                f"layout.weight_compression = {layout.weight_compression!r}: weights may be "
                f"{', '.join(WEIGHT_CODECS)}"
            )
    if layout.backward_shards is not None and layout.zero not in (3, None):
        what = f"layout.backward_shards = {layout.backward_shards}"
        yield f"{what}: only zero = 3 gathers weights for backward; use layout.zero = 3, or leave it out"


def least_zero(layout: Layout) -> int:
    """The lowest stage that gathers weights as the layout asks for it."""
    return 3 if layout.backward_shards is not None else 1 if layout.weight_compression is not None else 0


def problems_of_compression(layout: Layout) -> Iterator[str]:
    """What keeps this layout from being compressed as it says."""
    if layout.compression == AUTO:
        return
    if layout.compression is None:
        for name in SETTINGS:
            if (value := getattr(layout, name)) != Layout.model_fields[name].default:
                yield (
                    f"layout.{name} = {value!r}: has no effect without layout.compression; leave it out, or "
                    f"name a codec"
                )
        return
    compression = Compression.parse(layout.compression)
    if layout.compression_axes == "replica" and layout.replica == 1:
        yield (
            "layout.compression_axes = 'replica': there is one replica; give layout.replica, or compress "
            "over 'all' axes"
        )
    elif layout.compression_axes == "replica" and layout.zero == 0:
        yield (
            "layout.compression_axes = 'replica': with layout.zero = 0 all copies are summed at once; use "
            "layout.zero = 1, 2 or "
            "3, or compress over 'all' axes"
        )
    if layout.error_feedback and not compression.shrinks:
        yield (
            f"layout.error_feedback = true: {compression}'s errors are larger than the gradient, so what is "
            f"left out would grow "
            "without end; leave it out: they average out over steps"
        )
    if compression.name == "powersgd" and layout.tensor * layout.expert > 1:
        yield (
            f"layout.compression = {layout.compression!r}: needs whole matrices, and layout.tensor = "
            f"{layout.tensor}, "
            f"layout.expert = {layout.expert} split them; use another codec, 'int8' say"
        )


def _optimizer(optimizer: Optimizer, train: Train, layout: Layout) -> Iterator[str]:
    yield from optimizer.problems(train, layout, layout.zero or least_zero(layout))


def _optimizer_of_driver(optimizer: Optimizer, train: Train) -> Iterator[str]:
    """An optimizer may need devices in lockstep, or may not be able to do without a lock."""
    what = f"train.driver = {train.driver!r}"
    if train.driver != "synchronous" and optimizer.summed_momentum is not None:
        yield f"{what}: leave optimizer.name = {optimizer.name!r} out, which sums momenta in lockstep"
    elif train.driver == "hogwild" and not optimizer.lock_free:
        able = ", ".join(name for name, kind in BUILT_IN.items() if kind.lock_free)
        yield (
            f"{what}: optimizer.name = {optimizer.name!r} cannot update weights without a lock; "
            f"use one of {able}"
        )


def _prediction(optimizer: Optimizer, train: Train, server: Server) -> Iterator[str]:
    if train.driver == "server" and server.predicts and optimizer.momentum_per_step is None:
        yield (
            f"server.prediction = true: optimizer.name = {optimizer.name!r} has no momentum by which weights "
            "could be predicted; set server.prediction = false, or server.max_staleness = 0"
        )


def _server(train: Train, server: Server) -> Iterator[str]:
    if train.driver != "server":
        yield from _without_driver("server", server)
        return
    if server.damping and server.max_staleness == 0:
        yield (
            "server.damping = true: with server.max_staleness = 0 no gradient is stale; raise that, or leave "
            "it out"
        )


def _portions(train: Train, server: Server) -> Iterator[str]:
    if train.driver == "server" and server.portions and train.global_batch % server.portions:
        yield (
            f"server.portions = {server.portions}: does not divide train.global_batch = "
            f"{train.global_batch}; "
            f"use one of {', '.join(map(str, divisors(train.global_batch)))}"
        )


def _local(train: Train, local: Local) -> Iterator[str]:
    if train.driver != "local":
        yield from _without_driver("local", local)
        return
    if train.global_batch % local.groups:
        yield (
            f"local.groups = {local.groups}: does not divide train.global_batch = {train.global_batch}; "
            f"use one of {', '.join(map(str, divisors(train.global_batch)))}"
        )
    if local.steps % local.fragments:
        yield (
            f"local.fragments = {local.fragments}: does not divide local.steps = {local.steps}; "
            f"use one of {', '.join(map(str, divisors(local.steps)))}"
        )
    elif local.overlap >= local.steps // local.fragments:
        yield (
            f"local.overlap = {local.overlap}: an exchange has to be over before the next begins, after "
            f"{local.steps // local.fragments} steps; use at most {local.steps // local.fragments - 1}"
        )


def _train_of_groups(train: Train) -> Iterator[str]:
    what = "train.driver = 'local'"
    if train.driver != "local":
        return
    if train.precision == "float16":
        yield (
            f"{what}: float16 needs a loss scale that all devices agree on in each step; use bfloat16 or "
            f"float32"
        )
    if train.state_dtype == "bfloat16":
        yield f"{what}: groups move by less than bfloat16 can tell; leave train.state_dtype out"
    yield from _leave_out(what, "train", train, ("shares",))


def _layout_of_groups(train: Train, layout: Layout) -> Iterator[str]:
    what = "train.driver = 'local'"
    if train.driver != "local":
        return
    if layout.offload:
        yield f"{what}: groups exchange what is on the devices; leave layout.offload out"
    exchanged = "; what groups exchange is local.compression"
    yield from _leave_out(what, "layout", layout, ("compression", "weight_compression"), exchanged)


def _hogwild(train: Train, hogwild: Hogwild) -> Iterator[str]:
    if train.driver != "hogwild":
        yield from _without_driver("hogwild", hogwild)


def _without_driver(driver: str, section: Section) -> Iterator[str]:
    fields = type(section).model_fields
    for name in [name for name, value in section.__dict__.items() if value != fields[name].default]:
        yield f"{driver}.{name}: has no effect without train.driver = {driver!r}; leave it out, or set that"


def _copies(train: Train, recovery: Recovery) -> Iterator[str]:
    why = {"local": "whose groups differ", "hogwild": "whose workers have one memory"}
    if recovery.copies and train.driver in why:
        yield f"recovery.copies: not with train.driver = {train.driver!r}, {why[train.driver]}; leave it out"


WHOLE_MODELS = ("server", "hogwild")
"""Drivers whose workers are one device each: for a parameter server, or in shared memory."""


def _whole_models(train: Train, layout: Layout) -> Iterator[str]:
    if train.driver not in WHOLE_MODELS:
        return
    what = f"train.driver = {train.driver!r}"
    usual = {name for name, value in layout.__dict__.items() if value == Layout.model_fields[name].default}
    usual |= {"zero"} if train.driver == "hogwild" and layout.zero == 0 else set()
    if given := sorted(layout.model_fields_set - usual - {"data"}):
        yield (
            f"{what}: each of layout.data workers has a whole model; leave "
            f"layout.{', layout.'.join(given)} out"
        )


def _train_of_whole_models(train: Train) -> Iterator[str]:
    if train.driver not in WHOLE_MODELS:
        return
    what = f"train.driver = {train.driver!r}"
    if train.precision == "float16":
        yield (
            f"{what}: float16 needs a loss scale that all gradients of a step agree on; use bfloat16 or "
            f"float32"
        )
    if train.precision == "float8":
        yield f"{what}: float8 needs scales that all gradients of a step agree on; use bfloat16 or float32"
    if train.driver == "hogwild" and train.state_dtype == "bfloat16":
        yield (
            f"{what}: updates of single rows are smaller than bfloat16 can tell; leave train.state_dtype out"
        )
    yield from _leave_out(what, "train", train, ("shares",))


def _dense_models(model: Model, train: Train) -> Iterator[str]:
    if train.driver in WHOLE_MODELS and model.experts:
        yield (
            f"train.driver = {train.driver!r}: not with experts, whose loads are known to single "
            f"workers alone"
        )


def _positions(model: Model, data: Data) -> Iterator[str]:
    if data.sequence_length > model.max_positions:
        or_raise = (
            "" if model.pretrained else " or raise model.max_positions"
        )  # a model from elsewhere is as it is
        yield (
            f"data.sequence_length = {data.sequence_length}: longer than model.max_positions = "
            f"{model.max_positions}; "
            f"shorten the sequence{or_raise}"
        )


def problems_of_batch(train: Train, layout: Layout) -> Iterator[str]:
    """The batch must split evenly over the data-parallel devices and into micro-batches."""
    size = layout.data_parallel
    if train.global_batch % size:
        multiple = size * (train.micro_batch or 1)
        yield (
            f"train.global_batch = {train.global_batch}: does not divide over {size} data-parallel devices "
            f"(replica {layout.replica} x data {layout.data}); use "
            f"{nearest_multiples(train.global_batch, multiple)}"
        )
    elif train.micro_batch and (train.global_batch // size) % train.micro_batch:
        share = train.global_batch // size
        yield (
            f"train.micro_batch = {train.micro_batch}: does not divide a device's share of {share} "
            f"sequences; "
            f"use one of {', '.join(map(str, divisors(share)))}"
        )


def nearest_multiples(number: int, factor: int, most: int | None = None) -> str:
    """The multiples of a factor around a number, in words; `most` is the largest that is allowed."""
    below = number // factor * factor
    around = [value for value in (below, below + factor) if value and (most is None or value <= most)]
    return " or ".join(map(str, around or [factor]))


def divisors(number: int) -> list[int]:
    """Every divisor, ascending."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return sorted({*small, *(number // value for value in small)})


RULES: tuple[Callable[..., Iterator[str]], ...] = (
    _one_source,
    _heads,
    _head_dim,
    _window,
    _size,
    _experts,
    _data,
    _recompute,
    _state_dtype,
    _float8_settings,
    _open_data,
    _offload,
    problems_of_compression,
    _gathers,
    _optimizer,
    _optimizer_of_driver,
    _prediction,
    _server,
    _portions,
    _local,
    _train_of_groups,
    _layout_of_groups,
    _hogwild,
    _whole_models,
    _train_of_whole_models,
    _dense_models,
    _copies,
    _one_cluster,
    _positions,
    _float8_on_the_wire,
    _float8_module,
)
"""Small, so that a wrong value ends few of them (`found_by`)."""
