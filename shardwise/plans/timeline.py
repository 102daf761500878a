"""Simulate a schedule: when each action runs, how long ranks wait, how many activations they hold.

A rank runs its list in order; an action starts when its rank is free and its inputs have arrived. So one pass
over the list gives the exact time of every action, even for stages of unequal cost (the last stage has the
head, a later rank may be slower). The closed formulas of the papers hold only for equal stages. Costs may be
in any unit; with F = I = W = 1 a whole backward is twice a forward, as it is for matrix products.

*Bubble* here is the share of all ranks' time that is idle, from the first action of any rank to the last of
any rank: 1 - busy / (ranks x makespan). Papers often state another number. Megatron-LM divides the idle time
by the busy time. The zero-bubble papers count the idle time of one rank between its own first and last action
(`Timeline.gaps`), which leaves out its waits for its first micro-batch and for the others to finish.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from shardwise.plans.schedule import Action, Kind, Schedule, in_order, waits_for

Cost = float | Sequence[float]
"""One cost for all stages, or one per stage."""


@dataclass(frozen=True, slots=True)
class Span:
    """The start and end of an action."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The start and end of every action, by rank."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the first start to the last end."""
        return max(row[-1].end for row in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(span.end - span.start for span in row) for row in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the makespan that each rank waits."""
        return tuple(1 - busy / self.makespan for busy in self.busy)

    @property
    def gaps(self) -> tuple[float, ...]:
        """Time that each rank waits between its own first and last action."""
        return tuple(
            row[-1].end - row[0].start - busy for row, busy in zip(self.spans, self.busy, strict=True)
        )

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)


def simulate(
    schedule: Schedule,
    forward: Cost = 1.0,
    backward_input: Cost = 1.0,
    backward_weight: Cost = 1.0,
    send: float = 0.0,
) -> Timeline:
    """Return the timeline for these costs. `send` is the delay of a message, during which ranks can
    compute."""
    kinds: dict[str, Cost] = {"F": forward, "I": backward_input, "W": backward_weight}
    costs = {kind: _per_stage(cost, schedule.stages) for kind, cost in kinds.items()}
    costs["B"] = tuple(map(sum, zip(costs["I"], costs["W"], strict=True)))
    ends: dict[Action, float] = {}
    rows: list[list[Span]] = [[] for _ in range(schedule.ranks)]
    for rank, action in in_order(schedule):
        free = rows[rank][-1].end if rows[rank] else 0.0
        start = max([free, *_arrivals(action, rank, schedule, ends, send)])
        ends[action] = start + costs[action.kind][action.stage]
        rows[rank].append(Span(action, start, ends[action]))
    assert len(ends) == sum(map(len, schedule.actions)), "the schedule deadlocks"
    return Timeline(schedule, tuple(map(tuple, rows)))


@dataclass(frozen=True)
class PreparedSchedule:
    """A schedule prepared for many simulations with different costs."""

    ranks: int
    steps: tuple[tuple[int, int, float, tuple[int, ...]], ...]
    """For each action, in an order in which they can run: its rank, its stage, its share of the stage's cost,
    and the indices of the actions that it waits for."""


_THIRDS: dict[Kind, float] = {"F": 1 / 3, "I": 1 / 3, "W": 1 / 3, "B": 2 / 3}


def prepare_schedule(schedule: Schedule) -> PreparedSchedule:
    """Return a schedule prepared for many simulations."""
    indices: dict[Action, int] = {}
    steps = []
    for index, (rank, action) in enumerate(in_order(schedule)):
        waits = tuple(indices[before] for before in _inputs(action, schedule, indices))
        steps.append((rank, action.stage, _THIRDS[action.kind], waits))
        indices[action] = index
    return PreparedSchedule(schedule.ranks, tuple(steps))


def simulate_times(prepared: PreparedSchedule, stages: Sequence[float]) -> tuple[float, float]:
    """Return the time from the first start to the last end, and the work of the busiest rank.

    `stages` are the costs of both passes, of which forward is a third. The result is that of `simulate`,
    computed many times faster.
    """
    free, busy, ends = [0.0] * prepared.ranks, [0.0] * prepared.ranks, [0.0] * len(prepared.steps)
    for index, (rank, stage, share, waits) in enumerate(prepared.steps):
        start = free[rank]
        for before in waits:
            if ends[before] > start:
                start = ends[before]
        cost = share * stages[stage]
        busy[rank] += cost
        free[rank] = ends[index] = start + cost
    return max(free), max(busy)


def _inputs(action: Action, schedule: Schedule, done: Container[Action]) -> list[Action]:
    """Return the actions that ran before this one and that it waits for."""
    groups = waits_for(action, schedule.stages)
    return [before for choices in groups for before in choices if before in done]


def _arrivals(
    action: Action, rank: int, schedule: Schedule, ends: dict[Action, float], send: float
) -> list[float]:
    """Return the times at which the inputs of an action are there."""
    inputs = _inputs(action, schedule, ends)
    return [
        ends[before] + (send if schedule.rank_of_stage[before.stage] != rank else 0.0) for before in inputs
    ]


def _per_stage(cost: Cost, stages: int) -> tuple[float, ...]:
    costs = tuple(cost) if isinstance(cost, Sequence) else (cost,) * stages
    assert len(costs) == stages, f"{len(costs)} costs for {stages} stages"
    return costs


_HOLDS: dict[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Change in the number of kept activations. W needs them after I, so I frees nothing."""


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return the most activations that each rank keeps at once, counted in micro-batches of one stage."""
    peaks = []
    for actions in schedule.actions:
        held, peak = 0, 0
        for action in actions:
            held += _HOLDS[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
