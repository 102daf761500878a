"""Who computes what next, and whose gradients make the next update: the judgement of a parameter server, and
nothing else.

The training data is a row of *portions*; so many of them make a global batch. A worker asks, is handed the
next portion, reads the weights, and brings the gradient of that portion. So many gradients as there are
portions in a batch make an *update*; the number of updates made is the *version* of the weights. What an
update is short of its newest weights, the version it is made on minus the version that its gradient was
computed with, is that gradient's *staleness*.

A bound on staleness gives every portion a deadline: what was read at version v has to be in update v + bound
at the latest. The earliest deadlines go first, and an update waits if without it too many portions would be
left for the updates that remain to them. With a bound of 0 a portion of the next batch is handed out only
when all of this one are in: that is synchronous training, whoever computes what.

Where servers are slower than workers, gradients would pile up before them and grow old there, and no update
would be made sooner for it. So nothing is handed out while what the update after the next needs lies there
already, with a bound or without.

A portion counts once. Those of a worker that is lost are handed out again before any other. Where `again` is
set, a worker that would have to wait computes a portion that another has not brought yet, and the first to
come counts: nobody waits for a slow worker, and no data are dropped for it.

It has no clock, no process and no socket, so that every order of events can be tried in a test, and
replayed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

Worker = str


@dataclass(frozen=True)
class Contribution:
    """A gradient that was brought: of which portion, by whom, and computed with which version of the
    weights."""

    portion: int
    worker: Worker
    version: int


@dataclass(frozen=True)
class State:
    """What of a server's work outlives it: portions below `next_portion` are in the weights, but for those
    that are missing."""

    version: int = 0
    next_portion: int = 0
    missing: tuple[int, ...] = ()


@dataclass
class Portions:
    """The portions of one run: handed out, brought, and used."""

    portions: int
    """That make an update."""
    updates: int
    """In all."""
    most_stale: int | None
    """None: no bound."""
    again: bool = False
    start: State = field(default_factory=State)
    late: int = 0
    """Gradients that came after another of the same portion, and were dropped."""

    def __post_init__(self) -> None:
        self.version, self._next = self.start.version, self.start.next_portion
        self._missing = sorted(self.start.missing)
        self._out: dict[int, dict[Worker, int]] = {}
        """Portions under way: the version that each worker on it reads. In the order in which they were first
        handed out."""
        self._brought: dict[int, Contribution] = {}

    @property
    def ended(self) -> bool:
        """Whether every update is made."""
        return self.version >= self.updates

    def state(self) -> State:
        """As it is to be begun anew from the weights of this version."""
        return State(self.version, self._next, tuple(sorted([*self._missing, *self._out, *self._brought])))

    def ask(self, worker: Worker) -> int | None:
        """The portion that this worker is to compute, with the present weights or newer ones; None: nothing
        for now."""
        self.lost(worker)  # what it was handed before, it no longer computes
        if len(self._brought) >= 2 * self.portions:  # one update that may be in the making, and the next
            return None
        pending = len(self._out) + len(self._brought)
        if pending < self._room():
            portion = self._missing.pop(0) if self._missing else self._take_next()
            self._out[portion] = {worker: self.version}
            return portion
        return self._copied(worker) if self.again else None

    def bring(self, worker: Worker, portion: int) -> bool:
        """A worker has computed a portion; whether it counts."""
        version = self._out.get(portion, {}).get(worker)
        if version is None:
            self.late += 1
            return False
        del self._out[portion]
        self._brought[portion] = Contribution(portion, worker, version)
        return True

    def lost(self, worker: Worker) -> None:
        """What this worker was handed goes back, unless another is on it too. What it has brought counts."""
        for portion, on_it in list(self._out.items()):
            on_it.pop(worker, None)
            if not on_it:
                del self._out[portion]
                self._missing = sorted([*self._missing, portion])

    def due(self) -> list[Contribution] | None:
        """The contributions of the next update, by portion; None: it has to wait."""
        if len(self._brought) < self.portions or self.ended:
            return None
        by_deadline = sorted(self._brought.values(), key=lambda one: (one.version, one.portion))
        used, rest = by_deadline[: self.portions], by_deadline[self.portions :]
        left = [one.version for one in rest] + [min(on_it.values()) for on_it in self._out.values()]
        return sorted(used, key=lambda one: one.portion) if self._in_time(left) else None

    def update(self, used: list[Contribution]) -> None:
        """These are in the weights now."""
        for one in used:
            del self._brought[one.portion]
        self.version += 1

    def unused(self) -> list[Contribution]:
        """What was brought and is in no update yet."""
        return list(self._brought.values())

    def staleness(self, used: list[Contribution]) -> list[int]:
        """Of each, in the update that is due."""
        return [self.version - one.version for one in used]

    def _room(self) -> int:
        """How many portions may be under way or brought: as many as can be used before the newest is too
        stale, or at all."""
        ahead = self.updates - self.version
        return self.portions * (ahead if self.most_stale is None else min(ahead, self.most_stale + 1))

    def _take_next(self) -> int:
        self._next += 1
        return self._next - 1

    def _copied(self, worker: Worker) -> int | None:
        """A portion that others are on, the fewest and the longest; it reads the same weights as they do."""
        alike = [portion for portion, on_it in self._out.items() if min(on_it.values()) == self.version]
        portion = min(alike, key=lambda one: len(self._out[one]), default=None)
        if portion is not None:
            self._out[portion][worker] = self.version
        return portion

    def _in_time(self, left: list[int]) -> bool:
        """Whether what was read at these versions can be used in time by the updates after the next."""
        if self.most_stale is None:
            return True
        count = 0
        for version, reads in sorted(Counter(left).items()):
            count += reads
            if count > self.portions * (version + self.most_stale - self.version):
                return False
        return True
