"""Turns a plain model into a parallel one. The order of the steps matters:

1. build the model without memory for the weights (models/unallocated.py);
2. cut it into pipeline stages, and remove all but this rank's;
3. split matrices over `tensor`, experts over `expert`, and attention over `context`;
4. recomputation and compilation, block by block (`_recompute_and_compile` explains which wraps which);
5. sharding or replication over the data axes;
6. memory for this rank's share.

After that the weights get their values: from a checkpoint, a Hugging Face folder, or `first_values`.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from functools import lru_cache, partial

import torch
from torch import Tensor, nn

from shardwise._torch import recompute_casts
from shardwise.comm import Comm, CompressionSettings, GatherSettings
from shardwise.config.compression import is_compressed
from shardwise.config.layout_rules import sequence_multiple
from shardwise.config.model import Model
from shardwise.errors import UserError
from shardwise.models import (
    Head,
    Sharding,
    Transformer,
    adapt,
    build_program_module,
    build_user_module,
    check_values,
    for_program,
    has_initial_value,
    initialise,
    weights_without_memory,
    with_embeddings_in,
)
from shardwise.models.experts import Router
from shardwise.models.float8_products import Scale
from shardwise.models.layers import Embedding
from shardwise.models.torch_dtypes import DTYPES
from shardwise.models.unallocated import empty_memory_is_nan
from shardwise.optim import local
from shardwise.parallel.compiled import compile_blocks
from shardwise.parallel.context import local_positions, split_over_context
from shardwise.parallel.data import DataParallel, Replicated, SingleDevice, shard
from shardwise.parallel.expert import expert_modules, split_over_experts
from shardwise.parallel.float8_scales import Scales, use_float8
from shardwise.parallel.parallel_model import ParallelModel
from shardwise.parallel.placement import assign, local_part
from shardwise.parallel.recompute import recompute
from shardwise.parallel.seeds import Seeds, seed_blocks
from shardwise.parallel.stage_modules import make_stages, reduce_to_stage
from shardwise.parallel.tables import EMBEDDINGS, table_of
from shardwise.parallel.tensor import is_whole, split_over_tensor
from shardwise.plans import ModelSpec, Plan


def parallelise(plan: Plan, comm: Comm) -> ParallelModel:
    """Return the model on this rank's device, ready to train except for the values of its weights."""
    layout, shape = comm.mesh.layout, plan.model.shape
    plain = build_plain(plan.model)
    table, embeddings = table_of(plain), _embeddings(plain)
    positions = lru_cache(maxsize=8)(partial(local_positions, shape, comm)) if layout.context > 1 else None
    multiple = sequence_multiple(shape, layout)
    seeds = Seeds(plan.model.seed, comm) if plan.model.is_user_module else None
    scaled = [name for name, module in plain.named_modules() if isinstance(module, Scale)]
    if layout.pipeline == 1:
        part = _part(plan, plain, table, comm, seeds)
        scales = _scales(plan, [part], scaled, comm)
        return ParallelModel(comm, [part], table, positions, multiple, embeddings, seeds, scales)
    from shardwise.parallel.pipeline import Pipelined  # torch's pipelines take a second to import

    stages = make_stages(plan, comm)
    parts = []
    for index, (stage, _) in enumerate(stages.local_stages):
        model = build_plain(plan.model) if index else plain
        reduce_to_stage(model, table, stage, stages)
        parts.append(_part(plan, model, table, comm, seeds))
    scales = _scales(plan, parts, scaled, comm)
    return Pipelined(comm, parts, table, positions, multiple, embeddings, seeds, scales, stages=stages)


def _scales(plan: Plan, parts: list[DataParallel], names: list[str], comm: Comm) -> Scales | None:
    float8 = plan.model.float8
    if float8 is None:
        return None
    models, dtype = [part.model for part in parts], DTYPES[plan.model.dtypes.compute]
    delayed, compiled = float8.scaling == "delayed", plan.is_compiled(comm.device.type)
    return Scales(models, names, comm, delayed, dtype, plan.casts_weights_once, compiled)


def build_plain(spec: ModelSpec) -> nn.Module:
    """Return the whole model as on one device: weights without memory, buffers with their values."""
    compute = DTYPES[spec.dtypes.compute]
    with weights_without_memory(spec.seed):
        if spec.shape.is_of_program:
            model = build_program_module()
        else:
            model = (build_user_module if spec.is_user_module else Transformer)(spec.shape)
    _store_weights_in(model, DTYPES[spec.dtypes.states])
    if spec.shape.is_of_program:
        model = for_program(with_embeddings_in(model, compute), compute)
    elif spec.is_user_module:
        model = adapt(model, compute)
    for module in model.modules():
        if isinstance(module, Embedding):
            module.compute_dtype = compute
    if spec.float8 is not None and isinstance(model, Transformer):
        use_float8(model, spec.float8.products)
    return model


def _store_weights_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights to this dtype. Buffers keep theirs, because a table of angles must not be rounded to
    16 bits; only in a proof in float64 are float32 buffers cast too, because most operators need equal
    dtypes."""
    before = _named_buffers(model)
    with warnings.catch_warnings():
        # The warning is about buffers, which are restored below.
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        model.to(dtype)
    for (module, name), buffer in before.items():
        if (dtype, buffer.dtype) != (torch.float64, torch.float32):
            setattr(module, name, buffer)


def _named_buffers(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """Return the buffers by module and name in it; a buffer with two names comes twice."""
    return {
        (module, name): buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
    }


def _embeddings(model: nn.Module) -> frozenset[str]:
    """Return the names of the weights that are looked up, not multiplied by."""
    named = model.named_modules()
    return frozenset(f"{path}.weight" for path, module in named if isinstance(module, EMBEDDINGS))


def _part(plan: Plan, model: nn.Module, table: Sharding, comm: Comm, seeds: Seeds | None) -> DataParallel:
    """Do steps 3 to 6, for the whole model or one stage of it."""
    layout, shape, compiled = comm.mesh.layout, plan.model.shape, plan.is_compiled(comm.device.type)
    if layout.tensor > 1:
        saved = compiled or plan.model.float8 is not None  # the gathered input is saved, in 8 bits if float8
        model = split_over_tensor(model, table, comm, gather_again=plan.recompute == "none" and not saved)
    if shape.experts:
        model = split_over_experts(model, table, comm)
    if layout.context > 1:
        model = split_over_context(model, table, comm, shape)
    for module in model.modules():
        if isinstance(module, Head):
            module.compiled = compiled
    _recompute_and_compile(plan, model, table, compiled)
    if seeds is not None:
        seed_blocks(model, _named_blocks(model, table), seeds)
    return _on_data_axes(plan, model, table, comm)


def _recompute_and_compile(plan: Plan, model: nn.Module, table: Sharding, compiled: bool) -> None:
    """Wrap blocks with recomputation and compilation, in this order:

    - Recomputation is inside and compilation around it, so that the compiler sees the recomputed region and
      fuses within it.
    - But full recomputation is around compiled pieces where a block is not one graph (collectives are kept
      out of graphs, and a user's block may do anything): the compiler rejects a recomputed region that it
      cannot trace as a whole.
    - Selective recomputation is always inside: it selects operators, which compiled code hides.
    """
    draws, layout, mode = plan.model.is_user_module, plan.layout, plan.recompute
    ours = not draws and not plan.model.shape.experts
    whole_graph = layout.tensor == layout.context == layout.expert == 1 and ours
    around = compiled and not whole_graph and mode == "full"
    if not around:
        recompute(model, _blocks(model, table), mode, compiled, draws)
    if compiled and plan.model.float8 is not None:
        recompute_casts()
    if compiled:
        compile_blocks(model, _blocks(model, table), fullgraph=whole_graph, dynamic=plan.varies_rows)
    if around:
        recompute(model, _blocks(model, table), mode, compiled, draws)


def _named_blocks(model: nn.Module, table: Sharding) -> dict[str, nn.Module]:
    """Return the blocks by their numbers in the whole model."""
    return {} if table.blocks is None else dict(model.get_submodule(table.blocks).named_children())


def _blocks(model: nn.Module, table: Sharding) -> list[nn.Module]:
    return list(_named_blocks(model, table).values())


def _on_data_axes(plan: Plan, model: nn.Module, table: Sharding, comm: Comm) -> DataParallel:
    spec, layout, engine = plan.model, comm.mesh.layout, plan.engine
    settings = _compression(plan, model, table, comm)
    if not engine.sharded:
        allocate(model, comm.device)
        if engine.single:
            return SingleDevice(model)
        return Replicated(model, comm, settings, plan.bucket_bytes)
    compute, reduce = DTYPES[spec.dtypes.compute], DTYPES[spec.dtypes.sums]
    routers: list[nn.Module] = [module for module in model.modules() if isinstance(module, Router)]
    gathers = _gathers(plan, model, table, comm)
    experts = expert_modules(model, table)
    root_is_last = layout.pipeline == 1 and not spec.is_user_module and _ends_with_head(spec.shape)
    units = _units(model, table)
    sharded = shard(
        model, units, routers, experts, comm, compute, reduce, engine, settings, gathers, root_is_last
    )
    allocate(model, torch.device("cpu") if layout.offload else comm.device, comm.device)
    return sharded


def _ends_with_head(model: Model) -> bool:
    """Return whether everything that is neither block nor embedding comes after the blocks."""
    return not model.tied and model.positions != "learned"


def _compression(plan: Plan, model: nn.Module, table: Sharding, comm: Comm) -> CompressionSettings | None:
    """Return which of the model's gradients are compressed, and how; None: none."""
    how = plan.gradient_sums
    if how is None:
        return None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    names = _compressed(model, table, comm) & trained
    return CompressionSettings(how, plan.model.seed, DTYPES[plan.model.dtypes.sums], names)


def _gathers(plan: Plan, model: nn.Module, table: Sharding, comm: Comm) -> GatherSettings | None:
    """Return how weights are gathered; None: exactly. Routers always are, so that no score is rounded."""
    how = plan.weight_gathers
    if how is None:
        return None
    routers = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Router)
        for name, _ in module.named_parameters()
    }
    return GatherSettings(how, _compressed(model, table, comm) - routers)


def _compressed(model: nn.Module, table: Sharding, comm: Comm) -> frozenset[str]:
    """Return the names of the parameters that may be compressed. Excluded are those that are summed over
    another axis after the data axes: weights that tensor devices do not split, and a tied weight with its two
    uses on different stages."""
    shared = {*table.tied, *table.tied.values()} if comm.mesh.layout.pipeline > 1 else set()
    names = [
        name
        for name, parameter in model.named_parameters()
        if is_compressed(parameter.shape) and not is_whole(parameter) and name not in shared
    ]
    return frozenset(names)


def _units(model: nn.Module, table: Sharding) -> list[nn.Module]:
    """Return the FSDP2 units in the order of use: the embedding, unless it is tied to the head, and each
    block."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    embeddings = [
        module
        for path, module in model.named_modules()
        if (role := table.role(path)) and role.kind == "vocabulary"
    ]
    unshared = [
        module for module in embeddings if all(uses[id(weight)] == 1 for weight in module.parameters())
    ]
    return [*unshared, *_blocks(model, table)]


@torch.no_grad()
def first_values(parallel: ParallelModel, shape: Model, seed: int) -> None:
    """Give a new model its first weights, the same on any layout.

    Our own transformer, and a user's module that has `initial_value`, get them in place. Any other module
    gets those of its constructor.
    """
    model = parallel.parts[0].model
    if not isinstance(model, Transformer) and not has_initial_value(model):
        _construct_weights(parallel, shape, seed)
        return
    device = parallel.comm.device if parallel.comm.device.type == "cuda" else None
    for part in parallel.parts:
        initialise(part.model, seed, local_part, parallel.table.tied_name, device)
        if not has_initial_value(part.model):  # it may return zeros
            check_values(part.model, local=local)


def _construct_weights(parallel: ParallelModel, shape: Model, seed: int) -> None:
    """Give weights and the buffers that are saved the values of `torch.manual_seed(seed)` and the module's
    constructor on one device. For that, each process has the whole model in host memory for a moment."""
    with torch.random.fork_rng(devices=[]), empty_memory_is_nan():
        torch.manual_seed(seed)
        whole = build_program_module(with_weights=True) if shape.is_of_program else build_user_module(shape)
    for name, weight in whole.named_parameters():
        if weight.isnan().any():
            raise UserError(
                f"{type(whole).__name__}: the weight {name} begins with NaN, or its constructor leaves it "
                "without values, as torch.empty does; fill it there, for example with "
                "nn.init.normal_(weight, std=0.02)"
            )
    values = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    for name, parameter in (*parallel.named_parameters(), *parallel.named_buffers()):
        assign(parameter, values[name])


def allocate(model: nn.Module, device: torch.device, buffers_on: torch.device | None = None) -> None:
    """Allocate memory for the weights, without values, and move the buffers to the device that computes.
    Shared parameters and buffers stay shared."""
    users: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            users[id(parameter)].append((module, name))
    buffers = _named_buffers(model)
    model.to_empty(device=device)
    for (first, name), *others in users.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]
    moved = {id(buffer): buffer.to(buffers_on or device) for buffer in buffers.values()}
    for (module, name), buffer in buffers.items():
        setattr(module, name, moved[id(buffer)])
