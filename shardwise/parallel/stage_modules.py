"""How a model is cut into pipeline stages, and which tensors pass between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.config.schedules import SCHEDULE_FACTS
from shardwise.errors import UserError
from shardwise.models import Sharding
from shardwise.models.torch_dtypes import DTYPES
from shardwise.plans import Plan, Schedule, make_schedule

AXIS = "pipeline"


@dataclass(frozen=True)
class Stages:
    """How the model is cut, and the shape of the hidden states that pass between stages."""

    schedule: Schedule
    blocks: tuple[range, ...]
    """Numbers of the blocks of every stage."""
    rank: int
    micro_batch: int
    length: int
    """Number of tokens of a sequence on this device."""
    hidden: int
    dtype: torch.dtype

    @property
    def local_stages(self) -> list[tuple[int, range]]:
        """The stages of this rank and their blocks."""
        return [(stage, self.blocks[stage]) for stage in self.schedule.stages_of(self.rank)]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of inputs and of weights are computed at different times."""
        return SCHEDULE_FACTS[self.schedule.name].splits_backward

    @property
    def last(self) -> int:
        """Number of the last stage, which has the head."""
        return self.schedule.stages - 1


def make_stages(plan: Plan, comm: Comm) -> Stages:
    """Return how the plan cuts the model."""
    mesh, layout = comm.mesh, comm.mesh.layout
    schedule = make_schedule(layout.schedule, layout.pipeline, plan.accumulation, layout.stages_per_rank)
    assert layout.stages is not None, "a plan says how the model is cut"
    counts = layout.stages
    starts = [sum(counts[:stage]) for stage in range(schedule.stages)]
    return Stages(
        schedule=schedule,
        blocks=tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True)),
        rank=mesh.coordinate(AXIS),
        micro_batch=plan.micro_batch,
        length=plan.model.sequence_length // layout.context,
        hidden=plan.model.shape.hidden,
        dtype=DTYPES[plan.model.dtypes.compute],
    )


def reduce_to_stage(model: nn.Module, table: Sharding, stage: int, stages: Stages) -> None:
    """Remove from a model what is not of this stage; blocks keep their numbers, so parameters keep their
    names."""
    if table.blocks is None:
        raise UserError(
            "layout.pipeline: the model's sharding table names no `blocks`, so it cannot be cut into stages"
        )
    blocks = nn.ModuleList()
    for block in stages.blocks[stage]:
        blocks.add_module(str(block), model.get_submodule(f"{table.blocks}.{block}"))
    _replace(model, table.blocks, blocks)
    for path in (*(table.first if stage > 0 else ()), *(table.last if stage < stages.last else ())):
        _replace(model, path, None)


def _replace(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
