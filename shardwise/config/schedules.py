"""What is true of each pipeline schedule, written down once.

The job file, the checks, the planner, the formulas of memory and time, and the runtime all read this table.
The lists of actions themselves are in `plan/schedule.py`, whose docstring explains the schedules; the tests
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
"""All names. The planner's candidates hold a schedule as its index in this tuple."""
DEFAULT_SCHEDULE: ScheduleName = "1f1b"

Numbers = Any
"""An int or a bool for one layout; an array with one entry per candidate for many."""
Formula = Callable[[Numbers, Numbers, Numbers], Numbers]
"""A number as a function of m, p and v."""


class Pipeline(Protocol):
    """The part of a layout that says how a pipeline runs: a `Layout`, or the cost model's `Space`."""

    @property
    def pipeline(self) -> Any:
        """Number of pipeline ranks."""

    @property
    def schedule(self) -> Any:
        """Name of the schedule, or an array of indices in SCHEDULES."""

    @property
    def stages_per_rank(self) -> Any:
        """Number of stages asked for; None where the schedule decides."""


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
    """What is true of one schedule.

    Where a formula gives more than m, the number is m. Where `is_interleaved`, the formulas hold if p divides
    m: other steps have longer rounds, and keep a little more.
    """

    stages_per_rank: int = 1
    """Stages that a rank holds. Only a default where `is_interleaved`."""
    is_interleaved: bool = False
    """Whether a job may choose how many stages a rank holds. Stage s is then on rank s mod p."""
    is_in_a_v: bool = False
    """Whether the model goes down the ranks and comes back, so that the first rank has both ends of it."""
    splits_backward: bool = False
    """Whether the gradients of inputs and of weights are computed apart."""
    bubble: float = 1.0
    """Seconds that a rank waits, over (p - 1) times the seconds that a micro-batch takes on a rank, for
    equal stages. Divide it by v where `is_interleaved`."""
    held_by_first: Formula = _one_per_rank
    """Micro-batches whose activations (of all stages of a rank) the first rank keeps at once."""
    held_by_last: Formula = _one_per_rank
    """The same for the last rank."""
    halved_on_first: Formula = _none
    """Micro-batches whose backward runs in two halves through the model's last stage on the first rank."""
    moving_parts: float = 1.0
    """How complicated it is, for the choice between layouts that take equally long."""
    is_proposed: bool = True
    """Whether the planner tries it without being asked."""


SCHEDULE_FACTS: dict[str, ScheduleFacts] = {
    # The planner does not propose gpipe: 1f1b takes the same time and keeps fewer activations.
    "gpipe": ScheduleFacts(held_by_first=_all, held_by_last=_all, moving_parts=0.0, is_proposed=False),
    "1f1b": ScheduleFacts(held_by_last=_one, moving_parts=0.0),
    "interleaved": ScheduleFacts(
        stages_per_rank=2,
        is_interleaved=True,
        held_by_first=lambda m, p, v: (p * (v + 1) - 1) / v,
        held_by_last=lambda m, p, v: (p * (v - 1) + 1) / v,
        moving_parts=0.5,
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


def of_schedule(schedule: Any, value: Callable[[ScheduleFacts], Numbers]) -> Numbers:
    """The value that a schedule has; an array of values where `schedule` is an array of indices."""
    if isinstance(schedule, str):
        return value(SCHEDULE_FACTS[schedule])
    return schedule.choose([value(facts) for facts in SCHEDULE_FACTS.values()])


def splits_backward(layout: Pipeline) -> Numbers:
    """Whether the gradients of inputs and of weights are computed apart."""
    return (layout.pipeline > 1) & of_schedule(layout.schedule, lambda facts: facts.splits_backward)


def is_in_a_v(layout: Pipeline) -> Numbers:
    """Whether the model goes down the pipeline ranks and comes back."""
    return (layout.pipeline > 1) & of_schedule(layout.schedule, lambda facts: facts.is_in_a_v)


def is_interleaved(layout: Pipeline) -> Numbers:
    """Whether each pipeline rank holds as many stages as the layout says, in a loop."""
    return (layout.pipeline > 1) & of_schedule(layout.schedule, lambda facts: facts.is_interleaved)


def stages_per_rank(layout: Pipeline) -> Numbers:
    """Number of pipeline stages on a device: as asked where the schedule leaves a choice, else its own."""
    usual = of_schedule(layout.schedule, lambda facts: facts.stages_per_rank)
    asked = usual if layout.stages_per_rank is None else layout.stages_per_rank
    return usual + of_schedule(layout.schedule, lambda facts: facts.is_interleaved) * (asked - usual)


def problem_of_stages(schedule: str, asked: int | None) -> str | None:
    """Why the schedule cannot have this number of stages per rank; None where it can."""
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
    """The schedules for which something holds, as the documentation of a setting lists them."""
    *others, last = [f"`{name}`" for name, facts in SCHEDULE_FACTS.items() if holds(facts)]
    return f"{', '.join(others)} and {last}"
