"""A pipeline schedule as a list of actions for each rank, which can be printed, drawn, checked and timed.

The model is cut into stages and the batch into micro-batches. For every pair of the two there is a forward
(F) and a backward. Backward is either whole (B) or in two halves: the gradient of the stage's input (I), for
which the stage before is waiting, and the gradient of its weights (W), which can fill a gap because no stage
waits for it. A rank runs its list in order and waits for inputs that have not arrived. These waits are the
*bubble*. All schedules do the same work and give the same gradients. They differ in the bubble, and in the
number of activations that a rank must keep (`plans/timeline.py` counts both). With p ranks, m micro-batches,
v stages per rank, and F, I, W the times of one stage:

| name        | stages a rank | idle time of a rank         | activations kept    | from                     |
| ----------- | ------------- | --------------------------- | ------------------- | ------------------------ |
| gpipe       | 1             | (p-1)(F+I+W)                | m                   | Huang et al. 2019        |
| 1f1b        | 1             | (p-1)(F+I+W)                | p - rank            | PipeDream-flush,         |
|             |               |                             |                     | Narayanan et al. 2021    |
| interleaved | v, looped     | (p-1)(F+I+W), stages 1/v    | p(v+1) - 2 rank - 1 | Megatron-LM,             |
|             |               |                             |                     | Narayanan et al. 2021    |
| zb1p        | 1             | (p-1)(F+I-W)                | p                   | ZB-H1, Qi et al. 2023    |
| zbv         | 2, in a V     | 0 from first to last action | 2p                  | Qi et al. 2024           |
| dualpipev   | 2, in a V     | at most (p-1)(F+2I-W)       | 2p + 1              | DeepSeek-V3 2024, halved |

Activations are counted in stages, which are half as large if a rank holds two. The idle time of `zbv` is 0 if
F = I = W, which is nearly so for large matrix products; those of `zb1p` and `dualpipev` hold for other costs
too. *Looped* puts stage s on rank s mod p, so a micro-batch goes round v times. *In a V* puts stages r and
2p-1-r on rank r: a micro-batch goes down the ranks and comes back, so the first and the last stage share a
rank, and backward starts where forward ended. More stages cost more messages; a split backward traverses its
graph twice.

The published schedules assume many micro-batches. No action depends on another micro-batch, so a schedule
stays correct if some micro-batches are removed. If a pattern needs more micro-batches than there are, it is
made for as many as it needs, and the surplus is removed. So every schedule here works with one micro-batch or
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from typing import Literal

from shardwise.config.schedules import SCHEDULE_FACTS, SCHEDULES, Numbers, problem_of_stages
from shardwise.errors import ConfigError

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work: forward, backward, or half a backward, of one micro-batch on one stage."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every rank, in order."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)


def make_schedule(
    name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, checked: bool = True
) -> Schedule:
    """Return the named schedule. `stages_per_rank` can be chosen only for `interleaved` (default: 2).

    With `checked`, its correctness is checked, which takes as long as making it.
    """
    if name not in SCHEDULE_FACTS:
        unknown = f"layout.schedule = {name!r}: unknown; use one of {', '.join(SCHEDULES)}"
        raise ConfigError("the schedule", [unknown])
    if problem := problem_of_stages(name, stages_per_rank):
        raise ConfigError("the schedule", [problem])
    if ranks < 1 or micro_batches < 1:
        raise ConfigError(
            "the schedule",
            [f"{name}: needs at least one rank and one micro-batch, got {ranks} and {micro_batches}"],
        )
    facts = SCHEDULE_FACTS[name]
    per_rank = facts.stages_of_rank(stages_per_rank)
    if facts.is_interleaved:
        actions = [_interleaved(ranks, rank, micro_batches, per_rank) for rank in range(ranks)]
    else:
        actions = [_ORDERS[name](ranks, rank, micro_batches) for rank in range(ranks)]
    placed = rank_of_stage(ranks, per_rank, facts.is_in_a_v)
    schedule = Schedule(
        name, ranks, len(placed), micro_batches, placed, tuple(tuple(_fused(row)) for row in actions)
    )
    if checked:
        check(schedule)
    return schedule


def rank_of_stage(ranks: int, stages_per_rank: int, is_in_a_v: bool) -> tuple[int, ...]:
    """Return the rank of each stage: from the first rank to the last and back, or in a loop."""
    if is_in_a_v:
        return (*range(ranks), *reversed(range(ranks)))
    return tuple(stage % ranks for stage in range(ranks * stages_per_rank))


# -- one stage a rank ----------------------------------------------------------------------------------------


def _gpipe(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards: simple, but all activations are kept at once."""
    yield from (Action(rank, "F", index) for index in range(micro_batches))
    yield from (Action(rank, "B", index) for index in range(micro_batches))


def _one_forward_one_backward(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """Yield forwards until the first gradient arrives, then backwards and forwards in turn: each backward
    frees the memory that the next forward takes."""
    warm_up = min(micro_batches, ranks - rank)
    yield from (Action(rank, "F", index) for index in range(warm_up))
    for index in range(micro_batches):
        yield Action(rank, "B", index)
        if warm_up + index < micro_batches:
            yield Action(rank, "F", warm_up + index)


def _zero_bubble(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """Yield 1F1B with weight gradients delayed by `rank` micro-batches.

    Later ranks warm up with fewer forwards, so they have memory to delay more weight gradients. They compute
    these at the end, while earlier ranks still wait for their last gradients.
    """
    warm_up = min(micro_batches, ranks - rank)
    yield from (Action(rank, "F", index) for index in range(warm_up))
    for index in range(micro_batches):
        yield Action(rank, "I", index)
        if index >= rank:
            yield Action(rank, "W", index - rank)
        if warm_up + index < micro_batches:
            yield Action(rank, "F", warm_up + index)
    yield from (Action(rank, "W", index) for index in range(max(0, micro_batches - rank), micro_batches))


# -- several stages a rank, looped ---------------------------------------------------------------------------


def _interleaved(ranks: int, rank: int, micro_batches: int, per_rank: int) -> Iterator[Action]:
    """Yield 1F1B in which a rank takes a round of micro-batches through each of its stages in turn.

    Megatron-LM makes rounds of exactly `ranks` micro-batches. Longer rounds keep all ranks busy too, so here
    micro-batches are split as evenly as possible into rounds of `ranks` or more, and need not be a multiple
    of it.
    """
    if per_rank == 1:
        yield from _one_forward_one_backward(ranks, rank, micro_batches)
        return
    rounds = _rounds(micro_batches, ranks)
    stages = range(rank, ranks * per_rank, ranks)
    forwards = [(stage, index) for members in rounds for stage, index in product(stages, members)]
    backwards = [(stage, index) for members in rounds for stage, index in product(stages[::-1], members)]
    longest = max(map(len, rounds))
    warm_up = min(len(forwards), 2 * (ranks - rank - 1) + (per_rank - 1) * longest)
    yield from (Action(stage, "F", index) for stage, index in forwards[:warm_up])
    for position, (stage, index) in enumerate(backwards):
        if warm_up + position < len(forwards):
            yield Action(forwards[warm_up + position][0], "F", forwards[warm_up + position][1])
        yield Action(stage, "B", index)


def round_count(micro_batches: Numbers, ranks: Numbers) -> Numbers:
    """Return the number of rounds of an interleaved schedule; ints or arrays."""
    whole = micro_batches // ranks
    return whole + (whole == 0)


def _rounds(micro_batches: int, ranks: int) -> list[range]:
    """Return the micro-batches of each round, in order."""
    count = round_count(micro_batches, ranks)
    edges = [micro_batches * edge // count for edge in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(edges)]


# -- two stages a rank, in a V -------------------------------------------------------------------------------


class _VRank:
    """Collects the actions of one rank of a V. For each stage and kind, micro-batches come in order.

    `half` is 0 for the stage on the way down, and 1 for the stage on the way back. Weight gradients wait in a
    queue.
    """

    def __init__(self, ranks: int, rank: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.actions: list[Action] = []
        self._next: dict[tuple[int, str], int] = {}
        self._waiting: list[tuple[int, int]] = []

    def forward(self, half: int) -> None:
        self._add(half, "F", self._take(half, "F"))

    def backward(self, half: int) -> None:
        self._add(half, "B", self._take(half, "backward"))

    def backward_input(self, half: int) -> None:
        index = self._take(half, "backward")
        self._add(half, "I", index)
        self._waiting.append((half, index))

    def weight(self) -> None:
        """Add the weight gradient that has waited longest."""
        half, index = self._waiting.pop(0)
        self._add(half, "W", index)

    def finish(self, micro_batches: int) -> Iterator[Action]:
        """Add the weight gradients that still wait, and return all actions without surplus micro-batches."""
        while self._waiting:
            self.weight()
        return (action for action in self.actions if action.micro_batch < micro_batches)

    def _take(self, half: int, kind: str) -> int:
        """Return the next micro-batch of this stage and kind."""
        index = self._next.get((half, kind), 0)
        self._next[half, kind] = index + 1
        return index

    def _add(self, half: int, kind: Kind, index: int) -> None:
        self.actions.append(Action(self.stages[half], kind, index))


def _zero_bubble_v(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """Return actions without a gap between a rank's first and last, if F, I and W take the same time."""
    made_for = max(micro_batches, 2 * ranks)
    writer, to_bottom = _VRank(ranks, rank), ranks - rank
    for _ in range(2 * to_bottom - 1):  # warm-up: until the first micro-batch is back from the last rank
        writer.forward(0)
    for _ in range(rank):
        writer.forward(1)
        writer.forward(0)
    for _ in range(to_bottom):  # the gradients of the first micro-batches arrive
        writer.forward(1)
        writer.backward_input(1)
        writer.weight()
    started = 2 * ranks - 1 - rank
    for step in range(made_for - ranks):
        # steady: three actions on each half, which free the memory that they take
        if started + step < made_for:
            writer.forward(0)
        writer.backward_input(0)
        writer.weight()
        writer.forward(1)
        writer.backward_input(1)
        writer.weight()
    for _ in range(rank):  # cool-down: first what other ranks wait for, then weights in the gaps
        writer.backward_input(0)
        writer.backward_input(1)
    for _ in range(to_bottom):
        writer.backward_input(0)
        writer.weight()
    return writer.finish(micro_batches)


def _dual_pipe_v(ranks: int, rank: int, micro_batches: int) -> Iterator[Action]:
    """Return pairs of a forward of one half and a backward of the other, so that each hides the other's
    messages."""
    made_for = max(micro_batches, 2 * ranks)
    writer, below = _VRank(ranks, rank), ranks - rank - 1
    for _ in range(2 * below):  # warm-up: the way down
        writer.forward(0)
    for _ in range(rank + 1):
        writer.forward(0)
        writer.forward(1)
    for _ in range(below):
        writer.backward_input(1)
        writer.weight()
        writer.forward(1)
    for _ in range(made_for - 2 * ranks + rank + 1):  # steady: the pairs that overlap
        writer.forward(0)
        writer.backward(1)
        writer.forward(1)
        writer.backward(0)
    for _ in range(below):  # cool-down: no new micro-batches come down
        writer.backward(1)
        writer.forward(1)
        writer.backward(0)
    for step in range(2 * (rank + 1)):  # the second half delays its weights to the gaps that follow
        (writer.backward if step < rank + 1 else writer.backward_input)(1 - step % 2)
    for _ in range(below):
        writer.weight()
        writer.backward_input(0)
    return writer.finish(micro_batches)


_ORDERS: dict[str, Callable[[int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zb1p": _zero_bubble,
    "zbv": _zero_bubble_v,
    "dualpipev": _dual_pipe_v,
}


def _fused(actions: Iterator[Action]) -> Iterator[Action]:
    """Yield the actions with each I of stage 0 and a W right after it replaced by one B.

    No rank waits for the input gradient of stage 0, and one backward traverses the graph once instead of
    twice.
    """
    pending: Action | None = None
    for action in actions:
        if pending and action == Action(0, "W", pending.micro_batch):
            action, pending = Action(0, "B", pending.micro_batch), None
        if pending:
            yield pending
        pending = action if (action.stage, action.kind) == (0, "I") else None
        if pending is None:
            yield action
    if pending:
        yield pending


# -- checks of a schedule ------------------------------------------------------------------------------------


def waits_for(action: Action, stages: int) -> tuple[tuple[Action, ...], ...]:
    """Return groups of actions, of each of which one must run before this action.

    A group has two actions if either of them computes the gradient: an I or a B.
    """
    stage, index = action.stage, action.micro_batch
    if action.kind == "F":
        return ((Action(stage - 1, "F", index),),) if stage else ()
    if action.kind == "W":
        return ((Action(stage, "I", index),),)
    forward = (Action(stage, "F", index),)
    if stage == stages - 1:
        return (forward,)
    return forward, (Action(stage + 1, "I", index), Action(stage + 1, "B", index))


def in_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield every action with its rank, after the actions it waits for; ends early at a deadlock."""
    done: set[Action] = set()
    position = [0] * schedule.ranks
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions) and _ready(actions[position[rank]], schedule.stages, done):
                action = actions[position[rank]]
                yield rank, action
                done.add(action)
                position[rank] += 1
                progress = True


def _ready(action: Action, stages: int, done: set[Action]) -> bool:
    return all(any(choice in done for choice in choices) for choices in waits_for(action, stages))


def problems_of(schedule: Schedule) -> list[str]:
    """Return what would make the schedule compute wrong gradients or hang; empty if it is correct."""
    problems = [*_misplaced(schedule), *_incomplete(schedule)]
    if not problems and (stuck := _stuck(schedule)):
        problems.append(f"deadlock: {', '.join(f'rank {rank} waits at {action}' for rank, action in stuck)}")
    return problems


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Yield the actions on ranks that do not hold their stage."""
    for rank, actions in enumerate(schedule.actions):
        stages = schedule.stages_of(rank)
        for action in actions:
            if action.stage not in stages:
                yield f"{action} is on rank {rank}, which does not hold its stage"


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """Yield the stages and micro-batches that do not have exactly one forward and one backward."""
    pairs = product(range(schedule.stages), range(schedule.micro_batches))
    kinds: dict[tuple[int, int], list[str]] = {pair: [] for pair in pairs}
    for action in chain.from_iterable(schedule.actions):
        kinds.setdefault((action.stage, action.micro_batch), []).append(action.kind)
    for (stage, index), given in kinds.items():
        if sorted(given) not in (["B", "F"], ["F", "I", "W"]):
            has = " ".join(given) or "nothing"
            yield f"stage {stage}, micro-batch {index}: has {has}; needs F and B, or F, I and W"


def _stuck(schedule: Schedule) -> Sequence[tuple[int, Action]]:
    ran = [0] * schedule.ranks
    for rank, _ in in_order(schedule):
        ran[rank] += 1
    return [
        (rank, actions[ran[rank]])
        for rank, actions in enumerate(schedule.actions)
        if ran[rank] < len(actions)
    ]


def check(schedule: Schedule) -> None:
    """Raise ValueError if the schedule is not correct."""
    if problems := problems_of(schedule):
        raise ValueError(f"schedule {schedule.name}: " + "; ".join(problems[:8]))
