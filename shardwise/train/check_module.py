"""Check before any worker starts that a user's module fits the layout.

Tests check the transformer's sharding table; a user's table is checked here. `shardwise verify` finds wrong
roles. This module refuses mistakes that can be found without computing: weights without an entry, entries
without a module, weights that no pipeline stage would own, heads that do not divide, a forward that lacks an
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from traceback import extract_tb

import torch
from torch import Tensor, nn

from shardwise.config import Config, Layout
from shardwise.config.layout_rules import splits_evenly, splits_or_repeats
from shardwise.config.module_file import problems_without_table
from shardwise.config.parameters import ModuleParameters
from shardwise.drivers.registry import driver_of
from shardwise.errors import ConfigError, UserError
from shardwise.models import (
    MixtureOfExperts,
    Sharding,
    Transformer,
    check_first_value,
    count_items,
    counts_items,
    has_initial_value,
    matches,
)
from shardwise.models.user_module import accepted_arguments, name_of
from shardwise.optimizers.groups import unmatched
from shardwise.parallel import build_plain
from shardwise.parallel.tables import EMBEDDINGS, table_of
from shardwise.parallel.tensor import missing_entry, role_problem
from shardwise.plans import ModelSpec
from shardwise.plurals import counted

AVERAGING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules that compute with statistics of the rows of one device."""


def check_module(config: Config, layout: Layout) -> None:
    """Refuse a user's module that cannot be built, or cannot be split for this layout."""
    if config.model.module is not None:
        _check(build_plain(ModelSpec.of(config)), config, layout)


def check_first_values(config: Config) -> None:
    """Refuse a user's module whose `initial_value` does not work."""
    model = build_plain(ModelSpec.of(config))
    if has_initial_value(model):
        check_first_value(model, config.train.seed)


def count_parameters(config: Config) -> ModuleParameters | None:
    """Return the numbers of parameters of a user's module; None: the job has no such module."""
    if config.model.module is None:
        return None
    parameters = list(build_plain(ModelSpec.of(config)).parameters())
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return ModuleParameters(sum(parameter.numel() for parameter in parameters), frozen)


def embedded_ids(config: Config) -> int | None:
    """Return the number of token ids in the embedding of a user's module; None: no sharding table says which
    module that is."""
    model = build_plain(ModelSpec.of(config))
    table, modules = table_of(model), dict(model.named_modules())
    rows = [
        module.num_embeddings
        for path, module in modules.items()
        if isinstance(module, nn.Embedding) and (role := table.role(path)) and role.kind == "vocabulary"
    ]
    return min(rows, default=None)


def _check(model: nn.Module, config: Config, layout: Layout) -> None:
    """Raise all problems of the module, which is built without memory, and of its table on this layout."""
    table = table_of(model)
    table_rules = (_tensor, _pipeline, _context) if getattr(model, "sharding", None) is not None else ()
    rules = (_parameters, _groups, _state, _layers, _settings, _table, *table_rules, _experts)
    problems = [problem for rule in rules for problem in rule(model, table, config, layout)]
    if len(problems) == 1:
        raise UserError(problems[0])
    if problems:
        raise ConfigError(f"model.module = {config.model.module!r}", problems)
    if not config.model.is_of_program:
        _call(model, config)


def _parameters(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    name = name_of(model)
    frozen = [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
    if not any(parameter.requires_grad for parameter in model.parameters()):
        reason = "it has none"
        if frozen:
            reason = f"all {len(frozen)} have requires_grad=False; leave it out of those that are to learn"
        yield f"model.module = {config.model.module!r}: {name} has no parameters to train: {reason}"
    if frozen:
        yield from driver_of(config).problems_of_frozen(name, frozen[0])
    scalars = [path for path, parameter in model.named_parameters() if not parameter.ndim]
    if scalars and layout.zero:
        yield (
            f"layout.zero = {layout.zero}: {name}: {scalars[0]} is a parameter without a dim, which cannot "
            f"be "
            "sharded; give it one element in one dim, as in nn.Parameter(torch.ones(1)), or use layout.zero "
            "= 0"
        )
    if odd := [path for path, parameter in model.named_parameters() if not parameter.is_floating_point()]:
        dtype = model.get_parameter(odd[0]).dtype
        yield (
            f"{name}: the parameter {odd[0]} is of {dtype}, and weights are floating-point numbers; make it "
            "a buffer"
        )


def _groups(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    names: dict[bool, list[str]] = {True: [], False: []}
    for path, parameter in model.named_parameters():
        names[parameter.requires_grad].append(path)
    yield from unmatched(config.optimizer.groups, names[True], names[False])


def _state(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    name, plain = name_of(model), nn.Module.get_extra_state
    if stateful := [path for path, part in model.named_modules() if type(part).get_extra_state is not plain]:
        part = ".".join(filter(None, (stateful[0], "get_extra_state")))
        yield (
            f"{name}: {part} gives what no checkpoint holds, so it would be lost; keep it in buffers, or "
            "leave the method out"
        )
    if empty := [path for path, buffer in model.named_buffers() if buffer.is_meta]:
        yield (
            f"{name}: the buffer {empty[0]} has no values: it was computed from a weight, and weights have "
            "none while a module is built. Make it a parameter with requires_grad=False"
        )


def _layers(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    name = name_of(model)
    averaging = [path for path, part in model.named_modules() if isinstance(part, AVERAGING)]
    if averaging and layout.world > 1:
        yield (
            f"{name}: {averaging[0]} is {name_of(model.get_submodule(averaging[0]))}, whose statistics are "
            "of one device's rows: each layout would compute something else; use nn.LayerNorm or "
            "nn.GroupNorm, or one device"
        )
    sparse = [path for path, part in model.named_modules() if isinstance(part, EMBEDDINGS) and part.sparse]
    if sparse and driver_of(config).sums_gradients(layout):
        yield (
            f"{name}: {sparse[0]} has sparse=True, and devices sum dense gradients only; leave that out, "
            "train on one device, or use train.driver = 'hogwild'"
        )
    if sparse and config.train.state_dtype == "bfloat16":
        yield (
            f"train.state_dtype = 'bfloat16': {sparse[0]} of {name} has sparse=True, and updates of single "
            "rows are not rounded at random, so small ones would be lost; leave one of the two out"
        )
    if sparse and not config.optimizer.from_zeros:
        yield (
            f"optimizer.name = {config.optimizer.name!r}: {sparse[0]} of {name} has sparse=True, and the "
            "states of rows that no batch has looked up are zeros, with which this class does not begin; "
            "leave sparse=True out, or use another optimizer"
        )


def _settings(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    name, train = name_of(model), config.train
    if (
        config.data.reset_attention
        and not config.model.is_of_program
        and "documents" not in accepted_arguments(model)
    ):
        yield (
            f"data.reset_attention = true (as conversations need it): {name}.forward has no argument "
            "`documents`, so tokens would see other documents"
        )
    if table.blocks is None:
        needing = {"recompute": train.recompute != "none", "compile": train.compile is True}
        yield from (
            f"train.{key} = {getattr(train, key)!r}: works block by block, and no sharding table names the "
            f"`blocks` of {name}"
            for key, asked in needing.items()
            if asked
        )


def _table(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    name = name_of(model)
    if getattr(model, "sharding", None) is None:
        if config.model.is_of_program:
            yield from problems_without_table(name, layout, "engine.prepare a table as `sharding`")
        else:
            yield from problems_without_table(name, layout)
    paths = [path for path, _ in model.named_modules()]
    patterns = [*table.modules, *(pattern for pattern in (table.mixing, table.mask) if pattern)]
    if isinstance(model, Transformer):
        patterns = []  # the table of our own names what only some models have
    for pattern in patterns:
        if not any(matches(pattern, path) for path in paths):
            yield (
                f"the sharding table of {name} names {pattern!r}, which is no module; a * stands for one "
                f"part of a path"
            )


def _tensor(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    if layout.tensor == 1:
        return
    for path, module in model.named_modules():
        role, owned = table.role(path), [name for name, _ in module.named_parameters(recurse=False)]
        if role is None:
            if owned:
                yield missing_entry(path, owned)
        elif role.parts and not (splits_evenly if role.gather else splits_or_repeats)(
            role.parts, layout.tensor
        ):
            yield (
                f"layout.tensor = {layout.tensor}: {path} has {role.parts} parts, neither split nor repeated "
                f"evenly over it"
            )
        elif problem := role_problem(role, module):
            yield f"{path}: {problem}"


def _pipeline(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    if layout.pipeline == 1:
        return
    name = name_of(model)
    if table.blocks is None:
        yield (
            f"layout.pipeline = {layout.pipeline}: the sharding table of {name} names no `blocks` to cut "
            f"into stages"
        )
        return
    paths = dict(model.named_modules())
    for path in (table.blocks, *table.first, *table.last):
        if path not in paths and not _is_none(model, path):
            yield (
                f"the sharding table of {name} names {path!r} among blocks, first or last, and there is no "
                f"such module"
            )
            return
    blocks = [key for key, _ in paths[table.blocks].named_children()]
    if blocks != [str(number) for number in range(config.model.layers)]:
        asked = f"model.layers = {config.model.layers}"
        yield (
            f"{name}.{table.blocks} has {counted(len(blocks), 'module')}; a pipeline needs an nn.ModuleList "
            f"of {asked}"
        )
    owners = (table.blocks, *table.first, *table.last)
    for parameter, _ in model.named_parameters(remove_duplicate=False):
        if not any(parameter.startswith(f"{owner}.") for owner in owners):
            yield (
                f"layout.pipeline = {layout.pipeline}: {parameter} is in none of the modules that the "
                f"sharding table of {name} names as blocks, first or last, so no stage would own it"
            )
    yield from _untied(model, table)


def _untied(model: nn.Module, table: Sharding) -> Iterator[str]:
    """Yield a problem for each weight that two modules share and that `tied` does not name: the two may be on
    different stages."""
    original: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = original.setdefault(parameter, name)
        if name != first and table.tied.get(name) != first:
            yield (
                f"{name} is the same weight as {first}: say so in the sharding table, tied={{{name!r}: "
                f"{first!r}}}"
            )


def _context(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    if layout.context == 1:
        return
    name = name_of(model)
    if table.mixing is None:
        yield (
            f"layout.context = {layout.context}: the sharding table of {name} names no modules as `mixing`, "
            f"where tokens meet"
        )
    if not config.model.is_of_program and "positions" not in accepted_arguments(model):
        yield (
            f"layout.context = {layout.context}: {name}.forward has no argument `positions`, those of a "
            f"device's tokens"
        )


def _experts(model: nn.Module, table: Sharding, config: Config, layout: Layout) -> Iterator[str]:
    name, of_program = name_of(model), config.model.is_of_program
    mixtures = [path for path, module in model.named_modules() if isinstance(module, MixtureOfExperts)]
    if mixtures and of_program:
        yield (
            f"{name}: {mixtures[0]} is a shardwise.models.MixtureOfExperts, whose router only a job "
            "balances; write the router in the program, and give the module of the experts the role "
            "shardwise.experts()"
        )
    elif config.model.experts and not mixtures and not of_program:
        yield (
            f"model.experts = {config.model.experts}: {name} has no shardwise.models.MixtureOfExperts; leave "
            "it out"
        )
    for path, module in model.named_modules():
        if (role := table.role(path)) is None or role.kind != "experts":
            continue
        if any("." in parameter for parameter, _ in module.named_parameters()):
            yield (
                f"{path} has weights in modules of its own; a module with the role `experts` has all weights "
                "itself, stacked in their first dim"
            )
        if layout.tensor > 1 and not table.sequence_parallel:
            yield (
                f"layout.tensor = {layout.tensor}: {path} has the role `experts`, which needs "
                "sequence_parallel=True in the sharding table: else each tensor device would send the same "
                "tokens"
            )


def _call(model: nn.Module, config: Config) -> None:
    """Check what forward and `count_items` return. If they raise another error, nothing is refused: tensors
    have no values here, so the first step decides."""
    model.to("meta")
    ids = torch.zeros(1, config.data.sequence_length, dtype=torch.int64, device="meta")
    more = {"documents": ids} if config.data.reset_attention else {}
    _try(lambda: model(ids, ids, **more))
    if counts_items(model):
        try:
            signature(model.count_items).bind(ids, ids)  # type: ignore[arg-type]
        except TypeError as error:
            raise UserError(
                f"{name_of(model)}.count_items: {error}; it is called with (inputs, targets)"
            ) from None
        _try(lambda: count_items(model, ids, ids))


def _try(call: Callable[[], Tensor]) -> None:
    """Call a function; ignore all errors except those of our checks and an attempt to exit."""
    try:
        call()
    except UserError:
        raise
    except SystemExit as error:
        left = extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{left.filename}, line {left.lineno}: sys.exit({error.code}) would end the run; raise an error"
        ) from error
    except Exception:
        return


def _is_none(model: nn.Module, path: str) -> bool:
    """Return whether the model has this attribute, and it is None in this configuration."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(model.get_submodule(parent), name, model) is None
    except AttributeError:
        return False
