"""The table `[layout]` of a job: how many devices each axis has, and what they shard."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from shardwise.codecs import parse_codec, weight_codecs
from shardwise.codecs.registry import built_in_usages
from shardwise.config.compression import AUTO
from shardwise.config.schedules import DEFAULT_SCHEDULE, ScheduleName, names_in_words
from shardwise.section import Degree, Positive, Section

MAX_DEVICES = 2**20
"""Largest number of devices that can be planned for."""

SPELLINGS = {
    "pp": "pipeline",
    "dp_replicate": "replica",
    "dp_shard": "data",
    "dp": "data",
    "cp": "context",
    "tp": "tensor",
    "ep": "expert",
}
"""Our keys by the names that other libraries use."""


class Layout(Section):
    """How devices share the work. `replica x data` is the data-parallel size; states are sharded over
    `data`."""

    pipeline: Degree = Field(1, description="pipeline stages")
    replica: Degree = Field(1, description="copies of the sharded model (hybrid sharding)")
    data: Annotated[int, Field(ge=-1, le=2**20)] = Field(
        -1,
        description="data-parallel devices among which states are sharded; -1: all remaining devices (two "
        "CPU workers if a job writes -1 and has neither GPUs nor other axes)",
    )
    context: Degree = Field(1, description="devices that split one sequence")
    tensor: Degree = Field(1, description="devices that split each matrix")
    expert: Degree = Field(
        1, description="devices that split the experts, borrowed from data, context and tensor"
    )
    zero: Literal[0, 1, 2, 3] | None = Field(
        None,
        description="what is sharded over `data`: 0 nothing, 1 optimizer state, 2 also gradients, 3 also "
        "weights; left out: 3 if `replica` is above 1, else chosen by memory",
    )
    schedule: ScheduleName = Field(
        DEFAULT_SCHEDULE,
        description="order of the pipeline's work: see docs/pipelines.md; "
        f"{names_in_words(lambda facts: facts.splits_backward)} split backward",
    )
    stages_per_rank: Degree | None = Field(
        None,
        description="pipeline stages a device holds; left out: 2 for "
        f"{names_in_words(lambda facts: facts.stages_per_rank == 2)}, else 1",
    )
    stages: tuple[Degree, ...] | None = Field(
        None,
        description="number of blocks in each pipeline stage; left out: cut so that the slowest stage is as "
        "fast as possible",
        examples=[[2, 2]],
    )
    attention: Literal["auto", "ring", "ulysses"] = Field(
        "auto",
        description="how `context` devices share attention: in a ring, or by an all-to-all over heads "
        "(ulysses); auto: ulysses if the heads divide",
    )
    offload: bool = Field(
        False,
        description="keep weights, gradients and optimizer state in host memory between uses (GPUs; not with "
        "zero = 0)",
    )
    compression: str | None = Field(
        None,
        description="codec that compresses gradients between devices, which changes the results: "
        f"{', '.join(map('`{}`'.format, built_in_usages()))}; `{AUTO}`: the planner decides; see "
        "docs/compression.md",
    )
    compression_axes: Literal["all", "replica"] = Field(
        "all",
        description="which sums are compressed: all sums over data-parallel devices, or only those between "
        "replicas",
    )
    compression_warmup: Annotated[int, Field(ge=0)] = Field(0, description="steps before compression begins")
    weight_compression: str | None = Field(
        None,
        description="codec that compresses sharded weights when they are gathered, which changes the "
        f"results: {', '.join(map('`{}`'.format, weight_codecs()))}; see docs/compression.md",
    )
    backward_shards: Positive | None = Field(
        None,
        description="with zero = 3: number of neighbours (for example the devices of a node) that together "
        "keep a copy of the weights from forward to backward, so that backward gathers from them; left out: "
        "no copy",
    )
    error_feedback: bool | None = Field(
        None,
        description="whether the compression error is added to the next gradient; left out: yes, except for "
        "`terngrad` and `qsgd(2)`, whose errors exceed the gradient and average out instead. With `sign`, "
        "use the optimizer `1bit-adam`",
    )

    @model_validator(mode="before")
    @classmethod
    def _peer_spellings(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        if isinstance(values.get("stages"), list):
            values = {**values, "stages": tuple(values["stages"])}
        axes = [str(SPELLINGS.get(key, key)) for key in values]
        if twice := {axis for axis in axes if axes.count(axis) > 1}:
            raise ValueError(f"{', '.join(sorted(twice))} is given twice, under two spellings; keep one")
        return dict(zip(axes, values.values(), strict=True))

    @field_validator("compression", "weight_compression")
    @classmethod
    def _known_codec(cls, value: str | None) -> str | None:
        return value if value in (None, AUTO) else str(parse_codec(value))

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if (devices := self.degrees_without_data * max(self.data, 1)) > MAX_DEVICES:
            raise ValueError(f"{devices} devices; at most {MAX_DEVICES} can be planned for")
        return self

    @property
    def degrees_without_data(self) -> int:
        """Number of devices of all axes without `data`."""
        return self.pipeline * self.replica * self.context * self.tensor

    @property
    def world(self) -> int:
        """Total number of devices, once `data` is known."""
        assert self.data > 0, "the size of the data axis must be known"
        return self.degrees_without_data * self.data

    @property
    def shards(self) -> int:
        """Number of devices among which states are sharded: those of one replica that hold the same weights
        and read different tokens."""
        return self.data * self.context

    @property
    def data_parallel(self) -> int:
        """Number of devices, or groups of devices, that read different sequences."""
        return self.replica * self.data
