"""What crosses between devices in a step, collective by collective: the ledger of a run that has not happened yet.

`observe/ledger.py` writes down what a run really sends; the formulas here say the same beforehand, for every candidate of a
`Space` at once, of rank 0: the first device of the first pipeline rank. tests/parallel/test_predicted_traffic.py holds the two
together, to the byte and the call. Bytes are of the full tensor, as in the ledger; a ring puts a known factor of it on the wire.

With b sequences in a micro-batch, S = sequence / context tokens of each here, h the hidden width and a bytes an activation:

| axis     | moves                                                                         | from                     |
| -------- | ----------------------------------------------------------------------------- | ------------------------ |
| shards   | weights gathered, gradients scattered, unit by unit (parallel/data.py)        | Rajbhandari et al. 2020  |
| replica  | the scattered gradients summed over replicas, once a step                     | Zhao et al. 2023         |
| tensor   | b S h a: a gather before and a sum after each pair of matrices, in each pass; | Korthikanti et al. 2022  |
|          | what backward gathers again; three numbers a token for the loss               |                          |
| context  | keys and values around a ring, or heads by all-to-all                         | Liu 2023; Jacobs 2023    |
| expert   | b S h a / tensor for each expert that a token visits, there and back          | Lepikhin et al. 2020     |
| pipeline | b S h a / tensor for each micro-batch and border between stages               | Huang et al. 2019        |

and once a step the numbers that all ranks share, a sum of squares for each way of sharding, and the gradients of weights that are
whole on every tensor device.

What cannot be known beforehand: how many rows come to the experts of a device depends on the routing, and two of the four
all-to-alls of a layer carry the rows that came. They are given for an even load. Everything else is exact, for sequences without
document boundaries (`data.reset_attention` adds small messages), stages cut by cost, and recomputation of none, selected parts or
all of a block. With "cuda", blocks are taken to be compiled, which keeps gathered sequences where plain blocks gather again.

The cost: some thirty products of arrays, whatever the model's depth, a microsecond a candidate. What depends on few distinct
numbers (sizes of units, blocks of a cut) is worked out once for each of them and looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from shardwise.config import IN_A_V, Layout, Model, borrowed
from shardwise.cost.space import RECOMPUTE, Array, Bools, Ints, Space, Work
from shardwise.cost.stack import SHARDWISE, Stack
from shardwise.plan import grid
from shardwise.plan.chunks import chunk_tokens
from shardwise.plan.dtypes import BYTES, value_bytes, wide
from shardwise.plan.engine import Engine, engine_of, has_schedule
from shardwise.plan.grid import COPIES, EXPERT_SHARDS, SHARDS
from shardwise.plan.parameters import parameter_shapes
from shardwise.plan.schedule import SCHEDULES
from shardwise.plan.slices import sliced, split_dim

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of gradients that torch's DistributedDataParallel sums at once."""
AT_ONCE = 2**14
"""Candidates whose arrays lie in a processor's cache together."""


@dataclass(frozen=True)
class Flow:
    """Collectives of one kind over one axis that run beside the same work: how many a step, and the bytes of all of them."""

    kind: str
    axis: str
    """As the ledger names it, with parts of one device left in: "data x context" where only data has several."""
    when: str
    """What it runs beside: "forward" or "backward" of the blocks; "step": the optimizer; "pipeline": it runs between stages."""
    count: Array
    bytes: Array


def flows(work: Work, space: Space, stack: Stack = SHARDWISE, device: str = "cuda") -> list[Flow]:
    """Everything that rank 0 sends in a step, for every candidate. On a "cuda" device blocks are compiled and the loss has larger
    chunks than on a "cpu"."""
    sums: dict[tuple[str, str, str], tuple[Array, Array]] = {}
    for start in range(0, len(space), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        for flow in _flows(_rank(work, space.take(part), stack, device)):
            key = flow.kind, flow.axis, flow.when
            if key not in sums and flow.count.any():
                sums[key] = np.zeros(len(space)), np.zeros(len(space))
            if key in sums:
                sums[key][0][part] += flow.count
                sums[key][1][part] += flow.bytes
    return [Flow(*key, *both) for key, both in sums.items()]


def _flows(rank: _Rank) -> Iterator[Flow]:
    yield from _weights(rank)
    yield from _tensor(rank)
    yield from _loss(rank)
    yield from _context(rank)
    yield from _experts(rank)
    yield from _stages(rank)
    yield from _step(rank)


def totals(found: list[Flow], space: Space, place: int) -> dict[str, dict[str, int]]:
    """One candidate's flows as the ledger of a step writes them."""
    sums: dict[str, list[int]] = {}
    for flow in found:
        if flow.count[place]:
            entry = sums.setdefault(f"{flow.kind}/{label(flow.axis, space, place)}", [0, 0])
            entry[0] += int(flow.count[place])
            entry[1] += int(flow.bytes[place])
    return {key: {"count": count, "bytes": size} for key, (count, size) in sorted(sums.items())}


def label(axis: str, space: Space, place: int) -> str:
    """The ledger's name of an axis: its parts with several devices. Those of experts keep their name."""
    return grid.label(axis, space.layout(place))


def devices(axis: str, space: Space) -> Ints:
    """Devices along an axis of a flow, for every candidate."""
    size: Ints = grid.devices(axis, space)
    return size


# -- what rank 0 has ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rank:
    """Rank 0 of every candidate: what it holds, and how many bytes its numbers have."""

    work: Work
    space: Space
    stack: Stack
    engine: Engine
    """Who holds the data axes of each candidate."""
    shards: Ints
    """Devices that the states outside of experts are sharded over, and those of experts."""
    expert_shards: Ints
    blocks: Ints
    last_blocks: Ints
    """Of the blocks, those of the last stage, where rank 0 has it beside the first."""
    head: Bools
    """Whether the last norm and the head are here."""
    stages: Ints
    halved: Ints
    """Micro-batches whose backward goes through the last stage in two halves."""
    in_vain: Ints
    """Blocks that are gathered once more than they are used: see `_in_vain`."""
    again: dict[str, Bools]
    """Where recomputation is "selective" or "full"; "gather": where backward gathers again what forward let go."""
    device: str

    @cached_property
    def held(self) -> Ints:
        """Blocks times micro-batches."""
        return self.blocks * self.space.accumulation

    @property
    def asked_again(self) -> Ints:
        """Blocks times micro-batches whose gathered inputs backward asks for: twice where it has two halves."""
        return self.held + self.last_blocks * self.halved

    @cached_property
    def recomputed(self) -> Ints:
        """Blocks times micro-batches that are recomputed. The second half of a backward asks for the gradients of one matrix or
        norm after another, and torch recomputes the block for each."""
        return self.held + self.last_blocks * self.halved * _modules_of_block(self.work.model)

    @cached_property
    def length(self) -> Ints:
        """Tokens of a sequence that a context device has."""
        return self.work.sequence_length // self.space.context

    @cached_property
    def activations(self) -> Ints:
        """Bytes of the hidden states of a micro-batch on a context device."""
        return self.space.micro_batch * self.length * self.work.model.hidden * self.computed

    @cached_property
    def sizes(self) -> _Sizes:
        """Of its units."""
        return _sizes(self.work.model, self.space.tensor, self.shards)

    @property
    def computed(self) -> int:
        """Bytes of a computed number; products in float8 leave the others as in bfloat16."""
        return value_bytes(self.work.precision)

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
        """Bytes of a weight on the wire; a stack states those of training in bfloat16."""
        return self.computed * self.stack.weight_bytes / SHARDWISE.weight_bytes

    @property
    def reduced(self) -> float:
        """Bytes of a gradient on the wire."""
        return BYTES[self.work.reduce_dtype] * self.stack.reduce_bytes / SHARDWISE.reduce_bytes


def _rank(work: Work, space: Space, stack: Stack, device: str) -> _Rank:
    engine = engine_of(space, work.model.experts)
    blocks, last_blocks, head, stages, in_vain = _cut(work, space)
    selective, full = (space.recompute == RECOMPUTE.index(mode) for mode in ("selective", "full"))
    compiled = device != "cpu"
    return _Rank(
        work,
        space,
        stack,
        engine,
        shards=np.where(engine.zero > 0, space.shards, 1),
        expert_shards=np.where(engine.zero > 0, space.expert_shards, 1),
        blocks=blocks,
        last_blocks=last_blocks,
        head=head,
        stages=stages,
        halved=np.where(engine.splits_backward & (last_blocks > 0), _halved(space), 0),
        in_vain=in_vain,
        again={"selective": selective, "full": full, "gather": ~(selective | full | np.bool_(compiled))},
        device=device,
    )


def _halved(space: Space) -> Ints:
    """Micro-batches whose backward goes through the last stage in halves, on rank 0 of a V: all of `zbv`, the first few of
    `dualpipev` (plan/schedule.py)."""
    all_of_them = space.schedule == SCHEDULES.index("zbv")
    return np.where(all_of_them, space.accumulation, np.minimum(space.accumulation, space.pipeline - 1))


def _cut(work: Work, space: Space) -> tuple[Ints, Ints, Bools, Ints, Ints]:
    """Of rank 0: its blocks, those of them on the last stage of several, whether it has the head, its stages, and `_in_vain`."""
    in_a_v: Bools = has_schedule(space, IN_A_V) & (space.pipeline > 1)
    looped = (space.schedule == SCHEDULES.index("interleaved")) & (space.pipeline > 1)
    stages = np.where(in_a_v, 2, np.where(looped, space.stages_per_rank, 1))
    kinds, where = _distinct((space.pipeline * 256 + stages) * 2 + in_a_v)
    cuts = [_own_stages(work, kind // 512, kind // 2 % 256, bool(kind % 2)) for kind in kinds.tolist()]
    blocks = np.array([sum(cut) for cut in cuts], dtype=np.int64)[where]
    last = np.array([cut[-1] if kind % 2 else 0 for kind, cut in zip(kinds.tolist(), cuts, strict=True)], dtype=np.int64)[where]
    return blocks, last, in_a_v | (space.pipeline == 1), stages, np.where(looped, _in_vain(space, stages, cuts, where), 0)


def _own_stages(work: Work, ranks: int, stages: int, in_a_v: bool) -> tuple[int, ...]:
    """Blocks of each stage of rank 0; none where the model has too few blocks to be cut so."""
    if ranks * stages > work.model.layers:
        return (0,) * stages
    counts = work.blocks(ranks * stages)
    return (counts[0], counts[-1]) if in_a_v else counts[::ranks]


def _in_vain(space: Space, stages: Ints, cuts: list[tuple[int, ...]], where: Ints) -> Ints:
    """Stages of rank 0 whose last block torch gathers at the end of a step, for nobody.

    In backward FSDP2 gathers ahead, in the reverse order of all forwards of the step; so the first unit of one forward asks for
    the last unit of the forward before. Where a stage had no forward without its backward in between, as the later stages of an
    interleaved schedule between two rounds of micro-batches, the step's last backward asks for what nobody will use. That is so
    for stage k of a rank if k times the forwards of two rounds are more than the forwards that run ahead of backward.
    """
    rounds = np.maximum(1, space.accumulation // space.pipeline)
    two_rounds, longest = -(-2 * space.accumulation // rounds), -(-space.accumulation // rounds)
    ahead = 2 * space.pipeline - 3 + (stages - 1) * longest
    first = np.where(rounds > 1, ahead // two_rounds + 1, stages)
    several = [[count > 1 for count in cut] for cut in cuts]  # a stage of one block has it gathered still
    from_here = np.zeros((len(cuts), max(map(len, cuts), default=0) + 1), dtype=np.int64)
    for place, cut in enumerate(several):
        from_here[place, : len(cut)] = np.cumsum(cut[::-1])[::-1]
    return from_here[where, np.minimum(first, stages)]


def _distinct(code: Ints) -> tuple[Ints, Ints]:
    """The numbers that occur, and for each entry its place among them; without a sort where the numbers are small."""
    if not len(code) or code.max() > 2**22:
        return np.unique(code, return_inverse=True)
    kinds = np.flatnonzero(np.bincount(code))
    places = np.zeros(int(code.max()) + 1, dtype=np.int64)
    places[kinds] = np.arange(len(kinds))
    return kinds, places[code]


@lru_cache(maxsize=64)
def _modules_of_block(model: Model) -> int:
    """Matrices and norms of a block; a bias goes with the matrix."""
    names = parameter_shapes(model.model_copy(update={"layers": 1}))
    return len({name.removesuffix(".weight").removesuffix(".bias") for name in names if name.startswith("blocks.")})


def _flow(kind: str, axis: str, when: str, count: Any, each: Any) -> Flow:
    """So many collectives of so many bytes each."""
    times = np.asarray(count, dtype=np.float64)
    return Flow(kind, axis, when, times, times * each)


# -- weights and gradients ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sizes:
    """Numbers in the units of rank 0 before they are sharded, rows padded until they divide; and what it has of whole weights."""

    block: Ints
    embedding: Ints
    positions: Ints
    norm: Ints
    head: Ints
    whole_block: Ints
    """This device's shard of a block's weights that every tensor device has whole; likewise of the positions and the norm."""
    whole_positions: Ints
    whole_norm: Ints


def _sizes(model: Model, tensor: Ints, shards: Ints) -> _Sizes:
    """For each pair of a tensor degree and a number of shards, of which there are few."""
    most = int(shards.max(initial=0)) + 1
    pairs, where = _distinct(tensor * most + shards)
    parts: dict[str, Any] = {name: np.zeros_like(pairs) for name in ("block", "embedding", "positions", "norm", "head")}
    whole: dict[str, Any] = {name: np.zeros_like(pairs) for name in parts}
    for name, shape in parameter_shapes(model.model_copy(update={"layers": 1})).items():
        if ".experts." in name:
            continue
        part = "block" if name.startswith("blocks.") else name.partition(".")[0]
        for place, (degree, pieces) in enumerate(zip((pairs // most).tolist(), (pairs % most).tolist(), strict=True)):
            dim = split_dim(name, model, degree)
            held = sliced(shape, dim, degree, pieces)
            parts[part][place] += int(held.gathered)
            whole[part][place] += 0 if dim is not None else int(held.shard)
    chosen = {name: size[where] for name, size in parts.items()}
    return _Sizes(
        **chosen, whole_block=whole["block"][where], whole_positions=whole["positions"][where], whole_norm=whole["norm"][where]
    )


def _weights(rank: _Rank) -> Iterator[Flow]:
    """What ZeRO moves, unit by unit: a block, the embedding, the experts of a block, and a root with all that remains of a stage.

    The root stays gathered from forward to backward, so it moves once where others move twice.
    """
    space, model = rank.space, rank.work.model
    sizes = rank.sizes
    apart = (space.pipeline > 1) | (not model.tied)  # the embedding is a unit by itself
    positions, head = (1 if model.positions == "learned" else 0), rank.head.astype(np.int64)
    units = rank.blocks + apart
    roots = np.where(space.pipeline == 1, 1, positions + head)
    unit = rank.blocks * sizes.block + np.where(apart, sizes.embedding, 0)
    own_head = sizes.embedding if model.tied else sizes.head
    root = sizes.positions + head * (sizes.norm + np.where(apart, own_head, sizes.embedding))
    sharded = rank.engine.sharded
    yield from _sharded(rank, SHARDS, rank.shards, sharded, (units, unit), (roots, root))
    yield _flow("all_gather", SHARDS, "backward", rank.in_vain * (sharded & (rank.shards > 1)), sizes.block * rank.gathered)
    if model.experts:
        own = -(-(model.experts // space.expert) // rank.expert_shards) * rank.expert_shards
        size = rank.blocks * own * 3 * model.expert_width * model.hidden
        none = np.zeros_like(size)
        yield from _sharded(rank, "expert_data", rank.expert_shards, sharded, (rank.blocks, size), (none, none))
    buckets, whole = _buckets(model, rank.stored)
    yield _summed("all_reduce", COPIES, "backward", rank.engine.replicated, (buckets, whole), 1.0)


def _sharded(
    rank: _Rank, axis: str, shards: Ints, here: Bools, units: tuple[Ints, Ints], roots: tuple[Ints, Ints]
) -> Iterator[Flow]:
    """Units and roots, each their number and their size, that are sharded over this axis."""
    space, several = rank.space, here & (shards > 1)
    once = rank.engine.keeps_gathered
    forward = np.where(once, 1, space.accumulation) * several
    backward = np.where(once, 0, space.accumulation) * several
    both = units[0] + roots[0], units[1] + roots[1]
    yield _summed("all_gather", axis, "forward", forward, both, rank.gathered)
    yield _summed("all_gather", axis, "backward", backward, units, rank.gathered)
    each = rank.engine.reduces_each | (rank.stack.reduce_each & ~rank.engine.splits_backward)
    yield _summed("reduce_scatter", axis, "backward", np.where(each, space.accumulation, 1) * several, both, rank.reduced)
    among_copies = here & (rank.engine.zero == 0) & (space.replica * devices(axis, space) > 1)
    yield _summed("all_reduce", f"replica x {axis}", "backward", among_copies, both, rank.reduced)
    among_replicas = here & (rank.engine.zero > 0) & (space.replica > 1)
    yield _summed("all_reduce", "replica", "backward", among_replicas, (both[0], both[1] // shards), rank.reduced)


def _summed(kind: str, axis: str, when: str, times: Any, units: tuple[Any, Any], each: float) -> Flow:
    """So often, that many units of so many numbers together."""
    often = np.asarray(times, dtype=np.float64)
    return Flow(kind, axis, when, often * units[0], often * units[1] * each)


@lru_cache(maxsize=64)
def _buckets(model: Model, stored: int) -> tuple[int, int]:
    """How many sums DistributedDataParallel makes of the gradients, from the last parameter to the first, and their bytes. A
    bucket is full when it reaches its size; the first is small, so that summing begins early."""
    buckets = filled = total = 0
    for shape in reversed(parameter_shapes(model).values()):
        size = stored * int(np.prod(shape, dtype=object))
        filled, total = filled + size, total + size
        if filled >= (BUCKET if buckets else FIRST_BUCKET):
            buckets, filled = buckets + 1, 0
    return buckets + (filled > 0), total


# -- inside the blocks --------------------------------------------------------------------------------------------------


def _tensor(rank: _Rank) -> Iterator[Flow]:
    """Sequences gathered before each pair of matrices, and partial results summed after it; in backward each becomes the other.

    What is gathered again in backward: both inputs, by our own arrangement or by recomputation, which also sums again what
    attention made; it stops short of the block's last sum, after which nothing is kept. In a block with experts, selective
    recomputation begins behind the gathers, and a balancing loss comes after the last sum.
    """
    space, model, several = rank.space, rank.work.model, rank.space.tensor > 1
    pairs = 1 + (model.shared_experts > 0 if model.experts else 1)
    ends = rank.head + 0
    blocks, m = rank.held * pairs * several, space.accumulation * several
    whole = (rank.again["full"] | (rank.again["selective"] & (not model.experts))) * rank.recomputed * several
    gathers = (whole + rank.again["gather"] * rank.asked_again * several) * pairs
    attached = bool(model.experts) and bool(model.shared_experts) and bool(model.balance_loss or model.router_z_loss)
    sums = whole * (1 + attached)
    embedded = np.where(rank.engine.single, rank.activations // rank.computed * rank.stored, rank.activations)
    if not rank.stack.sequence_parallel:
        yield _flow("all_reduce", "tensor", "forward", blocks + m, rank.activations)
        yield _flow("all_reduce", "tensor", "backward", blocks + m * ends + sums, rank.activations)
        return
    yield _flow("all_gather", "tensor", "forward", blocks + m * ends, rank.activations)
    yield _flow("reduce_scatter", "tensor", "forward", blocks, rank.activations)
    yield _flow("reduce_scatter", "tensor", "forward", m, embedded)
    yield _flow("reduce_scatter", "tensor", "backward", blocks + m * ends + sums, rank.activations)
    yield _flow("all_gather", "tensor", "backward", blocks + gathers, rank.activations)
    yield _flow("all_gather", "tensor", "backward", m, embedded)


def _loss(rank: _Rank) -> Iterator[Flow]:
    """Of each token: the largest logit, then the sum of exponentials and the target's logit, chunk by chunk."""
    space, several = rank.space, (rank.space.tensor > 1) & rank.head
    tokens, rows = space.micro_batch * rank.length, -(-rank.work.model.vocabulary // space.tensor)
    chunks = -(-tokens // chunk_tokens(tokens, rows, rank.computed, rank.device))
    numbers = _flow("all_reduce", "tensor", "forward", 2 * space.accumulation * several, tokens * 3 * rank.wide / 2)
    yield Flow("all_reduce", "tensor", "forward", numbers.count * chunks, numbers.bytes)


def _context(rank: _Rank) -> Iterator[Flow]:
    """Attention over devices. A ring sends keys and values once around in each pass, and in backward their gradients, which are
    sums; selective recomputation keeps its result. Ulysses sends everything to those who have the heads, and the result back."""
    space, model, several = rank.space, rank.work.model, rank.space.context > 1
    ring, ulysses = several & (space.ring == 1), several & (space.ring == 0)
    heads, keys = model.heads // space.tensor, np.maximum(1, model.kv_heads // space.tensor)
    one_head = space.micro_batch * rank.length * model.head_dim
    hops, key = 2 * (space.context - 1) * ring, one_head * keys
    full, selective = rank.again["full"] * rank.recomputed, rank.again["selective"] * rank.recomputed
    yield _flow("send", "context", "forward", hops * rank.held, key * rank.computed)
    yield _flow("send", "context", "backward", hops * (rank.held + full), key * rank.computed)
    yield _flow("send", "context", "backward", hops * rank.held, key * rank.wide)
    repeats = space.context // np.gcd(space.context, keys)
    exchanged = one_head * (heads + keys * repeats) * rank.computed  # the mean of queries, keys and values, and of the results
    yield _flow("all_to_all", "context", "forward", 2 * ulysses * rank.held, exchanged)
    yield _flow("all_to_all", "context", "backward", 2 * ulysses * (rank.held + full + selective), exchanged)


def _experts(rank: _Rank) -> Iterator[Flow]:
    """How many rows go where; the rows there, and back. Backward the same without the numbers. With a balancing loss, the sums
    over sequences that lie on several devices."""
    space, model = rank.space, rank.work.model
    if not model.experts:
        return
    several, full = space.expert > 1, rank.again["full"] * rank.recomputed
    rows = rank.activations // space.tensor * model.experts_per_token
    yield _flow("all_to_all", "expert", "forward", rank.held * several, 8 * model.experts)
    yield _flow("all_to_all", "expert", "backward", full * several, 8 * model.experts)
    yield _flow("all_to_all", "expert", "forward", 2 * rank.held * several, rows)
    yield _flow("all_to_all", "expert", "backward", 2 * (rank.held + full) * several, rows)
    if model.balance_loss:
        loads = 2 * space.micro_batch * model.experts * rank.wide
        for axis in ("context", "tensor"):
            shared = getattr(space, axis) > 1
            yield _flow("all_reduce", axis, "forward", rank.held * shared, loads)
            yield _flow("all_reduce", axis, "backward", full * shared, loads)


def _stages(rank: _Rank) -> Iterator[Flow]:
    """Hidden states to the next stage, their gradients to the one before. Stages of one rank are neighbours only at the bottom of
    a V, which is not on rank 0."""
    space, several = rank.space, rank.space.pipeline > 1
    in_a_v = rank.last_blocks > 0
    onwards = np.where(in_a_v, 1, rank.stages) * space.accumulation * several
    backwards = (rank.stages - 1) * space.accumulation * several
    yield _flow("send", "pipeline", "pipeline", onwards + backwards, rank.activations // space.tensor)


# -- once a step --------------------------------------------------------------------------------------------------------


def _step(rank: _Rank) -> Iterator[Flow]:
    """What is left to do when all micro-batches are through."""
    space, model = rank.space, rank.work.model
    sizes = rank.sizes
    whole = rank.blocks * sizes.whole_block + sizes.whole_positions + rank.head * sizes.whole_norm
    yield _flow("all_reduce", "tensor", "step", space.tensor > 1, whole * rank.stored)
    elsewhere = (space.pipeline > 1) & ~rank.head & model.tied
    yield _flow("send", "pipeline", "step", elsewhere, sizes.embedding // rank.shards * rank.stored)
    yield from _norm(rank)
    for axis in ("context", "pipeline", "data", "replica", "tensor"):
        yield _flow("all_reduce", axis, "step", getattr(space, axis) > 1, 8 * (4 + 2 * space.world))
    if model.experts:
        for axis in ("replica", "data", "context", "tensor"):
            yield _flow("all_reduce", axis, "step", getattr(space, axis) > 1, 8 * rank.blocks * model.experts)
        yield _flow("all_reduce", "pipeline", "step", 2 * (space.pipeline > 1), (8 + 8 * model.experts) / 2)


def _norm(rank: _Rank) -> Iterator[Flow]:
    """One number for each axis of each way in which gradients are sharded: dense and split over tensor devices, dense and whole,
    experts. The names are those of the grid (mesh/mesh.py), where experts that borrow part of an axis cut it in two."""
    space, taken, number = rank.space, borrowed(rank.space), max(4, rank.stored)
    engine = rank.engine
    code = (engine.zero > 0) + 2 * engine.single + 4 * engine.replicated
    for place, axis in enumerate(("data", "context", "tensor")):
        size = getattr(space, axis)
        state = np.where(size == 1, 0, np.where(taken[axis] == 1, 1, np.where(taken[axis] == size, 2, 3)))
        code = code + state * 8 * 4**place
    kinds, first, where = np.unique(code, return_index=True, return_inverse=True)
    layouts = [space.layout(place) for place in first.tolist()]
    sums = [_axes_of_norm(layout, kind, rank.work.model.experts > 0) for layout, kind in zip(layouts, kinds, strict=True)]
    for name in sorted({name for one in sums for name in one}):
        yield _flow("all_reduce", name, "step", np.array([one.count(name) for one in sums])[where], number)
    yield _flow("all_reduce", "pipeline", "step", space.pipeline > 1, number)


def _axes_of_norm(layout: Layout, kind: int, experts: bool) -> list[str]:
    """The axes summed over by the norm of one kind of candidate, as `_norm` writes it down, of which this is a layout."""
    sharded, alone, plain = kind & 1, kind & 2, kind & 4
    if plain:
        return []

    def shards(axis: str) -> tuple[str, ...]:
        # An axis of one device, where nothing is sent, tells ways of sharding apart; a plain tensor has none.
        return () if alone else (grid.joined_name(layout, axis) if sharded else "solo",)

    def split(axis: str) -> tuple[str, ...]:
        return (grid.joined_name(layout, axis),) if grid.devices(axis, layout) > 1 else ()

    assert not (alone and sharded), "what nobody else has is not sharded"
    ways = {shards(SHARDS) + split("tensor"), shards(SHARDS)}
    ways |= {shards(EXPERT_SHARDS) + split("expert")} if experts else set()
    return [axis for way in ways for axis in way if axis != "solo"]
