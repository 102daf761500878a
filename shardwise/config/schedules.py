"""Facts about each pipeline schedule, written once.

The job file, the checks, the planner, the formulas of memory and time, and the runtime all read this table.
The lists of actions themselves are in `plans/schedule.py`, whose docstring explains the schedules; the tests
compare this table with what those lists do.

A formula is called with m micro-batches, p ranks and v stages per rank. It is written so that it takes ints
and NumPy arrays alike: one layout, or a million candidates of the planner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from shardwise.plurals import counted

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zb1p", "zbv", "dualpipev"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""All names. The planner's candidates store a schedule as its index in this tuple."""
DEFAULT_SCHEDULE: ScheduleName = "1f1b"

Numbers = Any
"""An int or a bool for one layout; an array with one entry per candidate for many."""
Formula = Callable[[Numbers, Numbers, Numbers], Numbers]
"""A number as a function of m, p and v."""


class Pipeline(Protocol):
    """The settings of a pipeline, which a `Layout` and the cost model's `Space` have."""

    @property
    def pipeline(self) -> Numbers:
        """Number of ranks in the pipeline."""

    @property
    def schedule(self) -> Numbers:
        """Name of the schedule, or an array of indices in SCHEDULES."""

    @property
    def stages_per_rank(self) -> Numbers:
        """Number of stages asked for; None: the schedule decides."""


def _all(m: Numbers, p: Numbers, v: Numbers) -> Numbers:
    return m


def _none(m: Numbers, p: Numbers, v: Numbers) -> Numbers:
    return 0


def _one(m: Numbers, p: Numbers, v: Numbers) -> Numbers:
    return 1


def _one_per_rank(m: Numbers, p: Numbers, v: Numbers) -> Numbers:
    return p


def _dual_pipe(m: Numbers, p: Numbers, v: Numbers) -> Numbers:
    return p + 0.5


@dataclass(frozen=True)
class ScheduleFacts:
    """Facts about one schedule.

    If a formula gives more than m, the number is m. With `is_interleaved`, the formulas hold if p divides m;
    otherwise rounds are longer, and a little more is kept.
    """

    stages_per_rank: int = 1
    """Number of stages that a rank holds; only a default with `is_interleaved`."""
    is_interleaved: bool = False
    """Whether a job may choose how many stages a rank holds. Stage s is then on rank s mod p."""
    is_in_a_v: bool = False
    """Whether stages go from the first rank to the last and back, so that the first rank has both ends."""
    splits_backward: bool = False
    """Whether the gradients of inputs and of weights are computed separately."""
    bubble: float = 1.0
    """Seconds that a rank waits, divided by (p - 1) times the seconds of a micro-batch on a rank, for equal
    stages. With `is_interleaved`, divide it by v."""
    held_by_first: Formula = _one_per_rank
    """Number of micro-batches whose activations the first rank keeps at once, over all its stages."""
    held_by_last: Formula = _one_per_rank
    """Number of micro-batches whose activations the last rank keeps at once."""
    halved_on_first: Formula = _none
    """Number of micro-batches whose backward is split in the model's last stage, on the first rank."""
    complexity: float = 1.0
    """How complicated the schedule is; decides between layouts that take equally long."""
    is_proposed: bool = True
    """Whether the planner tries it if the job does not name it."""

    def stages_of_rank(self, asked: Numbers) -> Numbers:
        """Return the number of stages of a rank: the one asked for if the schedule lets a job choose it and
        it is not None, else the schedule's own."""
        return asked if self.is_interleaved and asked is not None else self.stages_per_rank


SCHEDULE_FACTS: dict[str, ScheduleFacts] = {
    # The planner does not propose gpipe: 1f1b takes the same time and keeps fewer activations.
    "gpipe": ScheduleFacts(held_by_first=_all, held_by_last=_all, complexity=0.0, is_proposed=False),
    "1f1b": ScheduleFacts(held_by_last=_one, complexity=0.0),
    "interleaved": ScheduleFacts(
        stages_per_rank=2,
        is_interleaved=True,
        held_by_first=lambda m, p, v: (p * (v + 1) - 1) / v,
        held_by_last=lambda m, p, v: (p * (v - 1) + 1) / v,
        complexity=0.5,
    ),
    "zb1p": ScheduleFacts(splits_backward=True, bubble=1 / 3),
    "zbv": ScheduleFacts(
        stages_per_rank=2, is_in_a_v=True, splits_backward=True, bubble=1 / 6, halved_on_first=_all
    ),
    "dualpipev": ScheduleFacts(
        stages_per_rank=2,
        is_in_a_v=True,
        splits_backward=True,
        bubble=1 / 4,
        held_by_first=_dual_pipe,
        held_by_last=_dual_pipe,
        halved_on_first=lambda m, p, v: p - 1,
    ),
}
assert tuple(SCHEDULE_FACTS) == SCHEDULES, "every schedule has an entry, in the order of the names"


def schedule_value(schedule: Numbers, value: Callable[[ScheduleFacts], Numbers]) -> Numbers:
    """Return a fact of a schedule; an array of facts if `schedule` is an array of indices."""
    if isinstance(schedule, str):
        return value(SCHEDULE_FACTS[schedule])
    return schedule.choose([value(facts) for facts in SCHEDULE_FACTS.values()])


def splits_backward(layout: Pipeline) -> Numbers:
    """Whether the gradients of inputs and of weights are computed separately."""
    return (layout.pipeline > 1) & schedule_value(layout.schedule, lambda facts: facts.splits_backward)


def is_in_a_v(layout: Pipeline) -> Numbers:
    """Whether stages go from the first pipeline rank to the last and back."""
    return (layout.pipeline > 1) & schedule_value(layout.schedule, lambda facts: facts.is_in_a_v)


def is_interleaved(layout: Pipeline) -> Numbers:
    """Whether each pipeline rank holds several stages in a loop, as many as the layout says."""
    return (layout.pipeline > 1) & schedule_value(layout.schedule, lambda facts: facts.is_interleaved)


def stages_per_rank(layout: Pipeline) -> Numbers:
    """Return the number of stages of a rank. Without a pipeline the whole model is one stage."""
    of_schedule = schedule_value(layout.schedule, lambda facts: facts.stages_of_rank(layout.stages_per_rank))
    return 1 + (layout.pipeline > 1) * (of_schedule - 1)


def stage_count(layout: Pipeline) -> Numbers:
    """Return the number of stages into which the model is cut."""
    return layout.pipeline * stages_per_rank(layout)


def problem_of_stages(schedule: str, asked: int | None) -> str | None:
    """Return why the schedule does not support this number of stages per rank; None if it does."""
    facts = SCHEDULE_FACTS[schedule]
    if asked is None or (asked >= 1 if facts.is_interleaved else asked == facts.stages_per_rank):
        return None
    if asked < 1:
        return f"layout.stages_per_rank = {asked}: give 1 or more"
    return (
        f"layout.stages_per_rank = {asked}: {schedule} has exactly {facts.stages_per_rank} a rank; leave it "
        f"out, or use layout.schedule = 'interleaved' for {counted(asked, 'stage')} a rank"
    )


def names_in_words(holds: Callable[[ScheduleFacts], bool]) -> str:
    """Return the schedules for which a condition holds, as a list in words."""
    *others, last = [f"`{name}`" for name, facts in SCHEDULE_FACTS.items() if holds(facts)]
    return f"{', '.join(others)} and {last}"
