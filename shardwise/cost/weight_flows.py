"""Flows of the data axes: weights gathered and gradients summed, unit by unit.

A unit is what FSDP2 gathers at once (parallel/data.py): a block, its experts, its router, the embedding, and
a root with all that remains of a stage. The root stays gathered from forward to backward, so it is gathered
once where others are gathered twice. With P numbers in the units, R of them in the root, c and r bytes of a
weight and a gradient on the wire, m micro-batches:

| zero | weights gathered   | gradients summed                                       |
| ---- | ------------------ | ------------------------------------------------------ |
| 0    |                    | r P once, all-reduce                                   |
| 1    | c P once           | r P once, reduce-scatter                               |
| 2    | c P once           | r P m, reduce-scatter                                  |
| 3    | c (2 P - R) m      | r P m, reduce-scatter                                  |

and in a run with replicas what was scattered is summed over them, once. Where backward goes in halves,
everything is done once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from shardwise.codecs import MatrixCodec, RowCodec
from shardwise.config.compression import is_compressed
from shardwise.config.model import Model
from shardwise.config.parameters import Shape, parameter_shapes
from shardwise.config.schedules import Numbers, is_interleaved
from shardwise.cost.codec_work import CodecWork
from shardwise.cost.first_rank import FirstRank, Sizes
from shardwise.cost.flow import Flow, When, units
from shardwise.cost.software import SHARDWISE
from shardwise.cost.space import Bools, Ints
from shardwise.cost.stage_blocks import gathered_in_vain
from shardwise.plan.grid import COPIES, EXPERT_SHARDS, SHARDS, devices, within

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel sums at once, unless it is told."""
_ADDED, _COPIED = 3, 2
"""How often an element is read or written to add it to another in place, and to copy it."""


@dataclass(frozen=True)
class Units:
    """A group of units: how many, and the number of elements in all of them."""

    count: Numbers = 0.0
    numbers: Numbers = 0.0
    compressed: Numbers = 0.0
    """Elements whose gradients may be compressed."""
    rows: Numbers = 0.0
    """Rows of the compressed matrices."""
    columns: Numbers = 0.0
    cast: Numbers = 0.0
    """Elements that are gathered in 8 bits."""

    def __add__(self, other: Units) -> Units:
        return Units(*(mine + theirs for mine, theirs in zip(self._fields, other._fields, strict=True)))

    @property
    def pair(self) -> tuple[Numbers, Numbers]:
        """The number of units, and the number of their elements."""
        return self.count, self.numbers

    @property
    def _fields(self) -> tuple[Numbers, ...]:
        return self.count, self.numbers, self.compressed, self.rows, self.columns, self.cast

    def shard(self, shards: Ints) -> Units:
        """Return one device's share of the units; it has all columns."""
        rows, cast = self.rows // shards, self.cast // shards
        return Units(self.count, self.numbers // shards, self.compressed // shards, rows, self.columns, cast)


def weight_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the flows of weights and gradients of blocks, ends and experts, for every engine."""
    space, model = rank.space, rank.work.model
    sharded = ~(rank.engine.single | rank.plain)
    apart = (space.pipeline > 1) | (not model.tied)  # the embedding is a unit by itself
    positions, head = (1 if model.positions == "learned" else 0), rank.head.astype(np.int64)
    compressed = _measures(rank)
    blocks = Units(rank.cut.first, *(rank.cut.first * each.block for each in (rank.sizes, *compressed)))
    blocks = replace(blocks, cast=rank.cut.first * rank.cast.block)
    shared = (
        space.pipeline > 1
    ) & model.tied  # then its gradients are summed over stages too, and not compressed
    embedding = Units(
        apart * 1.0,
        np.where(apart, rank.sizes.embedding, 0.0),
        *(np.where(apart & ~shared, each.embedding, 0.0) for each in compressed),
    )

    def at_the_end(of: Sizes, tied: Numbers) -> Numbers:
        return head * (of.norm + np.where(apart, tied if model.tied else of.head, of.embedding))

    alone = space.pipeline == 1  # then all that remains is one unit
    last = Units(
        np.where(alone, 1.0, head),
        np.where(alone, rank.sizes.positions, 0) + at_the_end(rank.sizes, rank.sizes.embedding),
        *(np.where(alone, each.positions, 0) + at_the_end(each, 0) for each in compressed),
    )
    last = replace(last, cast=at_the_end(rank.cast, 0))
    first = Units(
        np.where(alone, 0.0, positions),
        *(np.where(alone, 0, each.positions) for each in (rank.sizes, *compressed)),
    )
    yield from _sharded(
        rank, SHARDS, rank.shards, sharded, _Weights.of(rank), blocks, embedding, (first, last)
    )
    if model.experts:
        yield from _experts(rank, sharded)
        yield from _routers(rank, sharded)
    yield from _bucket_sums(rank)


def _measures(rank: FirstRank) -> list[Sizes]:
    """Return the sizes of compressed units: their elements, and for PowerSGD their rows and columns."""
    if not _encodes(rank):
        return []
    how = rank.work.compression
    return (
        [rank.compressed, rank.rows, rank.columns]
        if how is not None and isinstance(how.codec, MatrixCodec)
        else [rank.compressed]
    )


def _encodes(rank: FirstRank) -> bool:
    """Whether units are encoded, each by itself."""
    gathers = rank.work.gathers
    return rank.work.compression is not None or (gathers is not None and gathers.codec is not None)


NOTHING = Units()


@dataclass(frozen=True)
class _Weights:
    """How weights of units are gathered."""

    width: float
    """Bytes of one, where it is not encoded."""
    codec: RowCodec | None = None
    nearby: int | None = None
    """Neighbours that keep a copy for backward."""

    @classmethod
    def of(cls, rank: FirstRank) -> _Weights:
        """Return how the job gathers its weights."""
        gathers = rank.work.gathers
        return (
            cls(rank.gathered)
            if gathers is None
            else cls(rank.gathered, gathers.codec, gathers.backward_shards)
        )


def gathered_ahead(rank: FirstRank) -> Iterator[Flow]:
    """What FSDP2 gathers for nobody at the end of a step. It alone depends on the number of micro-batches in
    no simple way."""
    space = rank.space
    where = np.flatnonzero((rank.shards > 1) & is_interleaved(space))
    blocks = np.zeros(len(space))
    blocks[where] = gathered_in_vain(rank.work, space.take(where), rank.stack)
    if len(where):
        unit = Units(
            blocks, *(blocks * size for size in (rank.block, *(each.block for each in _measures(rank)[:1])))
        )
        unit = replace(unit, cast=blocks * rank.cast.block)
        yield _gather(SHARDS, "once", 1.0, unit, rank.shards, _Weights.of(rank))


def _experts(rank: FirstRank, sharded: Bools) -> Iterator[Flow]:
    """FSDP2 cuts experts by their number, so that every shard has whole ones, padded until they divide."""
    model = rank.work.model
    own = model.experts // rank.space.expert
    if rank.stack.whole_experts:
        own = -(-own // rank.expert_shards) * rank.expert_shards
    width, hidden, number = model.expert_width, model.hidden, rank.cut.first * own
    size = number * 3 * width * hidden
    squeezed = is_compressed((model.experts, width, hidden))
    cast = sum(f"feed_forward.experts.{name}" in rank.work.cast for name in ("gate", "up", "down"))
    experts = Units(rank.cut.first, size, cast=number * cast * width * hidden)
    if squeezed:  # two matrices into the experts, and one out of them
        rows, columns = number * (2 * width + hidden), rank.cut.first * (2 * hidden + width)
        experts = replace(experts, compressed=size, rows=rows, columns=columns)
    yield from _sharded(rank, EXPERT_SHARDS, rank.expert_shards, sharded, _Weights.of(rank), experts)


def _routers(rank: FirstRank, sharded: Bools) -> Iterator[Flow]:
    """Gathered in the dtype of sums, so that no score is rounded."""
    if rank.stack.wide_routers:
        routers = Units(
            rank.cut.first, *(rank.cut.first * each.router for each in (rank.sizes, *_measures(rank)))
        )
        yield from _sharded(
            rank,
            SHARDS,
            rank.shards,
            sharded,
            replace(_Weights.of(rank), width=rank.wide, codec=None),
            routers,
        )


def _sharded(
    rank: FirstRank,
    axis: str,
    shards: Ints,
    here: Bools,
    weights: _Weights,
    blocks: Units,
    embedding: Units = NOTHING,
    rest: Sequence[Units] = (),
) -> Iterator[Flow]:
    """Units that are sharded over this axis, where they are `here`, and gathered in so many bytes a
    weight."""
    space, stack, several = rank.space, rank.stack, here & (shards > 1)
    ends = sum(rest, embedding)
    at_ends = [embedding, *rest] if _encodes(rank) else [ends]
    all_units = [blocks, *at_ends] if _encodes(rank) else [blocks + ends]
    three = (rank.engine.zero == 3) & ~rank.engine.splits_backward
    at_end = rank.engine.splits_backward | ((rank.engine.zero == 1) & (not stack.reduce_each))
    each_gather, each_sum = space.accumulation * (several & three), space.accumulation * (several & ~at_end)
    yield _gather(axis, "forward", each_gather, blocks, shards, weights)
    yield _gather_again(axis, "backward", each_gather, blocks, shards, weights)
    for unit in at_ends:
        yield _gather(axis, "ends", each_gather, unit, shards, weights)
    yield _gather_again(axis, "ends", each_gather, embedding, shards, weights)
    yield from _sums(rank, "reduce_scatter", axis, "backward", each_sum, blocks, shards)
    for unit in at_ends:
        yield from _sums(rank, "reduce_scatter", axis, "ends", each_sum, unit, shards)
    among_copies = here & (rank.engine.zero == 0) & (space.replica * devices(axis, space) > 1)
    among_replicas = here & (rank.engine.zero > 0) & (space.replica > 1)
    for unit in all_units:
        gathered = replace(
            unit, count=max(stack.gathers_after, 1) * unit.count
        )  # one by one, where a program does that
        yield _gather(
            axis, "step" if stack.gathers_after else "once", several & ~three, gathered, shards, weights
        )
        yield from _sums(rank, "reduce_scatter", axis, "once", several & at_end, unit, shards)
        copies = f"replica x {axis}"
        yield from _sums(rank, "all_reduce", copies, "once", among_copies, unit, devices(copies, space))
        yield from _sums(
            rank, "all_reduce", "replica", "once", among_replicas, unit.shard(shards), space.replica
        )


def _gather(axis: str, when: When, times: Numbers, unit: Units, shards: Ints, weights: _Weights) -> Flow:
    """Weights of units gathered: as they are, or what is compressed of them encoded
    (comm/weight_gathers.py)."""
    if weights.codec is None:
        sent = unit.numbers * weights.width - unit.cast * (weights.width - 1)
        return units("all_gather", axis, when, times, (unit.count, sent), 1.0)
    each = np.asarray(unit.compressed) // np.maximum(unit.count, 1) // shards  # of one unit, on one device
    sent = (
        unit.count * shards * _wire_bytes(weights.codec, each)
        + (unit.numbers - unit.compressed) * weights.width
    )
    own, none = np.asarray(unit.count * each, dtype=np.float64), 0.0 * each
    work = CodecWork(weights.codec, own, own * shards, none, 2.0 * np.asarray(unit.count) + none)
    return _coded(units("all_gather", axis, when, times, (unit.count, sent), 1.0), work, times)


def _gather_again(
    axis: str, when: When, times: Numbers, unit: Units, shards: Ints, weights: _Weights
) -> Flow:
    """The same for backward, which may have a copy nearby."""
    if weights.nearby is None:
        return _gather(axis, when, times, unit, shards, weights)
    return units("all_gather", within(axis, weights.nearby), when, times, unit.pair, weights.width)


def _sums(
    rank: FirstRank, kind: str, axis: str, when: When, times: Numbers, unit: Units, among: Numbers
) -> Iterator[Flow]:
    """Gradients of units summed: as they are, or what is compressed of them in one or two hops
    (comm/compressed_sums.py)."""
    work = rank.work
    if work.compression is None or not work.compression.compresses(axis):
        yield units(kind, axis, when, times, unit.pair, rank.reduced)
        return
    count, small = np.asarray(unit.count), np.asarray(unit.numbers - unit.compressed)
    yield units(kind, axis, when, times, (count * (small > 0), small), rank.reduced)
    squeezed = count * (np.asarray(unit.compressed) > 0)
    codec = work.compression.codec
    if isinstance(codec, MatrixCodec):
        yield _low_rank_sum(rank, codec, kind, axis, when, times, unit, squeezed, among)
        return
    assert isinstance(codec, RowCodec), "a codec is of rows or of matrices"
    each = -(-np.asarray(unit.compressed) // np.maximum(count, 1) // among)  # of one unit, for one device
    yield from _encoded_sum(rank, codec, kind, axis, when, times, squeezed, each, among)


def _encoded_sum(
    rank: FirstRank,
    codec: RowCodec,
    kind: str,
    axis: str,
    when: When,
    times: Numbers,
    units_summed: Numbers,
    each: Numbers,
    among: Numbers,
) -> Iterator[Flow]:
    """Yield the one or two hops of a compressed sum, in which each device adds up `each` elements of a
    unit."""
    row, all_rows = units_summed * each, units_summed * among * each
    hands_over = row if kind == "reduce_scatter" else 0.0 * row
    around = rank.reduced * (_ADDED * all_rows + _COPIED * hands_over)
    first = CodecWork(codec, all_rows - row, all_rows - row, around, units_summed * (among + 1))
    size = units_summed * among * _wire_bytes(codec, each)
    yield _coded(units("all_to_all", axis, when, times, (units_summed, size), 1.0), first, times)
    if kind == "all_reduce":
        of_sums = codec.for_sums()
        second = CodecWork(
            of_sums, row, all_rows, rank.reduced * _COPIED * all_rows, units_summed * (among + 1)
        )
        size = units_summed * among * _wire_bytes(of_sums, each)
        yield _coded(units("all_gather", axis, when, times, (units_summed, size), 1.0), second, times)


def _low_rank_sum(
    rank: FirstRank,
    codec: MatrixCodec,
    kind: str,
    axis: str,
    when: When,
    times: Numbers,
    unit: Units,
    units_summed: Numbers,
    among: Numbers,
) -> Flow:
    """Both factors of each matrix are summed whole, whatever part of the result a device keeps."""
    numbers = np.asarray(unit.compressed)
    work = CodecWork(
        codec,
        encoded=numbers,
        decoded=numbers / among if kind == "reduce_scatter" else numbers,
        copied=rank.reduced * _ADDED * numbers,
        kernels=0.0 * numbers,
    )
    factors = codec.rank * (unit.rows + unit.columns)
    return _coded(
        units("all_reduce", axis, when, times, (2 * units_summed, factors), rank.reduced), work, times
    )


def _coded(flow: Flow, work: CodecWork, times: Numbers) -> Flow:
    return replace(flow, codec_work=work.times(times))


def _wire_bytes(codec: RowCodec, numbers: Numbers) -> Numbers:
    """Return the bytes of encoded rows of these lengths, computed once for each distinct length."""
    lengths, index = np.unique(np.asarray(numbers), return_inverse=True)
    return np.asarray([float(codec.wire_bytes(int(length))) for length in lengths])[
        index.reshape(np.shape(numbers))
    ]


def _bucket_sums(rank: FirstRank) -> Iterator[Flow]:
    """Yield the sums of gradients by DistributedDataParallel."""
    width = rank.stack.reduce_bytes / SHARDWISE.reduce_bytes
    told = rank.work.bucket_bytes
    buckets = _buckets(rank.work.model, rank.stored, *((told, told) if told else (FIRST_BUCKET, BUCKET)))
    if rank.work.compression is None:
        numbers = sum(count * sum(map(prod, bucket)) for bucket, count in buckets.items())
        yield units("all_reduce", COPIES, "once", rank.plain, (buckets.total(), numbers * rank.stored), width)
        return
    for bucket, count in buckets.items():
        large = [shape for shape in bucket if is_compressed(shape)]
        rows, columns = sum(prod(shape[:-1]) for shape in large), sum(shape[-1] for shape in large)
        unit = Units(
            *(count * each for each in (1.0, sum(map(prod, bucket)), sum(map(prod, large)), rows, columns))
        )
        yield from _sums(rank, "all_reduce", COPIES, "once", rank.plain, unit, devices(COPIES, rank.space))


@lru_cache(maxsize=64)
def _buckets(model: Model, stored: int, first: int, others: int) -> Counter[tuple[Shape, ...]]:
    """The shapes in each of the buckets in which DistributedDataParallel sums gradients, from the last
    parameter to the first, and how many buckets are so. A bucket is full when it reaches its size; torch's
    first is small, to begin early."""
    buckets: list[list[Shape]] = [[]]
    for shape in reversed(parameter_shapes(model).values()):
        if stored * sum(map(prod, buckets[-1])) >= (others if len(buckets) > 1 else first):
            buckets.append([])
        buckets[-1].append(shape)
    return Counter(map(tuple, buckets))
