"""Flows of the data axes: weights gathered and gradients summed, unit by unit.

A unit is what FSDP2 gathers at once (parallel/data.py): a block, its experts, its router, the embedding, and
a root with the rest of a stage. The root stays gathered from forward to backward, so it is gathered once
where others are gathered twice. With P elements in the units, R of them in the root, c and r bytes of an
element of a gathered weight and of a reduced gradient, and m micro-batches:

| zero | weights gathered   | gradients summed                                       |
| ---- | ------------------ | ------------------------------------------------------ |
| 0    |                    | r P once, all-reduce                                   |
| 1    | c P once           | r P once, reduce-scatter                               |
| 2    | c P once           | r P m, reduce-scatter                                  |
| 3    | c (2 P - R) m      | r P m, reduce-scatter                                  |

In a run with replicas, the scattered gradients are then summed over replicas, once. If backward comes in
halves, all of this happens once per step.
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
from shardwise.cost.space import Array, Bools, Ints
from shardwise.cost.stage_blocks import gathered_without_use
from shardwise.plans.grid import COPIES, EXPERT_SHARDS, SHARDS, devices, within
from shardwise.plans.slices import Counts

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of gradients in the first and in the other buckets of DistributedDataParallel, by torch's default."""
_ADDED, _COPIED = 3, 2
"""How often an element is read or written to add it to another in place, and to copy it."""


@dataclass(frozen=True)
class Units(Counts):
    """A group of units: how many they are, and numbers of elements in all of them together."""

    count: Numbers = 0.0
    numbers: Numbers = 0.0
    """Number of elements in all of the units."""
    compressed: Numbers = 0.0
    """Number of elements whose gradients may be compressed."""
    rows: Numbers = 0.0
    """Number of rows of the compressed matrices."""
    columns: Numbers = 0.0
    cast: Numbers = 0.0
    """Number of elements that are gathered in 8 bits."""

    @property
    def pair(self) -> tuple[Numbers, Numbers]:
        """The number of units, and the number of their elements."""
        return self.count, self.numbers

    def shard(self, shards: Ints) -> Units:
        """Return one device's share of the units, which has parts of the rows and all columns."""
        rows, cast = self.rows // shards, self.cast // shards
        return Units(self.count, self.numbers // shards, self.compressed // shards, rows, self.columns, cast)


def weight_flows(rank: FirstRank) -> Iterator[Flow]:
    """Yield the flows of weights and gradients of blocks, embedding, head and experts, for every engine."""
    space, model = rank.space, rank.work.model
    sharded = ~(rank.engine.single | rank.plain)
    piped = space.pipeline > 1  # otherwise the rest of the model is one unit
    apart = piped | (not model.tied)  # whether the embedding is a unit by itself
    positions, head = (1 if model.positions == "learned" else 0), rank.cut.first_has_head.astype(np.int64)
    compressed = _measures(rank)
    blocks = Units(rank.cut.first, *(rank.cut.first * sizes.block for sizes in (rank.sizes, *compressed)))
    blocks = replace(blocks, cast=rank.cast_in_blocks)
    # Gradients of a tied embedding are summed over stages too, and not compressed.
    is_compressed_here = apart & ~(piped & model.tied)
    embedding = Units(
        apart * 1.0,
        np.where(apart, rank.sizes.embedding, 0.0),
        *(np.where(is_compressed_here, sizes.embedding, 0.0) for sizes in compressed),
    )

    def norm_and_head(sizes: Sizes, tied: Numbers) -> Numbers:
        return head * (sizes.norm + np.where(apart, tied if model.tied else sizes.head, sizes.embedding))

    last = Units(
        np.where(piped, head, 1.0),
        np.where(piped, 0, rank.sizes.positions) + norm_and_head(rank.sizes, rank.sizes.embedding),
        *(np.where(piped, 0, sizes.positions) + norm_and_head(sizes, 0) for sizes in compressed),
    )
    last = replace(last, cast=head * rank.cast_in_head)
    first = Units(
        np.where(piped, positions, 0.0),
        *(np.where(piped, sizes.positions, 0) for sizes in (rank.sizes, *compressed)),
    )
    weights = _Weights.of(rank)
    yield from _sharded(rank, SHARDS, rank.shards, sharded, weights, blocks, embedding, (first, last))
    if model.experts:
        yield from _experts(rank, sharded)
        yield from _routers(rank, sharded)
    yield from _bucket_sums(rank)


def _measures(rank: FirstRank) -> list[Sizes]:
    """Return the sizes of compressed units: their elements, and for PowerSGD their rows and columns."""
    if not _encodes(rank):
        return []
    compression = rank.work.compression
    if compression is not None and isinstance(compression.codec, MatrixCodec):
        return [rank.compressed, rank.rows, rank.columns]
    return [rank.compressed]


def _encodes(rank: FirstRank) -> bool:
    """Return whether units are encoded, each by itself."""
    gathers = rank.work.gathers
    return rank.work.compression is not None or (gathers is not None and gathers.codec is not None)


NOTHING = Units()


@dataclass(frozen=True)
class _Weights:
    """How weights of units are gathered."""

    width: float
    """Bytes of an element that is not encoded."""
    codec: RowCodec | None = None
    nearby: int | None = None
    """Number of neighbours that keep a copy for backward; None: backward gathers like forward."""

    @classmethod
    def of(cls, rank: FirstRank) -> _Weights:
        """Return how the job gathers its weights."""
        gathers = rank.work.gathers
        if gathers is None:
            return cls(rank.gathered)
        return cls(rank.gathered, gathers.codec, gathers.backward_shards)


def gathered_ahead(rank: FirstRank) -> Iterator[Flow]:
    """Yield the blocks that FSDP2 gathers at the end of a step without using them. Unlike other weights, they
    are not in proportion to the number of micro-batches."""
    space = rank.space
    where = np.flatnonzero((rank.shards > 1) & is_interleaved(space))

    def in_vain(among: tuple[int, ...] | None = None) -> Array:
        """Return how many of these blocks are gathered without being used."""
        blocks = np.zeros(len(space))
        blocks[where] = gathered_without_use(rank.work, space.take(where), rank.stack, among)
        return blocks

    if len(where):
        blocks, sizes = in_vain(), (rank.block, *(compressed.block for compressed in _measures(rank)[:1]))
        unit = replace(Units(blocks, *(blocks * size for size in sizes)), cast=rank.cast_in(in_vain))
        yield _gather(SHARDS, "once", 1.0, unit, rank.shards, _Weights.of(rank))


def _experts(rank: FirstRank, sharded: Bools) -> Iterator[Flow]:
    """Yield the flows of experts. FSDP2 shards them by their number, so every shard has whole experts, padded
    until they divide."""
    model = rank.work.model
    local = model.experts // rank.space.expert
    if rank.stack.whole_experts:
        local = -(-local // rank.expert_shards) * rank.expert_shards
    width, hidden, number = model.expert_width, model.hidden, rank.cut.first * local
    size = number * 3 * width * hidden
    matrices = (
        sum(".experts." in name for name in cast.names) * rank.blocks_among(cast.blocks)
        for cast in rank.work.cast
    )
    cast = local * sum(matrices, np.zeros(len(rank.space))) * width * hidden
    experts = Units(rank.cut.first, size, cast=cast)
    if is_compressed((model.experts, width, hidden)):  # two matrices into the experts, and one out of them
        rows, columns = number * (2 * width + hidden), rank.cut.first * (2 * hidden + width)
        experts = replace(experts, compressed=size, rows=rows, columns=columns)
    yield from _sharded(rank, EXPERT_SHARDS, rank.expert_shards, sharded, _Weights.of(rank), experts)


def _routers(rank: FirstRank, sharded: Bools) -> Iterator[Flow]:
    """Yield the flows of routers that are gathered in the dtype of sums, so that no score is rounded."""
    if rank.stack.wide_routers:
        sizes = (rank.cut.first * sizes.router for sizes in (rank.sizes, *_measures(rank)))
        weights = replace(_Weights.of(rank), width=rank.wide, codec=None)
        yield from _sharded(rank, SHARDS, rank.shards, sharded, weights, Units(rank.cut.first, *sizes))


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
    """Yield the flows of units that are sharded over this axis, for the candidates that use it (`here`).

    `rest` are the units of the embedding's and the head's stages besides the embedding.
    """
    space, stack, several = rank.space, rank.stack, here & (shards > 1)
    ends = sum(rest, embedding)
    at_ends = [embedding, *rest] if _encodes(rank) else [ends]
    all_units = [blocks, *at_ends] if _encodes(rank) else [blocks + ends]
    zero_3 = (rank.engine.zero == 3) & ~rank.engine.splits_backward
    sums_once = rank.engine.splits_backward | ((rank.engine.zero == 1) & (not stack.reduce_each))
    gathers, sums = space.accumulation * (several & zero_3), space.accumulation * (several & ~sums_once)
    yield _gather(axis, "forward", gathers, blocks, shards, weights)
    yield _gather_again(axis, "backward", gathers, blocks, shards, weights)
    for unit in at_ends:
        yield _gather(axis, "ends", gathers, unit, shards, weights)
    yield _gather_again(axis, "ends", gathers, embedding, shards, weights)
    yield from _sums(rank, "reduce_scatter", axis, "backward", sums, blocks, shards)
    for unit in at_ends:
        yield from _sums(rank, "reduce_scatter", axis, "ends", sums, unit, shards)
    copies = f"replica x {axis}"
    among_copies = here & (rank.engine.zero == 0) & (devices(copies, space) > 1)
    among_replicas = here & (rank.engine.zero > 0) & (space.replica > 1)
    after_step: When = "step" if stack.gathers_after else "once"
    for unit in all_units:
        gathered = replace(unit, count=max(stack.gathers_after, 1) * unit.count)
        yield _gather(axis, after_step, several & ~zero_3, gathered, shards, weights)
        yield from _sums(rank, "reduce_scatter", axis, "once", several & sums_once, unit, shards)
        yield from _sums(rank, "all_reduce", copies, "once", among_copies, unit, devices(copies, space))
        shard = unit.shard(shards)
        yield from _sums(rank, "all_reduce", "replica", "once", among_replicas, shard, space.replica)


def _gather(axis: str, when: When, times: Numbers, unit: Units, shards: Ints, weights: _Weights) -> Flow:
    """Return the gathers of units. With a codec, elements that may be compressed are encoded
    (comm/weight_gathers.py)."""
    if weights.codec is None:
        sent = unit.numbers * weights.width - unit.cast * (weights.width - 1)
        return units("all_gather", axis, when, times, (unit.count, sent), 1.0)
    row = np.asarray(unit.compressed) // np.maximum(unit.count, 1) // shards  # of one unit, on one device
    encoded_bytes = unit.count * shards * _wire_bytes(weights.codec, row)
    sent = encoded_bytes + (unit.numbers - unit.compressed) * weights.width
    encoded, none = np.asarray(unit.count * row, dtype=np.float64), 0.0 * row
    work = CodecWork(weights.codec, encoded, encoded * shards, none, 2.0 * np.asarray(unit.count) + none)
    return _coded(units("all_gather", axis, when, times, (unit.count, sent), 1.0), work, times)


def _gather_again(
    axis: str, when: When, times: Numbers, unit: Units, shards: Ints, weights: _Weights
) -> Flow:
    """Return the same for backward, whose neighbours may keep a copy."""
    if weights.nearby is None:
        return _gather(axis, when, times, unit, shards, weights)
    return units("all_gather", within(axis, weights.nearby), when, times, unit.pair, weights.width)


def _sums(
    rank: FirstRank, kind: str, axis: str, when: When, times: Numbers, unit: Units, among: Numbers
) -> Iterator[Flow]:
    """Yield the sums of gradients of units over `among` devices. With a codec, elements that may be
    compressed are summed in one or two hops (comm/compressed_sums.py)."""
    work = rank.work
    if work.compression is None or not work.compression.compresses(axis):
        yield units(kind, axis, when, times, unit.pair, rank.reduced)
        return
    count, plain = np.asarray(unit.count), np.asarray(unit.numbers - unit.compressed)
    yield units(kind, axis, when, times, (count * (plain > 0), plain), rank.reduced)
    encoded_units = count * (np.asarray(unit.compressed) > 0)
    codec = work.compression.codec
    if isinstance(codec, MatrixCodec):
        yield _low_rank_sum(rank, codec, kind, axis, when, times, unit, encoded_units, among)
        return
    assert isinstance(codec, RowCodec), "a codec is of rows or of matrices"
    row = -(-np.asarray(unit.compressed) // np.maximum(count, 1) // among)  # of one unit, for one device
    yield from _encoded_sum(rank, codec, kind, axis, when, times, encoded_units, row, among)


def _encoded_sum(
    rank: FirstRank,
    codec: RowCodec,
    kind: str,
    axis: str,
    when: When,
    times: Numbers,
    units_summed: Numbers,
    row: Numbers,
    among: Numbers,
) -> Iterator[Flow]:
    """Yield the one or two hops of a compressed sum, in which each device adds up a row of this many elements
    of each unit."""
    rows, all_rows, kernels = units_summed * row, units_summed * among * row, units_summed * (among + 1)
    result = rows if kind == "reduce_scatter" else 0.0 * rows
    copied = rank.reduced * (_ADDED * all_rows + _COPIED * result)
    first = CodecWork(codec, all_rows - rows, all_rows - rows, copied, kernels)
    size = units_summed * among * _wire_bytes(codec, row)
    yield _coded(units("all_to_all", axis, when, times, (units_summed, size), 1.0), first, times)
    if kind == "all_reduce":
        of_sums = codec.for_sums()
        second = CodecWork(of_sums, rows, all_rows, rank.reduced * _COPIED * all_rows, kernels)
        size = units_summed * among * _wire_bytes(of_sums, row)
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
    """Return the sums of both factors of each matrix, which are whole even if a device keeps a part of the
    result."""
    numbers = np.asarray(unit.compressed)
    work = CodecWork(
        codec,
        encoded=numbers,
        decoded=numbers / among if kind == "reduce_scatter" else numbers,
        copied=rank.reduced * _ADDED * numbers,
        kernels=0.0 * numbers,
    )
    factors = 2 * units_summed, codec.rank * (unit.rows + unit.columns)
    return _coded(units("all_reduce", axis, when, times, factors, rank.reduced), work, times)


def _coded(flow: Flow, work: CodecWork, times: Numbers) -> Flow:
    return replace(flow, codec_work=work.times(times))


def _wire_bytes(codec: RowCodec, numbers: Numbers) -> Numbers:
    """Return the bytes of encoded rows of these lengths, computed once for each distinct length."""
    lengths, index = np.unique(np.asarray(numbers), return_inverse=True)
    sizes = np.asarray([float(codec.wire_bytes(int(length))) for length in lengths])
    return sizes[index.reshape(np.shape(numbers))]


def _bucket_sums(rank: FirstRank) -> Iterator[Flow]:
    """Yield the sums of gradients by DistributedDataParallel."""
    width = rank.stack.reduce_bytes / SHARDWISE.reduce_bytes
    size = rank.work.bucket_bytes
    buckets = _buckets(rank.work.model, rank.stored, *((size, size) if size else (FIRST_BUCKET, BUCKET)))
    if rank.work.compression is None:
        numbers = sum(count * sum(map(prod, bucket)) for bucket, count in buckets.items())
        yield units("all_reduce", COPIES, "once", rank.plain, (buckets.total(), numbers * rank.stored), width)
        return
    for bucket, count in buckets.items():
        compressed = [shape for shape in bucket if is_compressed(shape)]
        unit = Units(
            1.0,
            sum(map(prod, bucket)),
            sum(map(prod, compressed)),
            rows=sum(prod(shape[:-1]) for shape in compressed),
            columns=sum(shape[-1] for shape in compressed),
        )
        among = devices(COPIES, rank.space)
        yield from _sums(rank, "all_reduce", COPIES, "once", rank.plain, unit * count, among)


@lru_cache(maxsize=64)
def _buckets(model: Model, stored: int, first: int, others: int) -> Counter[tuple[Shape, ...]]:
    """Return the shapes in each bucket of DistributedDataParallel, and the number of buckets with the same.

    Buckets are filled from the last parameter to the first. A bucket is full when it reaches its size; the
    first bucket of torch is small, so that sums begin early.
    """
    buckets: list[list[Shape]] = [[]]
    for shape in reversed(parameter_shapes(model).values()):
        if stored * sum(map(prod, buckets[-1])) >= (others if len(buckets) > 1 else first):
            buckets.append([])
        buckets[-1].append(shape)
    return Counter(map(tuple, buckets))
