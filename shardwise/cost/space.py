"""What a step computes (`Workload`), and the candidates for its layout (`Space`), one array entry for each.

The planner costs every candidate at once. A `Space` has one NumPy array for each choice, all of one length,
so a formula that reads like the one in a paper (`tokens * hidden / tensor`) runs over a million candidates in
milliseconds.

About twenty candidates share a layout and differ only in the micro-batch and in recomputation; some hundreds
share a grid of devices. What follows from the layout or from the grid alone is computed once for each of
those (`layouts`, `grids`) and looked up by index, in a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property, lru_cache, reduce
from operator import or_
from typing import Any, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from shardwise.config.axes import AXES
from shardwise.config.compression import SumCompression, WeightGathers
from shardwise.config.layout import Layout
from shardwise.config.layout_rules import context_attention
from shardwise.config.machine import Recompute
from shardwise.config.model import Model
from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES, stages_per_rank
from shardwise.optimizers import Optimizer, from_table
from shardwise.plans.compilation import compiles_blocks
from shardwise.plans.cut_stages import stage_blocks
from shardwise.plans.float8_choice import CastWeights, Float8Shares

Ints = NDArray[np.int64]
Array = NDArray[np.float64]
Bools = NDArray[np.bool_]
Index = Ints | Sequence[int] | slice
"""Indices of candidates in a `Space`."""
Values = TypeVar("Values")

RECOMPUTE = get_args(Recompute)
NONE, SELECTIVE, BUT_ATTENTION, FULL = range(4)
"""Indices in RECOMPUTE, in the order of what is recomputed: nothing, what is between products, all but
attention, everything."""
AT_ONCE = 2**14
"""Number of candidates whose arrays fit together in a CPU's cache."""


@dataclass(frozen=True)
class Workload:
    """What a step computes, the same for every layout."""

    model: Model
    sequence_length: int
    global_batch: int
    precision: str = "bfloat16"
    """Precision of matrix products: float32, bfloat16, float16, float64, or float8."""
    state_dtype: str = "float32"
    reduce_dtype: str = "float32"
    stages: tuple[int, ...] | None = None
    """Number of blocks of each pipeline stage, if given by hand; for candidates with as many stages."""
    compile: bool | str = "auto"
    """Value of the setting `train.compile`."""
    compression: SumCompression | None = None
    """Compression of gradient sums, after its warm-up."""
    gathers: WeightGathers | None = None
    """How weights are gathered, if not in the usual way."""
    bucket_bytes: int | None = None
    """Bytes of a bucket, as in `Plan.bucket_bytes`."""
    scales: int = 0
    """Number of scales of float8 tensors, whose maxima all devices share; 0 for other programs."""
    cast: tuple[CastWeights, ...] = ()
    """Weights that are gathered in 8 bits."""
    float8: Float8Shares | None = None
    """Which products shardwise computes in float8. None: no product is in float8, or another program has all
    products of blocks in float8 and the head in bfloat16."""
    optimizer: Optimizer = field(default_factory=lambda: from_table({}))
    """Optimizer, which knows how many states each parameter has and how many bytes an update moves."""

    def blocks(self, stages: int) -> tuple[int, ...]:
        """Return the number of blocks of each of this many stages: as given by hand, or cut by cost."""
        if self.stages is not None and len(self.stages) == stages:
            return self.stages
        return _cut(self.model, self.sequence_length, stages)

    @property
    def tokens(self) -> int:
        """Number of tokens in one step."""
        return self.sequence_length * self.global_batch


@lru_cache(maxsize=1024)
def _cut(model: Model, length: int, stages: int) -> tuple[int, ...]:
    return stage_blocks(model, length, stages)


@dataclass(frozen=True)
class Space:
    """Candidates. Every field is an array of one length. `schedule` and `recompute` are indices in SCHEDULES
    and RECOMPUTE."""

    pipeline: Ints
    replica: Ints
    data: Ints
    context: Ints
    tensor: Ints
    expert: Ints
    zero: Ints
    micro_batch: Ints
    accumulation: Ints
    """Number of micro-batches of one step on one device (or one pipeline)."""
    schedule: Ints
    stages_per_rank: Ints
    recompute: Ints
    ring: Ints
    """1: context devices attend in a ring; 0: by Ulysses."""
    offload: Ints

    def __len__(self) -> int:
        return len(self.pipeline)

    @cached_property
    def layouts(self) -> tuple[Space, Ints]:
        """The distinct layouts among the candidates, and for each candidate the index of its layout. These
        layouts have one micro-batch of one sequence, and recompute nothing."""
        names = {field.name for field in fields(self)} - {"micro_batch", "accumulation", "recompute"}
        first, index = distinct([getattr(self, name) for name in names])
        ones, zeros = np.ones(len(first), np.int64), np.zeros(len(first), np.int64)
        return replace(self.take(first), micro_batch=ones, accumulation=ones, recompute=zeros), index

    @cached_property
    def grids(self) -> tuple[Space, Ints]:
        """One candidate for each distinct grid of devices, and for each candidate the index of its grid."""
        first, index = distinct([getattr(self, name) for name in AXES])
        return self.take(first), index

    @property
    def world(self) -> Ints:
        """Number of devices of each candidate."""
        return self.pipeline * self.replica * self.data * self.context * self.tensor

    @property
    def shards(self) -> Ints:
        """Number of devices over which states are sharded."""
        return self.data * self.context

    def take(self, index: Index) -> Space:
        """Return the candidates at these indices."""
        return take(self, index)

    def parts(self) -> Iterator[Space]:
        """Yield the candidates in order, `AT_ONCE` at a time. Without candidates, yield one empty part."""
        for start in range(0, max(len(self), 1), AT_ONCE):
            yield self.take(slice(start, start + AT_ONCE))

    def row(self, index: int) -> dict[str, int]:
        """Return the values of one candidate by field."""
        return {field.name: int(getattr(self, field.name)[index]) for field in fields(self)}

    def layout(self, index: int) -> Layout:
        """Return one candidate as a layout."""
        row = self.row(index)
        axes: dict[str, Any] = {name: row[name] for name in (*AXES, "zero")}
        schedule = SCHEDULES[row["schedule"]]
        chosen = SCHEDULE_FACTS[schedule].is_interleaved and row["pipeline"] > 1
        return Layout(
            **axes,
            schedule=schedule,
            stages_per_rank=row["stages_per_rank"] if chosen else None,
            attention=("ring" if row["ring"] else "ulysses") if row["context"] > 1 else "auto",
            offload=bool(row["offload"]),
        )


def space_of(rows: Sequence[dict[str, int]]) -> Space:
    """Return candidates from one dictionary each. Degrees and counts that are left out are 1, other fields
    0."""
    ones = {*AXES, "micro_batch", "accumulation", "stages_per_rank"}
    columns = {
        name: np.asarray([row.get(name, int(name in ones)) for row in rows], dtype=np.int64)
        for name in (field.name for field in fields(Space))
    }
    return Space(**columns)


def take(values: Values, index: Index) -> Values:
    """Return the entries at these indices of an array, or of every array in a dataclass or dictionary.

    The indices are always valid. Leaving out their check ("clip") makes this four times as fast.
    """
    if isinstance(index, np.ndarray) and index.dtype == np.int64:
        return cast(Values, _on_arrays(lambda array: array.take(index, mode="clip"), values))
    return cast(Values, _on_arrays(lambda array: array[index], values))


def concatenate(parts: Sequence[Values]) -> Values:
    """Return arrays, or the arrays of dataclasses or dictionaries, joined into one."""
    return cast(Values, _on_arrays(lambda *arrays: np.concatenate(arrays), *parts))


def _on_arrays(function: Callable[..., Any], *values: Any) -> Any:
    first: Any = values[0]
    if isinstance(first, dict):
        return {name: _on_arrays(function, *(value[name] for value in values)) for name in first}
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        return replace(
            values[0],
            **{name: _on_arrays(function, *(getattr(value, name) for value in values)) for name in names},
        )
    return function(*values)


def distinct(columns: Sequence[Ints | Bools]) -> tuple[Ints, Ints]:
    """Find the distinct rows of these columns.

    Returns the index of the first candidate with each distinct row, and for each candidate the number of its
    row. A search lists candidates in nested loops, so most neighbours are equal. Only the first of each run
    of equal rows is looked up.
    """
    begins = np.ones(len(columns[0]), dtype=np.bool_)
    begins[1:] = reduce(or_, (column[1:] != column[:-1] for column in columns))
    starts = np.flatnonzero(begins)  # (runs,)
    numbers: dict[tuple[int, ...], int] = {}
    rows = zip(*(column[starts].tolist() for column in columns), strict=True)
    of_runs = np.asarray([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)
    first = starts[np.unique(of_runs, return_index=True)[1]]
    return first, np.repeat(of_runs, np.diff(starts, append=len(begins)))


def repeats_products(work: Workload, space: Space) -> Bools:
    """Return whether backward repeats a block's products and collectives. Those of experts are kept unless
    everything is recomputed."""
    again: Bools = space.recompute >= (FULL if work.model.experts else BUT_ATTENTION)
    return again


def is_compiled(work: Workload, space: Space, device_type: str) -> Bools:
    """Return whether the blocks of each candidate go through torch.compile."""
    compiled: Bools = compiles_blocks(work.compile, device_type, work.float8 is not None, space)
    return compiled


def recompute_mode(recompute: str | float) -> str:
    """Return the mode of recomputation; for a memory budget, the mode nearest to it."""
    if isinstance(recompute, str):
        return recompute
    return "none" if recompute >= 1 else "full" if recompute <= 0 else "selective"


def space_of_layout(
    model: Model, recompute: Recompute | float, layout: Layout, micro_batch: int, accumulation: int
) -> Space:
    """Return a complete layout as a space of one candidate."""
    row = {name: getattr(layout, name) for name in AXES}
    row["zero"] = layout.zero or 0
    row["micro_batch"], row["accumulation"] = micro_batch, accumulation
    row["schedule"] = SCHEDULES.index(layout.schedule)
    row["stages_per_rank"] = stages_per_rank(layout)
    row["recompute"] = RECOMPUTE.index(recompute_mode(recompute))
    row["ring"] = int(layout.context > 1 and context_attention(model, layout) == "ring")
    row["offload"] = int(layout.offload)
    return space_of([row])
