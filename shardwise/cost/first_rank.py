"""Rank 0 of every candidate, the first device of the first pipeline rank: its weights and its dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from shardwise.config.compression import is_compressed
from shardwise.config.dtype_names import BYTES
from shardwise.config.model import Model
from shardwise.config.parameters import parameter_shapes
from shardwise.config.schedules import schedule_value
from shardwise.cost.compute import reduce_bytes, value_bytes, weight_bytes
from shardwise.cost.software import Software
from shardwise.cost.space import (
    BUT_ATTENTION,
    FULL,
    SELECTIVE,
    Array,
    Bools,
    Ints,
    Space,
    Workload,
    distinct,
    is_compiled,
    take,
)
from shardwise.cost.stage_blocks import Cut, cut
from shardwise.plan.dtypes import computes_wide, wide
from shardwise.plan.engine import Engine, engine_of
from shardwise.plan.grid import expert_shards
from shardwise.plan.slices import sliced, split_dim


@dataclass(frozen=True)
class FirstRank:
    """The weights of rank 0 of every candidate, and the passes that it computes."""

    work: Workload
    space: Space
    stack: Software
    device: str
    engine: Engine
    cut: Cut

    @classmethod
    def of(cls, work: Workload, space: Space, stack: Software, device: str) -> FirstRank:
        """Return rank 0 of every candidate."""
        return cls(work, space, stack, device, engine_of(space, work.model.experts), cut(work, space, stack))

    def of_candidates(self, space: Space, index: Ints) -> FirstRank:
        """Return rank 0 of candidates; index[i] is the layout of candidate i."""
        return replace(self, space=space, engine=take(self.engine, index), cut=take(self.cut, index))

    @cached_property
    def plain(self) -> Bools:
        """Whether DistributedDataParallel sums the gradients."""
        replicated: Bools = self.engine.replicated & self.stack.buckets
        return replicated

    @cached_property
    def head(self) -> Bools:
        """Whether the last norm and the head are here."""
        here: Bools = self.cut.folded | (self.space.pipeline == 1)
        return here

    @cached_property
    def halved(self) -> Ints:
        """Micro-batches whose backward runs in two halves through the model's last stage, on rank 0."""
        m, p, v = self.space.accumulation, self.space.pipeline, self.space.stages_per_rank
        most = schedule_value(self.space.schedule, lambda facts: facts.halved_on_first(m, p, v))
        return np.where(p > 1, np.minimum(m, most), 0)

    @cached_property
    def shards(self) -> Ints:
        """Number of devices over which states outside of experts are sharded."""
        return np.where(self.engine.zero > 0, self.space.shards, 1)

    @cached_property
    def expert_shards(self) -> Ints:
        """Number of devices over which states of experts are sharded."""
        return np.where(self.engine.zero > 0, expert_shards(self.space), 1)

    @cached_property
    def by_operator(self) -> Bools:
        """Whether recomputation selects operators, and keeps attention."""
        chosen: Bools = (self.space.recompute == SELECTIVE) | (self.space.recompute == BUT_ATTENTION)
        return chosen

    @cached_property
    def full(self) -> Bools:
        """Whether whole blocks are recomputed."""
        chosen: Bools = self.space.recompute == FULL
        return chosen

    @cached_property
    def gathers_again(self) -> Bools:
        """Where backward gathers the inputs of a pair of matrices again: a program's own way, or a block that
        is not compiled, unless they are kept in 8 bits."""
        kept = is_compiled(self.work, self.space, self.device) | (self.work.float8 is not None)
        eager = ~(self.by_operator | self.full | kept)
        return eager | np.bool_(self.stack.gathers_again)

    @cached_property
    def passes(self) -> Array:
        """Blocks times micro-batches: forward passes of a block in a step."""
        return self.cut.first * self.space.accumulation

    @cached_property
    def backward_passes(self) -> Array:
        """Backward passes that ask for a block's gathered inputs: two where a backward has two halves."""
        return self.passes + self.cut.last_stage * self.halved

    @cached_property
    def recomputed(self) -> Array:
        """Forward passes that are done again, where all are. The second half of a backward asks for the
        gradients of one matrix or norm after another, and torch recomputes the block for each."""
        return self.passes + self.cut.last_stage * self.halved * _modules_of_block(self.work.model)

    @cached_property
    def length(self) -> Ints:
        """Tokens of a sequence that a context device has."""
        return self.work.sequence_length // self.space.context

    @cached_property
    def activations(self) -> Ints:
        """Bytes of the hidden states of a micro-batch on a context device."""
        return self.space.micro_batch * self.length * self.work.model.hidden * self.computed

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of each unit that FSDP2 gathers."""
        return sizes(self.work.model, self.space.tensor, self.shards)

    @cached_property
    def compressed(self) -> Sizes:
        """Elements of each unit whose gradients may be compressed."""
        return sizes(self.work.model, self.space.tensor, self.shards, "compressed")

    @cached_property
    def rows(self) -> Sizes:
        """Rows of all compressed matrices of each unit."""
        return sizes(self.work.model, self.space.tensor, self.shards, "rows")

    @cached_property
    def columns(self) -> Sizes:
        """Columns of all compressed matrices of each unit."""
        return sizes(self.work.model, self.space.tensor, self.shards, "columns")

    @cached_property
    def cast(self) -> Sizes:
        """Elements of each unit that are gathered in 8 bits."""
        return sizes(self.work.model, self.space.tensor, self.shards, self.work.cast)

    @property
    def block(self) -> Ints:
        """Numbers in the unit of a block."""
        return self.sizes.block if self.stack.wide_routers else self.sizes.block + self.sizes.router

    @property
    def computed(self) -> int:
        """Bytes of a computed number."""
        return value_bytes(self.work)

    @property
    def wide(self) -> int:
        """Bytes of a number in which sums are made."""
        return BYTES[wide(self.work.precision)]

    @property
    def stored(self) -> int:
        """Bytes of a weight between steps, and of its gradient."""
        return BYTES[self.work.state_dtype]

    @property
    def gathered(self) -> float:
        """Bytes of a weight on the wire."""
        return weight_bytes(self.work, self.stack)

    @property
    def reduced(self) -> float:
        """Bytes of a gradient on the wire."""
        return reduce_bytes(self.work, self.stack)


@lru_cache(maxsize=64)
def _modules_of_block(model: Model) -> int:
    """Matrices and norms of a block; a bias goes with the matrix."""
    names = parameter_shapes(model.model_copy(update={"layers": 1}))
    return len(
        {name.removesuffix(".weight").removesuffix(".bias") for name in names if name.startswith("blocks.")}
    )


@dataclass(frozen=True)
class Sizes:
    """Numbers in the units of rank 0 before they are sharded, rows padded until they divide; and what it has
    of whole weights."""

    block: Ints
    """Without its experts, and without its router."""
    router: Ints
    embedding: Ints
    positions: Ints
    norm: Ints
    head: Ints
    whole_block: Ints
    """This device's shard of a block's weights that every tensor device has whole; likewise of the positions
    and the norm."""
    whole_positions: Ints
    whole_norm: Ints


Measure = Literal["all", "compressed", "rows", "columns"] | tuple[str, ...]
"""What is counted: all numbers, those whose gradients can be compressed, or the rows or columns of the
matrices of these; or the weights of these modules, named as in a block."""


def sizes(model: Model, tensor: Ints, shards: Ints, measure: Measure = "all") -> Sizes:
    """Return the sizes for each pair of a tensor degree and a number of shards, of which there are few."""
    first, index = distinct([tensor, shards])
    pairs = zip(tensor[first].tolist(), shards[first].tolist(), strict=True)
    table = np.asarray([_sizes_of(model, *pair, measure) for pair in pairs], dtype=np.int64).reshape(-1, 9)
    return Sizes(*table[index].T)


@lru_cache(maxsize=65536)
def _sizes_of(model: Model, tensor: int, shards: int, measure: Measure) -> tuple[int, ...]:
    parts = dict.fromkeys(("block", "router", "embedding", "positions", "norm", "head"), 0)
    whole = dict(parts)
    for name, shape in parameter_shapes(model.model_copy(update={"layers": 1})).items():
        if ".experts." in name:
            continue
        part, dim = (
            "block" if name.startswith("blocks.") else name.partition(".")[0],
            split_dim(name, model, tensor),
        )
        if isinstance(measure, tuple):
            if name.removeprefix("blocks.0.").removesuffix(".weight") not in measure:
                continue
        elif measure != "all" and not (is_compressed(shape) and (tensor == 1 or dim is not None)):
            continue
        local = sliced(shape, dim, tensor, shards)
        counts = {"rows": int(local.gathered) // shape[-1], "columns": shape[-1]}
        parts["router" if computes_wide(name) else part] += counts.get(str(measure), int(local.gathered))
        whole[part] += 0 if dim is not None else int(local.shard)
    return (*parts.values(), whole["block"], whole["positions"], whole["norm"])
