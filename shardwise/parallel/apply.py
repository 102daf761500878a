"""A plain model becomes a parallel one. The order matters and is written down here once:

1. build on the meta device: no memory, however large the model;
2. recomputation, then compilation, block by block (the compiler must see the recomputed region);
3. sharding or replication over the data axes;
4. memory for this rank's share, and each parameter's values from (seed, name): the same bits on any layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.comm import Traffic
from shardwise.config import Config
from shardwise.models import Transformer, check_values, initialise
from shardwise.optim import local
from shardwise.parallel.data import Alone, replicate, shard
from shardwise.parallel.recompute import recompute
from shardwise.plan import reduce_dtype, state_dtype

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def parallelise(config: Config, traffic: Traffic) -> Alone:
    """The job's model, on this rank's device, ready to train."""
    train, layout = config.train, traffic.mesh.layout
    compiled = is_compiled(config, traffic.device)
    with torch.device("meta"):
        model = Transformer(config.model).to(DTYPES[state_dtype(train)])
    model.compute_dtype = DTYPES[train.precision]
    model.compiled_loss = compiled
    recompute(model.blocks, train.recompute, compiled)
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    if layout.zero == 0:
        materialise(model, traffic.device, train.seed)
        return Alone(model) if layout.data_parallel == 1 else replicate(model, traffic)
    sharded = shard(model, _units(model), traffic, DTYPES[train.precision], DTYPES[reduce_dtype(train)])
    materialise(model, torch.device("cpu") if layout.offload else traffic.device, train.seed, traffic.device)
    return sharded


def is_compiled(config: Config, device: torch.device) -> bool:
    """Whether blocks go through torch.compile."""
    return config.train.compile is True or (config.train.compile == "auto" and device.type == "cuda")


def _units(model: Transformer) -> list[nn.Module]:
    """What is gathered at once: each block; the embedding too, unless the head needs the same weights at the end."""
    return [*model.blocks, *([] if model.config.tied else [model.embedding])]


def materialise(model: Transformer, device: torch.device, seed: int, buffers_on: torch.device | None = None) -> None:
    """Allocate this rank's share and fill it."""
    model.to_empty(device=device)
    if buffers_on is not None and buffers_on != device:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(name, torch.empty_like(buffer, device=buffers_on), persistent=False)
    model.fill_buffers()
    initialise(model, seed, assign)
    check_values(model, local=local)


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter, or into this rank's shard of it. No communication: every rank has the whole."""
    if isinstance(parameter, DTensor):
        full = full.to(parameter.device)
        shards = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shards.to_local())
    else:
        parameter.copy_(full)
