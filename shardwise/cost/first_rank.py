"""Rank 0 of every candidate: its weights, its dtypes, and how many passes it computes.

Rank 0 is the first device of the first pipeline rank.
"""

from __future__ import annotations

from collections.abc import Callable
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
from shardwise.cost.stage_blocks import Cut, cut, first_rank_has
from shardwise.plans.dtypes import computes_wide, wide
from shardwise.plans.engine import Engine, engine_of
from shardwise.plans.grid import expert_shards
from shardwise.plans.slices import sliced, split_dim


@dataclass(frozen=True)
class FirstRank:
    """Rank 0 of every candidate."""

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
        """Return rank 0 of these candidates. `self` is that of their layouts; index[i] is the layout of
        candidate i."""
        return replace(self, space=space, engine=take(self.engine, index), cut=take(self.cut, index))

    @cached_property
    def plain(self) -> Bools:
        """Whether DistributedDataParallel sums the gradients of plain tensors."""
        plain: Bools = self.engine.replicated & self.stack.buckets
        return plain

    @cached_property
    def halved(self) -> Ints:
        """Number of micro-batches whose backward through the model's last stage rank 0 runs in two halves."""
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
        """Whether recomputation selects operators, and keeps the output of attention."""
        selects: Bools = (self.space.recompute == SELECTIVE) | (self.space.recompute == BUT_ATTENTION)
        return selects

    @cached_property
    def full(self) -> Bools:
        """Whether whole blocks are recomputed."""
        recomputes_all: Bools = self.space.recompute == FULL
        return recomputes_all

    @cached_property
    def gathers_again(self) -> Bools:
        """Whether backward gathers the inputs of a pair of matrices again.

        Some programs always do that. Blocks that are not compiled do it too, unless the inputs are kept in 8
        bits.
        """
        kept = is_compiled(self.work, self.space, self.device) | (self.work.float8 is not None)
        eager = ~(self.by_operator | self.full | kept)
        return eager | np.bool_(self.stack.gathers_again)

    @cached_property
    def passes(self) -> Array:
        """Number of forward passes of a block in a step: blocks times micro-batches."""
        return self.cut.first * self.space.accumulation

    @cached_property
    def backward_passes(self) -> Array:
        """Number of backward passes that need a block's gathered inputs: 2 for a backward in two halves."""
        return self.passes + self.cut.last_stage * self.halved

    @cached_property
    def recomputed(self) -> Array:
        """Number of forward passes that are repeated if all blocks are recomputed.

        The second half of a backward asks for the gradients of one matrix or norm after another, and torch
        recomputes the block for each.
        """
        return self.passes + self.cut.last_stage * self.halved * _modules_of_block(self.work.model)

    @cached_property
    def length(self) -> Ints:
        """Number of tokens of a sequence on a context device."""
        return self.work.sequence_length // self.space.context

    @cached_property
    def activations(self) -> Ints:
        """Bytes of the hidden states of a micro-batch on a context device."""
        return self.space.micro_batch * self.length * self.work.model.hidden * self.computed

    @cached_property
    def sizes(self) -> Sizes:
        """Elements of each unit that FSDP2 gathers."""
        return self._measured("all")

    @cached_property
    def compressed(self) -> Sizes:
        """Elements of each unit whose gradients may be compressed."""
        return self._measured("compressed")

    @cached_property
    def rows(self) -> Sizes:
        """Rows of all compressed matrices of each unit."""
        return self._measured("rows")

    @cached_property
    def columns(self) -> Sizes:
        """Columns of all compressed matrices of each unit."""
        return self._measured("columns")

    @cached_property
    def cast_in_blocks(self) -> Array:
        """Elements of the units of all its blocks that are gathered in 8 bits."""
        return self.cast_in(self.blocks_among)

    @cached_property
    def cast_in_head(self) -> Ints:
        """Elements of a head that are gathered in 8 bits."""
        names = tuple(name for cast in self.work.cast for name in cast.names)
        return self._measured(names).head

    def cast_in(self, count: Callable[[tuple[int, ...] | None], Array | Ints]) -> Array:
        """Return the elements that are gathered in 8 bits in the units of some blocks. `count` returns how
        many of those blocks are among the given ones."""
        elements: Array = np.zeros(len(self.space))
        for cast in self.work.cast:
            elements = elements + self._measured(cast.names).block * count(cast.blocks)
        return elements

    def blocks_among(self, blocks: tuple[int, ...] | None) -> Array | Ints:
        """Return how many of these blocks (None: of all) are on rank 0."""
        if blocks is None:
            return self.cut.first
        return first_rank_has(self.work, self.space, self.stack, self.cut, blocks)

    def _measured(self, measure: Measure) -> Sizes:
        return sizes(self.work.model, self.space.tensor, self.shards, measure)

    @property
    def block(self) -> Ints:
        """Number of elements in the unit of a block."""
        return self.sizes.block if self.stack.wide_routers else self.sizes.block + self.sizes.router

    @property
    def computed(self) -> int:
        """Bytes of an element in the dtype of computation."""
        return value_bytes(self.work)

    @property
    def wide(self) -> int:
        """Bytes of an element in the dtype of sums."""
        return BYTES[wide(self.work.precision)]

    @property
    def stored(self) -> int:
        """Bytes of an element of a weight between steps, and of its gradient."""
        return BYTES[self.work.state_dtype]

    @property
    def gathered(self) -> float:
        """Bytes of an element of a weight that is gathered."""
        return weight_bytes(self.work, self.stack)

    @property
    def reduced(self) -> float:
        """Bytes of an element of a gradient that is reduced."""
        return reduce_bytes(self.work, self.stack)


@lru_cache(maxsize=64)
def _modules_of_block(model: Model) -> int:
    """Return the number of matrices and norms of a block; a bias belongs to its matrix."""
    names = parameter_shapes(model.model_copy(update={"layers": 1}))
    return len(
        {name.removesuffix(".weight").removesuffix(".bias") for name in names if name.startswith("blocks.")}
    )


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements of rank 0's units before they are sharded, with rows padded until they divide; and
    of its shards of the weights that every tensor device has whole."""

    block: Ints
    """Elements of a block without its experts and its router."""
    router: Ints
    embedding: Ints
    positions: Ints
    norm: Ints
    head: Ints
    whole_block: Ints
    """Elements of this device's shard of a block's weights that every tensor device has whole."""
    whole_positions: Ints
    whole_norm: Ints


Measure = Literal["all", "compressed", "rows", "columns"] | tuple[str, ...]
"""What is counted: all elements; those whose gradients can be compressed; the rows or the columns of their
matrices; or the elements of the weights of these modules, named as in a block."""


def sizes(model: Model, tensor: Ints, shards: Ints, measure: Measure = "all") -> Sizes:
    """Return the sizes for each candidate, computed once for each pair of tensor degree and shards."""
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
        part = "block" if name.startswith("blocks.") else name.partition(".")[0]
        dim = split_dim(name, model, tensor)
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
