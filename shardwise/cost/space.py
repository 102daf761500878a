"""What is to be computed, and the layouts it could be computed under, as arrays: one entry a candidate.

The planner costs every candidate at once. A `Space` has one NumPy array for each choice, all of one length, so a formula that
reads like the one in a paper (`tokens * hidden / tensor`) runs over a million candidates in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.config import Config, Layout, Model, context_attention
from shardwise.plan.grid import expert_shards
from shardwise.plan.schedule import SCHEDULES, stages_on_a_rank
from shardwise.plan.stages import stage_blocks

Ints = NDArray[np.int64]
Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Work:
    """What a step computes, whatever the layout."""

    model: Model
    sequence_length: int
    global_batch: int
    precision: str = "bfloat16"
    """Of matrix products: float32, bfloat16, float16, float64, or float8."""
    state_dtype: str = "float32"
    reduce_dtype: str = "float32"
    stages: tuple[int, ...] | None = None
    """Blocks of each pipeline stage, where they were given by hand: they hold for candidates with as many stages."""

    def blocks(self, stages: int) -> tuple[int, ...]:
        """Blocks of each of so many stages: by hand, or as they are cut by cost."""
        if self.stages is not None and len(self.stages) == stages:
            return self.stages
        return _cut(self.model, self.sequence_length, stages)

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.sequence_length * self.global_batch


@lru_cache(maxsize=1024)
def _cut(model: Model, length: int, stages: int) -> tuple[int, ...]:
    return stage_blocks(model, length, stages)


@dataclass(frozen=True)
class Space:
    """Candidates. Every field is an array of one length; `schedule`, `recompute` are places in SCHEDULES and RECOMPUTE."""

    pipeline: Ints
    replica: Ints
    data: Ints
    context: Ints
    tensor: Ints
    expert: Ints
    zero: Ints
    micro_batch: Ints
    accumulation: Ints
    """Micro-batches of one step on one device (or one pipeline)."""
    schedule: Ints
    stages_per_rank: Ints
    recompute: Ints
    ring: Ints
    """1: context devices attend in a ring; 0: by Ulysses."""
    offload: Ints

    def __len__(self) -> int:
        return len(self.pipeline)

    @property
    def world(self) -> Ints:
        """Devices of each candidate."""
        return self.pipeline * self.replica * self.data * self.context * self.tensor

    @property
    def shards(self) -> Ints:
        """Devices that share sharded states."""
        return self.data * self.context

    @property
    def expert_shards(self) -> Ints:
        """Devices that share the sharded states of the same experts."""
        shared: Ints = expert_shards(self)
        return shared

    def take(self, places: Any) -> Space:
        """The candidates at these places."""
        return Space(**{one.name: getattr(self, one.name)[places] for one in fields(self)})

    def row(self, place: int) -> dict[str, int]:
        """One candidate's numbers."""
        return {one.name: int(getattr(self, one.name)[place]) for one in fields(self)}

    def layout(self, place: int) -> Layout:
        """One candidate as a layout."""
        row = self.row(place)
        axes: dict[str, Any] = {
            name: row[name] for name in ("pipeline", "replica", "data", "context", "tensor", "expert", "zero")
        }
        schedule = SCHEDULES[row["schedule"]]
        return Layout(
            **axes,
            schedule=schedule,  # type: ignore[arg-type]
            stages_per_rank=row["stages_per_rank"] if schedule == "interleaved" and row["pipeline"] > 1 else None,
            attention=("ring" if row["ring"] else "ulysses") if row["context"] > 1 else "auto",
            offload=bool(row["offload"]),
        )


def space_of(rows: Sequence[dict[str, int]]) -> Space:
    """Candidates from one dictionary each; what is left out is 1, or 0 where that means none."""
    ones = {"pipeline", "replica", "data", "context", "tensor", "expert", "micro_batch", "accumulation", "stages_per_rank"}
    columns = {one.name: [row.get(one.name, 1 if one.name in ones else 0) for row in rows] for one in fields(Space)}
    return Space(**{name: np.asarray(column, dtype=np.int64) for name, column in columns.items()})


def distinct(columns: Sequence[Ints | Bools]) -> tuple[list[tuple[int, ...]], Ints]:
    """The rows that occur in these columns (candidates are the rows), and for each candidate the index of its own.

    A million candidates have a few hundred rows in common, so what is costly is worked out for those and looked up. Small numbers
    are counted, which takes a tenth of a sort.
    """
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, index = _numbered(column.astype(np.int64, copy=False))
        code = code * max(len(values), 1) + index
    values, index = _numbered(code)
    first = np.zeros(len(values), dtype=np.int64)
    first[index[::-1]] = np.arange(len(code))[::-1]  # the first candidate with each row
    return list(zip(*(column[first].tolist() for column in columns), strict=True)), index


def _numbered(numbers: Ints) -> tuple[Ints, Ints]:
    """The numbers that occur, in order, and for each entry its index among them."""
    if not len(numbers) or numbers.max() > 2**16:
        return np.unique(numbers, return_inverse=True)
    values = np.flatnonzero(np.bincount(numbers))
    index_of = np.zeros(int(values[-1]) + 1, dtype=np.int64)
    index_of[values] = np.arange(len(values))
    return values, index_of[numbers]


def recompute_mode(recompute: str | float) -> str:
    """Of a memory budget, the nearest of the modes that the planner knows."""
    if isinstance(recompute, str):
        return recompute
    return "none" if recompute >= 1 else "full" if recompute <= 0 else "selective"


def space_of_layout(config: Config, layout: Layout, micro_batch: int, accumulation: int) -> Space:
    """The one candidate that a complete layout is."""
    row = {name: getattr(layout, name) for name in ("pipeline", "replica", "data", "context", "tensor", "expert")}
    row["zero"] = layout.zero or 0
    row["micro_batch"], row["accumulation"] = micro_batch, accumulation
    row["schedule"] = SCHEDULES.index(layout.schedule)
    row["stages_per_rank"] = stages_on_a_rank(layout.schedule, layout.stages_per_rank) if layout.pipeline > 1 else 1
    row["recompute"] = RECOMPUTE.index(recompute_mode(config.train.recompute))
    row["ring"] = int(layout.context > 1 and context_attention(config.model, layout) == "ring")
    row["offload"] = int(layout.offload)
    return space_of([row])
