"""How a model is cut into pipeline stages, and what flows between them: values, and the cutting itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.comm import Comm
from shardwise.config.schedules import SCHEDULE_FACTS
from shardwise.errors import UserError
from shardwise.models import Sharding
from shardwise.models.torch_dtypes import DTYPES
from shardwise.plan import Plan, Schedule, make_schedule

AXIS = "pipeline"


@dataclass(frozen=True)
class Stages:
    """How the model is cut, and what flows between the stages."""

    schedule: Schedule
    blocks: tuple[range, ...]
    """The blocks of every stage."""
    rank: int
    micro_batch: int
    length: int
    """Tokens of a sequence that are this device's."""
    hidden: int
    dtype: torch.dtype

    @property
    def own(self) -> list[tuple[int, range]]:
        """The stages of this rank and their blocks."""
        return [(stage, self.blocks[stage]) for stage in self.schedule.stages_of(self.rank)]

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed apart."""
        return SCHEDULE_FACTS[self.schedule.name].splits_backward

    @property
    def last(self) -> int:
        """The stage with the head."""
        return self.schedule.stages - 1


def own_stages(plan: Plan, comm: Comm) -> Stages:
    """The cut of this job."""
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


def cut_out(model: nn.Module, table: Sharding, stage: int, stages: Stages) -> None:
    """Turn a whole model into one stage of it; blocks keep their numbers, so parameters keep their names."""
    if table.blocks is None:
        raise UserError(
            "layout.pipeline: the model's sharding table names no `blocks`, so it cannot be cut into stages"
        )
    kept = nn.ModuleList()
    for block in stages.blocks[stage]:
        kept.add_module(str(block), model.get_submodule(f"{table.blocks}.{block}"))
    _replace(model, table.blocks, kept)
    gone = [*(table.first if stage > 0 else ()), *(table.last if stage < stages.last else ())]
    for path in gone:
        _replace(model, path, None)


def _replace(model: nn.Module, path: str, module: nn.Module | None) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
